"""Which sorted rows stay with the experts between their products, and which go back to the tokens' devices.

Where several devices have an array for the rows of all of them, those of other devices' experts are zero in what
products make, and in what is linear in that; of what else is made of it nothing is known there, so that it stays.
"""

from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from ..program.group_rows import index_root
from ..program.ir import Equation, Program, Value
from ..program.primitives.primitive import Kind
from ..program.sizes import nbytes
from .sorting import Sorting

_ROW_BY_ROW = (Kind.ELEMENTWISE, Kind.SHAPE, Kind.CUT, Kind.REDUCTION, Kind.RUNNING)


@dataclass(frozen=True)
class Away:
    """Rows that are away: on each device of the expert axes those of all of them, zero where the expert is another's.

    `values`: those that are; `equations`: what works on them row by row; `back`: those of these, of the products and
    of the lookups in tables, whose results go back to the devices of the tokens. `brought`: the values whose rows an
    equation is the first of a body to bring. `asking`: the products that are the first of a body to ask how many rows
    each device has of each group.
    """

    values: frozenset[Value] = frozenset()
    equations: frozenset[int] = frozenset()
    back: frozenset[int] = frozenset()
    brought: Mapping[int, tuple[Value, ...]] = field(default_factory=dict)
    asking: frozenset[int] = frozenset()


def find_away(sorting: Sorting) -> Away:
    """The most that can be away: from one product on, through what works row by row, to others."""
    program = sorting.of.program
    grouped = {e.index for e in sorting.products()} | sorting.tables.keys()
    values = _values(sorting, grouped)
    equations = {
        e.index
        for e in program.equations
        if e.index not in grouped and not e.doors and any(v in values for v in e.ins)
    }
    makers = [program.equations[i] for i in sorted(grouped | equations)]
    back = {e.index for e in makers if sorting.order(e.outs[0]) is not None and e.outs[0] not in values}
    first = {sorting.of.counts.inner(e.ins[2]): e.index for e in reversed([*sorting.products()])}
    return Away(
        frozenset(values),
        frozenset(equations),
        frozenset(back),
        _brought(sorting, grouped, values),
        frozenset(first.values()),
    )


def _values(sorting: Sorting, grouped: Set[int]) -> set[Value]:
    program = sorting.of.program
    found = {v for v in range(len(program.avals)) if sorting.order(v) is not None}
    readers, at_doors = _readers(program)
    while True:
        left = {
            v
            for v in found
            if _made(sorting, v, found, grouped, at_doors)
            and all(_reads(sorting, e, v, found, grouped) for e in readers[v])
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
    grouped: Set[int],
    at_doors: Mapping[Value, list[Value | None]],
) -> bool:
    e = sorting.of.program.maker.get(v)
    if e is None or e.doors:
        return bool(at_doors[v])
    return e.index in grouped or _row_by_row(sorting, e, found)


def _row_by_row(sorting: Sorting, e: Equation, found: set[Value]) -> bool:
    """Does `e` make each row of rows that are away, and of what is the same for all rows?"""
    if e.primitive.kind not in _ROW_BY_ROW or any(sorting.order(v) is None for v in e.outs):
        return False
    state = next((s for v in e.ins if (s := sorting.order(v)) is not None), None)
    return state is not None and all(
        v is None or v in found or (sorting.order(v) is None and _even(sorting, v, state.dim)) for v in e.ins
    )


def _even(sorting: Sorting, v: Value, dim: int) -> bool:
    return not sorting.of.program.shapes[v] or sorting.of.even(v, dim)


def _reads(sorting: Sorting, e: Equation, v: Value, found: set[Value], grouped: Set[int]) -> bool:
    """Does `e` read rows that are away as they are? What it makes may go back itself where that is not more, and zero
    for the experts of others, as results of products are."""
    if e.index in grouped:
        return v in rows_of(e)
    if not _row_by_row(sorting, e, found):
        return False
    if len(e.outs) > 1 or e.outs[0] in found:
        return all(w in found for w in e.outs)
    avals = sorting.of.program.avals
    read = sum(nbytes(avals[w]) for w in {*e.ins} if w is not None and w in found)
    return nbytes(avals[e.outs[0]]) <= read and _zero(sorting, e.outs[0], grouped)


def _zero(sorting: Sorting, v: Value | None, grouped: Set[int]) -> bool:
    """Are rows that are away zero on the devices that don't have their experts?"""
    v = sorting.of.counts.inner(v)
    e = None if v is None else sorting.of.program.maker.get(v)
    if e is None or e.doors or sorting.order(v) is None:
        return False
    if e.index in grouped:
        return True
    if e.primitive.in_each:
        rows = [w for w in e.ins if sorting.order(w) is not None]
        return len(rows) == 1 and _zero(sorting, rows[0], grouped)
    linear = range(len(e.ins))[e.primitive.linear or slice(0)]
    even = all(sorting.order(w) is None for k, w in enumerate(e.ins) if k not in linear)
    return bool(linear) and even and all(_zero(sorting, e.ins[k], grouped) for k in linear)


def rows_of(e: Equation) -> list[Value | None]:
    """The operands, of a product of groups or of what looks up a table with a row for each, that are rows."""
    return e.ins[:2] if e.primitive.product else e.ins[2:3]


def _brought(sorting: Sorting, grouped: Set[int], away: set[Value]) -> Mapping[int, tuple[Value, ...]]:
    """Of tables also which row each is: whose group it is of is not known on other devices."""
    brought, seen = dict[int, tuple[Value, ...]](), set[Value]()
    for i in sorted(grouped):
        e, new = sorting.of.program.equations[i], list[Value]()
        named = e.ins[1:2] if i in sorting.tables else []
        for v in (*named, *rows_of(e)):
            root = index_root(sorting.of, v) if v in named else sorting.of.counts.inner(v)
            if v is not None and sorting.order(v) is not None and v not in away and root not in seen:
                new.append(v)
                seen |= set() if root is None else {root}
        brought[i] = tuple(dict.fromkeys(new))
    return brought
