"""A loop that goes on from a checkpoint: what its first calls give, which are not computed again."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..checkpoints import SavedLeaf
from ..checkpoints.differs import check_same
from ..checkpoints.objects import impl_of
from ..errors import ShardError
from ..placing import put
from .journal import Journal
from .outputs import BEFORE, CARRIED, OWN, Outputs, as_given, as_input, nothing, placed_as, stand_in
from .outputs import given as given_by

if TYPE_CHECKING:
    from ..checkpoints import Store
    from .entry import Entry


class Resumed:
    """The calls up to checkpoint `step` of a store, one after the other.

    A call gives its own state back as it came, the small outputs that the same call gave in the run that was saved, and
    in the place of larger ones nothing but zeros. Where an array of the checkpoint came from this call, it gives that.
    """

    def __init__(self, store: "Store", step: int):
        self._store, self.step = store, step
        self.saved, extra = store.saved(step), store.extra(step)
        if "kinds" not in extra:
            raise ShardError(
                f"checkpoint {step} of {store.name} is a state alone, none of a loop: %shard load {store.name} "
                "reads it, and --resume goes on from what --checkpoint saved"
            )
        try:
            self.journal = Journal.of(extra["kinds"], extra["returned"])
            self.places = _places(extra["places"])  # in the data of a feed, one a host
            self._exact = bool(extra["exact"])  # the state went into the call after these
            self._sources = _sources(extra["sources"], {leaf.path for leaf in self.saved.leaves})
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, MemoryError):
            raise ShardError(
                f"checkpoint {step} of {store.name} can't be gone on from: what it tells of its loop is damaged; take "
                "an older one, moving this one away"
            ) from None
        self._calls = self.journal.calls()
        self._arrays: dict[str, Any] | None = None
        self._given: dict[str, Any] = {}
        self.left_out: set[str] = set()  # outputs that skipped calls gave zeros for

    def skip(self, call: int, entry: "Entry", outputs: Outputs, inputs: tuple[Any, ...]) -> tuple[Any, dict]:
        """What call number `call` gives, and of it by output what comes from the checkpoint. Raises ShardError where it
        is another call than the one that was saved."""
        if call == 1:
            self._compare(entry, outputs, numbers=False)
        kind, values = next(self._calls)
        if kind != outputs.small:
            raise self._changed(call, "numbers")
        given = self._handed_out(call, entry, outputs)
        small = {part.output: value for part, value in zip(kind, values, strict=True)}
        leaves, flat = entry.leaves(inputs), []
        for o in range(len(given_by(entry))):
            if o in given:
                flat.append(given[o])
            elif o in small:
                flat.append(placed_as(entry, o, small[o]))
            elif o in outputs.state:
                i = outputs.state[o]
                flat.append(stand_in(entry, o, i, leaves[i]))
            else:
                self.left_out.add(outputs.large[o])
                flat.append(nothing(entry, o))
        return as_given(entry, flat), given

    def go_on(self, entry: "Entry", outputs: Outputs, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs of the first call that is computed, with the state that went into it in the run that was saved.
        Raises ShardError where this is another state."""
        if self._exact:
            self._compare(entry, outputs, numbers=True)
        arrays = self._read(entry, outputs)
        carried = sorted(name for name in arrays if name.startswith(CARRIED))[: len(entry.consts)]
        n = len(carried)
        entry.consts[:n] = put([arrays[name] for name in carried], [x.sharding for x in entry.consts[:n]])
        leaves = entry.leaves(inputs)
        if self._exact:
            for i, name in outputs.names.items():
                if name in arrays and leaves[i] is not self._given.get(name):
                    leaves[i] = as_input(entry, i, arrays[name], leaves[i])
        self._arrays, self._given = {}, {}
        return entry.arrange(leaves)

    def _handed_out(self, call: int, entry: "Entry", outputs: Outputs) -> dict[int, Any]:
        sources = self._sources.get(call, {})
        if not sources:
            return {}
        there, avals = {leaf.path: leaf for leaf in self.saved.leaves}, given_by(entry)
        if any(o >= len(avals) or avals[o].shape != there[name].shape for o, name in sources.items()):
            raise self._changed(call, "arrays")
        arrays = self._read(entry, outputs, sources)
        given = {o: placed_as(entry, o, arrays[name]) for o, name in sources.items()}
        self._given |= {name: given[o] for o, name in sources.items()}
        return given

    def _changed(self, call: int, what: str) -> ShardError:
        return ShardError(
            f"--resume: call {call} of the step returns other {what} than it did in the run that was saved in "
            f"{self._store.name}: the cell has changed; begin anew in another folder"
        )

    def _read(
        self, entry: "Entry", outputs: Outputs, sources: Mapping[int, str] | None = None
    ) -> dict[str, Any]:
        """The checkpoint's arrays, read when the first of them is wanted: each where this program has it."""
        if self._arrays is None:
            places = {name: entry.shardings[i] for i, name in outputs.names.items()}
            places |= {name: entry.out_shardings[o] for o, name in (sources or {}).items()}
            whole = NamedSharding(entry.plan.mesh, PartitionSpec())
            target = {
                leaf.path: jax.ShapeDtypeStruct(
                    leaf.shape, _dtype(leaf), sharding=places.get(leaf.path.removeprefix(BEFORE), whole)
                )
                for leaf in self.saved.leaves
            }
            self._arrays = dict(self._store.restore(self.step, target))
        return self._arrays

    def _compare(self, entry: "Entry", outputs: Outputs, *, numbers: bool) -> None:
        """Raise ShardError where a program's state is another one. `numbers`: they count, too; Python's own, as the
        count of steps of a state that is new, are no arrays before the second or third call."""
        avals = entry.traced.closed.out_avals
        wanted = leaves_of({outputs.names[i]: avals[o] for o, i in outputs.state.items()})
        names = {leaf.path for leaf in wanted}
        there = [x for x in self.saved.leaves if x.path in names or not x.path.startswith(OWN)]
        spare = [] if numbers else [x.path for x in there if not x.shape]
        check_same(there, wanted, f"checkpoint {self.step} of {self._store.name}", cast=None, spare=spare)


def _places(told: Any) -> list[dict[str, Any]] | None:
    """Raises TypeError and KeyError for what is no place in data."""
    if told is None:
        return None
    return [dict(place) for place in told if place["passes"] is not None and place["kind"]]


def _sources(told: Any, names: Collection[str]) -> dict[int, dict[int, str]]:
    """By call, and output of that, the array of the checkpoint that it gave. Raises ValueError and TypeError for
    anything else."""
    found: dict[int, dict[int, str]] = {}
    for name, call, o in told:
        if name not in names or type(call) is not int or type(o) is not int or o < 0:
            raise ValueError
        found.setdefault(call, {})[o] = name
    return found


def leaves_of(tree: Mapping[str, Any]) -> tuple[SavedLeaf, ...]:
    """What is told of arrays, or shapes, by name."""
    return tuple(SavedLeaf(name, tuple(x.shape), str(x.dtype)) for name, x in tree.items())


def _dtype(leaf: SavedLeaf) -> Any:
    if leaf.dtype.startswith("key<"):
        return jax.random.key(0, impl=impl_of(leaf.dtype)).dtype
    return jax.numpy.dtype(leaf.dtype)


def nbytes(arrays: Sequence[Any]) -> int:
    """Bytes of arrays, those of keys as numbers."""
    return sum(int(x.nbytes) if hasattr(x, "nbytes") else int(np.asarray(x).nbytes) for x in arrays)
