"""Split backward scans in two: first the input gradients for the stage before, then the weight gradients."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from ..gradients.partial_replay import PartialReplay
from ..program import control_flow
from ..program.emit import Emitter
from ..program.flow import required_equations
from ..program.ir import Body, Equation, Program, Value
from ..program.primitives import scan_counts
from ..program.replay import retrace


@dataclass(frozen=True)
class _ScanHalves:
    """Division of a scan's results between two scans.

    Attributes:
        carries: Positions of the carries of the first scan.
        stacked: Positions of the stacked results of the first scan.
        residuals: Body values computed by the first scan and read by the second.
    """

    carries: tuple[int, ...]
    stacked: tuple[int, ...]
    residuals: tuple[Value, ...]


def halve_backward_scans(closed: ClosedJaxpr, urgent_outputs: Sequence[int]) -> ClosedJaxpr:
    """Run each scan with partly urgent results as two scans; nothing is computed twice.

    The first scan computes what the urgent outputs need, the second scan the rest.

    Args:
        closed: A forward and backward pass.
        urgent_outputs: Positions of the outputs needed first.
    """
    # The first half of a split scan reads fewer operands, so that scans before it may become divisible: split again.
    while True:
        program = Program(closed)
        outs = {v for i in urgent_outputs if (v := program.outputs[i]) is not None}
        first = required_equations(program.top, outs, ())
        read = outs | {v for e in program.top.equations if e.index in first for v in e.operands if v is not None}
        found = {
            e.index: halves
            for e in program.top.equations
            if e.index in first and e.is_scan and (halves := _find_halves(e, read)) is not None
        }
        if not found:
            return closed
        closed = retrace(_ScanHalver(program, found))


def _find_halves(e: Equation, read: Collection[Value]) -> _ScanHalves | None:
    """Return how to divide a scan of which others read some results first; None if one half would be empty."""
    consts, carried = scan_counts(e.params)
    scope = e.bodies[0].sub_jaxpr
    stacked = [j for j, v in enumerate(e.results[carried:]) if v in read]
    carries = {i for i, v in enumerate(e.results[:carried]) if v in read}
    # What the first scan reads of a carry, it must compute as well: repeat to a fixed point.
    while True:
        first_results = {scope.outputs[i] for i in carries} | {scope.outputs[carried + j] for j in stacked}
        first = required_equations(scope, {v for v in first_results if v is not None}, ())
        reads = first_results | {v for x in scope.equations if x.index in first for v in x.operands}
        needed_carries = {i for i in range(carried) if scope.inputs[consts + i] in reads} - carries
        if not needed_carries:
            break
        carries |= needed_carries
    if len(carries) == carried and len(stacked) == len(e.results) - carried:
        return None
    second_results = [v for j, v in enumerate(scope.outputs) if j not in carries and j - carried not in stacked]
    first_values = {v for x in scope.equations if x.index in first for v in x.results}
    first_values |= {scope.inputs[consts + i] for i in carries}
    second = required_equations(scope, {v for v in second_results if v is not None}, first_values)
    # The first scan already computes everything that the remaining results need.
    if not second - first:
        return None
    reads = {v for v in second_results if v is not None}
    reads |= {
        v for x in scope.equations if x.index in second and x.index not in first for v in x.operands if v is not None
    }
    return _ScanHalves(tuple(sorted(carries)), tuple(stacked), tuple(sorted(reads & first_values)))


class _ScanHalver(Emitter):
    """Emit a program with some scans as two scans each."""

    def __init__(self, program: Program, halves: Mapping[int, _ScanHalves]):
        super().__init__(program)
        self._halves = halves

    def _scan(self, e: Equation, values: list, body: Body) -> list:
        halves = self._halves.get(e.index)
        if halves is None:
            return super()._scan(e, values, body)
        _, carried = scan_counts(e.params)
        others = tuple(i for i in range(carried) if i not in halves.carries)
        ys = len(e.results) - carried
        other_stacked = tuple(j for j in range(ys) if j not in halves.stacked)
        first, residuals = self._run_half(e, values, halves.carries, halves.stacked, (), halves.residuals, [])
        second, _ = self._run_half(e, values, others, other_stacked, halves.residuals, (), residuals)
        outs: list[Any] = [None] * len(e.results)
        for half, results in (((halves.carries, halves.stacked), first), ((others, other_stacked), second)):
            positions = [*half[0], *(carried + j for j in half[1])]
            for i, x in zip(positions, results, strict=True):
                outs[i] = x
        return outs

    def _run_half(
        self,
        e: Equation,
        values: list,
        carries: tuple[int, ...],
        stacked: tuple[int, ...],
        known: tuple[Value, ...],
        residuals: tuple[Value, ...],
        known_stacks: list,
    ) -> tuple[list, list]:
        """Emit one half of a scan.

        Args:
            e: The scan.
            values: Operands of the scan.
            carries: Positions of the carries of this half.
            stacked: Positions of the stacked results of this half.
            known: Body values computed by the first half.
            residuals: Body values to return as well, stacked.
            known_stacks: The values of `known`, stacked.

        Returns:
            The final carries and stacked results, then the stacked residuals.
        """
        consts, carried = scan_counts(e.params)
        scope = e.bodies[0].sub_jaxpr
        ends = [*(scope.outputs[i] for i in carries), *(scope.outputs[carried + j] for j in stacked)]
        wanted = [v for v in ends if v is not None]
        part = PartialReplay(self.program, [*wanted, *residuals], known, scope)
        # An output that is a literal is no value of the program, but is in the jaxpr.
        literals = scope.jaxpr.outvars
        positions = [*carries, *(carried + j for j in stacked)]

        def trip(carry: Any, x: Any) -> tuple:
            own, stacks = x
            # Carries of the other half stay None: no equation of this half reads them.
            inside: list[Any] = [*values[:consts], *[None] * carried, *own]
            for i, now in zip(carries, carry, strict=True):
                inside[consts + i] = now
            made = part(inside, dict(zip(known, stacks, strict=True)))
            rest = iter(made)
            outs = [literals[k].val if v is None else next(rest) for k, v in zip(positions, ends, strict=True)]
            n = len(carries)
            return tuple(map(jnp.asarray, outs[:n])), (tuple(outs[n:]), tuple(rest))

        start = [values[consts + i] for i in carries]
        carry, (ys, extra) = control_flow.scan(e, trip, start, (tuple(values[consts + carried :]), tuple(known_stacks)))
        return [*carry, *ys], list(extra)
