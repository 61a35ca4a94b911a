"""What is understood of a step, and what is asked of it -> a `Plan`."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from ..config.request import Request
from ..config.strategies import STRATEGIES
from ..errors import ShardError
from ..plan import WHOLE, Finding, LeafPlan, Plan
from ..program.emit import Emitter
from ..program.facts import Facts
from ..program.flops import unseen
from ..program.loss import find_loss
from ..program.mapped import PerDevice
from ..program.placements import axes_placed
from ..program.roles import BATCH, OTHER
from ..program.sizes import nbytes
from ..program.trace import Traced, path_name
from ..program.weights import largest_weight
from ..specs import Placement
from .attention import attend
from .contested import gather_contested
from .divided import divided_experts, divided_positions
from .examples import about_the_batch, examples_divide
from .hold import Hold
from .layout import Axes, Layout, partition_spec, spec_of
from .pieces import take_apart
from .placements import apply_placements, dims_over
from .pmap import spread_plan
from .positions import one_example
from .results import about_results, nothing_returned, returns_nothing
from .shares import shares
from .sp import why_positions
from .stepwise import about_steps
from .undivided import keep_whole
from .unplaced import Unplaced


def plan(facts: Facts, request: Request) -> Plan:
    """Decide where every array of a step goes.

    Raises `ShardError` for everything that cannot be done, before anything is moved.
    """
    if isinstance(facts.traced, PerDevice):
        return spread_plan(facts, request)
    traced, program, flow, roles, mesh = facts.traced, facts.program, facts.flow, facts.roles, request.mesh
    axes = request.axes
    if {"sp", "ep"} & axes.keys() and returns_nothing(flow):  # neither positions nor experts show in it
        raise ShardError(nothing_returned(traced, flow))
    layout = Layout(
        program,
        facts.dimensions,
        facts.storage,
        flow,
        roles,
        facts.batch,
        mesh,
        mesh.devices.flat[0].platform,
        request.batch_axes,
    )
    if not request.compiler_decides and not ("sp" in axes and one_example(program, roles, facts.batch)):
        examples_divide(traced, layout, pads=request.pipeline is None)
    apply_placements(layout, facts.placed)
    layout.names = [path_name(p) for p in traced.in_paths]
    layout.positions = dims_over(axes.get("sp", ()), facts.placed, roles.data)
    for row in sorted((STRATEGIES[name] for name in axes), key=lambda row: row.order):
        if row.divides:
            row.function()(layout, axes[row.name])
    keep_whole(layout)
    take_apart(layout)
    gather_contested(layout)
    how = attend(layout, request.attention) if layout.sequence else None
    if how is not None and request.attention == "ring" and not request.rings:
        over = "+".join(layout.sequence_axes)
        message = (
            f"--attention ring: positions lie over {over}, by which tp divides, so that nothing goes round"
        )
        layout.findings.append(Finding("no-ring", "info", message))
    in_specs = [_input_spec(layout, i, facts.placed) for i in range(len(roles.of))]
    gradients = request.gradients
    by_itself = request.compiler_decides
    run: Emitter = (
        Unplaced(layout, facts.labels)
        if by_itself
        else Hold(layout, facts.labels, gradients.reduce, gradients.sum_dtype)
    )
    return Plan(
        traced=traced,
        mesh=mesh,
        strategy=request.strategy,
        in_specs=tuple(in_specs),
        out_specs=tuple(_output_spec(layout, o, in_specs) for o in range(len(program.outputs))),
        leaves=tuple(_leaf(traced, layout, i, in_specs[i], facts.placed) for i in range(len(in_specs))),
        run=run,
        state_pairs=roles.state,
        loss=find_loss(traced, flow, roles.state),
        batch_axes=request.batch_axes,
        idle_axes=_idle_axes(layout, axes, in_specs),
        findings=(
            *about_results(facts),
            *(about_the_batch(traced, layout) if request.batch_axes and not returns_nothing(flow) else ()),
            *layout.findings,
            *(() if by_itself else about_steps(layout)),
        ),
        jobs=axes,
        examples=facts.batch.size,
        work=facts.work,
        shares=None if by_itself else shares(layout, facts.work),
        unseen=unseen(program),
        largest_weight=None if by_itself else largest_weight(flow, roles),
        attention=how,
        experts=divided_experts(layout, facts.phases),
        positions=divided_positions(layout, run),
    )


def _input_spec(layout: Layout, i: int, given: Mapping[int, Placement]) -> PartitionSpec:
    value = layout.program.inputs[i]
    if i in given:
        return partition_spec(given[i].spec)
    if i in layout.roles.stored and i not in layout.batch.dims:
        return partition_spec(layout.at_rest(value))
    spec = layout.active(value) if i in layout.batch.dims else []
    if layout.batch_axes or layout.sequence or any(spec):
        return partition_spec(spec)
    return PartitionSpec()


def _output_spec(layout: Layout, o: int, in_specs: Sequence[PartitionSpec]) -> PartitionSpec:
    value = layout.program.outputs[o]
    if o in layout.roles.state:
        return in_specs[layout.roles.state[o]]
    if value is None:
        return PartitionSpec()
    return partition_spec(layout.active(value) if layout.batchy(value) else layout.at_rest(value))


def _leaf(
    traced: Traced, layout: Layout, i: int, spec: PartitionSpec, given: Mapping[int, Placement]
) -> LeafPlan:
    aval, roles = traced.closed.in_avals[i], layout.roles
    role = roles.of[i]
    if role == BATCH and i not in layout.batch.dims and i < len(traced.consts):
        role = OTHER
    return LeafPlan(
        path=path_name(traced.in_paths[i]),
        role=role,
        shape=tuple(aval.shape),
        dtype=aval.dtype,
        spec=spec,
        why=_why(layout, i, given),
        wanted=(wanted := _wanted(layout, i, spec)),
        lost=_lost(layout, aval, spec, wanted),
    )


def _wanted(layout: Layout, i: int, spec: PartitionSpec) -> Axes:
    """The axes that parts of the strategy could not cut a leaf over, and no other part did."""
    cut = {axis for axes in spec_of(spec) for axis in axes}
    return tuple(axis for axis in dict.fromkeys(layout.wanted.get(i, ())) if axis not in cut)


def _lost(layout: Layout, aval: Any, spec: PartitionSpec, wanted: Axes) -> int:
    """The bytes that a device has of a leaf, less those that it would have were it cut over the wanted axes as well."""
    held = nbytes(aval) // layout.count(sum(spec_of(spec), ()))
    return held - held // layout.count(wanted)


def _why(layout: Layout, i: int, given: Mapping[int, Placement]) -> str:
    if i in given:
        return given[i].source
    if i in layout.batch.dims:
        said = _examples(layout, i), why_positions(layout, i), _features(layout, i)
        return "; ".join(filter(None, said)) or WHOLE
    if i in layout.roles.stored:
        fixed = layout.fixed_by(layout.program.inputs[i])
        return f"follows {fixed}" if fixed else "; ".join(layout.why.get(i, ())) or WHOLE
    if layout.roles.of[i] == BATCH and layout.batch_axes:
        return "no batch dimension in it: a copy on every device"
    return WHOLE


def _examples(layout: Layout, i: int) -> str | None:
    if not layout.batch_axes or layout.sequence & layout.batch.classes:
        return None
    rows, over = "examples" if layout.batch.joined is None else "rows", "+".join(layout.batch_axes)
    spec, dims = layout.active(layout.program.inputs[i]), layout.batch.dims[i]
    divided = [d for d in dims if spec[d]]
    if not divided:
        return f"{rows}: dim {dims[0]} does not divide by {over}={layout.count(layout.batch_axes)}"
    return f"{rows}: dim {', '.join(map(str, divided))} over {over}"


def _features(layout: Layout, i: int) -> str | None:
    """Why a leaf of the batch is divided along a dimension that products with weights divide."""
    value = layout.program.inputs[i]
    spec, tensor = layout.active(value), layout.tensor_axes(value)
    divided = [d for d, axes in enumerate(spec) if axes and axes == tensor[d]]
    return "; ".join(f"tp: features, dim {d} over {'+'.join(spec[d])}" for d in divided) or None


def _idle_axes(layout: Layout, axes: Mapping[str, Axes], in_specs: Sequence[PartitionSpec]) -> Axes:
    busy = {a for used in axes.values() for a in used} | set(layout.batch_axes)
    busy |= {a for spec in in_specs for axes in spec_of(spec) for a in axes} | axes_placed(layout.program)
    return tuple(a for a in layout.mesh.axis_names if a not in busy and layout.mesh.shape[a] > 1)
