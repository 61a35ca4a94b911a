"""Planner: turn the facts about a step and a request into a `Plan`.

A plan has a summary of its sharded experts, with the layers that choose among them, and of its sharded positions, with
their rings.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import PartitionSpec

from ..config.request import Request
from ..config.strategies import STRATEGIES
from ..errors import ShardError
from ..plan import REPLICATED, DividedExperts, DividedPositions, Finding, LeafPlan, Plan, PlannedRing
from ..program.emit import Emitter
from ..program.facts import Facts, largest_weight
from ..program.flops import uncounted_primitives
from ..program.flow import follow_aliases
from ..program.loss import find_loss
from ..program.per_device import PerDeviceTrace
from ..program.roles import BATCH, OTHER
from ..program.routing import find_routed_layers
from ..program.sizes import nbytes
from ..program.source_lines import user_location
from ..program.trace import Traced, path_name
from ..program.user_placements import placement_axes
from ..specs import RequestedSpec
from .attention_form import choose_attention_form
from .device_shares import device_shares
from .layout import Axes, Layout, from_partition_spec, partition_spec
from .placements import apply_placements, placed_dims
from .plan_checks import (
    batch_findings,
    check_examples_divide,
    result_findings,
    returns_nothing,
    returns_nothing_message,
)
from .pmap import pmap_plan
from .positions import is_one_example
from .regions.ring import RingAttention
from .sharded_lowering import ShardedLowering, UnconstrainedEmitter
from .sp import positions_reason
from .split_exchanges import plan_split_exchanges
from .unsharded_dims import gather_contested_operands, unshard_required_dims
from .weight_gathers import gather_findings


def plan(facts: Facts, request: Request) -> Plan:
    """Decide the spec of every array of a step.

    Args:
        facts: The traced step and the results of its analysis.
        request: Mesh, strategy and options.

    Returns:
        The plan, with the emitter that adds sharding constraints to the step, specs, a `LeafPlan` for each input, and
        findings.

    Raises:
        ShardError: The request cannot be satisfied. Nothing has been moved to devices by then.
    """
    if isinstance(facts.traced, PerDeviceTrace):
        return pmap_plan(facts, request)
    traced, program, flow, roles, mesh = facts.traced, facts.program, facts.flow, facts.roles, request.mesh
    axes = request.axes
    # A step without computed results shows neither positions nor experts: the strategies would report that instead.
    if {"sp", "ep"} & axes.keys() and returns_nothing(flow):
        raise ShardError(returns_nothing_message(traced, flow))
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
    if not request.compiler_decides and not ("sp" in axes and is_one_example(program, roles, facts.batch)):
        check_examples_divide(traced, layout, can_pad=request.pipeline is None)
    # Before the strategies, which leave inputs placed by the user alone.
    apply_placements(layout, facts.user_placements)
    layout.input_names = [path_name(p) for p in traced.in_paths]
    layout.user_position_dims = placed_dims(axes.get("sp", ()), facts.user_placements, roles.data)
    # The order matters: tp shards no dimension that counts experts (ep), and fsdp takes what tp leaves free.
    for row in sorted((STRATEGIES[name] for name in axes), key=lambda row: row.order):
        if row.divides:
            row.function()(layout, axes[row.name])
    # After all strategies: these three read the final specs.
    unshard_required_dims(layout)
    plan_split_exchanges(layout)
    gather_contested_operands(layout)
    attention_form = choose_attention_form(layout, request.attention) if layout.position_classes else None
    if attention_form is not None and request.attention == "ring" and not request.rings:
        over = "+".join(layout.position_axes)
        message = f"--attention ring: positions lie over {over}, by which tp divides, so that nothing goes round"
        layout.findings.append(Finding("no-ring", "info", message))
    in_specs = [_input_spec(layout, i, facts.user_placements) for i in range(len(roles.by_input))]
    gradients = request.gradients
    compiler_decides = request.compiler_decides
    emitter: Emitter = (
        UnconstrainedEmitter(layout, facts.labels)
        if compiler_decides
        else ShardedLowering(layout, facts.labels, gradients.reduce, gradients.sum_dtype)
    )
    return Plan(
        traced=traced,
        mesh=mesh,
        strategy=request.strategy,
        in_specs=tuple(in_specs),
        out_specs=tuple(_output_spec(layout, o, in_specs) for o in range(len(program.outputs))),
        leaves=tuple(_leaf_plan(traced, layout, i, in_specs[i], facts.user_placements) for i in range(len(in_specs))),
        run=emitter,
        state_pairs=roles.state,
        loss=find_loss(traced, flow, roles.state),
        batch_axes=request.batch_axes,
        idle_axes=_idle_axes(layout, axes, in_specs),
        findings=(
            *result_findings(facts),
            *(batch_findings(traced, layout) if request.batch_axes and not returns_nothing(flow) else ()),
            *layout.findings,
            *(() if compiler_decides else gather_findings(layout)),
        ),
        axes_by_strategy=axes,
        examples=facts.batch.size,
        work=facts.work,
        shares=None if compiler_decides else device_shares(layout, facts.work),
        uncounted_primitives=uncounted_primitives(program),
        largest_weight=None if compiler_decides else largest_weight(flow, roles),
        attention=attention_form,
        experts=_divided_experts(layout, facts.phases),
        positions=_divided_positions(layout, emitter),
    )


def _input_spec(layout: Layout, i: int, placements: Mapping[int, RequestedSpec]) -> PartitionSpec:
    value = layout.program.inputs[i]
    if i in placements:
        return partition_spec(placements[i].spec)
    if i in layout.roles.storage_order and i not in layout.batch.input_dims:
        return partition_spec(layout.stored_spec(value))
    spec = layout.activation_spec(value) if i in layout.batch.input_dims else []
    if layout.batch_axes or layout.position_classes or any(spec):
        return partition_spec(spec)
    return PartitionSpec()


def _output_spec(layout: Layout, o: int, in_specs: Sequence[PartitionSpec]) -> PartitionSpec:
    value = layout.program.outputs[o]
    # Updated state is an input of the next call, so that it keeps the sharding of its input.
    if o in layout.roles.state:
        return in_specs[layout.roles.state[o]]
    if value is None:
        return PartitionSpec()
    return partition_spec(layout.activation_spec(value) if layout.is_activation(value) else layout.stored_spec(value))


def _leaf_plan(
    traced: Traced, layout: Layout, i: int, spec: PartitionSpec, placements: Mapping[int, RequestedSpec]
) -> LeafPlan:
    aval, roles = traced.closed.in_avals[i], layout.roles
    role = roles.by_input[i]
    # An array that the step closes over looks like data, but no call passes it.
    if role == BATCH and i not in layout.batch.input_dims and i < len(traced.consts):
        role = OTHER
    return LeafPlan(
        path=path_name(traced.in_paths[i]),
        role=role,
        shape=tuple(aval.shape),
        dtype=aval.dtype,
        spec=spec,
        reason=_reason(layout, i, placements),
        unsharded_axes=(wanted := _unsharded_axes(layout, i, spec)),
        replicated_bytes=_replicated_bytes(layout, aval, spec, wanted),
    )


def _unsharded_axes(layout: Layout, i: int, spec: PartitionSpec) -> Axes:
    """Return the mesh axes over which strategies failed to shard an input, without axes used by another strategy."""
    used_axes = {axis for axes in from_partition_spec(spec) for axis in axes}
    return tuple(axis for axis in dict.fromkeys(layout.unsharded_axes.get(i, ())) if axis not in used_axes)


def _replicated_bytes(layout: Layout, aval: Any, spec: PartitionSpec, unsharded_axes: Axes) -> int:
    """Return the bytes per device that would be saved if the leaf were also sharded over `unsharded_axes`."""
    local_bytes = nbytes(aval) // layout.device_count(sum(from_partition_spec(spec), ()))
    return local_bytes - local_bytes // layout.device_count(unsharded_axes)


def _reason(layout: Layout, i: int, placements: Mapping[int, RequestedSpec]) -> str:
    if i in placements:
        return placements[i].source
    if i in layout.batch.input_dims:
        batch_reasons = _examples_reason(layout, i), positions_reason(layout, i), _features_reason(layout, i)
        return "; ".join(filter(None, batch_reasons)) or REPLICATED
    if i in layout.roles.storage_order:
        fixed = layout.placement_source(layout.program.inputs[i])
        return f"follows {fixed}" if fixed else "; ".join(layout.reasons.get(i, ())) or REPLICATED
    if layout.roles.by_input[i] == BATCH and layout.batch_axes:
        return "no batch dimension in it: a copy on every device"
    return REPLICATED


def _examples_reason(layout: Layout, i: int) -> str | None:
    if not layout.batch_axes or layout.position_classes & layout.batch.classes:
        return None
    rows, over = "examples" if layout.batch.joining_equation is None else "rows", "+".join(layout.batch_axes)
    spec, dims = layout.activation_spec(layout.program.inputs[i]), layout.batch.input_dims[i]
    divided = [d for d in dims if spec[d]]
    if not divided:
        return f"{rows}: dim {dims[0]} does not divide by {over}={layout.device_count(layout.batch_axes)}"
    return f"{rows}: dim {', '.join(map(str, divided))} over {over}"


def _features_reason(layout: Layout, i: int) -> str | None:
    """Return the reason for a batch leaf sharded along a dimension that products with weights shard, or None."""
    value = layout.program.inputs[i]
    spec, tensor = layout.activation_spec(value), layout.tensor_axes(value)
    divided = [d for d, axes in enumerate(spec) if axes and axes == tensor[d]]
    return "; ".join(f"tp: features, dim {d} over {'+'.join(spec[d])}" for d in divided) or None


def _idle_axes(layout: Layout, axes: Mapping[str, Axes], in_specs: Sequence[PartitionSpec]) -> Axes:
    busy = {a for used in axes.values() for a in used} | set(layout.batch_axes)
    busy |= {a for spec in in_specs for axes in from_partition_spec(spec) for a in axes} | placement_axes(
        layout.program
    )
    return tuple(a for a in layout.mesh.axis_names if a not in busy and layout.mesh.shape[a] > 1)


def _divided_experts(layout: Layout, phases: Mapping[int, str]) -> tuple[DividedExperts, ...]:
    """Return the sharded experts, an entry for each expert count.

    Empty where no experts are sharded, or where the user placed all expert matrices otherwise.

    Args:
        layout: The layout, filled in by the strategies.
        phases: Phase of each equation, by index.
    """
    experts = layout.experts
    # A placement by the user takes precedence over the strategy.
    if experts is None or all(layout.storage_class_axes.get(c) != experts.axes for c in experts.weight_classes):
        return ()
    router_operands = [e.operands[2] for e in layout.shard_local_sorts.group_products()]
    for v in (v for loop in experts.loops.values() for v in loop.stacked_values if layout.is_activation(v)):
        readers = (e for w in layout.flow.descendants([v], follow_aliases) for _, e in layout.flow.successors[w])
        router_operands += [v, *(w for e in readers if e is not None and e.primitive.is_product for w in e.operands)]
    routes = find_routed_layers(
        layout.dims,
        layout.storage,
        layout.flow,
        phases,
        sorted(layout.roles.weights),
        experts.counts,
        experts.classes,
        experts.capacity_classes | experts.shared_capacity_classes,
        layout.batch.classes,
        [v for v in router_operands if v is not None],
    )
    routes = tuple(r for r in routes if experts.loop_equations.isdisjoint(c.equation for c in r.choices))
    work = (
        "places"
        if experts.capacity_classes | experts.shared_capacity_classes
        else "all"
        if experts.classes
        else "sorted"
    )
    return tuple(
        DividedExperts(n, experts.axes, work, tuple(r for r in routes if r.expert_count == n))
        for n in sorted(experts.counts)
    )


def _divided_positions(layout: Layout, emitter: Emitter) -> tuple[DividedPositions, ...]:
    """Return the sharded positions, an entry for each sequence length; empty where no positions are sharded."""
    if not layout.position_classes or not isinstance(emitter, ShardedLowering):
        return ()
    n = layout.device_count(layout.position_axes)
    sizes = {z for c in layout.position_classes for z in layout.dims.all_sizes[c] if z > 1 and z % n == 0}
    rings = _ring_summaries(emitter.region(RingAttention))
    input_sizes = {
        layout.program.shapes[v][d]
        for v in (layout.program.inputs[i] for i in layout.roles.data)
        for d, axes in enumerate(layout.activation_spec(v) if layout.is_activation(v) else ())
        if axes == layout.position_axes
    }
    # A class may have other sizes too, such as those of shifted or padded sequences. Those of inputs and rings count.
    numbers = sizes & (input_sizes | {ring.positions for ring in rings}) or sizes
    return tuple(
        DividedPositions(z, layout.position_axes, tuple(r for r in rings if r.positions == z))
        for z in sorted(numbers, reverse=True)
    )


def _ring_summaries(region: RingAttention) -> list[PlannedRing]:
    """Return the ring attentions of a step, equal ones on one source line counted together."""
    program, counts, gradients = region.layout.program, Counter[PlannedRing](), dict[PlannedRing, int]()
    for e in (program.equations[i] for i in sorted(region.members)):
        file, line = user_location(e.jaxpr_eqn) or (None, None)
        ring, gradient_turn = region.ring(e), region.gradient_step_bytes(e)
        # Count and gradient bytes are left out here, so that a forward pass and its gradient have the same key.
        summary = PlannedRing(ring.positions, ring.steps, 0, region.step_bytes(e), None, ring.zigzag, file, line)
        if gradient_turn is None:
            counts[summary] += e.trip_count
        else:
            gradients[summary] = gradient_turn
    return [replace(one, count=n, gradients=gradients.get(one)) for one, n in counts.items()]
