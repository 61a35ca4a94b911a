"""Cuts of a rematerialised loss into segments: residuals between equations, and the cuts with the lowest peak.

Residuals of an equation are what its backward pass reads, by JAX's own derivative rules.
"""

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp

from ..program.flops import count_work
from ..program.flow import Flow
from ..program.ir import Equation, Program, SubJaxpr, Value
from ..program.primitives import bind, is_literal
from ..program.sizes import nbytes

MOST_PLACES = 96  # positions to cut at; the search is quadratic in their number


@dataclass(frozen=True)
class _Residuals:
    """Residuals of one equation.

    Attributes:
        values: Operands and results that are saved.
        own: Bytes of further saved arrays.
    """

    values: tuple[Value, ...]
    own: int


def equation_residuals(scope: SubJaxpr) -> list[_Residuals]:
    """Return the residuals of every equation of a jaxpr, with all floating-point inputs differentiated.

    A loop's residuals are those of all its trips.
    """
    moving = {v for v, var in zip(scope.inputs, scope.jaxpr.invars, strict=True) if _inexact(var)}
    known: dict[Hashable, tuple[tuple[int, ...], tuple[int, ...], int]] = {}
    found = []
    for e in scope.equations:
        active = tuple(v in moving for v in e.operands)
        if e.name == "stop_gradient" or not any(active) or not any(map(_inexact, e.jaxpr_eqn.outvars)):
            found.append(_Residuals((), 0))
            continue
        moving.update(v for v, var in zip(e.results, e.jaxpr_eqn.outvars, strict=True) if _inexact(var))
        key = _key(e, active)
        # Each key costs a trace of `jax.vjp`, and repeated layers have equal keys.
        if key not in known:
            known[key] = _residuals(e, active)
        ins, outs, own = known[key]
        values = [*(e.operands[k] for k in ins), *(e.results[k] for k in outs)]
        found.append(_Residuals(tuple(v for v in values if v is not None), own))
    return found


def _residuals(e: Equation, active: tuple[bool, ...]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return positions of the operands and of the results that an equation saves, and bytes of further residuals."""
    given = [v.aval for v in e.jaxpr_eqn.invars if not is_literal(v)]

    def run(*xs: Any) -> tuple[list, list]:
        rest = iter(xs)
        values = [v.val if is_literal(v) else next(rest) for v in e.jaxpr_eqn.invars]
        chosen = [k for k, on in enumerate(active) if on]

        def differentiated(*ys: Any) -> list:
            mixed = dict(enumerate(values)) | dict(zip(chosen, ys, strict=True))
            return bind(e.jaxpr_eqn, list(mixed.values()))

        outs, back = jax.vjp(differentiated, *(values[k] for k in chosen))
        return outs, jax.tree.leaves(back)

    try:
        # With the JAX configuration under which the user's code made the equation.
        with e.jaxpr_eqn.ctx.manager:
            jaxpr = jax.make_jaxpr(run)(*given).jaxpr
    except (NotImplementedError, ValueError):  # no derivative: JAX raises again where the loss is differentiated
        return (), (), 0
    outs, kept = jaxpr.outvars[: len(e.results)], jaxpr.outvars[len(e.results) :]
    positions = [k for k, v in enumerate(e.jaxpr_eqn.invars) if not is_literal(v)]
    ins = dict(zip(jaxpr.invars, positions, strict=True))
    # Literals and constants are in memory anyway.
    kept = {v for v in kept if not is_literal(v) and v not in jaxpr.constvars}
    results = {v: k for k, v in enumerate(outs) if not is_literal(v)}
    return (
        tuple(ins[v] for v in kept if v in ins),
        tuple(results[v] for v in kept if v in results and v not in ins),
        sum(nbytes(v.aval) for v in kept if v not in ins and v not in results),
    )


def _key(e: Equation, active: tuple[bool, ...]) -> Hashable:
    """Return a key, equal for equations with the same residuals."""
    key = e.name, active, tuple(str(v.aval) for v in e.jaxpr_eqn.invars), tuple(e.params.items())
    try:
        hash(key)
    except TypeError:
        return e.index
    return key


def _inexact(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)


@dataclass(frozen=True)
class SegmentCosts:
    """Costs of a jaxpr's equations, by their position.

    Attributes:
        made: Values that each equation makes for later equations.
        read: Values that each equation is the last to read.
        kept: Values that each equation is the first to save for its backward pass.
        own: Bytes of further residuals.
        flops: FLOPs of products, all trips of loops together.
        size: Bytes of every value. 0 for inputs and their casts, which are in memory all the time.
        born: Position of the equation that makes each value.
    """

    made: tuple[tuple[Value, ...], ...]
    read: tuple[tuple[Value, ...], ...]
    kept: tuple[tuple[Value, ...], ...]
    own: tuple[int, ...]
    flops: tuple[int, ...]
    size: dict[Value, int]
    born: dict[Value, int]

    def residual_bytes(self, start: int, stop: int) -> int:
        """Return bytes of residuals of the equations in a range, without values made before the range."""
        values = {v for found in self.kept[start:stop] for v in found if self.born.get(v, -1) >= start}
        return sum(self.own[start:stop]) + sum(self.size[v] for v in values)


@dataclass(frozen=True)
class Segmentation:
    """Division of equations into segments.

    Attributes:
        segments: Position of the first equation of each, and the position after its last.
        peak: Peak bytes of the segments' backward passes.
    """

    segments: tuple[tuple[int, int], ...]
    peak: int


def costs(program: Program, scope: SubJaxpr) -> SegmentCosts:
    """Return residuals of a jaxpr's equations, and the values between them."""
    born = {v: k for k, e in enumerate(scope.equations) for v in e.results}
    last = {v: k for k, e in enumerate(scope.equations) for v in e.operands if v in born}
    kept = equation_residuals(scope)
    first: dict[Value, int] = {}
    for k, found in enumerate(kept):
        for v in found.values:
            first.setdefault(v, k)

    def at(where: dict[Value, int]) -> tuple[tuple[Value, ...], ...]:
        lists: list[list[Value]] = [[] for _ in scope.equations]
        for v, k in where.items():
            lists[k].append(v)
        return tuple(map(tuple, lists))

    return SegmentCosts(
        made=at({v: born[v] for v in last}),
        read=at(last),
        kept=at(first),
        own=tuple(found.own for found in kept),
        flops=_flops(program, scope),
        size=_sizes(program, scope),
        born=born,
    )


def best_segmentations(costs: SegmentCosts, start: int, stop: int, most: int) -> list[Segmentation]:
    """Return the cut with the lowest peak for each number of segments from 1 to `most`.

    Fewer cuts come back where there are too few positions to cut at. Among equal cuts the one with the fewest
    recomputed FLOPs wins. A segment stores its outputs until all later segments have had their backward pass, and its
    residuals during its own: the segments from i on take `max(residuals_i, outputs_i + segments from i + 1 on)` bytes.
    The last segment's backward pass begins where the forward pass ends, with the residuals in memory in any case.

    Args:
        costs: Costs of the equations.
        start: Position of the first equation.
        stop: Position after the last equation.
        most: Highest number of segments.
    """
    places = [start, *_places(costs, start, stop, most), stop]
    inside, out = zip(*(_ranges(costs, k, places) for k in range(len(places) - 1)), strict=True)
    flops = [0, *accumulate(costs.flops)]
    end = len(places) - 1
    table = [[(inside[a][-1], 0, end) for a in range(end)]]  # (peak, recomputed FLOPs, end of the first segment)
    for count in range(2, min(most, end) + 1):
        rest = table[-1]
        row = []
        for a in range(end - count + 1):
            ways = (
                (
                    max(inside[a][b - a - 1], out[a][b - a - 1] + rest[b][0]),
                    flops[places[b]] - flops[places[a]] + rest[b][1],
                    b,
                )
                for b in range(a + 1, end - count + 2)
            )
            row.append(min(ways))
        table.append(row)
    return [Segmentation(_segments(table[: k + 1], places), row[0][0]) for k, row in enumerate(table)]


def fewest(cuts: Sequence[Segmentation], at_least: int = 1) -> Segmentation:
    """Return the cut with the fewest segments, `at_least` or more, within 10 % of the lowest peak.

    Args:
        cuts: Best cuts into 1, 2, ... segments.
        at_least: Lowest number of segments.
    """
    allowed = cuts[min(at_least, len(cuts)) - 1 :]
    low = min(cut.peak for cut in allowed)
    return next(cut for cut in allowed if cut.peak <= 1.1 * low)


def _segments(table: Sequence[Sequence[tuple[int, int, int]]], places: Sequence[int]) -> tuple:
    at, found = 0, []
    for row in reversed(table):
        after = row[at][2]
        found.append((places[at], places[after]))
        at = after
    return tuple(found)


def _places(costs: SegmentCosts, start: int, stop: int, most: int) -> list[int]:
    """Return positions to cut at: local minima of the bytes that cross, or all positions where the minima are too
    few."""
    crossing = dict(zip(range(start + 1, stop), _ranges(costs, 0, range(start, stop))[1], strict=True))
    low = [p for p in crossing if _is_low(crossing, p)]
    chosen, room = low if len(low) >= most - 1 else list(crossing), max(MOST_PLACES, most - 1)
    if len(chosen) <= room:
        return chosen
    edges = [k * len(chosen) // room for k in range(room + 1)]
    return [min(chosen[a:b], key=crossing.__getitem__) for a, b in pairwise(edges)]


def _is_low(crossing: dict[int, int], place: int) -> bool:
    here = crossing[place]
    return all(here <= crossing.get(beside, here) for beside in (place - 1, place + 1))


def _ranges(costs: SegmentCosts, first: int, places: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return bytes of residuals inside and bytes of values leaving, for the equations from position `first` to each
    later one."""
    start = places[first]
    inside, out = [], []
    held = live = 0
    for a, b in pairwise(places[first:]):
        for k in range(a, b):
            held += costs.own[k] + _bytes(costs, costs.kept[k], start)
            live += _bytes(costs, costs.made[k], start) - _bytes(costs, costs.read[k], start)
        inside.append(held)
        out.append(live)
    return inside, out


def _bytes(costs: SegmentCosts, values: Sequence[Value], start: int) -> int:
    return sum(costs.size[v] for v in values if costs.born.get(v, -1) >= start)


def _sizes(program: Program, scope: SubJaxpr) -> dict[Value, int]:
    """Return bytes of every value of a jaxpr; 0 for another form of an input that is no larger."""
    size = {v: nbytes(program.avals[v]) for e in scope.equations for v in e.results}
    free = {*scope.inputs, *scope.const_values}
    largest = {v: nbytes(program.avals[v]) for v in free}
    for e in scope.equations:
        if e.primitive.alias and e.operands[0] in free:
            forms = [v for v in e.results if size[v] <= largest[e.operands[0]]]
            free.update(forms)
            largest.update((v, size[v]) for v in forms)
    return size | dict.fromkeys(free, 0)


def _flops(program: Program, scope: SubJaxpr) -> tuple[int, ...]:
    """Return FLOPs of the products of each equation and its bodies."""
    indices = [e.index for e in scope.equations]
    found = [0] * len(indices)
    for work in count_work(program, Flow(program)):
        found[bisect_right(indices, work.equation) - 1] += work.flops
    return tuple(found)
