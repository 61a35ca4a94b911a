"""Weights that a loop reads at every trip, gathered once before it."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from ..program.ir import Equation, Scope, Value
from ..program.primitives import REMAT, called, scan_counts
from .layout import Layout


@dataclass(frozen=True)
class Ahead:
    """`operands`: the positions of each loop's operands that are gathered before it, by the index of its equation.
    `values`: those inside, weights as they are used, which need no gathering any more."""

    operands: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    values: frozenset[Value] = frozenset()


def find_ahead(layout: Layout, kept: Collection[Value]) -> Ahead:
    """The weights of the loops that the step enters once, and whose carries are among `kept`, gradients in parts. Not
    those that a loop steps over, of which each trip has its own."""
    program = layout.program
    met = (v for e in program.equations if layout.storage.batchy_equation(e) and not e.doors for v in e.ins)
    weights = [v for v in met if v is not None and not layout.batchy(v)]
    used = layout.flow.back(weights, lambda _v, w, _name: not layout.batchy(w))
    operands, values = {}, set()
    for e in _entered_once(program.top):
        n, k = scan_counts(e.params)
        inside = e.doors[0].scope.ins
        if not any(v in kept for v in inside[n : n + k]):
            continue
        chosen = [i for i in range(n) if inside[i] in used and _divided(layout, e.ins[i])]
        operands[e.index] = tuple(chosen)
        values |= _made_of(layout, e.doors[0].scope, {inside[i] for i in chosen})
    return Ahead(operands, frozenset(values))


def _divided(layout: Layout, value: Value | None) -> bool:
    if value is None or layout.batchy(value):
        return False
    tensor = {a for axes in layout.in_use(value) for a in axes}
    return any(a not in tensor for axes in layout.at_rest(value) for a in axes)


def _entered_once(scope: Scope) -> Iterator[Equation]:
    for e in scope.equations:
        if e.name == "scan":
            yield e
        elif called(e.eqn) is not None and e.name not in REMAT:
            yield from _entered_once(e.doors[0].scope)


def _made_of(layout: Layout, scope: Scope, known: set[Value]) -> set[Value]:
    """The values of a body that are made of `known` ones and nothing else but numbers: casts, slices, products of
    weights."""
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
