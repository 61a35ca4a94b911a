"""Rows that are sorted by expert, each shard of the batch its own: which of a step's equations that takes.

What is made of sorted rows is the same in any order (`program.orders`), so that a shard may sort its own rows, look
them up and put them back without those of others. Groups have as many rows there as the shard has of them, so that
their sizes are kept shard by shard.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ..program.ir import Equation, Value
from ..program.order_states import Known, Numbers, Sorted
from ..program.orders import Orders

if TYPE_CHECKING:
    from .layout import Layout

Dims = tuple[int | None, ...]


@dataclass(frozen=True, eq=False)
class Sorting:
    """The orders of a step that each shard of the batch may have by itself.

    `of`: all that the step sorts; `orders`: those, by the equation that sorts. `sizes`: the values that are sizes of
    their groups, in any form, inside of loops and out of them. `counted`: the equations that count these, with the
    dimension of each operand that rows run along. `tables`: the equations that look up a parameter's row for the group
    of each sorted row, or add up its gradient, with its dimension that counts groups.
    """

    of: Orders
    orders: frozenset[int] = frozenset()
    sizes: frozenset[Value] = frozenset()
    counted: Mapping[int, Dims] = field(default_factory=dict)
    tables: Mapping[int, int] = field(default_factory=dict)

    def order(self, v: Value | None) -> Sorted | None:
        """How the rows of a value are sorted; None where they are not, or not by each shard."""
        state = self.of.of.get(v) if v is not None else None
        return state if isinstance(state, Sorted) and state.order in self.orders else None

    def equations(self) -> frozenset[int]:
        """Those that sort, look up what was sorted, or multiply it group by group."""
        orders = self.of
        found = {i for i, order in orders.sorts.items() if order in self.orders}
        found |= {
            i for i in orders.backs if self.row_state(orders.program.equations[i].ins[0]).order in self.orders
        }
        found |= {i for i, lookup in orders.lookups.items() if lookup.order in self.orders}
        return frozenset(found | {e.index for e in self.products()})

    @cached_property
    def numbers(self) -> frozenset[int]:
        """The equations that make numbers of rows or places of others, or of such the same number for all of them."""
        found, of = set[int](), self.of.of
        for e in self.of.program.equations if self.orders else ():
            states = [of.get(v) for v in e.ins if v is not None]
            if e.outs and not e.doors and any(isinstance(s, Numbers) for s in states):
                made = of.get(e.outs[0])
                sorts = any(isinstance(s, Numbers) and s.order in self.orders for s in states)
                if isinstance(made, Known) or (isinstance(made, Numbers) and sorts):
                    found.add(e.index)
        return frozenset(found)

    def products(self) -> Iterable[Equation]:
        """The products of sorted rows, group by group."""
        equations = (self.of.program.equations[i] for i in sorted(self.of.products))
        return (e for e in equations if self.order(e.ins[0]) is not None)

    def weights(self) -> Iterable[tuple[Value, int]]:
        """The matrices that rows are multiplied with, and the vectors that are looked up for them, one for each group,
        with the dimension that counts these."""
        for e in self.products():
            v = e.ins[1]
            if v is not None and self.order(v) is None:
                yield v, group_dim(e, 1)
        for i, d in self.tables.items():
            e = self.of.program.equations[i]
            if e.primitive.gathers and e.ins[0] is not None:
                yield e.ins[0], d

    def order_of(self, e: Equation) -> int | None:
        """The order of the rows of a product of groups."""
        return None if e.ins[0] is None else self.of.sorted_by(e.ins[0])

    def row_state(self, v: Value | None) -> Sorted | Numbers:
        """How the rows of an equation's operand that has to do with an order lie."""
        state = self.of.of[v] if v is not None else None
        assert isinstance(state, (Sorted, Numbers))
        return state


def group_dim(e: Equation, k: int) -> int:
    """The dimension that counts the groups of a product's operand `k`, or, -1, of its result."""
    assert e.contraction is not None
    return next(d for q, d in e.contraction.by_group if q == k)


def find_sorting(layout: "Layout") -> Sorting:
    """What each shard of the batch can sort by itself in a step."""
    orders = layout.flow.orders
    kept, sizes, counted = set[int](), set[Value](), dict[int, Dims]()
    if layout.count(layout.batch_axes) > 1:
        rows = _rows_of_orders(orders)
        for order in sorted({*orders.sorts.values()} - orders.lost.keys()):
            found = _sizes(layout, orders, order)
            if found is not None and all(_divided(layout, v, d) for v, d in rows[order]):
                kept.add(order)
                sizes |= found[0]
                counted |= found[1]
    return Sorting(orders, frozenset(kept), frozenset(sizes), counted)


def _rows_of_orders(orders: Orders) -> dict[int, list[tuple[Value, int]]]:
    """What each shard has to have a part of, by order: all that is sorted, and what is looked up or put back."""
    program, found = orders.program, defaultdict[int, list[tuple[Value | None, int]]](list)
    for v, state in orders.of.items():
        if isinstance(state, (Sorted, Numbers)) and state.order is not None:
            found[state.order].append((v, state.dim))
    for i, order in orders.sorts.items():
        found[order] += [(v, 0) for v in program.equations[i].ins]
    for i, lookup in orders.lookups.items():
        e = program.equations[i]
        dn = e.params["dimension_numbers"]
        (rows,) = dn.scatter_dims_to_operand_dims if e.primitive.scatters else dn.start_index_map
        found[lookup.order] += [(v, rows) for v in (e.ins[0], *e.outs[: e.primitive.scatters])]
    return {order: [(v, d) for v, d in rows if v is not None] for order, rows in found.items()}


def _divided(layout: "Layout", v: Value, d: int) -> bool:
    """Does each shard of the batch have a part of the rows along a dimension?"""
    if layout.batchy(v):
        return layout.active(v)[d] == layout.batch_axes
    return layout.program.shapes[v][d] % layout.count(layout.batch_axes) == 0


def _sizes(layout: "Layout", orders: Orders, order: int) -> tuple[set[Value], dict[int, Dims]] | None:
    """The sizes of an order's groups, and what counts them, where a shard can count its own; None where it can't."""
    program, counts = layout.program, orders.counts
    products = (program.equations[i] for i in orders.products)
    states = ((e, orders.of.get(e.ins[0])) for e in products if e.ins[0] is not None)
    roots = {
        counts.root(e.ins[2]) for e, state in states if isinstance(state, Sorted) and state.order == order
    }
    sizes, counted = set[Value](), dict[int, Dims]()
    for root in roots:
        dims = None if root is None else _counting(layout, program.maker[root])
        if root is None or dims is None:
            return None
        counted[program.maker[root].index] = dims
        same = (v for v, shape in enumerate(program.shapes) if shape == program.shapes[root])
        sizes |= {v for v in same if counts.root(v) == root}
    return (sizes, counted) if sizes and _stays_within(layout, sizes) else None


def _counting(layout: "Layout", e: Equation) -> Dims | None:
    """The dimension of each operand of `e`, which counts keys, that these run along."""
    if e.primitive.scatters:
        return None, 0, 0
    v = e.ins[0]
    rows = [d for d in e.params["axes"] if v is not None and layout.batchy(v) and _divided(layout, v, d)]
    return (rows[0],) if len(rows) == 1 else None


def _stays_within(layout: "Layout", sizes: set[Value]) -> bool:
    """Are sizes, which lie in parts, read by this program alone, the same on both sides of each body's ends, and those
    that a loop stacks read by other loops alone, trip by trip?"""
    program = layout.program
    doors = [door for e in program.equations for door in e.doors]
    stacked = {b for door in doors for a, b, lead in door.out if lead and a in sizes}
    stepped = {a for door in doors for a, _, lead in door.into if lead}
    steps = all((a in stacked) == (b in sizes) for door in doors for a, b, lead in door.into if lead)
    ends = [(a, b) for door in doors for a, b, lead in (*door.into, *door.out) if not lead]
    alike = all((a in sizes) == (b in sizes) for a, b in ends)
    carried = {v for door in doors for pair in door.loop for v in pair}
    read = {v for e in program.equations if not e.doors for v in e.ins} | {v for pair in ends for v in pair}
    inner = {a for door in doors for a, _, lead in door.out if lead}  # what is stacked again
    return (
        steps
        and alike
        and carried.isdisjoint(sizes | stacked)
        and stacked <= stepped
        and stacked.isdisjoint({*read, *inner, *program.outputs})
        and layout.read_elsewhere.isdisjoint(sizes | stacked)
    )
