"""Weights that a loop reads at every trip, gathered once before it."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...plan import Sent
from ...program.ir import Equation, Program, Scope, Value
from ...program.primitives import called, scan_counts
from ..changes import read_narrow
from ..layout import Layout, Spec
from ..stepwise import gathers_sent
from .region import Context, Emission, Region


@dataclass(frozen=True, eq=False)
class Ahead(Region):
    """Loops whose weights are gathered before them, each weight once for all loops that read it.

    `operands`: those weights among each loop's operands, by position, by the index of its equation. `gathers`: the
    values, outside of the calls around it, that a loop is the first to read. `weights`: those inside, which lie as they
    are used. `narrow`: the values that only products read which take them in bfloat16.
    """

    layout: Layout
    operands: Mapping[int, Mapping[int, Value]]
    gathers: Mapping[int, tuple[Value, ...]]
    weights: frozenset[Value]
    narrow: frozenset[Value]

    @property
    def gathered(self) -> Collection[Value]:
        return self.weights

    def emit(self, e: Equation, values: list, rest: Callable[[list], list], hold: Emission) -> list:
        for i, v in self.operands[e.index].items():
            values[i] = self._brought(values[i], v, hold)
        return rest(values)

    def _brought(self, x: Any, weight: Value, hold: Emission) -> Any:
        """A weight as it is used; kept with what it is made of, whose id stays taken so."""
        return hold.once((Ahead, id(x)), lambda: (x, hold.gather(x, weight)))[1]

    def sent(self, e: Equation, operands: Iterable[Sent], rest: Iterable[Sent]) -> Iterable[Sent]:
        for v in self.gathers[e.index]:
            for sent in gathers_sent(self.layout, v, e.trips, narrowed=v in self.narrow):
                yield replace(sent, value=v)
        yield from rest

    def held(self, e: Equation, rest: Callable[[], int]) -> int:
        """The gathered weights lie beside the divided ones until the loop ends."""
        layout = self.layout
        read = self.operands[e.index].values()
        return rest() + sum(layout.bytes_of(v, layout.in_use(v)) for v in read)

    def lies(self, value: Value) -> Spec | None:
        return self.layout.in_use(value) if value in self.weights else None


def gathered_ahead(context: Context) -> Ahead:
    """The loops that the step enters once, where "once-gathered" was asked for. Not the weights that a loop steps over,
    of which each trip has its own."""
    layout, program = context.layout, context.layout.program
    operands: dict[int, dict[int, Value]] = {}
    gathers: dict[int, tuple[Value, ...]] = {}
    weights, read, wide = set[Value](), set[Value](), set[Value]()
    if context.reduce == "once-gathered":
        by_activations = {
            v
            for e in program.equations
            if layout.storage.batchy_equation(e) and not e.doors
            for v in e.ins
            if v is not None and not layout.batchy(v)
        }
        used = layout.flow.back(by_activations, lambda _v, w, _e: not layout.batchy(w))
        for e in (e for e in program.top.walk(_runs_in_place) if e.is_scan):
            scope, n = e.doors[0].scope, scan_counts(e.params)[0]
            constants = {i: v for i, v in enumerate(e.ins[:n]) if v is not None and scope.ins[i] in used}
            chosen = {i: v for i, v in constants.items() if _divided(layout, v)}
            if not chosen:
                continue
            operands[e.index] = chosen
            known = {scope.ins[i]: _outside_of_calls(program, v) for i, v in chosen.items()}
            gathers[e.index] = tuple(dict.fromkeys(v for v in known.values() if v not in read))
            weights |= _made_of(layout, scope, {*known})
            wide |= {v for inside, v in known.items() if not read_narrow(layout, inside)}
            read |= {*known.values()}
    return Ahead(operands.keys(), layout, operands, gathers, frozenset(weights), frozenset(read - wide))


def _runs_in_place(e: Equation) -> bool:
    return called(e.eqn) is not None and not e.primitive.remat


def _outside_of_calls(program: Program, value: Value) -> Value:
    """The value that enters the calls, within each other, in which `value` is."""
    while (outside := program.outside(value)) is not None and _runs_in_place(
        program.entrances[value].equation
    ):
        value = outside
    return value


def _divided(layout: Layout, value: Value) -> bool:
    if layout.batchy(value):
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
