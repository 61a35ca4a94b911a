"""Fast path for later calls of a compiled step: from the user's arguments to the program's inputs in microseconds.

Every class has `gather`, `finish` and `watch`. `gather` raises TypeError or ValueError for a call of another kind,
before anything runs.
"""

from collections.abc import Sequence
from typing import Any

import jax

from ..compilation.compiled_step import CompiledStep
from ..compilation.donation import OwnOutputs
from ..program.cache_keys import cache_key
from ..program.flatten_call import FlatCall, nnx_objects, node_predicate, split_arguments
from ..program.python_state import PythonState
from ..program.references import read_reference

MAX_WATCHED = 8  # sets of NNX objects followed for one program, the newest

GatheredCall = tuple[tuple[Any, ...], Any]  # the program's inputs, and a value for `finish`


class CallMismatch(TypeError):
    """Raised for a call of another kind than the program was compiled for."""


class FastPytreeCall:
    """Fast call with pytrees of arrays only: the compiled program flattens and checks the arguments itself.

    Args:
        entry: Compiled program.
        flat_call: A call of the same kind.
    """

    def __init__(self, entry: CompiledStep, flat_call: FlatCall):
        step = flat_call.step
        self.entry, self._bound, self._names = entry, step.bound, step.bound_kwargs
        self._state = flat_call.state

    def gather(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GatheredCall:
        """Return the program's inputs, and None as there is nothing to finish."""
        _read_state(self._state)
        if self._bound or self._names:
            args, kwargs = (*self._bound, *args), {**self._names, **kwargs}
        return (self.entry.consts, args, kwargs), None

    def watch(self, flat_call: FlatCall) -> bool:
        """Follow the objects of a call and the values read by its step; return whether all changes can be detected."""
        self._state = flat_call.state
        return True

    def finish(self, watch: None, inputs: tuple[Any, ...], outs: Any) -> Any:
        """Return the program's results unchanged."""
        return outs


class FastFlatCall:
    """Fast call with static leaves, donated buffers, or results that contain leaves other than arrays.

    Args:
        entry: Compiled program.
        flat_call: A call of the same kind.
        own_outputs: Arrays returned by the step, open to donation.
    """

    def __init__(self, entry: CompiledStep, flat_call: FlatCall, own_outputs: OwnOutputs):
        self.entry, self._step, self._own_outputs = entry, flat_call.step, own_outputs
        self._tree, self._places = flat_call.treedef, flat_call.array_positions
        self._held = [(i, cache_key(x)) for i, x in flat_call.python_values.items()]
        self._state = flat_call.state
        self._references = [flat_call.array_positions.index(i) for i in flat_call.reference_positions]
        self._statics = {k: cache_key(x) for k, x in flat_call.statics.items()}
        self._is_node = node_predicate(flat_call.step) if flat_call.node_positions else None

    def gather(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GatheredCall:
        """Return the program's inputs, and the arguments for `finish`."""
        arguments, leaves = self._flatten(args, kwargs)
        return self._arrange([*self._arrays(leaves), *_read_state(self._state)]), arguments

    def watch(self, flat_call: FlatCall) -> bool:
        """Follow the values read by the step of a call; always True."""
        self._state = flat_call.state
        return True

    def finish(self, arguments: Any, inputs: tuple[Any, ...], outs: Any) -> Any:
        """Write results into the arguments changed by the step, and return the step's result."""
        # Later calls donate arrays only if the step itself has returned them.
        if self.entry.donated:
            self._own_outputs.add(outs)
        self.entry.result.write_back(arguments, outs, self._is_node)
        return self.entry.result.build(outs)

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
        """Return the arguments and their leaves. Raises CallMismatch for another tree or other static values."""
        arguments, statics, _ = split_arguments(self._step, args, kwargs)
        leaves, tree = jax.tree.flatten(arguments, is_leaf=self._is_node)
        if tree != self._tree or {k: cache_key(x) for k, x in statics.items()} != self._statics:
            raise CallMismatch
        for i, key in self._held:
            if cache_key(leaves[i]) != key:
                raise CallMismatch
        return arguments, leaves

    def _arrays(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the traced leaves, with the arrays of references. Raises CallMismatch for an array in their place."""
        arrays = [leaves[i] for i in self._places]
        for k in self._references:
            if not isinstance(arrays[k], jax.Ref):
                raise CallMismatch
            arrays[k] = read_reference(arrays[k])
        return arrays

    def _arrange(self, flat: Sequence[Any]) -> tuple[Any, ...]:
        """Return flat inputs arranged for the program. Raises CallMismatch if an input can't be donated."""
        inputs = self.entry.arrange(flat)
        if self.entry.donated and not self._own_outputs.can_donate(inputs[2], inputs[1]):
            raise CallMismatch
        return inputs


class FastGraphCall(FastFlatCall):
    """Fast call with NNX objects among the arguments.

    Objects are watched for changes, and read and written without another split.
    """

    def __init__(self, entry: CompiledStep, flat_call: FlatCall, own_outputs: OwnOutputs):
        super().__init__(entry, flat_call, own_outputs)
        self._nodes = flat_call.node_positions
        self._watches: dict[tuple[int, ...], tuple[Any, PythonState | None]] = {}
        self._update: Any = entry.result.update
        self._holders = [h.position for h in self._update.changed]
        self._outs = [h.sources[0][1] for h in self._update.changed]

    @staticmethod
    def is_possible(entry: CompiledStep) -> bool:
        """Return whether the step leaves the structure of its NNX objects unchanged."""
        update = entry.result.update
        return update is not None and update.same_structure and not update.returns_arguments

    def watch(self, flat_call: FlatCall) -> bool:
        """Begin to watch the objects of a call; return whether all changes can be detected."""
        watch = nnx_objects().ObjectWatch(flat_call.nodes)
        if watch.is_watchable:
            while len(self._watches) >= MAX_WATCHED:
                del self._watches[next(iter(self._watches))]
            self._watches[tuple(map(id, watch.roots()))] = watch, flat_call.state
        return watch.is_watchable

    def gather(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GatheredCall:
        """Return the program's inputs, and the watched objects and arguments for `finish`."""
        arguments, leaves = self._flatten(args, kwargs)
        roots = [leaves[i] for i in self._nodes]
        watch, state = self._watches.get(tuple(map(id, roots)), (None, None))
        if watch is None or not watch.is_unchanged(roots):
            raise CallMismatch
        # Unchanged objects need no new split of the NNX graph: the watch reads their arrays.
        flat = [*watch.values(), *self._arrays(leaves), *_read_state(state)]
        return self._arrange(flat), (watch, arguments)

    def finish(self, call: Any, inputs: tuple[Any, ...], outs: Any) -> Any:
        """Write results into the NNX objects and arguments, and return the step's result."""
        if self.entry.donated:
            self._own_outputs.add(outs)
        watch, arguments = call
        self.entry.result.write_back(arguments, outs, self._is_node)
        watch.set_values(self._holders, [outs[o] for o in self._outs])
        if not self._update.returned:
            return self.entry.result.build(outs)
        nodes = nnx_objects().build_returned(self._update, self.entry.leaves(inputs), outs)
        return self.entry.result.build(outs, nodes)


def _read_state(state: PythonState | None) -> list[Any]:
    """Return the values that the step reads besides its arguments and takes as inputs.

    Raises CallMismatch if the step reads other Python values now than when its program was made.
    """
    read = [] if state is None else state.current_inputs()
    if read is None:
        raise CallMismatch
    return read


def fast_call(entry: CompiledStep, flat_call: FlatCall, own_outputs: OwnOutputs) -> Any:
    """Return the fast call for later calls of the kind of `flat_call`; None if there is none.

    Args:
        entry: Compiled program of the kind of call.
        flat_call: The call, with flat inputs.
        own_outputs: Arrays returned by the step, open to donation.
    """
    if entry.takes_pytrees:
        return FastPytreeCall(entry, flat_call)
    if entry.result.update is None:
        return FastFlatCall(entry, flat_call, own_outputs)
    return (
        FastGraphCall(entry, flat_call, own_outputs)
        if flat_call.nodes is not None and FastGraphCall.is_possible(entry)
        else None
    )
