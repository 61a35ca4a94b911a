"""Rows sorted by expert where each shard of the batch sorts its own.

Results made of sorted rows are the same in any order (proved by the analysis of sorts in `program`). A shard can
therefore sort, look up and put back its own rows without the rows of other shards. Groups then contain only the shard's
rows, and group sizes are partial sums, one array for each shard.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ..program.ir import Equation, Value
from ..program.sort_analysis import SortAnalysis
from ..program.sort_states import ConstantValue, IntegerRows, SortedAlong

# `layout.py` imports this module.
if TYPE_CHECKING:
    from .layout import Layout

Dims = tuple[int | None, ...]


@dataclass(frozen=True, eq=False)
class ShardLocalSorts:
    """Sorts of a step that each shard of the batch can do by itself.

    Attributes:
        analysis: Analysis of all sorts of the step.
        local_orders: Orders made by each shard alone, by the index of the sorting equation.
        group_sizes: Sizes of the groups, as values in any shape or dtype, inside and outside of loops.
        counters: Equations counting the group sizes, by index, with the row dimension of each operand.
        bias_lookups: Lookups of a parameter's row for the group of each sorted row, and their gradients, by equation
            index, with the parameter's dimension of groups.
    """

    analysis: SortAnalysis
    local_orders: frozenset[int] = frozenset()
    group_sizes: frozenset[Value] = frozenset()
    counters: Mapping[int, Dims] = field(default_factory=dict)
    bias_lookups: Mapping[int, int] = field(default_factory=dict)

    def sort_state(self, v: Value | None) -> SortedAlong | None:
        """Return the sort state of a value's rows; None where the rows are unsorted or not sorted by each shard."""
        state = self.analysis.states.get(v) if v is not None else None
        return state if isinstance(state, SortedAlong) and state.order in self.local_orders else None

    def equations(self) -> frozenset[int]:
        """Return the indices of equations that sort, look up what was sorted, or multiply sorted rows group by
        group."""
        orders = self.analysis
        found = {i for i, order in orders.sorts.items() if order in self.local_orders}
        found |= {
            i
            for i in orders.inverse_sorts
            if self.row_state(orders.program.equations[i].operands[0]).order in self.local_orders
        }
        found |= {i for i, lookup in orders.lookups.items() if lookup.order in self.local_orders}
        return frozenset(found | {e.index for e in self.group_products()})

    @cached_property
    def row_number_equations(self) -> frozenset[int]:
        """Indices of equations that turn row numbers into other row numbers, or into one constant for all rows."""
        found, states_of = set[int](), self.analysis.states
        for e in self.analysis.program.equations if self.local_orders else ():
            states = [states_of.get(v) for v in e.operands if v is not None]
            if e.results and not e.bodies and any(isinstance(s, IntegerRows) for s in states):
                made = states_of.get(e.results[0])
                has_local_order = any(isinstance(s, IntegerRows) and s.order in self.local_orders for s in states)
                if isinstance(made, ConstantValue) or (isinstance(made, IntegerRows) and has_local_order):
                    found.add(e.index)
        return frozenset(found)

    def group_products(self) -> Iterable[Equation]:
        """Return the group-wise products of sorted rows."""
        equations = (self.analysis.program.equations[i] for i in sorted(self.analysis.grouped_products))
        return (e for e in equations if self.sort_state(e.operands[0]) is not None)

    def group_weights(self) -> Iterable[tuple[Value, int]]:
        """Yield the weights with one matrix or vector for each group, with their dimension of groups.

        These are the matrices multiplied with sorted rows, and the vectors looked up for them.
        """
        for e in self.group_products():
            v = e.operands[1]
            if v is not None and self.sort_state(v) is None:
                yield v, group_dim(e, 1)
        for i, d in self.bias_lookups.items():
            e = self.analysis.program.equations[i]
            if e.primitive.is_gather and e.operands[0] is not None:
                yield e.operands[0], d

    def product_order(self, e: Equation) -> int | None:
        """Return the order of the rows of a group-wise product; None for unsorted rows."""
        return None if e.operands[0] is None else self.analysis.order_of(e.operands[0])

    def row_state(self, v: Value | None) -> SortedAlong | IntegerRows:
        """Return the state of the rows of a sorted or numbered operand."""
        state = self.analysis.states[v] if v is not None else None
        assert isinstance(state, (SortedAlong, IntegerRows))
        return state


def group_dim(e: Equation, position: int) -> int:
    """Return the dimension that counts groups.

    Args:
        e: A group-wise product.
        position: Position of the operand; -1 for the result.
    """
    assert e.contraction is not None
    return next(d for q, d in e.contraction.group_dims if q == position)


def find_shard_local_sorts(layout: "Layout") -> ShardLocalSorts:
    """Return the sorts of a step that each shard of the batch can do by itself; none without batch shards."""
    orders = layout.flow.sort_analysis
    local_orders, sizes, counted = set[int](), set[Value](), dict[int, Dims]()
    if layout.device_count(layout.batch_axes) > 1:
        rows = _row_dims_by_order(orders)
        for order in sorted({*orders.sorts.values()} - orders.lost_at.keys()):
            found = _local_group_sizes(layout, orders, order)
            # All arrays of an order must be split at the same rows.
            if found is not None and all(_is_divided(layout, v, d) for v, d in rows[order]):
                local_orders.add(order)
                sizes |= found[0]
                counted |= found[1]
    return ShardLocalSorts(orders, frozenset(local_orders), frozenset(sizes), counted)


def _row_dims_by_order(orders: SortAnalysis) -> dict[int, list[tuple[Value, int]]]:
    """Return by order the values, with their row dimension, of which each shard needs its part: sorted, looked up or
    put back."""
    program, found = orders.program, defaultdict[int, list[tuple[Value | None, int]]](list)
    for v, state in orders.states.items():
        if isinstance(state, (SortedAlong, IntegerRows)) and state.order is not None:
            found[state.order].append((v, state.dim))
    for i, order in orders.sorts.items():
        found[order] += [(v, 0) for v in program.equations[i].operands]
    for i, lookup in orders.lookups.items():
        e = program.equations[i]
        dn = e.params["dimension_numbers"]
        (rows,) = dn.scatter_dims_to_operand_dims if e.primitive.is_scatter else dn.start_index_map
        found[lookup.order] += [(v, rows) for v in (e.operands[0], *e.results[: e.primitive.is_scatter])]
    return {order: [(v, d) for v, d in rows if v is not None] for order, rows in found.items()}


def _is_divided(layout: "Layout", v: Value, d: int) -> bool:
    """Return whether each shard of the batch has a part of dimension `d`."""
    if layout.is_activation(v):
        return layout.activation_spec(v)[d] == layout.batch_axes
    return layout.program.shapes[v][d] % layout.device_count(layout.batch_axes) == 0


def _local_group_sizes(layout: "Layout", orders: SortAnalysis, order: int) -> tuple[set[Value], dict[int, Dims]] | None:
    """Return the sizes of an order's groups and the equations that count them, if shards can count their own; else
    None."""
    program, counts = layout.program, orders.histograms
    products = (program.equations[i] for i in orders.grouped_products)
    states = ((e, orders.states.get(e.operands[0])) for e in products if e.operands[0] is not None)
    roots = {
        counts.root(e.operands[2]) for e, state in states if isinstance(state, SortedAlong) and state.order == order
    }
    sizes, counted = set[Value](), dict[int, Dims]()
    for root in roots:
        dims = None if root is None else _counted_dims(layout, program.producer[root])
        if root is None or dims is None:
            return None
        counted[program.producer[root].index] = dims
        same = (v for v, shape in enumerate(program.shapes) if shape == program.shapes[root])
        sizes |= {v for v in same if counts.root(v) == root}
    return (sizes, counted) if sizes and _can_stay_partial(layout, sizes) else None


def _counted_dims(layout: "Layout", e: Equation) -> Dims | None:
    """Return the row dimension of each operand of `e`, an equation that counts keys; None where shards cannot count."""
    if e.primitive.is_scatter:
        # A scatter adds to zeros, which every shard has; indices and updates have a row for each key.
        return None, 0, 0
    v = e.operands[0]
    rows = [d for d in e.params["axes"] if v is not None and layout.is_activation(v) and _is_divided(layout, v, d)]
    return (rows[0],) if len(rows) == 1 else None


def _can_stay_partial(layout: "Layout", group_sizes: set[Value]) -> bool:
    """Return whether group sizes can stay partial sums.

    All readers must be in this program, both sides of each body boundary must agree, and no loop may carry them. Sizes
    stacked by a loop may only be scanned by other loops.
    """
    program = layout.program
    bodies = [body for e in program.equations for body in e.bodies]
    stacked = {b for door in bodies for a, b, lead in door.outputs if lead and a in group_sizes}
    stepped = {a for door in bodies for a, _, lead in door.inputs if lead}
    scans_agree = all((a in stacked) == (b in group_sizes) for door in bodies for a, b, lead in door.inputs if lead)
    boundaries = [(a, b) for door in bodies for a, b, lead in (*door.inputs, *door.outputs) if not lead]
    boundaries_agree = all((a in group_sizes) == (b in group_sizes) for a, b in boundaries)
    carried = {v for door in bodies for pair in door.carries for v in pair}
    read = {v for e in program.equations if not e.bodies for v in e.operands} | {v for pair in boundaries for v in pair}
    # Sizes stacked by one loop must not be stacked again by a loop around it.
    inner = {a for door in bodies for a, _, lead in door.outputs if lead}
    return (
        scans_agree
        and boundaries_agree
        and carried.isdisjoint(group_sizes | stacked)
        and stacked <= stepped
        and stacked.isdisjoint({*read, *inner, *program.outputs})
        and layout.external_reads.isdisjoint(group_sizes | stacked)
    )
