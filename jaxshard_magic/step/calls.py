"""The later calls of a compiled step: from the user's arguments to the program's inputs in microseconds.

A `gather` raises TypeError or ValueError where the call is of another kind, before anything has run.
"""

from collections.abc import Sequence
from typing import Any

import jax

from ..program.held import held_key
from ..program.in_place import write
from ..program.peel import Peeled, nnx_calls, node_test, split
from ..program.python_state import PythonState
from .donation import Ours
from .entry import Entry

MAX_WATCHED = 8

Gathered = tuple[tuple[Any, ...], Any]  # the program's inputs, and what `finish` needs to know of the call


class Mismatch(TypeError):
    """This call is not of the kind that the program was compiled for."""


class WholeCall:
    """All arguments are pytrees of arrays: the compiled program opens and checks them itself."""

    def __init__(self, entry: Entry, peeled: Peeled):
        step = peeled.step
        self.entry, self._bound, self._names = entry, step.bound, step.bound_names
        self._state = peeled.state

    def gather(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Gathered:
        _read(self._state)
        if self._bound or self._names:
            args, kwargs = (*self._bound, *args), {**self._names, **kwargs}
        return (self.entry.consts, args, kwargs), None

    def watch(self, peeled: Peeled) -> bool:
        """Begin to watch a call's objects, and what its step reads; False where changes to them could not be seen."""
        self._state = peeled.state
        return True

    def finish(self, watch: None, inputs: tuple[Any, ...], outs: Any) -> Any:
        return outs


class FlatCall:
    """Some leaves are held, some buffers donated, or the result has leaves that are no arrays."""

    def __init__(self, entry: Entry, peeled: Peeled, ours: Ours):
        self.entry, self._step, self._ours = entry, peeled.step, ours
        self._tree, self._places = peeled.tree, peeled.array_places
        self._held = [(i, held_key(x)) for i, x in peeled.held.items()]
        self._state, self._written = peeled.state, entry.result.written
        self._statics = {k: held_key(x) for k, x in peeled.statics.items()}
        self._is_node = node_test(peeled.step) if peeled.node_places else None

    def gather(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Gathered:
        arguments, leaves = self._open(args, kwargs)
        return self._arranged([*(leaves[i] for i in self._places), *_read(self._state)]), arguments

    def watch(self, peeled: Peeled) -> bool:
        """As `WholeCall` does."""
        self._state = peeled.state
        return True

    def finish(self, arguments: Any, inputs: tuple[Any, ...], outs: Any) -> Any:
        if self.entry.donated:
            self._ours.add(outs)
        write(self._written, arguments, outs)
        return self.entry.result.build(outs)

    def _open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
        """The arguments, and their leaves."""
        arguments, statics, _ = split(self._step, args, kwargs)
        leaves, tree = jax.tree.flatten(arguments, is_leaf=self._is_node)
        if tree != self._tree or {k: held_key(x) for k, x in statics.items()} != self._statics:
            raise Mismatch
        for i, key in self._held:
            if held_key(leaves[i]) != key:
                raise Mismatch
        return arguments, leaves

    def _arranged(self, flat: Sequence[Any]) -> tuple[Any, ...]:
        inputs = self.entry.arrange(flat)
        if self.entry.donated and not self._ours.all(inputs[2], inputs[1]):
            raise Mismatch
        return inputs


class GraphCall(FlatCall):
    """NNX objects among the arguments: watched for changes, read and written without opening them again."""

    def __init__(self, entry: Entry, peeled: Peeled, ours: Ours):
        super().__init__(entry, peeled, ours)
        self._nodes = peeled.node_places
        self._watches: dict[tuple[int, ...], tuple[Any, PythonState | None]] = {}
        self._update: Any = entry.result.update
        self._holders = [h.place for h in self._update.changed]
        self._outs = [h.sources[0][1] for h in self._update.changed]

    @staticmethod
    def possible(entry: Entry) -> bool:
        """Does the step leave its objects' structure as it is?"""
        update = entry.result.update
        return update is not None and update.same and not update.refers

    def watch(self, peeled: Peeled) -> bool:
        """Begin to watch a call's objects; False where changes to them could not be seen."""
        watch = nnx_calls().Watch(peeled.nodes)
        if watch.watchable:
            while len(self._watches) >= MAX_WATCHED:
                del self._watches[next(iter(self._watches))]
            self._watches[tuple(map(id, watch.roots()))] = watch, peeled.state
        return watch.watchable

    def gather(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Gathered:
        arguments, leaves = self._open(args, kwargs)
        roots = [leaves[i] for i in self._nodes]
        watch, state = self._watches.get(tuple(map(id, roots)), (None, None))
        if watch is None or not watch.same(roots):
            raise Mismatch
        flat = [*watch.values(), *(leaves[i] for i in self._places), *_read(state)]
        return self._arranged(flat), (watch, arguments)

    def finish(self, call: Any, inputs: tuple[Any, ...], outs: Any) -> Any:
        if self.entry.donated:
            self._ours.add(outs)
        watch, arguments = call
        write(self._written, arguments, outs)
        watch.put(self._holders, [outs[o] for o in self._outs])
        if not self._update.returned:
            return self.entry.result.build(outs)
        made = nnx_calls().give_back(self._update, self.entry.leaves(inputs), outs)
        return self.entry.result.build(outs, made)


def _read(state: PythonState | None) -> list[Any]:
    """What the step reads beside its arguments and takes as inputs. Raises Mismatch where it reads anything else than
    when its program was made."""
    read = [] if state is None else state.inputs_now()
    if read is None:
        raise Mismatch
    return read


def fast_call(entry: Entry, peeled: Peeled, ours: Ours) -> Any:
    """How later calls of the kind take the short way; None where they can't."""
    if entry.whole:
        return WholeCall(entry, peeled)
    if entry.result.update is None:
        return FlatCall(entry, peeled, ours)
    return GraphCall(entry, peeled, ours) if peeled.nodes is not None and GraphCall.possible(entry) else None
