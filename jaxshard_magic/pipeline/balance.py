"""Stages of about the same work, with the layers of a scan in equal parts where that costs little."""

import re
from collections.abc import Collection, Mapping

from ..errors import ShardError, one_of
from ..gradients.named import Names
from .cut import cut, largest
from .units import Units, layers_of

EVEN = 1.25  # how many times the largest stage of the best cut that of one with equal parts of a scan may be


def named_starts(units: Units, pattern: str) -> list[int]:
    """The units at which a module, a function or a scope begins whose name the regular expression `pattern` finds.

    Raises ShardError, with the names that there are, where it finds none.
    """
    names = Names(units.loss)
    spans = names.spans(units.loss.top, re.compile(pattern))
    found = set()
    for first, stop in spans:
        inside = {e.index for e in units.loss.top.equations[first:stop]}
        mine = [units.span[e.index][0] for e in units.main if e.index in inside]
        found.update(mine[:1])
    if not found:
        there = one_of(names.nearest(pattern))
        raise ShardError(
            f"--cut {pattern!r} finds no module, function or scope that the loss calls"
            + (f"; there are {there}" if there else "; it names none: leave --cut out")
        )
    return sorted(found)


def stage_starts(
    units: Units, stages: int, chunks: int = 1, among: Collection[int] | None = None
) -> list[int]:
    """The first unit of each of `stages` stages after the first; a rank of the pipeline runs `chunks` of them. `among`:
    the only ones that a stage may start at.

    Raises ShardError where there are fewer units than stages.
    """
    costs = [unit.cost for unit in units.units]
    if among is not None:
        starts = cut(
            costs, units.crossing, stages, {u: False for u in range(1, len(costs)) if u not in among}
        )
        if starts is None:
            n = len({*among} - {0}) + 1
            raise ShardError(
                f"--cut: there are {n} places for a stage to begin, {stages} stages are asked for; use --stages "
                f"{max(n // chunks, 1)} or fewer, or an expression that finds more"
            )
        return starts
    _enough(len(units.units), stages, chunks)
    best = cut(costs, units.crossing, stages)
    assert best is not None
    found, limit = best, EVEN * largest(costs, best)
    fixed: Mapping[int, bool] = {}
    for first, layers in _scans(units):
        inside = sum(first < start < first + layers for start in found)
        options = [
            (largest(costs, starts), starts, more)
            for parts in range(inside + 1, stages + 1)
            if inside
            and layers % parts == 0
            and (
                starts := cut(
                    costs, units.crossing, stages, more := {**fixed, **_equal(first, layers, parts)}
                )
            )
        ]
        fitting = [option for option in options if option[0] <= limit]
        if fitting:
            _, found, fixed = min(fitting, key=lambda option: option[0])
    return found


def _scans(units: Units) -> list[tuple[int, int]]:
    """The first unit and the number of layers of each scan, the one of the most work first."""
    spans = [units.span[e.index] for e in units.main if layers_of(e)]
    work = {first: sum(u.cost for u in units.units[first : last + 1]) for first, last in spans}
    return [(first, last - first + 1) for first, last in sorted(spans, key=lambda s: -work[s[0]])]


def _equal(first: int, layers: int, parts: int) -> dict[int, bool]:
    """Where stages start in a scan of so many equal parts."""
    return {first + k: k * parts % layers == 0 for k in range(1, layers)}


def _enough(units: int, stages: int, chunks: int) -> None:
    if units >= stages:
        return
    asked = f"--stages {stages // chunks}" + (f" of {chunks} chunks each" if chunks > 1 else "")
    if not units:
        raise ShardError(
            f"{asked}: the loss has no operation that depends on parameters and on examples, so that there is nothing "
            "to cut into stages; use dp"
        )
    most = units // chunks
    fewer = "use a schedule with one chunk a rank" if chunks > 1 else "use dp"
    raise ShardError(
        f"{asked}: the loss has {units} place{'s' * (units > 1)} for a stage (operations on parameters and examples, "
        f"each layer of a scan one), {stages} are needed; {f'use --stages {most} or fewer' if most > 1 else fewer}"
    )
