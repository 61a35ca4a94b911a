"""The experts and positions that a plan divides, in the words of a report, with the rows that were counted."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from ..plan import DividedExperts, DividedPositions
from ..program.routing import Route
from ..report import Experts, Load, Positions, Report, Ring

if TYPE_CHECKING:
    from ..step import Entry
    from ..step.load import Counted


def experts_of(entry: "Entry") -> tuple[Experts, ...]:
    """The experts that the plan of a program divides; files have the names that Python knows them by."""
    counted, real = entry.load or {}, entry.real
    share = Fraction(1) if real is None else Fraction(int(real.sum()), real.size)

    def told(one: DividedExperts) -> Experts:
        loads = (load for route in one.routes for load in _loads(route, share, counted.get(route)))
        return Experts(one.number, one.axes, one.work, tuple(loads))

    return tuple(map(told, entry.plan.experts))


def _loads(route: Route, share: Fraction, counted: "Counted | None") -> Iterator[Load]:
    mask, (tokens, groups) = route.mask, route.real(share)
    load = Load(
        tokens,
        route.best,
        None if mask is None else mask.places * groups,
        groups,
        file=route.file,
        line=route.line,
    )
    for layer in range(route.layers):
        if counted is None:
            yield load
            continue
        kept = None if counted.kept is None else tuple(counted.kept[layer].tolist())
        chosen, most = tuple(counted.chosen[layer].tolist()), int(counted.most[layer].max())
        yield replace(load, chosen=chosen, kept=kept, most=None if mask is None else most)


def positions_of(entry: "Entry") -> tuple[Positions, ...]:
    """The positions that it divides; as `experts_of`."""
    attention = entry.plan.attention
    if attention is None:
        return ()

    def told(one: DividedPositions) -> Positions:
        rings = (Ring(r.turns, r.count, r.bytes, r.gradients, r.zigzag, r.file, r.line) for r in one.rings)
        return Positions(one.number, one.axes, attention, tuple(rings))

    return tuple(map(told, entry.plan.positions))


def placed(report: Report) -> Iterator[Load | Ring]:
    """What of these has a line."""
    yield from (load for experts in report.experts for load in experts.layers)
    yield from (ring for positions in report.positions for ring in positions.rings)


def with_names(report: Report, name: Callable[[str], str]) -> Report:
    """The report with the reader's names for the files of these."""

    def named(part):
        return part if part.file is None else replace(part, file=name(part.file))

    experts = (replace(one, layers=tuple(map(named, one.layers))) for one in report.experts)
    positions = (replace(one, rings=tuple(map(named, one.rings))) for one in report.positions)
    return replace(report, experts=tuple(experts), positions=tuple(positions))
