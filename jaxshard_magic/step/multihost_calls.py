"""Calls of a step on several hosts: equal arrays on all hosts, or rows of the batch on each."""

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet
from zlib import crc32

import jax
import numpy as np
from jax.sharding import NamedSharding

from ..compilation.compiled_step import CompiledStep, has_sharding, type_key
from ..compilation.completion_probe import is_done
from ..compilation.donation import OwnOutputs
from ..compilation.planned_call import mesh_context, trace_or_reuse
from ..config.request import Request
from ..coordination import gather_texts
from ..device_arrays import count_hosts, is_local, is_prng_key
from ..errors import ShardError
from ..plan import Finding
from ..program.flatten_call import FlatCall, aval_key, shape_structs
from ..program.hooks import retrace_context
from ..program.roles import BATCH
from ..program.trace import path_name
from ..strategies import find_facts
from ..targets import target_of
from .call_comparison import CallComparison, CallDescription, LeafInfo, comparable_values
from .fast_calls import CallMismatch

PER_HOST = "--data per-host"
MEETING_LIMIT_S = 60.0  # seconds for all hosts to come with a new kind of call
MAX_COMPARE_GAP = 64  # calls, at most, between two comparisons of the hosts' data
# Fingerprints of global arrays, which no host can read whole: in the program's sharding, and in another.
GLOBAL_IN_PLACE, GLOBAL_MISPLACED = "-", "~"
_ALL: "WeakSet[MultihostCalls]" = WeakSet()  # `finished_state` is given an array and not its step


class MultihostCalls:
    """Calls of a step on a mesh over several hosts; each host passes its own arguments.

    Each function in `barriers` is called before a call, with the call's comparison: a host stops there if another has
    failed or calls differently. Functions in `release_hooks` let the other hosts out of a barrier.

    Args:
        request: Strategy, mesh and options.
        hosts: Number of hosts.
    """

    barriers: ClassVar[list[Callable[[CallComparison], None]]] = []
    # Called with the exception raised here, or with None at the end of a loop.
    release_hooks: ClassVar[list[Callable[[BaseException | None], None]]] = []
    cell_number: ClassVar[int] = 0  # of the running cell; its first call of each kind is compared

    def __init__(self, request: Request, hosts: int):
        self._request, self._hosts = request, hosts
        self._under_way: deque[tuple[CompiledStep, Any, Any, Any]] = deque()
        _ALL.add(self)
        self._per_host = request.data == "per-host"
        self._calls: WeakKeyDictionary[CompiledStep, int] = WeakKeyDictionary()  # of the cell `_counted_cell`
        self._counted_cell = 0
        self._last: CompiledStep | None = None
        self._has_met = False
        self._kinds: dict[tuple[tuple[int, int], ...], dict[Hashable, Hashable]] = {}

    def with_global_shapes(self, flat_call: FlatCall, say: Callable[[str], None]) -> FlatCall:
        """Return a flat call with the shapes of the global batch, for planning."""
        return (
            self._with_global_dims(flat_call, _batch_dims(flat_call, self._request, say))
            if self._per_host
            else flat_call
        )

    def with_program_key(self, flat_call: FlatCall) -> FlatCall:
        """Return a flat call under the key of its program.

        Parts of the batch on each host, and the global arrays of all hosts, lead to the same key.
        """
        if not self._per_host:
            return flat_call
        local_key, loose = flat_call.keys_with([(aval_key(x), is_local(x)) for x in flat_call.leaves])
        for rows, keys in self._kinds.items():
            whole = self._global_keys(flat_call, dict(rows))
            if whole is not None:
                loose = whole[1]
                if whole[0] in keys:
                    return replace(flat_call, key=keys[whole[0]], loose_key=loose)
        return replace(flat_call, key=local_key, loose_key=loose)

    def compile_call(
        self, build: Callable[[FlatCall], CompiledStep], say: Callable[[str], None], flat_call: FlatCall
    ) -> CompiledStep:
        """Compile a call with the shapes of the global batch.

        Args:
            build: Compiles a flat call.
            say: Progress callback.
            flat_call: The call as made on this host.
        """
        rows = _batch_dims(flat_call, self._request, say) if self._per_host else {}
        entry = build(self._with_global_dims(flat_call, rows))
        entry.per_host_dims = rows
        if self._per_host and (whole := self._global_keys(flat_call, rows)) is not None:
            self._kinds.setdefault(tuple(rows.items()), {})[whole[0]] = flat_call.key
        return entry

    def begin_call(self) -> None:
        """Begin a call of the user's; hosts meet once in it."""
        self._has_met = False

    def meet_for_extra_call(self) -> None:
        """Meet before an additional call, besides the user's own."""
        self.begin_call()
        self.meet_for_call("the step", self._last, lambda: (["a call that is recorded"], []))

    def meet_for_call(self, name: str, entry: CompiledStep | None, describe: Callable[[], CallDescription]) -> None:
        """Meet the other hosts for a call, once per call, and release the values of finished calls.

        Args:
            name: Name of the step.
            entry: Program of the call; None for a program still to be compiled.
            describe: Makes the description to compare.

        Raises:
            ShardError: Hosts make different calls; raised before anything runs.
        """
        if self._has_met:
            return
        self._has_met = True
        call = CallComparison(name, entry is None or entry is not self._last, describe, self._hosts, self._per_host)
        for meet in MultihostCalls.barriers:
            meet(call)
        # One of the barriers may have compared the call.
        if call.is_new and not call.compared and (MultihostCalls.barriers or entry is None or entry.calls == 0):
            call.compare(MEETING_LIMIT_S if MultihostCalls.barriers else None)
        self._last = entry
        while self._under_way and ((sign := self._under_way[0][-1]) is None or is_done(sign)):
            self._under_way.popleft()

    def record_call(self, entry: CompiledStep, inputs: Any, outs: Any) -> None:
        """Record a call, and keep its values until the call has finished."""
        self._last = entry
        # If a host dies, the call never finishes, and `state_before` needs the inputs. The devices keep them alive
        # anyway.
        self._under_way.append((entry, inputs, outs, entry.clock.probe))

    def state_before(self, x: Any) -> Any:
        """Return the state that went into a running call in place of the output `x`; None for any other array."""
        for entry, inputs, outs, _ in self._under_way:
            at = next((o for o, out in enumerate(jax.tree.leaves(outs)) if out is x), None)
            if at is not None and (place := entry.plan.state_pairs.get(at)) is not None:
                return entry.leaves(inputs)[place - len(entry.consts)]
        return None

    def join_parts(self, entry: CompiledStep, flat_call: FlatCall) -> FlatCall:
        """Return a flat call with hosts' parts joined into global arrays, after comparing values between hosts.

        Raises ShardError if the values differ.
        """
        self._compare_values(entry, flat_call.leaves)
        return replace(flat_call, leaves=entry.join_parts(flat_call.leaves)) if entry.per_host_dims else flat_call

    def fast_call(self, call: Any, own_outputs: OwnOutputs) -> "FastMultihostCall":
        """Return a fast call with the comparisons between hosts."""
        return FastMultihostCall(self, call, own_outputs)

    def accepts(self, entry: CompiledStep, leaves: Sequence[Any]) -> bool:
        """Return whether flat inputs, as on this host, fit the program.

        Global arrays are the same on all hosts and are not checked: a check takes 0.5 us each.
        """
        avals = entry.traced.closed.in_avals[len(entry.consts) :]
        return all(
            not is_local(x) or self._fits(entry, i, x, aval)
            for i, (x, aval) in enumerate(zip(leaves, avals, strict=True))
        )

    def _fits(self, entry: CompiledStep, i: int, x: Any, aval: Any) -> bool:
        """Return whether a host's own array fits an aval of the program, with its rows multiplied by the number of
        hosts."""
        shape, dtype, weak = type_key(x)
        dim = entry.per_host_dims.get(i)
        if dim is not None and dim < len(shape):
            shape = (*shape[:dim], shape[dim] * self._hosts, *shape[dim + 1 :])
        return (shape, dtype, weak) == (aval.shape, aval.dtype, aval.weak_type)

    def describe_call(self, entry: CompiledStep, leaves: Sequence[Any]) -> CallDescription:
        """Return the description, for comparison, of a call of a known program."""
        call, paths = entry.call_shapes, entry.traced.in_paths
        names = map(path_name, paths[len(paths) - len(leaves) :])
        return self._description(call, list(map(_leaf, names, leaves)))

    def describe_new_call(self, flat_call: FlatCall) -> CallDescription:
        """Return the description, for comparison, of a call as made on this host."""
        names = (path_name(path) for path, _, _ in flat_call.inputs)
        return self._description(flat_call, list(map(_leaf, names, flat_call.leaves)))

    def _description(self, call: FlatCall | None, leaves: list[LeafInfo]) -> CallDescription:
        """Return the options and static values of a call, and its arrays."""
        request = self._request
        head = [request.strategy, str(request.options), str(dict(request.mesh.shape))]
        if call is not None:
            head += comparable_values([*call.python_values.values(), *call.statics.values()])
        return head, leaves

    def place_inputs(
        self, entry: CompiledStep, inputs: tuple[Any, ...], leaves: Sequence[Any], own_outputs: OwnOutputs
    ) -> tuple[Any, ...]:
        """Return the arranged inputs of a later call, moved to the program's shardings.

        Args:
            entry: Program of the call.
            inputs: Arranged inputs.
            leaves: The same inputs, flat.
            own_outputs: Arrays returned by the step, open to donation.

        Raises:
            ShardError: Values differ between hosts.
        """
        self._compare_values(entry, leaves)
        return entry.place_on_hosts(inputs, leaves, own_outputs)

    def _global_keys(self, flat_call: FlatCall, rows: Mapping[int, int]) -> tuple[Hashable, Hashable] | None:
        """Return both keys of a call with the global batch; `rows` gives the batch dimension of flat inputs. None if
        impossible."""
        whole = list(map(aval_key, flat_call.leaves))
        if any(i >= len(whole) or dim >= len(whole[i][0]) for i, dim in rows.items()):
            return None
        for i, dim in rows.items():
            shape, dtype, weak, memory = whole[i]
            if is_local(flat_call.leaves[i]):
                shape = (*shape[:dim], shape[dim] * self._hosts, *shape[dim + 1 :])
                whole[i] = shape, dtype, weak, memory
        return flat_call.keys_with(whole)

    def _with_global_dims(self, flat_call: FlatCall, rows: Mapping[int, int]) -> FlatCall:
        """Return a flat call with shapes for arrays, and global shapes for parts."""
        leaves = shape_structs(flat_call.leaves)
        for i, dim in rows.items():
            x = flat_call.leaves[i]
            if is_local(x):
                shape = leaves[i].shape
                leaves[i] = leaves[i].update(shape=(*shape[:dim], shape[dim] * self._hosts, *shape[dim + 1 :]))
        return replace(flat_call, leaves=leaves) if rows else flat_call

    def _compare_values(self, entry: CompiledStep, leaves: Sequence[Any]) -> None:
        """Compare the values of a call between hosts, unless the calls before were compared often enough."""
        if self._counted_cell != MultihostCalls.cell_number:
            self._counted_cell = MultihostCalls.cell_number
            self._calls.clear()
        calls = self._calls.get(entry, 0)  # including skipped calls
        self._calls[entry] = calls + 1
        # In each cell: the first call of a kind, then after 1, 2, 4, ... calls, at most MAX_COMPARE_GAP apart.
        if calls % MAX_COMPARE_GAP == 0 or calls & (calls - 1) == 0:
            _check_equal_values(entry, leaves)


class FastMultihostCall:
    """Fast call on several hosts: inputs are compared between hosts and moved to the program's shardings.

    Args:
        hosts: Calls of the step on several hosts.
        call: Fast call on one host.
        own_outputs: Arrays returned by the step, open to donation.
    """

    def __init__(self, hosts: MultihostCalls, call: Any, own_outputs: OwnOutputs):
        self._hosts, self._call, self._own_outputs = hosts, call, own_outputs
        self.entry: CompiledStep = call.entry
        self.watch = call.watch

    def gather(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """Return the program's inputs and the state for `finish`. Raises CallMismatch for a call of another kind."""
        hosts, entry = self._hosts, self.entry
        inputs, watch = self._call.gather(args, kwargs)
        leaves = entry.leaves(inputs)
        if not hosts.accepts(entry, leaves):
            raise CallMismatch
        hosts.meet_for_call(_name(entry), entry, partial(hosts.describe_call, entry, leaves))
        return hosts.place_inputs(entry, inputs, leaves, self._own_outputs), watch

    def finish(self, watch: Any, inputs: tuple[Any, ...], outs: Any) -> Any:
        """Record the call, and return the step's result."""
        self._hosts.record_call(self.entry, inputs, outs)
        return self._call.finish(watch, inputs, outs)


def finished_state(x: Any) -> jax.Array | None:
    """Return an output of a step, or an earlier finished state if a dead host prevents the call from finishing.

    Returns:
        None if the array was donated, so that no state is available.
    """
    while x is not None and not x.is_deleted() and not _key_data(x).is_ready():
        x = next((before for each in list(_ALL) if (before := each.state_before(x)) is not None), None)
    return None if x is None or x.is_deleted() else x


def multihost_calls_of(request: Request) -> MultihostCalls | None:
    """Return the calls on several hosts for a request; None for devices of a single host, or not attached."""
    hosts = 1 if target_of(request.mesh) is not None else count_hosts(request.mesh)
    return None if hosts == 1 else MultihostCalls(request, hosts)


def _leaf(path: str, x: Any) -> LeafInfo:
    """Return the description of an array, for comparison between hosts."""
    shape, dtype, *_ = aval_key(x)
    return path, str(dtype), list(shape), is_local(x)


def _name(entry: CompiledStep) -> str:
    """Return the name of the step of a program."""
    return "the step" if entry.call_shapes is None else entry.call_shapes.step.name


def _batch_dims(flat_call: FlatCall, request: Request, say: Callable[[str], None]) -> dict[int, int]:
    """Return the batch dimension of each flat input with examples. Raises ShardError if there is none."""
    with mesh_context(request.mesh), retrace_context():
        call = trace_or_reuse(flat_call, request, say)
        if not request.per_device:
            call = call.on_mesh(request.mesh, whole=True)
        facts = find_facts(call.traced, request, flat_call.own_placements)
    first = len(call.traced.consts)
    dims_by_input = {i - first: dims[0] for i, dims in facts.batch.input_dims.items() if dims and i >= first}
    if not dims_by_input:
        raise ShardError(
            f"{PER_HOST}: {flat_call.step.name} has no argument that holds examples; --spec names one, as in "
            "--spec \"batch=P('data')\", or leave it out"
        )
    return dims_by_input


def _check_equal_values(entry: CompiledStep, leaves: Sequence[Any]) -> None:
    """Raise ShardError if hosts pass different values for an array that must be equal on all.

    If each host has its own rows, and all rows are equal, a warning is added to the plan.
    """
    sums = " ".join(map(_fingerprint, leaves, entry.shardings))
    values = [set(each) for each in zip(*(host.split(" ") for host in gather_texts(sums)), strict=True)]
    same = [len(each) == 1 for each in values]
    n = len(entry.consts)
    inputs = entry.plan.leaves[n : n + len(leaves)]
    if mixed := [leaf for leaf, each in zip(inputs, values, strict=True) if GLOBAL_MISPLACED in each and len(each) > 1]:
        raise ShardError(
            f"{_name(entry)}: {mixed[0].path} is an array of all {entry.hosts} hosts on some, and a host's own on "
            "others. Make it in the same way on all"
        )
    different = [
        leaf for i, leaf in enumerate(inputs) if len(values[i] - {GLOBAL_IN_PLACE}) > 1 and i not in entry.per_host_dims
    ]
    if different:
        raise _different_values_error(entry, sorted(different, key=lambda leaf: leaf.role == BATCH)[0])
    local_inputs = [i for i in entry.per_host_dims if is_local(leaves[i])]
    if (
        local_inputs
        and all(same[i] for i in local_inputs)
        and not any(f.code == "same-rows" for f in entry.plan.findings)
    ):
        message = (
            f"All {entry.hosts} hosts have the same rows of {inputs[local_inputs[0]].path}: every example "
            f"counts {entry.hosts} "
            f"times. Load other rows on each, by jax.process_index(), or leave {PER_HOST} out."
        )
        entry.plan = replace(entry.plan, findings=(*entry.plan.findings, Finding("same-rows", "warning", message)))


def _different_values_error(entry: CompiledStep, leaf: Any) -> ShardError:
    """Return an error for an array with different values on hosts."""
    head = f"{_name(entry)}: {leaf.path} is not the same on all {entry.hosts} hosts"
    if leaf.role == BATCH:
        return ShardError(
            f"{head}. Where each host loads its own part of the batch, say {PER_HOST}; else load the same on all",
            fix=PER_HOST,
        )
    return ShardError(f"{head}. Make it alike on all of them, from the same seed or the same file")


def _fingerprint(x: Any, sharding: NamedSharding) -> str:
    """Return a text for comparing an array between hosts: a checksum of a host's own array, or the kind of a global
    array."""
    if is_local(x):
        return f"{_checksum(x):x}"
    return GLOBAL_IN_PLACE if has_sharding(x, sharding) else GLOBAL_MISPLACED


def _checksum(x: Any) -> int:
    """Return the CRC-32 of an array's bytes."""
    return crc32(np.ascontiguousarray(_key_data(x)).tobytes())


def _key_data(x: Any) -> Any:
    """Return the numbers of a typed key; any other array itself."""
    return jax.random.key_data(x) if is_prng_key(x) else x
