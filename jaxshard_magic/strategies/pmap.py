"""Steps written for one device, with collectives over axis names, run by `shard_map` on the mesh."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from ..config.request import Request
from ..plan import DeviceWork, LeafPlan, Plan
from ..program.emit import Emitter
from ..program.facts import Facts
from ..program.flops import uncounted_primitives
from ..program.ir import Equation, Program
from ..program.loss import find_loss
from ..program.per_device import AxisName, DeviceSlice, PerDeviceTrace
from ..program.primitives import axis_names, bind, rename_axes
from ..program.roles import BATCH, OTHER
from ..program.trace import path_name
from .layout import partition_spec
from .replication_check import check_results
from .unused_results import result_findings


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
    out_cuts, findings = check_results(traced, facts.dimensions, facts.batch)
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
