"""Which sorted rows stay with the experts between their products, and which go back to the tokens' devices."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..program.ir import Equation, Program, Value
from ..program.primitives.primitive import Kind
from .sorting import Sorting


@dataclass(frozen=True)
class Away:
    """Rows that are away: on each device of the expert axes those of all of them, zero where the expert is another's.

    `values`: those that are; `equations`: what works on them row by row; `back`: those of these, and of the products,
    whose results go back to the devices of the tokens. `brought`: the values whose rows an equation is the first of a
    body to bring. `asking`: the products that are the first of a body to ask how many rows each device has of each
    group.
    """

    values: frozenset[Value] = frozenset()
    equations: frozenset[int] = frozenset()
    back: frozenset[int] = frozenset()
    brought: Mapping[int, tuple[Value, ...]] = field(default_factory=dict)
    asking: frozenset[int] = frozenset()


def find_away(sorting: Sorting) -> Away:
    """The most that can be away: from one product on, through what works row by row, to others."""
    program = sorting.of.program
    products = {e.index for e in sorting.products()}
    values = _values(sorting, products)
    equations = {
        e.index
        for e in program.equations
        if e.index not in products and not e.doors and any(v in values for v in e.ins)
    }
    makers = [program.equations[i] for i in sorted(products | equations)]
    back = {e.index for e in makers if sorting.order(e.outs[0]) is not None and e.outs[0] not in values}
    first = {sorting.of.counts.inner(e.ins[2]): e.index for e in reversed([*sorting.products()])}
    return Away(
        frozenset(values),
        frozenset(equations),
        frozenset(back),
        _brought(sorting, values),
        frozenset(first.values()),
    )


def _values(sorting: Sorting, products: set[int]) -> set[Value]:
    program = sorting.of.program
    found = {v for v in range(len(program.avals)) if sorting.order(v) is not None}
    readers, at_doors = _readers(program)
    while True:
        left = {
            v
            for v in found
            if _made(sorting, v, found, products, at_doors)
            and all(_reads(sorting, e, v, found, products) for e in readers[v])
            and all(w in found for w in at_doors[v])
        }
        if left == found:
            return found
        found = left


def _readers(program: Program) -> tuple[Mapping[Value, list[Equation]], Mapping[Value, list[Value | None]]]:
    """The equations without bodies that read each value; and what a value is at the other side of doors, None for what
    the whole program gives."""
    readers, doors = defaultdict[Value, list[Equation]](list), defaultdict[Value, list[Value | None]](list)
    for e in program.equations:
        for v in () if e.doors else e.ins:
            if v is not None:
                readers[v].append(e)
        for door in e.doors:
            for a, b in [(a, b) for a, b, _ in (*door.into, *door.out)]:
                if a is not None:
                    doors[a].append(b)
                    doors[b].append(a)
    for v in program.outputs:
        if v is not None:
            doors[v].append(None)
    return readers, doors


def _made(
    sorting: Sorting,
    v: Value,
    found: set[Value],
    products: set[int],
    at_doors: Mapping[Value, list[Value | None]],
) -> bool:
    e = sorting.of.program.maker.get(v)
    if e is None or e.doors:
        return bool(at_doors[v])
    return e.index in products or _row_by_row(sorting, e, found)


def _row_by_row(sorting: Sorting, e: Equation, found: set[Value]) -> bool:
    """Does `e` make each row of rows that are away, and of what is the same for all rows?"""
    if e.primitive.kind is not Kind.ELEMENTWISE:
        return False
    state = next((s for v in e.ins if (s := sorting.order(v)) is not None), None)
    return state is not None and all(
        v is None or v in found or (sorting.order(v) is None and _even(sorting, v, state.dim)) for v in e.ins
    )


def _even(sorting: Sorting, v: Value, dim: int) -> bool:
    return not sorting.of.program.shapes[v] or sorting.of.even(v, dim)


def _reads(sorting: Sorting, e: Equation, v: Value, found: set[Value], products: set[int]) -> bool:
    """Does `e` read rows that are away as they are? A sum of products' rows alone may go back itself."""
    if e.index in products:
        return v in e.ins[:2]
    if not _row_by_row(sorting, e, found):
        return False
    return e.outs[0] in found or (e.primitive.adds and all(w in found for w in e.ins))


def _brought(sorting: Sorting, away: set[Value]) -> Mapping[int, tuple[Value, ...]]:
    brought, seen = dict[int, tuple[Value, ...]](), set[Value]()
    for e in sorting.products():
        new = [v for v in _rows(sorting, e) if v not in away and sorting.of.counts.inner(v) not in seen]
        seen |= {w for v in new if (w := sorting.of.counts.inner(v)) is not None}
        brought[e.index] = tuple(dict.fromkeys(new))
    return brought


def _rows(sorting: Sorting, e: Equation) -> Iterable[Value]:
    return (v for v in e.ins[:2] if v is not None and sorting.order(v) is not None)
