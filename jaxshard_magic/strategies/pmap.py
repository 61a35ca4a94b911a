"""Steps written for one device, with collectives over axis names, run by `shard_map` on the mesh.

The results of a step (as for `jax.pmap`) are checked before they are assembled: what the devices would replicate must
be equal on all of them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import DictKey, GetAttrKey, KeyPath

from ..config.request import Request
from ..errors import ShardError
from ..plan import DeviceWork, Finding, LeafPlan, Plan
from ..program.batching.batch import Batch
from ..program.dimensions import Dimensions
from ..program.emit import Emitter
from ..program.facts import Facts
from ..program.flops import uncounted_primitives
from ..program.ir import Equation, Program, Value
from ..program.loss import find_loss
from ..program.per_device import AxisName, DeviceSlice, PerDeviceTrace
from ..program.primitives import axis_names, bind, rename_axes
from ..program.roles import BATCH, OPTIMIZER, OTHER, PARAMS
from ..program.trace import path_name
from ..program.varying_axes import SAME, AxisNames, varying_axes
from .layout import partition_spec
from .plan_checks import result_findings

_Cuts = tuple[DeviceSlice | None, ...]


def pmap_plan(facts: Facts, request: Request) -> Plan:
    """Return the plan of a step traced as the program of one device.

    Args:
        facts: Facts of the per-device trace.
        request: The request with mesh and strategy.

    Raises:
        ShardError: State, or a number without a device axis, would differ between devices.
    """
    traced, program, flow, roles = facts.traced, facts.program, facts.flow, facts.roles
    assert isinstance(traced, PerDeviceTrace)
    mapped, mesh = traced.mapping, request.mesh
    out_cuts, findings = _check_results(traced, facts.dimensions, facts.batch)
    in_specs, out_specs = (tuple(_spec(traced, cut) for cut in cuts) for cuts in (traced.slices, out_cuts))
    emitter = _MeshAxisEmitter(program, facts.labels, mapped.axes)
    examples = facts.batch.size
    return Plan(
        traced=traced,
        mesh=mesh,
        strategy=request.strategy,
        in_specs=in_specs,
        out_specs=out_specs,
        leaves=tuple(_leaf_plan(traced, i, spec) for i, spec in enumerate(in_specs)),
        run=jax.shard_map(
            per_device_function(emitter, traced.slices, out_cuts),
            mesh=mesh,
            in_specs=in_specs,
            out_specs=list(out_specs),
            # With this check JAX itself sums the gradients of replicated inputs, in addition to the step's own
            # reduction.
            check_vma=False,
        ),
        state_pairs=roles.state,
        loss=find_loss(traced, flow, roles.state),
        batch_axes=mapped.mesh_axes,
        idle_axes=_idle_axes(traced, mesh),
        findings=(*result_findings(facts), *findings),
        axes_by_strategy={"pmap": mapped.mesh_axes},
        examples=None if examples is None else examples * mapped.device_count,
        # The trace is of one device, `work` of all devices.
        work=tuple(
            replace(w, flops=w.flops * mapped.device_count, bytes=w.bytes * mapped.device_count) for w in facts.work
        ),
        shares=tuple(DeviceWork(w.flops, w.bytes, w.dtype, w.recomputed, w.exact) for w in facts.work),
        uncounted_primitives=uncounted_primitives(program),
    )


class _MeshAxisEmitter(Emitter):
    """Emitter that runs collectives over the mesh axes behind their axis names."""

    def __init__(self, program: Program, labels: Mapping[int, str], axes: Mapping[AxisName, tuple[str, ...]]):
        super().__init__(program, labels)
        self._axes = axes

    def run_equation(self, e: Equation, values: list) -> list:
        names = axis_names(e.jaxpr_eqn)
        if not any(name in self._axes for name in names):
            return super().run_equation(e, values)
        # The primitive takes a single axis; the function numbers devices along several.
        if e.name == "axis_index":
            return [lax.axis_index(self._axes[names[0]])]
        return bind(rename_axes(e.jaxpr_eqn, self._axes), values)


def per_device_function(
    step: Callable[..., list], cuts: Sequence[DeviceSlice | None], out_cuts: Sequence[DeviceSlice | None]
) -> Callable[..., list]:
    """Wrap `step` to drop the device axis of its inputs and to restore it on its results.

    Args:
        step: The step of one device, on flat inputs.
        cuts: Split of each flat input, None for one that is replicated.
        out_cuts: Split of each flat result.
    """

    def run(*parts: Any) -> list:
        inside = [lax.squeeze(x, [c.dim]) if c and c.is_device_axis else x for x, c in zip(parts, cuts, strict=True)]
        outs = step(*inside)
        return [
            lax.expand_dims(x, [c.dim]) if c and c.is_device_axis else x for x, c in zip(outs, out_cuts, strict=True)
        ]

    return run


def _spec(traced: PerDeviceTrace, cut: DeviceSlice | None) -> PartitionSpec:
    return PartitionSpec() if cut is None else partition_spec([()] * cut.dim + [traced.mapping.mesh_axes])


def _idle_axes(traced: PerDeviceTrace, mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes of more than one device that no axis name stands for."""
    busy = {a for axes in traced.mapping.axes.values() for a in axes}
    return tuple(a for a in mesh.axis_names if a not in busy and mesh.shape[a] > 1)


def _leaf_plan(traced: PerDeviceTrace, i: int, spec: PartitionSpec) -> LeafPlan:
    role = traced.roles.by_input[i]
    return LeafPlan(
        path=path_name(traced.in_paths[i]),
        role=OTHER if role == BATCH and i < len(traced.consts) else role,
        shape=traced.global_input_shape(i),
        dtype=traced.closed.in_avals[i].dtype,
        spec=spec,
        reason=_reason(traced, i),
    )


def _reason(traced: PerDeviceTrace, i: int) -> str:
    cut, over = traced.slices[i], "+".join(traced.mapping.mesh_axes)
    if cut is None:
        cause = "in_axes is None" if traced.mapping.has_device_axis else "no device axis"
        return f"pmap: a copy on every device, {cause}"
    if cut.is_device_axis:
        part = "its copy" if i in traced.roles.storage_order else "its place"
        return f"pmap: each device has {part} along the device axis, dim {cut.dim} over {over}"
    return f"pmap: no device axis; examples, dim {cut.dim} over {over}"


def _check_results(traced: PerDeviceTrace, dims: Dimensions, batch: Batch) -> tuple[_Cuts, tuple[Finding, ...]]:
    """Return how each result is assembled from the devices' parts, and the findings about the results.

    With a device axis every result has an entry for each device, and only parameters and optimizer state must be equal
    in all entries. Without a device axis all state must be equal, and any other differing result needs a dimension of
    examples.

    Args:
        traced: The step, traced as one device runs a call.
        dims: Dimension classes of the traced program.
        batch: The batch dimensions of the program.

    Returns:
        A cut for each output, None for an output equal on all devices; and findings.

    Raises:
        ShardError: An output must be equal on all devices and may differ. The message names the line to add to the
            step.
    """
    return _check_stacked(traced) if traced.mapping.has_device_axis else _check_unstacked(traced, dims, batch)


def _check_stacked(traced: PerDeviceTrace) -> tuple[_Cuts, tuple[Finding, ...]]:
    data = [i for i, cut in enumerate(traced.slices) if cut is not None and traced.roles.by_input[i] == BATCH]
    # Only a missing reduction is an error. State that differs on purpose (axis_index, psum_scatter) is a finding.
    unreduced_axes = _varying_after_many_steps(traced, data, own_parts=False)
    unreduced_outputs = [
        o
        for o, i in sorted(traced.roles.state.items())
        if traced.roles.by_input[i] in (PARAMS, OPTIMIZER) and _axes_of_output(traced, unreduced_axes, o)
    ]
    if unreduced_outputs:
        _raise_unreduced_state(traced, unreduced_outputs, unreduced_axes)
    axes_by_value = _varying_after_many_steps(traced, data, own_parts=True)
    differing = [i for o, i in sorted(traced.roles.state.items()) if _axes_of_output(traced, axes_by_value, o)]
    return traced.output_slices, _state_differs_findings(traced, differing)


def _varying_after_many_steps(traced: PerDeviceTrace, data: Iterable[int], *, own_parts: bool) -> list[AxisNames]:
    """Return the axes over which each value differs between devices, after many steps.

    State returned different enters the next step different, so the analysis repeats until no input is added. Parameters
    and optimizer state without a reduction are not added unless `own_parts`, because the caller reports them.
    """
    mapped_axes = frozenset(traced.mapping.split_names)
    inputs, start = traced.program.inputs, set(data)
    while True:
        axes_by_value = varying_axes(traced.program, {inputs[i]: mapped_axes for i in start}, own_parts=own_parts)
        differing_inputs = {
            i
            for o, i in traced.roles.state.items()
            if _axes_of_output(traced, axes_by_value, o)
            and (own_parts or traced.roles.by_input[i] not in (PARAMS, OPTIMIZER))
        }
        if differing_inputs <= start:
            return axes_by_value
        start |= differing_inputs


def _state_differs_findings(traced: PerDeviceTrace, state_inputs: Sequence[int]) -> tuple[Finding, ...]:
    if not state_inputs:
        return ()
    name, axis = path_name(traced.in_paths[state_inputs[0]]), _axis_source(traced.mapping.split_names)
    more = f" and {len(state_inputs) - 1} more" if len(state_inputs) > 1 else ""
    variable = _variable_name(traced.in_paths[state_inputs[0]])
    message = f"{name}{more} differ from device to device after the step, as under jax.pmap."
    return (Finding("state-differs", "info", message, f"{variable} = jax.lax.pmean({variable}, {axis})"),)


def _check_unstacked(traced: PerDeviceTrace, dims: Dimensions, batch: Batch) -> tuple[_Cuts, tuple[Finding, ...]]:
    program, state, mapped_axes = traced.program, traced.roles.state, frozenset(traced.mapping.split_names)
    start = {program.inputs[i]: mapped_axes for i, cut in enumerate(traced.slices) if cut is not None}
    axes_by_value = varying_axes(program, start)
    outputs = range(len(program.outputs))
    differing_outputs = [
        o
        for o in outputs
        if o in state and traced.slices[state[o]] is None and _axes_of_output(traced, axes_by_value, o)
    ]
    if differing_outputs:
        unreduced_axes = varying_axes(program, start, own_parts=False)
        unreduced_outputs = [o for o in differing_outputs if _axes_of_output(traced, unreduced_axes, o)]
        _raise_unreduced_state(
            traced, unreduced_outputs, unreduced_axes
        ) if unreduced_outputs else _raise_partial_state(traced, differing_outputs)
    cuts: list[DeviceSlice | None] = []
    for o in outputs:
        axes = _axes_of_output(traced, axes_by_value, o)
        if o in state:
            # State is passed to the next call, so that it must be split as it came.
            cuts.append(traced.slices[state[o]])
            continue
        dim = _example_dim(dims, batch, program.outputs[o]) if axes else None
        # A result is put together only along the axes that split the inputs.
        if axes and (dim is None or axes - mapped_axes):
            _raise_differing_result(traced, o, axes)
        cuts.append(None if dim is None else DeviceSlice(dim, False))
    return tuple(cuts), ()


def _example_dim(dims: Dimensions, batch: Batch, value: Value | None) -> int | None:
    """Return the dimension of a result that counts examples, or None."""
    if value is None:
        return None
    named = [d for d, c in enumerate(dims.classes_of(value)) if c in batch.classes]
    shape = dims.program.shapes[value]
    return next(iter(named), 0 if shape and shape[0] == batch.size else None)


def _axes_of_output(traced: PerDeviceTrace, axes_by_value: Sequence[AxisNames], o: int) -> AxisNames:
    value = traced.program.outputs[o]
    return SAME if value is None else axes_by_value[value]


def _raise_unreduced_state(
    traced: PerDeviceTrace, outputs: Sequence[int], unreduced_axes: Sequence[AxisNames]
) -> NoReturn:
    """Raise `ShardError` for state without a reduction, and name the gradient where the gradient differs."""
    o = outputs[0]
    path = traced.in_paths[traced.roles.state[o]]
    axis = _axis_source(_axes_of_output(traced, unreduced_axes, o))
    # A reduction of the gradients makes the optimizer state equal as well.
    gradients = _differing_gradients(traced, o, unreduced_axes)
    variable = "grads" if gradients else _variable_name(path)
    line = f"{variable} = jax.lax.pmean({variable}, {axis})"
    more = f" (and {len(outputs) - 1} more)" if len(outputs) > 1 else ""
    what = "its gradient is not reduced" if gradients else "it is not reduced"
    raise ShardError(
        f"{path_name(path)}{more} would differ between devices: {what} over {axis}. Add the line {line}"
        f"{' after the gradients are taken' if gradients else ''}",
        fix=line,
    )


def _differing_gradients(traced: PerDeviceTrace, o: int, unreduced_axes: Sequence[AxisNames]) -> set[Value]:
    """Return the gradients that differ between devices and contribute to output `o`."""
    flow = traced.flow
    met = flow.ancestors([traced.program.outputs[o]], lambda _v, w, _e: bool(unreduced_axes[w]))
    return {v for v in met if v in flow.gradients and unreduced_axes[v]}


def _raise_partial_state(traced: PerDeviceTrace, outputs: Sequence[int]) -> NoReturn:
    path = traced.in_paths[traced.roles.state[outputs[0]]]
    variable, axis = _variable_name(path), _axis_source(traced.mapping.split_names)
    raise ShardError(
        f"{path_name(path)} would be another part on every device (axis_index, psum_scatter, ppermute), which state "
        f"without a device axis can't hold. Keep the whole of it, jax.lax.all_gather({variable}, {axis}, tiled=True), "
        "from the first state on, or give state and batch a device axis"
    )


def _raise_differing_result(traced: PerDeviceTrace, o: int, axes: AxisNames) -> NoReturn:
    path = traced.out_paths[o]
    is_loss = o == find_loss(traced, traced.flow, traced.roles.state)
    variable = _innermost_name(path) or ("loss" if is_loss else "metrics")
    line = f"{variable} = jax.lax.pmean({variable}, {_axis_source(axes)})"
    raise ShardError(
        f"{path_name(path)}{' (the loss)' if is_loss and not _innermost_name(path) else ''} would differ "
        "between devices and has "
        f"no device axis. Add the line {line}",
        fix=line,
    )


def _axis_source(names: Iterable[Any]) -> str:
    """Return axis names as written in a call: 'batch', or ('i', 'j')."""
    listed = sorted(names, key=str)
    return repr(listed[0]) if len(listed) == 1 else repr(tuple(listed))


def _variable_name(path: KeyPath) -> str:
    """Return a variable name for the state at `path`: the first identifier below the argument, else the argument's
    name."""
    return next(filter(str.isidentifier, map(_key_name, path[1:2])), "") or _key_name(path[0]) or "state"


def _innermost_name(path: KeyPath) -> str:
    """Return the innermost identifier in the path of a result, or ""."""
    return next((k for k in map(_key_name, reversed(path[1:])) if k.isidentifier()), "")


def _key_name(key: Any) -> str:
    if isinstance(key, DictKey):
        return str(key.key)
    return key.name if isinstance(key, GetAttrKey) else ""
