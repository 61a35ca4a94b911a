"""Report the experts and sequence positions sharded by a plan, with counted rows per expert."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction

from ..compilation.compiled_step import CompiledStep
from ..compilation.expert_rows import ExpertRowCounts
from ..plan import DividedExperts, DividedPositions
from ..program.routing import RoutedLayer
from ..report import ExpertLoad, Experts, Positions, Report, Ring


def experts_of(entry: CompiledStep) -> tuple[Experts, ...]:
    """Return the sharded experts of a compiled program; files carry the names used by Python."""
    counted, real = entry.expert_rows or {}, entry.example_mask
    # Rows that pad the batch have no tokens to count.
    share = Fraction(1) if real is None else Fraction(int(real.sum()), real.size)

    def told(one: DividedExperts) -> Experts:
        loads = (load for route in one.layers for load in _loads(route, share, counted.get(route)))
        return Experts(one.expert_count, one.axes, one.work, tuple(loads))

    return tuple(map(told, entry.plan.experts))


def _loads(route: RoutedLayer, share: Fraction, counted: ExpertRowCounts | None) -> Iterator[ExpertLoad]:
    mask, (tokens, groups) = route.mask, route.real_counts(share)
    load = ExpertLoad(
        tokens,
        route.experts_per_token,
        None if mask is None else mask.capacity * groups,
        groups,
        file=route.file,
        line=route.line,
    )
    for layer in range(route.layer_count):
        if counted is None:
            yield load
            continue
        kept = None if counted.within_capacity is None else tuple(counted.within_capacity[layer].tolist())
        chosen, most = tuple(counted.chosen[layer].tolist()), int(counted.max_per_group[layer].max())
        yield replace(load, chosen=chosen, kept=kept, most=None if mask is None else most)


def positions_of(entry: CompiledStep) -> tuple[Positions, ...]:
    """Return the sharded sequence positions of a compiled program; files carry the names used by Python."""
    attention = entry.plan.attention
    if attention is None:
        return ()

    def told(one: DividedPositions) -> Positions:
        rings = (Ring(r.turns, r.count, r.bytes, r.gradients, r.zigzag, r.file, r.line) for r in one.rings)
        return Positions(one.position_count, one.axes, attention, tuple(rings))

    return tuple(map(told, entry.plan.positions))


def parts_with_lines(report: Report) -> Iterator[ExpertLoad | Ring]:
    """Yield the parts of a report with a source line: layers of experts, and rings."""
    yield from (load for experts in report.experts for load in experts.layers)
    yield from (ring for positions in report.positions for ring in positions.rings)


def with_names(report: Report, name: Callable[[str], str]) -> Report:
    """Return the report with the files of expert layers and rings renamed for the reader.

    Args:
        report: Report with the file names used by Python.
        name: Maps a file to the name shown to the reader.
    """

    def named(part):
        return part if part.file is None else replace(part, file=name(part.file))

    experts = (replace(one, layers=tuple(map(named, one.layers))) for one in report.experts)
    positions = (replace(one, rings=tuple(map(named, one.rings))) for one in report.positions)
    return replace(report, experts=tuple(experts), positions=tuple(positions))
