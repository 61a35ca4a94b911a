"""Weights read at every trip of a loop, gathered once before the loop."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...plan import PlannedCollective
from ...program.ir import Equation, Program, SubJaxpr, Value
from ...program.primitives import called_body, scan_counts
from ..layout import Layout, Spec
from ..reshard_steps import is_read_in_bfloat16
from ..weight_gathers import gather_collectives
from .region import Context, Emission, Region


@dataclass(frozen=True, eq=False)
class HoistedGathers(Region):
    """Loops with weights gathered beforehand, each weight once for all loops.

    Attributes:
        layout: The layout.
        operands: Weights among each loop's operands, by the loop's index and the operand's position.
        gathers: Weights first read by each loop, as values outside of the calls around the loop.
        weights: Weights inside the loops, already under their compute spec.
        narrowed: Weights read only by products in bfloat16.
    """

    layout: Layout
    operands: Mapping[int, Mapping[int, Value]]
    gathers: Mapping[int, tuple[Value, ...]]
    weights: frozenset[Value]
    narrowed: frozenset[Value]

    @property
    def gathered_weights(self) -> Collection[Value]:
        return self.weights

    def emit(self, e: Equation, values: list, default: Callable[[list], list], lowering: Emission) -> list:
        for i, v in self.operands[e.index].items():
            values[i] = self._gather(values[i], v, lowering)
        return default(values)

    def _gather(self, x: Any, weight: Value, lowering: Emission) -> Any:
        """Return a gathered weight."""
        # The cached pair holds `x` alive, so that no other array gets its id.
        return lowering.once((HoistedGathers, id(x)), lambda: (x, lowering.gather(x, weight)))[1]

    def collectives(
        self, e: Equation, operand_collectives: Iterable[PlannedCollective], default: Iterable[PlannedCollective]
    ) -> Iterable[PlannedCollective]:
        for v in self.gathers[e.index]:
            for sent in gather_collectives(self.layout, v, e.trip_count, narrowed=v in self.narrowed):
                yield replace(sent, value=v)
        yield from default

    def scratch_bytes(self, e: Equation, default: Callable[[], int]) -> int:
        """Return the bytes including the gathered weights, alive with their shards until the loop ends."""
        layout = self.layout
        read = self.operands[e.index].values()
        return default() + sum(layout.shard_bytes(v, layout.compute_spec(v)) for v in read)

    def boundary_spec(self, value: Value) -> Spec | None:
        return self.layout.compute_spec(value) if value in self.weights else None


def find_hoisted_gathers(context: Context) -> HoistedGathers:
    """Find loops entered once in a step, if "once-gathered" is asked for.

    Weights that a loop scans are left out, as each trip has its own.
    """
    layout, program = context.layout, context.layout.program
    operands: dict[int, dict[int, Value]] = {}
    gathers: dict[int, tuple[Value, ...]] = {}
    weights, read, wide = set[Value](), set[Value](), set[Value]()
    if context.reduce == "once-gathered":
        by_activations = {
            v
            for e in program.equations
            if layout.storage.touches_batch(e) and not e.bodies
            for v in e.operands
            if v is not None and not layout.is_activation(v)
        }
        used = layout.flow.ancestors(by_activations, lambda _v, w, _e: not layout.is_activation(w))
        # Loops inside of other loops are left out: they would gather at each trip of the outer one.
        for e in (e for e in program.top.walk(_runs_in_place) if e.is_scan):
            scope, n = e.bodies[0].sub_jaxpr, scan_counts(e.params)[0]
            # Constants of a scan are the same at every trip; each trip has its own slices of scanned weights.
            constants = {i: v for i, v in enumerate(e.operands[:n]) if v is not None and scope.inputs[i] in used}
            chosen = {i: v for i, v in constants.items() if _is_gathered(layout, v)}
            if not chosen:
                continue
            operands[e.index] = chosen
            outer_values = {scope.inputs[i]: _outermost_value(program, v) for i, v in chosen.items()}
            gathers[e.index] = tuple(dict.fromkeys(v for v in outer_values.values() if v not in read))
            weights |= _derived_values(layout, scope, {*outer_values})
            wide |= {v for inside, v in outer_values.items() if not is_read_in_bfloat16(layout, inside)}
            read |= {*outer_values.values()}
    return HoistedGathers(operands.keys(), layout, operands, gathers, frozenset(weights), frozenset(read - wide))


def _runs_in_place(e: Equation) -> bool:
    return called_body(e.jaxpr_eqn) is not None and not e.primitive.remat


def _outermost_value(program: Program, value: Value) -> Value:
    """Return the value outside of all nested inlined calls that becomes `value` inside."""
    while (outside := program.outer_value(value)) is not None and _runs_in_place(program.body_inputs[value].equation):
        value = outside
    return value


def _is_gathered(layout: Layout, value: Value) -> bool:
    """Return whether a weight's stored spec has axes that its compute spec lacks."""
    if layout.is_activation(value):
        return False
    in_use = {a for axes in layout.compute_spec(value) for a in axes}
    return any(a not in in_use for axes in layout.stored_spec(value) for a in axes)


def _derived_values(layout: Layout, scope: SubJaxpr, weights: set[Value]) -> set[Value]:
    """Return `weights` and the values of a body made only of them and of scalars: casts, slices, products of
    weights."""
    shapes = layout.program.shapes
    for e in scope.equations:
        for body in e.bodies:
            weights |= {b for a, b, _ in body.inputs if a in weights}
            weights = _derived_values(layout, body.sub_jaxpr, weights)
        arrays = [v for v in e.operands if v is not None and shapes[v]]
        if not e.bodies and arrays and weights.issuperset(arrays):
            weights |= {v for v in e.results if not layout.is_activation(v)}
        elif called_body(e.jaxpr_eqn) is not None:
            weights |= {b for a, b, _ in e.bodies[0].outputs if a in weights}
    return weights
