"""Backward loops in two: one that makes what the stage before waits for, and one for the weights' gradients."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from ..gradients.part import Part
from ..program import control_flow
from ..program.emit import Emitter
from ..program.flow import needed
from ..program.ir import Door, Equation, Program, Value
from ..program.primitives import scan_counts
from ..program.replay import retraced


@dataclass(frozen=True)
class _Halves:
    """Of a scan: the carries and stacked results, by position, that its first half makes; what the first half makes and
    the second reads."""

    carries: tuple[int, ...]
    stacked: tuple[int, ...]
    between: tuple[Value, ...]


def in_halves(closed: ClosedJaxpr, urgent: Sequence[int]) -> ClosedJaxpr:
    """`closed` with each scan of which the outputs `urgent`, by position, need a part alone run as two scans, the
    second without what that needs. Nothing is computed twice."""
    while True:
        program = Program(closed)
        outs = {v for i in urgent if (v := program.outputs[i]) is not None}
        first = needed(program.top, outs, ())
        read = outs | {v for e in program.top.equations if e.index in first for v in e.ins if v is not None}
        found = {
            e.index: halves
            for e in program.top.equations
            if e.index in first and e.is_scan and (halves := _halves(e, read)) is not None
        }
        if not found:
            return closed
        closed = retraced(_InHalves(program, found))


def _halves(e: Equation, read: Collection[Value]) -> _Halves | None:
    """How a scan is halved of which others read only some results; None where one half would have nothing to do."""
    consts, carried = scan_counts(e.params)
    scope = e.doors[0].scope
    stacked = [j for j, v in enumerate(e.outs[carried:]) if v in read]
    carries = {i for i, v in enumerate(e.outs[:carried]) if v in read}
    while True:  # a carry that one of these needs is one of them
        ends = {scope.outs[i] for i in carries} | {scope.outs[carried + j] for j in stacked}
        first = needed(scope, {v for v in ends if v is not None}, ())
        reads = ends | {v for x in scope.equations if x.index in first for v in x.ins}
        more = {i for i in range(carried) if scope.ins[consts + i] in reads} - carries
        if not more:
            break
        carries |= more
    if len(carries) == carried and len(stacked) == len(e.outs) - carried:
        return None
    rest = [v for j, v in enumerate(scope.outs) if j not in carries and j - carried not in stacked]
    made = {v for x in scope.equations if x.index in first for v in x.outs}
    made |= {scope.ins[consts + i] for i in carries}
    second = needed(scope, {v for v in rest if v is not None}, made)
    if not second - first:  # the rest is what the first half makes anyway
        return None
    reads = {v for v in rest if v is not None}
    reads |= {
        v
        for x in scope.equations
        if x.index in second and x.index not in first
        for v in x.ins
        if v is not None
    }
    return _Halves(tuple(sorted(carries)), tuple(stacked), tuple(sorted(reads & made)))


class _InHalves(Emitter):
    def __init__(self, program: Program, halves: Mapping[int, _Halves]):
        super().__init__(program)
        self._halves = halves

    def _scan(self, e: Equation, values: list, door: Door) -> list:
        halves = self._halves.get(e.index)
        if halves is None:
            return super()._scan(e, values, door)
        _, carried = scan_counts(e.params)
        others = tuple(i for i in range(carried) if i not in halves.carries)
        ys = len(e.outs) - carried
        later = tuple(j for j in range(ys) if j not in halves.stacked)
        first, between = self._half(e, values, halves.carries, halves.stacked, (), halves.between, [])
        second, _ = self._half(e, values, others, later, halves.between, (), between)
        outs: list[Any] = [None] * len(e.outs)
        for places, results in (((halves.carries, halves.stacked), first), ((others, later), second)):
            at = [*places[0], *(carried + j for j in places[1])]
            for i, x in zip(at, results, strict=True):
                outs[i] = x
        return outs

    def _half(
        self,
        e: Equation,
        values: list,
        carries: tuple[int, ...],
        stacked: tuple[int, ...],
        known: tuple[Value, ...],
        more: tuple[Value, ...],
        given: list,
    ) -> tuple[list, list]:
        """A scan over `carries` that makes the results `stacked`, and the values `more` of its body stacked; `given`:
        the values `known` of the body, stacked."""
        consts, carried = scan_counts(e.params)
        scope = e.doors[0].scope
        ends = [*(scope.outs[i] for i in carries), *(scope.outs[carried + j] for j in stacked)]
        wanted = [v for v in ends if v is not None]
        part = Part(self.program, [*wanted, *more], known, scope)
        literals = scope.jaxpr.outvars
        where = [*carries, *(carried + j for j in stacked)]

        def trip(carry: Any, x: Any) -> tuple:
            own, stacks = x
            inside: list[Any] = [*values[:consts], *[None] * carried, *own]
            for i, now in zip(carries, carry, strict=True):
                inside[consts + i] = now
            made = part(inside, dict(zip(known, stacks, strict=True)))
            rest = iter(made)
            outs = [literals[k].val if v is None else next(rest) for k, v in zip(where, ends, strict=True)]
            n = len(carries)
            return tuple(map(jnp.asarray, outs[:n])), (tuple(outs[n:]), tuple(rest))

        start = [values[consts + i] for i in carries]
        carry, (ys, extra) = control_flow.scan(
            e, trip, start, (tuple(values[consts + carried :]), tuple(given))
        )
        return [*carry, *ys], list(extra)
