"""Weights that a loop reads at every trip, gathered once before it."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ...plan import Sent
from ...program.ir import Equation, Scope, Value
from ...program.primitives import called, scan_counts
from ..layout import Layout, Spec
from ..stepwise import gathers_sent
from .region import Context, Emission, Region


@dataclass(frozen=True, eq=False)
class Ahead(Region):
    """Loops whose weights are gathered before them. `operands`: which of each loop's are, by the index of its equation;
    `weights`: those inside, which lie as they are used."""

    layout: Layout
    operands: Mapping[int, tuple[int, ...]]
    weights: frozenset[Value]

    @property
    def gathered(self) -> Collection[Value]:
        return self.weights

    def emit(self, e: Equation, values: list, rest: Callable[[list], list], hold: Emission) -> list:
        for i in self.operands[e.index]:
            if (v := e.ins[i]) is not None:
                values[i] = hold.gather(values[i], v)
        return rest(values)

    def sent(self, e: Equation, operands: Iterable[Sent], rest: Iterable[Sent]) -> Iterable[Sent]:
        layout = self.layout
        for v in self._gathered_before(e):
            yield from gathers_sent(layout, v, e.trips)
        yield from rest

    def held(self, e: Equation, rest: Callable[[], int]) -> int:
        """The gathered weights lie beside the divided ones until the loop ends."""
        layout = self.layout
        return rest() + sum(layout.bytes_of(v, layout.in_use(v)) for v in self._gathered_before(e))

    def _gathered_before(self, e: Equation) -> Iterator[Value]:
        return (v for i in self.operands[e.index] if (v := e.ins[i]) is not None)

    def lies(self, value: Value) -> Spec | None:
        return self.layout.in_use(value) if value in self.weights else None


def gathered_ahead(context: Context) -> Ahead:
    """The loops that the step enters once and whose carries are gradients in parts, where "once-gathered" was asked
    for. Not the weights that a loop steps over, of which each trip has its own."""
    layout, program = context.layout, context.layout.program
    operands: dict[int, tuple[int, ...]] = {}
    weights: set[Value] = set()
    if context.reduce != "once-gathered":
        return Ahead((), layout, operands, frozenset())
    read = (v for e in program.equations if layout.storage.batchy_equation(e) and not e.doors for v in e.ins)
    by_activations = [v for v in read if v is not None and not layout.batchy(v)]
    used = layout.flow.back(by_activations, lambda _v, w, _e: not layout.batchy(w))
    plain = program.top.walk(lambda e: called(e.eqn) is not None and not e.primitive.remat)
    for e in (e for e in plain if e.name == "scan"):
        n, k = scan_counts(e.params)
        inside = e.doors[0].scope.ins
        if any(v in context.deferred.values for v in inside[n : n + k]):
            chosen = [i for i in range(n) if inside[i] in used and _divided(layout, e.ins[i])]
            operands[e.index] = tuple(chosen)
            weights |= _made_of(layout, e.doors[0].scope, {inside[i] for i in chosen})
    return Ahead(operands.keys(), layout, operands, frozenset(weights))


def _divided(layout: Layout, value: Value | None) -> bool:
    if value is None or layout.batchy(value):
        return False
    in_use = {a for axes in layout.in_use(value) for a in axes}
    return any(a not in in_use for axes in layout.at_rest(value) for a in axes)


def _made_of(layout: Layout, scope: Scope, known: set[Value]) -> set[Value]:
    """`known` and the values of a body that are made of them and of nothing else but numbers: casts, slices, products
    of weights."""
    shapes = layout.program.shapes
    for e in scope.equations:
        for door in e.doors:
            known |= {b for a, b, _ in door.into if a in known}
            known = _made_of(layout, door.scope, known)
        arrays = [v for v in e.ins if v is not None and shapes[v]]
        if not e.doors and arrays and known.issuperset(arrays):
            known |= {v for v in e.outs if not layout.batchy(v)}
        elif called(e.eqn) is not None:
            known |= {b for a, b, _ in e.doors[0].out if a in known}
    return known
