"""Summary of a plan's sharded experts, with the layers that choose among them, and of sharded positions, with their
rings."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from ..plan import DividedExperts, DividedPositions, PlannedRing
from ..program.emit import Emitter
from ..program.flow import follow_aliases
from ..program.roles import PARAMS
from ..program.routing import find_routed_layers
from ..program.source_lines import user_location
from .layout import Layout
from .regions.ring import RingAttention
from .sharded_lowering import ShardedLowering


def divided_experts(layout: Layout, phases: Mapping[int, str]) -> tuple[DividedExperts, ...]:
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
        [i for i, role in enumerate(layout.roles.by_input) if role == PARAMS],
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


def divided_positions(layout: Layout, emitter: Emitter) -> tuple[DividedPositions, ...]:
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
