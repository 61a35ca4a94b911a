"""Indivisible units of a loss: its equations in order, and the single layers of its scans."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod

from ..program.flops import count_work
from ..program.flow import Flow, dependents, operand_roots, root_dependencies
from ..program.ir import Equation, Program, Value
from ..program.primitives import scan_counts
from ..program.sizes import nbytes


@dataclass(frozen=True)
class LossUnit:
    """One indivisible piece of work: an equation of the loss, or one layer of a scan with carries.

    Attributes:
        equation: The equation.
        layer: Layer of the scan; None for a complete equation.
        cost: FLOPs of the forward pass, or the given cost.
    """

    equation: Equation
    layer: int | None
    cost: float


class LossUnits:
    """The equations of a loss that depend on parameters and on examples, in order, as units.

    All other equations are free: each stage that reads their results computes them again.

    Args:
        loss: The loss of one microbatch.
        parameters: Inputs that hold weights.
        examples: Inputs that hold examples.
        own_costs: Costs of the units, in place of FLOPs.
    """

    def __init__(
        self,
        loss: Program,
        parameters: Collection[Value],
        examples: Collection[Value],
        own_costs: Sequence[float] | None = None,
    ):
        self.loss, self._parameters = loss, frozenset(parameters)
        self.from_parameters, self.from_examples = (dependents(loss.top, parameters), dependents(loss.top, examples))
        dependent = self.from_parameters & self.from_examples
        self.main_equations = [e for e in loss.top.equations if any(v in dependent for v in e.results)]
        costs = equation_flops(loss)
        self.units: list[LossUnit] = []
        self.unit_range: dict[int, tuple[int, int]] = {}  # first and last unit of each main equation, by index
        for e in self.main_equations:
            layers, first = splittable_layers(e), len(self.units)
            each = costs[e.index] / (layers or 1)
            self.units += [LossUnit(e, i if layers else None, each) for i in range(layers or 1)]
            self.unit_range[e.index] = first, len(self.units) - 1
        if own_costs is not None:
            self.units = [replace(unit, cost=cost) for unit, cost in zip(self.units, own_costs, strict=True)]

    @cached_property
    def parameters_read(self) -> list[frozenset[Value]]:
        """Parameters read by each unit, directly or through values computed from parameters alone."""
        made = {v for e in self.main_equations for v in e.results}
        behind = root_dependencies(self.loss.top, self._parameters | made)
        return [operand_roots(unit.equation, behind) - made for unit in self.units]

    @cached_property
    def crossing_bytes(self) -> list[int]:
        """Bytes at the boundary before each unit: values of earlier units with later readers."""
        byte_changes = [0] * (len(self.units) + 1)

        def add_bytes(first: int, last: int, size: int) -> None:
            if last >= first:
                byte_changes[first] += size
                byte_changes[last + 1] -= size

        readers = self._readers
        avals = self.loss.avals
        for e in self.main_equations:
            first, last = self.unit_range[e.index]
            for v in e.results:
                read = [self._last_reader_unit(v, r) for r in readers[v]]
                add_bytes(last + 1, max(read, default=-1), nbytes(avals[v]))
            # Between two layers of a scan, its carries cross.
            if last > first:
                _, carried = scan_counts(e.params)
                add_bytes(first + 1, last, sum(nbytes(avals[v]) for v in e.results[:carried]))
        return list(accumulate(byte_changes[:-1]))

    def _last_reader_unit(self, v: Value, reader: Equation) -> int:
        """Return the last unit of `reader` that reads `v`. An initial carry of a scan is read by the first layer
        only."""
        first, last = self.unit_range[reader.index]
        if last == first:
            return first
        consts, carried = scan_counts(reader.params)
        others = [*reader.operands[:consts], *reader.operands[consts + carried :]]
        return last if v in others else first

    @cached_property
    def _readers(self) -> dict[Value, list[Equation]]:
        """Main equations that read each value."""
        readers: dict[Value, list[Equation]] = defaultdict(list)
        for e in self.main_equations:
            for v in {v for v in e.operands if v is not None}:
                readers[v].append(e)
        return readers


def splittable_layers(e: Equation) -> int:
    """Return the number of layers of a scan that can be split between layers; 0 for an equation that stays in one
    stage."""
    # A reversed scan runs its last layer first, and layers without carries (`lax.map`) form no chain.
    if not e.is_scan or e.params["reverse"] or not scan_counts(e.params)[1]:
        return 0
    return e.params["length"] if e.params["length"] > 1 else 0


def equation_flops(loss: Program) -> dict[int, float]:
    """Return the FLOPs of each top-level equation: its products, plus one for each number in its results."""
    costs = {e.index: float(sum(prod(loss.shapes[v]) for v in e.results)) for e in loss.top.equations}
    for work in count_work(loss, Flow(loss)):
        e = loss.equations[work.equation]
        while e.parent is not None:
            e = e.parent
        costs[e.index] += work.flops
    return costs
