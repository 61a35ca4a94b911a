"""Steps written for one device, with `jax.lax.pmean(..., axis_name)`: run by `shard_map` on the mesh."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from ..config.request import Request
from ..plan import LeafPlan, Plan, Share
from ..program.emit import Emitter
from ..program.facts import Facts
from ..program.flops import unseen
from ..program.ir import Equation, Program
from ..program.loss import find_loss
from ..program.mapped import Cut, Name, PerDevice
from ..program.primitives import axis_names, bind, over_axes
from ..program.roles import BATCH, OTHER
from ..program.trace import path_name
from .alike import results
from .layout import partition_spec
from .results import about_results


def spread_plan(facts: Facts, request: Request) -> Plan:
    """The plan of a step that is traced as what one device does: every device runs it on its part.

    Raises `ShardError` where state, or a number without a device axis, would differ between the devices.
    """
    traced, program, flow, roles = facts.traced, facts.program, facts.flow, facts.roles
    assert isinstance(traced, PerDevice)
    mapped, mesh = traced.mapped, request.mesh
    out_cuts, findings = results(traced, facts.dimensions, facts.batch)
    in_specs, out_specs = (tuple(_spec(traced, cut) for cut in cuts) for cuts in (traced.cuts, out_cuts))
    emitter = _OnMesh(program, facts.labels, mapped.axes)
    examples = facts.batch.size
    return Plan(
        traced=traced,
        mesh=mesh,
        strategy=request.strategy,
        in_specs=in_specs,
        out_specs=out_specs,
        leaves=tuple(_leaf(traced, i, spec) for i, spec in enumerate(in_specs)),
        run=jax.shard_map(
            one_device(emitter, traced.cuts, out_cuts),
            mesh=mesh,
            in_specs=in_specs,
            out_specs=list(out_specs),
            check_vma=False,  # else jax sums the gradients of what is whole on every device once more
        ),
        state_pairs=roles.state,
        loss=find_loss(traced, flow, roles.state),
        batch_axes=mapped.mesh_axes,
        idle_axes=_idle(traced, mesh),
        findings=(*about_results(facts), *findings),
        jobs={"pmap": mapped.mesh_axes},
        examples=None if examples is None else examples * mapped.devices,
        work=tuple(
            replace(w, flops=w.flops * mapped.devices, bytes=w.bytes * mapped.devices) for w in facts.work
        ),
        shares=tuple(Share(w.flops, w.bytes, w.dtype, w.recomputed, w.exact) for w in facts.work),
        unseen=unseen(program),
    )


class _OnMesh(Emitter):
    """Collectives over the mesh axes that stand behind their names."""

    def __init__(self, program: Program, labels: Mapping[int, str], axes: Mapping[Name, tuple[str, ...]]):
        super().__init__(program, labels)
        self._axes = axes

    def equation(self, e: Equation, values: list) -> list:
        names = axis_names(e.eqn)
        if not any(name in self._axes for name in names):
            return super().equation(e, values)
        if e.name == "axis_index":
            return [lax.axis_index(self._axes[names[0]])]
        return bind(over_axes(e.eqn, self._axes), values)


def one_device(
    step: Callable[..., list], cuts: Sequence[Cut | None], out_cuts: Sequence[Cut | None]
) -> Callable[..., list]:
    """What a device does: its place along a device axis has that no more inside the step, and again outside.

    `cuts` are those of the step's flat inputs, `out_cuts` of its results.
    """

    def run(*parts: Any) -> list:
        inside = [
            lax.squeeze(x, [c.dim]) if c and c.device_axis else x for x, c in zip(parts, cuts, strict=True)
        ]
        outs = step(*inside)
        return [
            lax.expand_dims(x, [c.dim]) if c and c.device_axis else x
            for x, c in zip(outs, out_cuts, strict=True)
        ]

    return run


def _spec(traced: PerDevice, cut: Cut | None) -> PartitionSpec:
    return PartitionSpec() if cut is None else partition_spec([()] * cut.dim + [traced.mapped.mesh_axes])


def _idle(traced: PerDevice, mesh: Mesh) -> tuple[str, ...]:
    busy = {a for axes in traced.mapped.axes.values() for a in axes}
    return tuple(a for a in mesh.axis_names if a not in busy and mesh.shape[a] > 1)


def _leaf(traced: PerDevice, i: int, spec: PartitionSpec) -> LeafPlan:
    role = traced.roles.of[i]
    return LeafPlan(
        path=path_name(traced.in_paths[i]),
        role=OTHER if role == BATCH and i < len(traced.consts) else role,
        shape=traced.whole(i),
        dtype=traced.closed.in_avals[i].dtype,
        spec=spec,
        why=_why(traced, i),
    )


def _why(traced: PerDevice, i: int) -> str:
    cut, over = traced.cuts[i], "+".join(traced.mapped.mesh_axes)
    if cut is None:
        held = "in_axes is None" if traced.mapped.device_axis else "no device axis"
        return f"pmap: a copy on every device, {held}"
    if cut.device_axis:
        what = "its copy" if i in traced.roles.stored else "its place"
        return f"pmap: each device has {what} along the device axis, dim {cut.dim} over {over}"
    return f"pmap: no device axis; examples, dim {cut.dim} over {over}"
