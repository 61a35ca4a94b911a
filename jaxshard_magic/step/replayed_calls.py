"""Replay the first calls of a resumed loop from a checkpoint, without computing them.

`StepLog` logs the small outputs of every call of a run, for the replay by a resumed run. `OutputRoles` names the inputs
and outputs of the step's program for checkpoints; other outputs of skipped calls have stand-ins.
"""

from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..checkpoints import CheckpointStore, SavedLeaf
from ..checkpoints.state_arrays import prng_impl_of
from ..checkpoints.state_match import check_same
from ..compilation.compiled_step import CompiledStep
from ..device_arrays import own_copy, put, to_numpy
from ..errors import ShardError
from ..program.trace import path_name

CARRIED_PREFIX = "carried."  # names of values that a program itself carries from call to call
PREVIOUS_PREFIX = "before."  # names of state that went into the last call: the loop may go on from it
# Names in a checkpoint other than those of the state that goes into the next call.
NON_STATE_PREFIXES = (PREVIOUS_PREFIX, CARRIED_PREFIX, "return")

MAX_SMALL_BYTES = 64  # bytes of an output that is logged at every call
MAX_PENDING = 256  # calls with outputs on their devices; at this number the older half is read


class SmallOutput(NamedTuple):
    """Description of a small output.

    Attributes:
        output: Position among the program's flat outputs.
        shape: Shape of the array.
        dtype: Name of the dtype.
    """

    output: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return int(np.prod(self.shape, dtype=int)) * jnp.dtype(self.dtype).itemsize


OutputSchema = tuple[SmallOutput, ...]  # small outputs of one program, in order


class StepLog:
    """Small outputs of each call so far.

    `add` waits for long past calls only; `flush` waits for all.
    """

    def __init__(self) -> None:
        self.schemas: list[OutputSchema] = []
        self._schema_indices = array("H")
        self._values: list[bytearray] = []
        self._waiting: deque[tuple[int, Sequence[Any]]] = deque()

    def __len__(self) -> int:
        return len(self._schema_indices) + len(self._waiting)

    def add(self, schema: OutputSchema, outs: Sequence[Any]) -> None:
        """Append a call.

        Args:
            schema: Descriptions of the small outputs of the program, in order.
            outs: The outputs, possibly not finished.
        """
        if schema not in self.schemas:
            self.schemas.append(schema)
            self._values.append(bytearray())
        self._waiting.append((self.schemas.index(schema), outs))
        # The older half has long finished: reading it does not wait for the device.
        if len(self._waiting) >= MAX_PENDING:
            self._read_pending(MAX_PENDING // 2)

    def flush(self) -> None:
        """Wait for all calls so far and read their outputs. Raises the exception of a failed call."""
        self._read_pending(len(self._waiting))

    def iter_calls(self) -> Iterator[tuple[OutputSchema, list[np.ndarray]]]:
        """Yield the descriptions and outputs of each call, from the first on."""
        at = [0] * len(self.schemas)
        for which in list(self._schema_indices):
            values = []
            for small in self.schemas[which]:
                n, start = small.nbytes, at[which]
                part = bytes(self._values[which][start : start + n])
                values.append(np.frombuffer(part, jnp.dtype(small.dtype)).reshape(small.shape))
                at[which] += n
            yield self.schemas[which], values

    def to_data(self) -> tuple[list[Any], dict[str, np.ndarray]]:
        """Return all outputs read so far: the descriptions as JSON data, and arrays by name."""
        arrays: dict[str, np.ndarray] = {"which": np.array(self._schema_indices, np.uint16)}
        for k, values in enumerate(self._values):
            arrays[f"values{k}"] = np.frombuffer(bytes(values), np.uint8)
        return [[list(small) for small in kind] for kind in self.schemas], arrays

    @classmethod
    def from_data(cls, schemas: Sequence[Any], arrays: Mapping[str, Any]) -> "StepLog":
        """Rebuild a log from the values of `to_data`. Raises ValueError, TypeError or KeyError for anything else.

        Args:
            schemas: Descriptions of small outputs, as JSON data.
            arrays: Arrays by name.
        """
        journal = cls()
        journal.schemas = [tuple(SmallOutput(o, tuple(shape), dtype) for o, shape, dtype in kind) for kind in schemas]
        journal._schema_indices = array("H", np.asarray(arrays["which"], np.uint16).tolist())
        journal._values = [bytearray(np.asarray(arrays[f"values{k}"], np.uint8).tobytes()) for k in range(len(schemas))]
        calls = Counter(journal._schema_indices)
        for k, kind in enumerate(journal.schemas):
            if calls.pop(k, 0) * sum(small.nbytes for small in kind) != len(journal._values[k]):
                raise ValueError("calls and what they gave differ in number")
        if calls:
            raise ValueError("calls of no kind")
        return journal

    def _read_pending(self, count: int) -> None:
        """Move the outputs of the oldest `count` pending calls to the host."""
        for _ in range(count):
            # The call stays in the queue during the wait, in which an interrupt may come.
            which, outs = self._waiting[0]
            values = [to_numpy(x) for x in outs]
            self._waiting.popleft()
            self._schema_indices.append(which)
            for small, value in zip(self.schemas[which], values, strict=True):
                self._values[which] += np.asarray(value, jnp.dtype(small.dtype)).tobytes()


@dataclass(frozen=True)
class OutputRoles:
    """Roles of a program's flat outputs.

    Attributes:
        state_inputs: For an output that is the next value of state, the flat input with the present value.
        state_names: Name of each flat input that is state.
        small: Small outputs, logged for each call.
        large_names: Name of each remaining output.
    """

    state_inputs: Mapping[int, int]
    state_names: Mapping[int, str]
    small: OutputSchema
    large_names: Mapping[int, str]


def output_roles(entry: CompiledStep) -> OutputRoles:
    """Return the roles of a program's outputs.

    State is an output planned as the next value of an argument, or written into an argument.
    """
    n, traced = len(entry.consts), entry.traced
    avals = _returned_avals(entry)
    input_positions = {path: i for i, path in enumerate(traced.in_paths)}
    written = {o: input_positions.get(path, -1) for o, path in enumerate(traced.out_paths[: len(avals)])}
    same = {o: i for o, i in written.items() if i >= n and traced.closed.in_avals[i].shape == avals[o].shape}
    state = {o: i - n for o, i in {**same, **entry.plan.state_pairs}.items() if i >= n}
    names = {i: path_name(traced.in_paths[n + i]) for i in state.values()}
    small, large = [], {}
    for o, aval in enumerate(avals):
        if o in state:
            continue
        # Typed PRNG keys have no NumPy dtype, and the log is of NumPy arrays.
        plain = isinstance(aval.dtype, np.dtype)
        if plain and aval.size * aval.dtype.itemsize <= MAX_SMALL_BYTES:
            small.append(SmallOutput(o, tuple(aval.shape), aval.dtype.name))
        else:
            large[o] = path_name(traced.out_paths[o])
    return OutputRoles(state, names, tuple(small), large)


def _returned_avals(entry: CompiledStep) -> Sequence[Any]:
    """Return the avals of the flat outputs of a call, without values carried to the next call inside the program."""
    avals = entry.traced.closed.out_avals
    return avals[: len(avals) - (0 if entry.rewritten is None else entry.rewritten.carried)]


def flat_outputs(entry: CompiledStep, outs: Any) -> Sequence[Any]:
    """Return the flat outputs of a call."""
    return jax.tree.leaves(outs) if entry.takes_pytrees else outs


def _unflatten_outputs(entry: CompiledStep, flat: Sequence[Any]) -> Any:
    """Return flat outputs in the form returned by the program: the user's own pytree, or a list."""
    return entry.result.treedef.unflatten(flat) if entry.takes_pytrees else list(flat)


def _input_as_output(entry: CompiledStep, o: int, i: int, x: Any) -> Any:
    """Return a placed flat input in place of a skipped call's output, with the dtype and sharding of the output.

    Args:
        entry: Compiled program.
        o: Position of the flat output.
        i: Position of the flat input.
        x: The placed input.
    """
    aval, sharding = entry.traced.closed.out_avals[o], entry.out_shardings[o]
    alike = (
        isinstance(x, jax.Array)
        and x.dtype == aval.dtype
        and getattr(x, "weak_type", False) == getattr(aval, "weak_type", False)
        and x.sharding.is_equivalent_to(sharding, x.ndim)
    )
    if alike:
        # A copy: the array is the user's, and a later call may donate it.
        return own_copy(x, sharding) if entry.donated and i not in entry.donated else x
    return _to_output(entry, o, x)


def _to_input(entry: CompiledStep, i: int, x: Any, like: Any) -> Any:
    """Return `x` as the flat input `i`; a Python number if `like`, the value in the call, is one."""
    if isinstance(like, (bool, int, float, complex)):
        return type(like)(np.asarray(x).item())
    return put([x], entry.shardings[i])[0]


def _to_output(entry: CompiledStep, o: int, x: Any) -> jax.Array:
    """Return `x` as the flat output `o`, with the output's dtype and sharding."""
    aval, sharding = entry.traced.closed.out_avals[o], entry.out_shardings[o]
    if not isinstance(aval.dtype, np.dtype):  # typed PRNG keys
        return put([x], sharding)[0]
    if getattr(aval, "weak_type", False) and not aval.shape:
        # JAX makes weakly typed arrays from Python numbers only, by tracing them.
        return jax.jit(lambda value: value, out_shardings=sharding)(np.asarray(x).item())
    if not isinstance(x, jax.Array):
        x = np.asarray(x, aval.dtype)
    elif x.dtype != aval.dtype or x.weak_type:
        x = jnp.asarray(x, aval.dtype)
    return put([x], sharding)[0]


def _zero_output(entry: CompiledStep, o: int) -> jax.Array:
    """Return zeros for an output that was not saved."""
    aval = entry.traced.closed.out_avals[o]
    if not isinstance(aval.dtype, np.dtype):
        keys = jnp.broadcast_to(jax.random.key(0, impl=prng_impl_of(str(aval.dtype))), aval.shape)
        return put([keys], entry.out_shardings[o])[0]
    return _to_output(entry, o, np.zeros(aval.shape, aval.dtype))


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
        for o in range(len(_returned_avals(entry))):
            if o in returned:
                flat.append(returned[o])
            elif o in small:
                flat.append(_to_output(entry, o, small[o]))
            elif o in outputs.state_inputs:
                i = outputs.state_inputs[o]
                flat.append(_input_as_output(entry, o, i, leaves[i]))
            else:
                self.zeroed.add(outputs.large_names[o])
                flat.append(_zero_output(entry, o))
        return _unflatten_outputs(entry, flat), returned

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
                    leaves[i] = _to_input(entry, i, arrays[name], leaves[i])
        # The loop goes on with other arrays: these must not stay on the devices.
        self._arrays, self._given = {}, {}
        return entry.arrange(leaves)

    def _returned_arrays(self, call: int, entry: CompiledStep, outputs: OutputRoles) -> dict[int, Any]:
        """Return the arrays of the checkpoint that came from a call, by output."""
        sources = self._sources.get(call, {})
        if not sources:
            return {}
        saved_leaves, avals = {leaf.path: leaf for leaf in self.saved.leaves}, _returned_avals(entry)
        if any(o >= len(avals) or avals[o].shape != saved_leaves[name].shape for o, name in sources.items()):
            raise self._changed_error(call, "arrays")
        arrays = self._read_arrays(entry, outputs, sources)
        returned = {o: _to_output(entry, o, arrays[name]) for o, name in sources.items()}
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
