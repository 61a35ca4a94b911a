"""Replay the first calls of a resumed loop from a checkpoint, without computing them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..checkpoints import CheckpointStore, SavedLeaf
from ..checkpoints.state_arrays import prng_impl_of
from ..checkpoints.state_match import check_same
from ..compilation.compiled_step import CompiledStep
from ..device_arrays import put
from ..errors import ShardError
from .output_roles import (
    CARRIED_PREFIX,
    NON_STATE_PREFIXES,
    PREVIOUS_PREFIX,
    OutputRoles,
    input_as_output,
    to_input,
    to_output,
    unflatten_outputs,
    zero_output,
)
from .output_roles import returned_avals as given_by
from .step_log import StepLog


class ReplayedCalls:
    """Calls up to checkpoint `step` of a store, in order.

    A replayed call returns its own input state unchanged, the small outputs of the same call in the saved run, and
    zeros in place of larger outputs. An array of the checkpoint that came from the call is returned in its place.

    Args:
        store: Folder of checkpoints.
        step: Number of the checkpoint.

    Raises:
        ShardError: The checkpoint is none of a loop, or is damaged.
    """

    def __init__(self, store: CheckpointStore, step: int):
        self._store, self.step = store, step
        self.saved, extra = store.info(step), store.extra(step)
        if "kinds" not in extra:
            raise ShardError(
                f"checkpoint {step} of {store.name} is a state alone, none of a loop: %shard load {store.name} "
                "reads it, and --resume goes on from what --checkpoint saved"
            )
        try:
            self.log = StepLog.from_data(extra["kinds"], extra["returned"])
            self.feed_positions = _parse_positions(extra["places"])  # one for each host of the saved run
            self._exact = bool(extra["exact"])  # whether the state is the input of the next call
            self._sources = _parse_sources(extra["sources"], {leaf.path for leaf in self.saved.leaves})
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, MemoryError):
            raise ShardError(
                f"checkpoint {step} of {store.name} can't be gone on from: what it tells of its loop is damaged; take "
                "an older one, moving this one away"
            ) from None
        self._calls = self.log.iter_calls()
        self._arrays: dict[str, Any] | None = None
        self._given: dict[str, Any] = {}
        self.zeroed: set[str] = set()  # names of outputs that were replaced by zeros

    def replay(self, call: int, entry: CompiledStep, outputs: OutputRoles, inputs: tuple[Any, ...]) -> tuple[Any, dict]:
        """Return the results of a skipped call, and the arrays from the checkpoint among them by output.

        Args:
            call: Number of the call.
            entry: Program of the call.
            outputs: Roles of the program's outputs.
            inputs: Arranged inputs.

        Raises:
            ShardError: The saved run made another call.
        """
        if call == 1:
            self._check_state(entry, outputs, numbers=False)
        kind, values = next(self._calls)
        if kind != outputs.small:
            raise self._changed_error(call, "numbers")
        returned = self._returned_arrays(call, entry, outputs)
        small = {part.output: value for part, value in zip(kind, values, strict=True)}
        leaves, flat = entry.leaves(inputs), []
        for o in range(len(given_by(entry))):
            if o in returned:
                flat.append(returned[o])
            elif o in small:
                flat.append(to_output(entry, o, small[o]))
            elif o in outputs.state_inputs:
                i = outputs.state_inputs[o]
                flat.append(input_as_output(entry, o, i, leaves[i]))
            else:
                self.zeroed.add(outputs.large_names[o])
                flat.append(zero_output(entry, o))
        return unflatten_outputs(entry, flat), returned

    def first_inputs(self, entry: CompiledStep, outputs: OutputRoles, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the inputs of the first computed call, with the state of the saved run.

        Constants carried inside the program are set to their saved values.

        Args:
            entry: Program of the call.
            outputs: Roles of the program's outputs.
            inputs: Arranged inputs.

        Raises:
            ShardError: The saved state has other arrays.
        """
        if self._exact:
            self._check_state(entry, outputs, numbers=True)
        arrays = self._read_arrays(entry, outputs)
        carried = sorted(name for name in arrays if name.startswith(CARRIED_PREFIX))[: len(entry.consts)]
        n = len(carried)
        entry.consts[:n] = put([arrays[name] for name in carried], [x.sharding for x in entry.consts[:n]])
        leaves = entry.leaves(inputs)
        if self._exact:
            # State that a replayed call has returned is in place, and is not copied to the devices again.
            for i, name in outputs.state_names.items():
                if name in arrays and leaves[i] is not self._given.get(name):
                    leaves[i] = to_input(entry, i, arrays[name], leaves[i])
        # The loop goes on with other arrays: these must not stay on the devices.
        self._arrays, self._given = {}, {}
        return entry.arrange(leaves)

    def _returned_arrays(self, call: int, entry: CompiledStep, outputs: OutputRoles) -> dict[int, Any]:
        """Return the arrays of the checkpoint that came from a call, by output."""
        sources = self._sources.get(call, {})
        if not sources:
            return {}
        saved_leaves, avals = {leaf.path: leaf for leaf in self.saved.leaves}, given_by(entry)
        if any(o >= len(avals) or avals[o].shape != saved_leaves[name].shape for o, name in sources.items()):
            raise self._changed_error(call, "arrays")
        arrays = self._read_arrays(entry, outputs, sources)
        returned = {o: to_output(entry, o, arrays[name]) for o, name in sources.items()}
        self._given |= {name: returned[o] for o, name in sources.items()}
        return returned

    def _changed_error(self, call: int, what: str) -> ShardError:
        """Return an error for a call with other outputs than in the saved run."""
        return ShardError(
            f"--resume: call {call} of the step returns other {what} than it did in the run that was saved in "
            f"{self._store.name}: the cell has changed; begin anew in another folder"
        )

    def _read_arrays(
        self, entry: CompiledStep, outputs: OutputRoles, sources: Mapping[int, str] | None = None
    ) -> dict[str, Any]:
        """Return the arrays of the checkpoint in the program's layout, read at first use."""
        if self._arrays is None:
            shardings = {name: entry.shardings[i] for i, name in outputs.state_names.items()}
            shardings |= {name: entry.out_shardings[o] for o, name in (sources or {}).items()}
            whole = NamedSharding(entry.plan.mesh, PartitionSpec())
            target = {
                leaf.path: jax.ShapeDtypeStruct(
                    leaf.shape, _dtype(leaf), sharding=shardings.get(leaf.path.removeprefix(PREVIOUS_PREFIX), whole)
                )
                for leaf in self.saved.leaves
            }
            self._arrays = dict(self._store.restore(self.step, target))
        return self._arrays

    def _check_state(self, entry: CompiledStep, outputs: OutputRoles, *, numbers: bool) -> None:
        """Raise ShardError if the program's state differs from the checkpoint.

        Args:
            entry: Program of the call.
            outputs: Roles of the program's outputs.
            numbers: Compare scalars, too.
        """
        avals = entry.traced.closed.out_avals
        expected = describe_leaves({outputs.state_names[i]: avals[o] for o, i in outputs.state_inputs.items()})
        names = {leaf.path for leaf in expected}
        saved_leaves = [x for x in self.saved.leaves if x.path in names or not x.path.startswith(NON_STATE_PREFIXES)]
        # A Python number of a new state, such as its step count, is an array only from the second or third call on.
        spare = [] if numbers else [x.path for x in saved_leaves if not x.shape]
        check_same(saved_leaves, expected, f"checkpoint {self.step} of {self._store.name}", cast=None, optional=spare)


def _parse_positions(saved: Any) -> list[dict[str, Any]] | None:
    """Check and return saved positions in the data of a feed; None if unknown. Raises TypeError or KeyError if
    malformed."""
    if saved is None:
        return None
    return [dict(place) for place in saved if place["passes"] is not None and place["kind"]]


def _parse_sources(saved: Any, names: Collection[str]) -> dict[int, dict[int, str]]:
    """Return the names of the checkpoint's arrays by source call and output. Raises ValueError or TypeError if
    malformed."""
    sources: dict[int, dict[int, str]] = {}
    for name, call, o in saved:
        if name not in names or type(call) is not int or type(o) is not int or o < 0:
            raise ValueError
        sources.setdefault(call, {})[o] = name
    return sources


def describe_leaves(tree: Mapping[str, Any]) -> tuple[SavedLeaf, ...]:
    """Return descriptions of arrays, or shapes, by name."""
    return tuple(SavedLeaf(name, tuple(x.shape), str(x.dtype)) for name, x in tree.items())


def _dtype(leaf: SavedLeaf) -> Any:
    """Return the dtype of a saved leaf, also of typed keys."""
    if leaf.dtype.startswith("key<"):
        return jax.random.key(0, impl=prng_impl_of(leaf.dtype)).dtype
    return jax.numpy.dtype(leaf.dtype)


def total_bytes(arrays: Sequence[Any]) -> int:
    """Return the size of arrays in bytes; keys count as their numbers."""
    return sum(int(x.nbytes) if hasattr(x, "nbytes") else int(np.asarray(x).nbytes) for x in arrays)
