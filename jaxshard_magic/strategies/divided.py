"""What a plan divides besides arrays: experts with the layers that choose among them, positions with their rings."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from ..plan import DividedExperts, DividedPositions, RingOf
from ..program.emit import Emitter
from ..program.flow import by_alias
from ..program.lines import users_place
from ..program.roles import PARAMS
from ..program.routing import find_routes
from .hold import Hold
from .layout import Layout
from .regions.ring import RingAttention


def divided_experts(layout: Layout, phases: Mapping[int, str]) -> tuple[DividedExperts, ...]:
    """The experts that are divided, of each number of them; empty where none are, or the user placed all of their
    matrices otherwise."""
    experts = layout.experts
    if experts is None or all(layout.stored.get(c) != experts.axes for c in experts.stored):
        return ()
    among = [e.ins[2] for e in layout.sorting.products()]
    for v in (v for loop in experts.loops.values() for v in loop.stacks if layout.batchy(v)):
        readers = (e for w in layout.flow.forward([v], by_alias) for _, e in layout.flow.after[w])
        among += [v, *(w for e in readers if e is not None and e.primitive.product for w in e.ins)]
    routes = find_routes(
        layout.dims,
        layout.storage,
        layout.flow,
        phases,
        [i for i, role in enumerate(layout.roles.of) if role == PARAMS],
        experts.numbers,
        experts.classes,
        experts.places | experts.shared,
        layout.batch.classes,
        [v for v in among if v is not None],
    )
    routes = tuple(r for r in routes if experts.inside.isdisjoint(c.equation for c in r.choices))
    work = "places" if experts.places | experts.shared else "all" if experts.classes else "sorted"
    return tuple(
        DividedExperts(n, experts.axes, work, tuple(r for r in routes if r.number == n))
        for n in sorted(experts.numbers)
    )


def divided_positions(layout: Layout, run: Emitter) -> tuple[DividedPositions, ...]:
    """The positions that are divided, of each number of them; empty where none are."""
    if not layout.sequence or not isinstance(run, Hold):
        return ()
    n = layout.count(layout.sequence_axes)
    sizes = {z for c in layout.sequence for z in layout.dims.all_sizes[c] if z > 1 and z % n == 0}
    rings = _rings(run.region(RingAttention))
    given = {
        layout.program.shapes[v][d]
        for v in (layout.program.inputs[i] for i in layout.roles.data)
        for d, axes in enumerate(layout.active(v) if layout.batchy(v) else ())
        if axes == layout.sequence_axes
    }
    numbers = sizes & (given | {ring.positions for ring in rings}) or sizes
    return tuple(
        DividedPositions(z, layout.sequence_axes, tuple(r for r in rings if r.positions == z))
        for z in sorted(numbers, reverse=True)
    )


def _rings(region: RingAttention) -> list[RingOf]:
    """The attentions of a step that are rings, alike ones of one line together."""
    program, counts, gradients = region.layout.program, Counter[RingOf](), dict[RingOf, int]()
    for e in (program.equations[i] for i in sorted(region.members)):
        file, line = users_place(e.eqn) or (None, None)
        ring, summed = region.ring(e), region.turn_of_gradients(e)
        one = RingOf(ring.positions, ring.turns, 0, region.turn(e), None, ring.zigzag, file, line)
        if summed is None:
            counts[one] += e.trips
        else:
            gradients[one] = summed
    return [replace(one, count=n, gradients=gradients.get(one)) for one, n in counts.items()]
