"""Allowed first units of a stage, from name patterns (`--cut`) or markers in the model."""

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from ..errors import ShardError, list_names
from ..gradients.call_names import ProgramNames
from ..program.flow import dependents
from ..program.ir import Body, Equation, Value
from .loss_units import LossUnits
from .marker import MARKER_NAME


@dataclass(frozen=True)
class MarkedStarts:
    """Allowed starts from the markers of a loss.

    Attributes:
        starts: Units that follow a marker, with other units before and after.
        ignored: Number of markers between two operations of an indivisible unit. They are ignored.
    """

    starts: list[int]
    ignored: int


def allowed_starts(units: LossUnits, stages: int, chunks: int = 1, pattern: str | None = None) -> list[int] | None:
    """Return the units at which a stage may begin; None for any unit, without a pattern and without markers.

    Args:
        units: The units of the loss.
        stages: Number of stages needed.
        chunks: Number of stages per rank.
        pattern: Regular expression for names at which stages begin. By default the markers (`jaxshard_magic.cut`)
            decide.

    Raises:
        ShardError: Too few starts for `stages`, with their number in the message; or `pattern` matches no name.
    """
    if pattern is not None:
        starts = named_starts(units, pattern)
        n = len({*starts} - {0}) + 1
        if n < stages:
            raise ShardError(
                f"--cut: there are {n} places for a stage to begin, {stages} stages are asked for; use --stages "
                f"{max(n // chunks, 1)} or fewer, or an expression that finds more"
            )
        return starts
    marked = marked_starts(units)
    if marked is None:
        return None
    if len(marked.starts) + 1 < stages:
        raise _too_few_error(marked, stages, chunks)
    return marked.starts


def named_starts(units: LossUnits, pattern: str) -> list[int]:
    """Return the first unit of each module, function or scope with a name matched by the regular expression `pattern`.

    Raises:
        ShardError: No match; the message lists available names.
    """
    names = ProgramNames(units.loss)
    spans = names.spans(units.loss.top, re.compile(pattern))
    starts = set()
    for first, stop in spans:
        inside = {e.index for e in units.loss.top.equations[first:stop]}
        unit_starts = [units.unit_range[e.index][0] for e in units.main_equations if e.index in inside]
        starts.update(unit_starts[:1])
    if not starts:
        suggestions = list_names(names.nearest(pattern))
        raise ShardError(
            f"--cut {pattern!r} finds no module, function or scope that the loss calls"
            + (f"; there are {suggestions}" if suggestions else "; it names none: leave --cut out")
        )
    return sorted(starts)


def marked_starts(units: LossUnits) -> MarkedStarts | None:
    """Return the starts allowed by the markers of a loss; None for a loss without markers.

    A marker at the start of an equation with a body counts as a marker before the equation, a marker at the end as one
    behind it. In a scan, both apply to each layer.
    """
    starts: set[int] = set()
    markers: set[int] = set()  # units that consist of a marker alone
    next_unit, ignored, has_marker = 0, 0, False
    for e in units.loss.top.equations:
        first, last = units.unit_range.get(e.index, (next_unit, next_unit - 1))
        next_unit = last + 1
        runs = [
            is_marker for is_marker, _ in groupby(_markers_and_work([e], units.from_parameters, units.from_examples))
        ]
        if True not in runs:
            continue
        has_marker = True
        ignored += sum(runs[1:-1])
        if e.index in units.unit_range and not e.bodies:
            markers.add(first)
        # Each layer of a scan is a unit: a marker in its body applies to all of them.
        if runs[0]:
            starts.update(range(first, max(next_unit, first + 1)))
        if len(runs) > 1 and runs[-1]:
            starts.update(range(first + 1, next_unit + 1))
    if not has_marker:
        return None
    work = [u for u in range(len(units.units)) if u not in markers]
    # Consecutive markers are one boundary: only units with work count.
    boundaries = {bisect_left(work, u) for u in starts}
    return MarkedStarts(sorted({work[k - 1] + 1 for k in boundaries if 0 < k < len(work)}), ignored)


def _markers_and_work(
    equations: Iterable[Equation], trained: Collection[Value], varying: Collection[Value]
) -> Iterator[bool]:
    """Yield True for each marker and False for each operation on parameters and examples, in order, bodies included."""
    for e in equations:
        if e.primitive.names_value and e.params["name"] == MARKER_NAME:
            yield True
        elif e.bodies:
            for body in e.bodies:
                inner = _dependent_in_body(body, trained), _dependent_in_body(body, varying)
                yield from _markers_and_work(body.sub_jaxpr.equations, *inner)
        elif not e.primitive.alias and any(v in trained and v in varying for v in e.results):
            yield False


def _dependent_in_body(body: Body, outside: Collection[Value]) -> set[Value]:
    """Return the values of a body that depend on given values outside of the body, also through loop carries."""
    start = {b for a, b, _ in body.inputs if a in outside}
    while True:
        made = dependents(body.sub_jaxpr, start)
        again = {b for a, b in body.carries if a in made} - start
        if not again:
            return made
        start |= again


def _too_few_error(marked: MarkedStarts, stages: int, chunks: int) -> ShardError:
    n, ignored = len(marked.starts), marked.ignored
    asked = f"--stages {stages // chunks}" + (f" of {chunks} chunks each" if chunks > 1 else "")
    ignored_text = (
        f" ({ignored} more in the middle of a loop's body, a branch or remat, which stay whole)" if ignored else ""
    )
    most = (n + 1) // chunks
    fix = f"--stages {most}" if most > 1 else None
    more = "move those to its start or end, or mark more" if ignored else "mark more"
    fewer = f"use {fix} or fewer, or {more}" if fix else more
    if chunks > 1 and not fix:
        fewer += ", or use a schedule with one chunk a rank"
    return ShardError(
        f"{asked}: jaxshard_magic.cut marks {n} place{'s' * (n != 1)} for a stage to begin{ignored_text}, {stages - 1} "
        f"{'are' if stages > 2 else 'is'} needed; {fewer}",
        fix=fix,
    )
