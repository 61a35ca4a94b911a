"""Estimate of a step's memory on one device under a layout, from the traced step, before compilation.

Inputs and outputs are exact. In between, elementwise results are assumed fused into their readers; results of products,
lookups, sums and loops are assumed alive until their last reader. The compiler may use less by recomputation, and more
by another order of execution.
"""

from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, replace

from ..program.ir import Equation, SubJaxpr, Value
from ..program.primitives import scan_counts
from .regions import Region
from .sharded_lowering import ShardedLowering


@dataclass(frozen=True)
class Footprint:
    """Bytes on one device.

    Attributes:
        arrays: All inputs, and the outputs that do not reuse a donated input.
        temporaries: Most bytes of temporaries alive at once.
    """

    arrays: int
    temporaries: int

    @property
    def peak(self) -> int:
        return self.arrays + self.temporaries


def footprint(lowering: ShardedLowering, donated: Collection[int] = ()) -> Footprint:
    """Return the bytes on one device of a step as `lowering` emits it.

    Args:
        lowering: The lowering of the step.
        donated: Inputs, by number, with memory reused by outputs.
    """
    return _Estimate(lowering).step_footprint(donated)


def footprint_of_part(
    lowering: ShardedLowering, equations: Container[int], known: Collection[Value], results: Collection[Value]
) -> int:
    """Return the bytes on one device that part of a step takes besides its arguments, as a separate program.

    Args:
        lowering: The lowering of the whole step.
        equations: Top-level equations of the part, by index.
        known: Values given to the part, besides inputs of the step.
        results: Values returned by the part.
    """
    return _Estimate(lowering).part_bytes(equations, known, results)


class _Estimate:
    def __init__(self, lowering: ShardedLowering):
        self._lowering, self._layout, self._program = lowering, lowering.layout, lowering.program
        self._used = self._layout.flow.live_values
        self._is_materialized_by_index: dict[int, bool] = {}

    def step_footprint(self, donated: Collection[int]) -> Footprint:
        """Estimate the bytes of the step.

        Outputs reuse the memory of donated inputs. The others take the place of the temporaries that they are made of.
        """
        program = self._program
        outs = {v for v in program.outputs if v is not None} - {*program.inputs}
        donated_bytes = sum(self._bytes(program.inputs[i]) for i in donated)
        new_output_bytes = max(0, sum(map(self._bytes, outs)) - donated_bytes)
        # Two weights at a time: XLA gathers the next one while one is in use.
        gathered = 2 * self._largest_gathered(program.equations)
        between = self._peak_bytes(program.top, outs) + gathered
        # Outputs take the place of the temporaries that they are made of.
        return Footprint(sum(map(self._bytes, program.inputs)) + new_output_bytes, max(0, between - new_output_bytes))

    def part_bytes(self, equations: Container[int], known: Collection[Value], results: Collection[Value]) -> int:
        top = self._program.top
        chosen = replace(top, equations=[e for e in top.equations if e.index in equations])
        outs = {*results} - {*known, *self._program.inputs}
        between = self._peak_bytes(chosen, outs) + 2 * self._largest_gathered(chosen.walk())
        return sum(map(self._bytes, outs)) + between

    def _largest_gathered(self, equations: Iterable[Equation]) -> int:
        """Return the bytes, under its compute spec, of the largest weight gathered for an equation."""
        layout, largest = self._layout, 0
        for e in equations:
            if not e.bodies and layout.storage.touches_batch(e):
                for v in e.operands:
                    if v is not None and not layout.is_activation(v) and self._lowering.gather_axes(v):
                        largest = max(largest, layout.shard_bytes(v, layout.compute_spec(v)))
        return largest

    def _peak_bytes(self, scope: SubJaxpr, outs: Collection[Value]) -> int:
        """Return the most bytes that values of a scope take at once, besides its inputs and outputs."""
        materialized_sources: dict[Value, frozenset[Value]] = {}
        last_reader: dict[Value, int] = {}
        materialized = []
        for e in scope.equations:
            read = frozenset[Value]().union(*(materialized_sources.get(v, ()) for v in e.operands if v is not None))
            # Dead code, which XLA drops.
            if self._used.isdisjoint(e.results) and not e.bodies:
                continue
            if self._is_materialized(e):
                materialized_sources |= {v: frozenset([v]) for v in e.results}
                last_reader |= dict.fromkeys(read, len(materialized))
                materialized.append(e)
            else:
                # Fused into its readers: it takes no memory itself, but the values that it is made of stay alive for
                # it.
                materialized_sources |= dict.fromkeys(e.results, read)
        for v in outs:
            last_reader |= dict.fromkeys(materialized_sources.get(v, ()), len(materialized))
        freed_after: dict[int, list[Value]] = {}
        live_bytes = peak = 0
        for position, e in enumerate(materialized):
            new_values = [v for v in e.results if v in last_reader and v not in outs]
            live_bytes += sum(map(self._bytes, new_values))
            peak = max(peak, live_bytes + self._running_bytes(e, self._lowering.regions_of(e)))
            for v in new_values:
                freed_after.setdefault(last_reader[v], []).append(v)
            live_bytes -= sum(map(self._bytes, freed_after.pop(position, ())))
        return peak

    def _running_bytes(self, e: Equation, regions: tuple[Region, ...]) -> int:
        """Return the bytes that `e` takes while running, besides its operands and results."""
        if regions:
            return regions[0].scratch_bytes(e, lambda: self._running_bytes(e, regions[1:]))
        return max((self._body_bytes(e, body.sub_jaxpr) for body in e.bodies), default=0)

    def _body_bytes(self, e: Equation, scope: SubJaxpr) -> int:
        """Return the bytes of one run of a body: its own values and, in a scan, its slices of stacked operands and
        results."""
        outs = {v for v in scope.outputs if v is not None}
        inside = self._peak_bytes(scope, outs)
        if not e.is_scan:
            return inside
        const_count, carry_count = scan_counts(e.params)
        slices = (
            *scope.inputs[const_count + carry_count :],
            *(v for v in scope.outputs[carry_count:] if v is not None),
        )
        return inside + sum(map(self._bytes, slices))

    def _is_materialized(self, e: Equation) -> bool:
        if e.index not in self._is_materialized_by_index:
            inner = (i for body in e.bodies for i in body.sub_jaxpr.equations)
            self._is_materialized_by_index[e.index] = e.primitive.materialized or any(map(self._is_materialized, inner))
        return self._is_materialized_by_index[e.index]

    def _bytes(self, v: Value) -> int:
        layout = self._layout
        return layout.shard_bytes(v, layout.activation_spec(v) if layout.is_activation(v) else layout.stored_spec(v))
