"""The places where a loss can be cut into stages: its equations in a row, and the layers of its scans."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod

from ..program.flops import counted
from ..program.flow import Flow, made_of, origins, origins_of
from ..program.ir import Equation, Program, Value
from ..program.primitives import scan_counts
from ..program.sizes import nbytes


@dataclass(frozen=True)
class Unit:
    """What is never cut: an equation of a loss, or one layer of a scan that carries from layer to layer. `cost`: of its
    forward pass, in FLOPs."""

    equation: Equation
    layer: int | None
    cost: float


class Units:
    """The equations of `loss` that depend on parameters and on examples, in their order, as units.

    All others are free: each stage that reads what they make computes it anew. `parameters` and `examples` are inputs
    of the program; `own_costs` of the units, in the place of their FLOPs.
    """

    def __init__(
        self,
        loss: Program,
        parameters: Collection[Value],
        examples: Collection[Value],
        own_costs: Sequence[float] | None = None,
    ):
        self.loss, self._parameters = loss, frozenset(parameters)
        self.trained, self.varying = made_of(loss.top, parameters), made_of(loss.top, examples)
        both = self.trained & self.varying
        self.main = [e for e in loss.top.equations if any(v in both for v in e.outs)]
        costs = equation_costs(loss)
        self.units: list[Unit] = []
        self.span: dict[int, tuple[int, int]] = {}  # of each main equation: its first unit and its last
        for e in self.main:
            layers, first = layers_of(e), len(self.units)
            each = costs[e.index] / (layers or 1)
            self.units += [Unit(e, i if layers else None, each) for i in range(layers or 1)]
            self.span[e.index] = first, len(self.units) - 1
        if own_costs is not None:
            self.units = [replace(unit, cost=cost) for unit, cost in zip(self.units, own_costs, strict=True)]

    @cached_property
    def read(self) -> list[frozenset[Value]]:
        """The parameters that each unit reads, by itself or through what is made of them alone."""
        made = {v for e in self.main for v in e.outs}
        behind = origins(self.loss.top, self._parameters | made)
        return [origins_of(unit.equation, behind) - made for unit in self.units]

    @cached_property
    def crossing(self) -> list[int]:
        """`crossing[u]`: the bytes that stand between the units before u and u with those after it."""
        change = [0] * (len(self.units) + 1)

        def alive(first: int, last: int, size: int) -> None:
            if last >= first:
                change[first] += size
                change[last + 1] -= size

        readers = self._readers
        avals = self.loss.avals
        for e in self.main:
            first, last = self.span[e.index]
            for v in e.outs:
                read = [self._last_read(v, r) for r in readers[v]]
                alive(last + 1, max(read, default=-1), nbytes(avals[v]))
            if last > first:  # between layers stands what the scan carries
                _, carried = scan_counts(e.params)
                alive(first + 1, last, sum(nbytes(avals[v]) for v in e.outs[:carried]))
        return list(accumulate(change[:-1]))

    def _last_read(self, v: Value, reader: Equation) -> int:
        """The last unit that reads `v`: of a scan, the first layer reads what it starts from."""
        first, last = self.span[reader.index]
        if last == first:
            return first
        consts, carried = scan_counts(reader.params)
        others = [*reader.ins[:consts], *reader.ins[consts + carried :]]
        return last if v in others else first

    @cached_property
    def _readers(self) -> dict[Value, list[Equation]]:
        readers: dict[Value, list[Equation]] = defaultdict(list)
        for e in self.main:
            for v in {v for v in e.ins if v is not None}:
                readers[v].append(e)
        return readers


def layers_of(e: Equation) -> int:
    """The layers that a scan may be cut between; 0 for an equation that stays whole."""
    if not e.is_scan or e.params["reverse"] or not scan_counts(e.params)[1]:
        return 0
    return e.params["length"] if e.params["length"] > 1 else 0


def equation_costs(loss: Program) -> dict[int, float]:
    """FLOPs of each equation of the top level: of its products, and one for each number that it makes."""
    costs = {e.index: float(sum(prod(loss.shapes[v]) for v in e.outs)) for e in loss.top.equations}
    for work in counted(loss, Flow(loss)):
        e = loss.equations[work.equation]
        while e.outer is not None:
            e = e.outer
        costs[e.index] += work.flops
    return costs
