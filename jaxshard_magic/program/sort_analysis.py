"""Find sorted rows: values with rows as a sort left them, and the equations that sort rows and put them back.

In a mixture of experts, tokens are sorted by expert, multiplied group by group and put back. Intermediate values depend
on the order row by row alone, so any other batch, sorted by itself, gives the same rows. A value that combines rows of
different orders gets the state `UnknownOrder`, and no claim is made about it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from .histograms import Histograms
from .ir import Equation, Program, Value
from .primitives import bind, is_literal
from .primitives.primitive import Kind
from .primitives.sharding_rules import axis_dims, reduced_dims
from .solver import Domain, solve
from .sort_states import (
    UNKNOWN_ORDER,
    UNREACHED,
    ConstantValue,
    IntegerRows,
    IntegerTable,
    RowReordering,
    SortedAlong,
    SortState,
    UnknownOrder,
    after_inverse_sort,
    after_sort,
    after_stacking,
    has_order,
    in_trip,
    numpy_operands,
)

_INTEGER_OR_BOOL_KINDS = "iub"  # NumPy dtype kinds: signed, unsigned, bool


class SortAnalysis(Domain[SortState]):
    """Analysis of all sorts of a program.

    Attributes:
        states: State of every value that has one.
        lookups: Gathers and scatters that move rows into or out of an order, by equation index.
        sorts: Order made by each `sort`, by equation index; equal for all sorts by the same keys.
        inverse_sorts: Indices of sorts that restore program order.
        grouped_products: Indices of ragged products with rows sorted by group.
        lost_at: Equation index at which an order was first mixed with others, shown (a callback) or returned, by order.
        facts: State of every value, by value number.
    """

    bottom: SortState = UNREACHED

    def __init__(self, program: Program):
        self.program = program
        self.states: dict[Value, SortState] = {}
        self.lookups: dict[int, RowReordering] = {}
        self.sorts: dict[int, int] = {}
        self.inverse_sorts: set[int] = set()
        self.grouped_products: set[int] = set()
        self.lost_at: dict[int, int] = {}
        self._constant_along: dict[tuple[Value, int], bool] = {}
        self._folded: dict[tuple, IntegerTable | ConstantValue] = {}
        self.facts: Sequence[SortState] = [None] * len(program.avals)
        if any(_is_vector_sort(e) for e in program.equations):
            solve(program, self, [None] * len(program.inputs))
            self._collect_results()

    @cached_property
    def histograms(self) -> Histograms:
        """Histograms of the program's integers."""
        return Histograms(self.program)

    def involves_order(self, e: Equation) -> bool:
        """Return whether an operand or a result of `e` depends on a sorted order."""
        return any(has_order(self.states.get(v)) for v in (*e.operands, *e.results) if v is not None)

    def order_of(self, v: Value) -> int | None:
        """Return the order of a value's rows; None for rows without, or with an order per trip of a loop."""
        state = self.states.get(v)
        return state.order if isinstance(state, SortedAlong) and state.loop is None else None

    def is_sorted_by_group(self, order: int, sizes: Value | None) -> bool:
        """Return whether the rows of an order were sorted by group.

        Args:
            order: Index of the `sort` equation.
            sizes: Number of rows per group; None gives False.
        """
        keys = self.program.equations[order].operands[0]
        return sizes is not None and self.histograms.are_equal(keys, self.histograms.counted_keys(sizes))

    # Lattice, and bodies.

    def join(self, first: SortState, second: SortState) -> SortState:
        """Return the state of a value equal to either operand: unknown if either depends on an order."""
        if second in (first, UNREACHED):
            return first
        if first == UNREACHED:
            return second
        self._constant_along.clear()  # a value that was constant so far may no longer be
        return UNKNOWN_ORDER if has_order(first) or has_order(second) else None

    def constant(self, number: Any) -> SortState:
        """Return the state of a literal: known for a Python or NumPy scalar."""
        return None if isinstance(number, jax.Array) or np.ndim(number) else ConstantValue(number)

    def enter(self, eqn: Equation, operand: SortState, lead: int) -> SortState:
        """Return the state inside a body. No order enters branches, or loops with unknown trips."""
        if eqn.is_cond or eqn.is_while or (lead and self._outer_loop_steps_over(eqn, operand)):
            return UNKNOWN_ORDER if has_order(operand) else operand
        return in_trip(operand) if lead else operand

    def leave(self, eqn: Equation, result: SortState, lead: int) -> SortState:
        """Return the state outside of a body.

        A scan stacks an order per trip. Branches and repeated trips may each have another order, hence an unknown one.
        """
        if lead:
            return after_stacking(result, eqn.index)
        may_differ = eqn.is_cond or eqn.is_while or (eqn.is_scan and self._is_sorted_in_body(result, eqn))
        return UNKNOWN_ORDER if has_order(result) and may_differ else result

    def control(self, eqn: Equation, result: SortState, decider: SortState) -> SortState:
        """Return the state of a result, unknown if a sorted value selects the branch or the number of trips."""
        return UNKNOWN_ORDER if has_order(decider) else result

    def _outer_loop_steps_over(self, eqn: Equation, operand: SortState) -> bool:
        """Return whether a loop around `eqn` steps over a value stacked by the same loop as the operand.

        The orders of two trips would then meet in the body of `eqn`.
        """
        loop = operand.loop if isinstance(operand, (SortedAlong, IntegerRows)) else None
        outer = None if loop is None else eqn.parent
        while outer is not None:
            stepped_over = (
                self.facts[v] for body in outer.bodies for v, _, lead in body.inputs if lead and v is not None
            )
            if any(isinstance(state, (SortedAlong, IntegerRows)) and state.loop == loop for state in stepped_over):
                return True
            outer = outer.parent
        return False

    def _is_sorted_in_body(self, state: SortState, eqn: Equation) -> bool:
        """Return whether the order of a state is made in a body of `eqn`, again in each trip."""
        order = state.order if isinstance(state, (SortedAlong, IntegerRows)) else None
        outer = None if order is None else self.program.equations[order].parent
        while outer is not None and outer is not eqn:
            outer = outer.parent
        return outer is not None

    def _collect_results(self) -> None:
        """Collect the attributes from the fixpoint."""
        self.states = {v: s for v, s in enumerate(self.facts) if s not in (None, UNREACHED)}
        # Discard what `transfer` recorded before the fixpoint was reached: it need not hold there.
        self.lookups, self.inverse_sorts, self.grouped_products = {}, set(), set()
        for e in self.program.equations:
            if not e.bodies:
                self.transfer(e, [self._operand_state(e, k) for k in range(len(e.operands))])
        first_states = {i: self.states.get(self.program.equations[i].results[0]) for i in self.sorts}
        self.sorts = {i: order for i, order in self.sorts.items() if not isinstance(first_states[i], UnknownOrder)}
        # Equations with bodies come last, so that the innermost equation is recorded.
        for e in sorted(self.program.equations, key=lambda e: bool(e.bodies)):
            results = [*e.results, *(v for body in e.bodies for v in (*body.sub_jaxpr.inputs, *body.sub_jaxpr.outputs))]
            # An equation without results is a callback or print, which shows rows in their sorted order.
            if not results or any(isinstance(self.states.get(v), UnknownOrder) for v in results if v is not None):
                self._mark_lost([*e.operands, *results], e)
        for v in self.program.outputs:  # the caller sees the rows in their sorted order
            if v in self.program.producer:
                self._mark_lost([v], self.program.producer[v])

    def _mark_lost(self, values: Iterable[Value | None], eqn: Equation) -> None:
        """Record that the orders of `values` are lost at an equation, for orders not lost before."""
        for state in (self.states.get(v) for v in values if v is not None):
            if isinstance(state, (SortedAlong, IntegerRows)) and state.order is not None:
                self.lost_at.setdefault(state.order, eqn.index)

    def _operand_state(self, e: Equation, k: int) -> SortState:
        """Return the state of operand number `k`."""
        v, var = e.operands[k], e.jaxpr_eqn.invars[k]
        return self.constant(var.val) if is_literal(var) else self.states.get(v) if v is not None else None

    # Transfer through one equation.

    def transfer(self, eqn: Equation, operands: Sequence[SortState]) -> list[SortState]:
        """Return the states of the results, and record what the equation does to orders."""
        e, states = eqn, list(operands)
        if e.name == "iota":
            dim = e.params["dimension"]
            return [IntegerRows(dim, self._iota_table(e.params["shape"][dim], e.params["dtype"]))]
        if e.name == "sort":
            return self._sort(e, states)
        if e.primitive.kind is Kind.PASS_THROUGH:
            return states
        if all(s is None for s in states):
            return [None] * len(e.results)
        state = self._transfer_rule(e)(e, states)
        return [state] * len(e.results)

    def _transfer_rule(self, e: Equation) -> Callable[[Equation, list[SortState]], SortState]:
        """Return the transfer function of an equation."""
        kind = e.primitive.kind
        if kind is Kind.ELEMENTWISE:
            return self._elementwise
        if kind is Kind.SHAPE:
            return self._reshape
        if e.primitive.is_gather:
            return self._gather
        if e.primitive.is_scatter:
            return self._scatter
        if e.primitive.is_product:
            return self._product
        if kind is Kind.REDUCTION:
            return self._reduction
        return self._other_dimensions if kind in (Kind.SLICE, Kind.CUMULATIVE, Kind.SORT) else _no_rule

    def _sort(self, e: Equation, states: list[SortState]) -> list[SortState]:
        """Return the states of the results of a `sort`."""
        if not _is_vector_sort(e):
            return [self._other_dimensions(e, [s]) for s in states]
        key = states[0]
        # Sorting the row numbers of an order restores program order.
        if isinstance(key, IntegerRows) and key.order is not None:
            if key.loop is not None or key.table.repeats(len(key.table)) != 1:
                return [UNKNOWN_ORDER] * len(states)
            self.inverse_sorts.add(e.index)
            return [IntegerRows(0, key.table), *(after_inverse_sort(s, key) for s in states[1:])]
        if e.params["num_keys"] != 1 or any(map(has_order, states)):
            return [UNKNOWN_ORDER] * len(states)
        equal_sorts = (
            o
            for o in self.sorts.values()
            if self.histograms.are_equal(e.operands[0], self.program.equations[o].operands[0])
        )
        self.sorts[e.index] = next(equal_sorts, e.index)
        return [after_sort(s, self.sorts[e.index]) for s in states]

    def _elementwise(self, e: Equation, states: list[SortState]) -> SortState:
        """Return the state of an elementwise result: sorted rows combine with rows of the same order or constants."""
        sorted_states = [s for s in states if isinstance(s, SortedAlong)]
        if any(isinstance(s, UnknownOrder) for s in states):
            return UNKNOWN_ORDER
        if not sorted_states:
            return self._fold_integers(e, states)
        first = sorted_states[0]
        if any(s != first for s in sorted_states) or any(
            isinstance(s, IntegerRows) and s.order is not None for s in states
        ):
            return UNKNOWN_ORDER
        unsorted = [k for k, s in enumerate(states) if not isinstance(s, SortedAlong)]
        return first if all(self._is_operand_constant_along(e, k, first.dim) for k in unsorted) else UNKNOWN_ORDER

    def _fold_integers(self, e: Equation, states: list[SortState]) -> SortState:
        """Evaluate an elementwise function of integers; anything unknown among the operands gives no integers."""
        numbers = [s for s in states if isinstance(s, IntegerRows)]
        unknown = UNKNOWN_ORDER if any(map(has_order, states)) else None
        kinds = {
            getattr(getattr(v.aval, "dtype", None), "kind", "V") for v in (*e.jaxpr_eqn.invars, *e.jaxpr_eqn.outvars)
        }
        if not kinds <= {*_INTEGER_OR_BOOL_KINDS} or not all(
            isinstance(s, (IntegerRows, ConstantValue)) for s in states
        ):
            return unknown
        if len({s.index_key() for s in numbers}) > 1:
            return unknown
        operand_keys = [
            s.table if isinstance(s, IntegerRows) else np.asarray(s.value).item()
            for s in states
            if isinstance(s, (IntegerRows, ConstantValue))
        ]
        key = e.name, str(e.params), *map(str, (v.aval.dtype for v in e.jaxpr_eqn.invars)), *operand_keys  # pyright: ignore[reportAttributeAccessIssue]
        # Cached because a table has as many rows as a batch; equal operands of equal functions share the result.
        if key not in self._folded:
            with jax.ensure_compile_time_eval():
                result = np.asarray(bind(e.jaxpr_eqn, numpy_operands(e, states))[0])
            is_constant = result.size and (result == result.flat[0]).all()  # in any order of rows
            self._folded[key] = ConstantValue(result.flat[0]) if is_constant else IntegerTable(result)
        folded = self._folded[key]
        return folded if isinstance(folded, ConstantValue) else replace(numbers[0], table=folded)

    def _iota_table(self, size: int, dtype: Any) -> IntegerTable:
        """Return the table 0, 1, ... `size` - 1."""
        table = self._folded.setdefault(("iota", size, dtype), IntegerTable(np.arange(size).astype(dtype)))
        assert isinstance(table, IntegerTable)
        return table

    def _reshape(self, e: Equation, states: list[SortState]) -> SortState:
        """Return the state after a reshape, transpose or broadcast."""
        state = states[0]
        if isinstance(state, ConstantValue):
            return state
        if not isinstance(state, (SortedAlong, IntegerRows)):
            return UNKNOWN_ORDER if has_order(state) else None
        d = None if e.factors is None else e.factors.unsplit_dim(state.dim)
        if d is None or state.loop is not None:
            return UNKNOWN_ORDER if has_order(state) else None
        return replace(state, dim=d)

    def _other_dimensions(self, e: Equation, states: list[SortState]) -> SortState:
        """Return the state after an equation that works along other dimensions than the sorted one."""
        first = next((s for s in states if has_order(s)), None)
        if first is None:
            return None
        if not isinstance(first, SortedAlong) or first.loop is not None:
            return UNKNOWN_ORDER
        d, out = first.dim, e.shapes[len(e.operands)]
        works_along = e.primitive.has_axis and d in axis_dims(e.params, len(out))
        others = [k for k, s in enumerate(states) if s != first]
        same_rank = all(len(shape) in (0, len(out)) for shape in e.shapes[: len(e.operands)])
        keeps_rows = d < len(out) and out[d] == e.shapes[states.index(first)][d] and same_rank and not works_along
        return first if keeps_rows and all(self._is_operand_constant_along(e, k, d) for k in others) else UNKNOWN_ORDER

    def _reduction(self, e: Equation, states: list[SortState]) -> SortState:
        """Return the state after a reduction: over sorted rows, a sum or a maximum is the same in any order."""
        first = next((s for s in states if has_order(s)), None)
        if first is None:
            return None
        if any(s != first for s in states) or not isinstance(first, SortedAlong) or first.loop is not None:
            return UNKNOWN_ORDER
        dims = reduced_dims(e.params)
        if first.dim in dims:
            return None if e.primitive.is_combinable else UNKNOWN_ORDER
        return replace(first, dim=first.dim - sum(d < first.dim for d in dims))

    def _product(self, e: Equation, states: list[SortState]) -> SortState:
        """Return the state of a product."""
        contraction, (left, right) = e.contraction, states[:2]
        assert contraction is not None
        if not any(map(has_order, states)):
            return None
        left_rows, right_rows = (s if isinstance(s, SortedAlong) else None for s in (left, right))
        orders = {(s.order, s.loop) for s in states if isinstance(s, SortedAlong)}
        unknown = any(has_order(s) for s in states[2:]) or any(
            has_order(s) != isinstance(s, SortedAlong) for s in states
        )
        if unknown or len(orders) != 1:
            return UNKNOWN_ORDER
        ((order, loop),) = orders
        if loop is not None:
            return UNKNOWN_ORDER
        if contraction.ragged_dim is not None:
            if (
                left_rows is None
                or left_rows.dim != contraction.ragged_dim
                or not self.is_sorted_by_group(order, e.operands[2])
            ):
                return UNKNOWN_ORDER
            self.grouped_products.add(e.index)
        if left_rows is not None and right_rows is not None:
            pairs = [out for a, b, out in contraction.batch if (a, b) == (left_rows.dim, right_rows.dim)]
            if pairs:
                return SortedAlong(order, pairs[0])
            return None if (left_rows.dim, right_rows.dim) in contraction.contracted else UNKNOWN_ORDER
        sorted_rows, free = (
            (left_rows, contraction.left_free) if left_rows is not None else (right_rows, contraction.right_free)
        )
        out = next((o for d, o in free if sorted_rows is not None and d == sorted_rows.dim), None)
        return UNKNOWN_ORDER if out is None else SortedAlong(order, out)

    def _gather(self, e: Equation, states: list[SortState]) -> SortState:
        """Return the state after a gather."""
        dn, (operand, index) = e.params["dimension_numbers"], states[:2]
        if not any(map(has_order, states)):
            return None
        index_dims = [d for d in range(len(e.shapes[len(e.operands)])) if d not in dn.offset_dims]
        if isinstance(index, SortedAlong) and not has_order(operand) and index.loop is None:  # table[sorted rows]
            return SortedAlong(index.order, index_dims[index.dim]) if index.dim < len(index_dims) else UNKNOWN_ORDER
        if not has_order(index) and isinstance(operand, SortedAlong) and operand.loop is None:
            return self._gather_slices(e, operand)
        if not isinstance(index, IntegerRows) or index.order is None or index.loop is not None:
            return UNKNOWN_ORDER
        if tuple(dn.start_index_map) != tuple(dn.collapsed_slice_dims) or len(dn.start_index_map) != 1:
            return UNKNOWN_ORDER
        (indexed_dim,) = dn.start_index_map
        repeats = index.table.repeats(e.shapes[0][indexed_dim])
        if repeats is None or index.dim >= len(index_dims):
            return UNKNOWN_ORDER
        if index.inverse:
            if repeats != 1 or operand != SortedAlong(index.order, indexed_dim):
                return UNKNOWN_ORDER
            self.lookups[e.index] = RowReordering(index.order, False, 1)
            return None
        if (
            isinstance(operand, IntegerRows)
            and operand.index_key() == (indexed_dim, index.order, True, None)
            and repeats == 1
        ):
            return IntegerRows(index_dims[index.dim], operand.table)  # inverse[order]: the permutations cancel
        if isinstance(operand, (SortedAlong, IntegerRows, UnknownOrder)):
            return UNKNOWN_ORDER
        self.lookups[e.index] = RowReordering(index.order, True, repeats)
        return SortedAlong(index.order, index_dims[index.dim])

    def _gather_slices(self, e: Equation, operand: SortedAlong) -> SortState:
        """Return the state after a gather of slices that each contain all sorted rows."""
        dn, d = e.params["dimension_numbers"], operand.dim
        dropped = (*dn.collapsed_slice_dims, *dn.operand_batching_dims)
        if d in dropped or e.params["slice_sizes"][d] != e.shapes[0][d]:
            return UNKNOWN_ORDER
        remaining = [k for k in range(len(e.shapes[0])) if k not in dropped]
        return replace(operand, dim=dn.offset_dims[remaining.index(d)])

    def _scatter(self, e: Equation, states: list[SortState]) -> SortState:
        """Return the state after a scatter."""
        dn, (operand, index, updates) = e.params["dimension_numbers"], states[:3]
        if not any(map(has_order, states)):
            return None
        index_dims = [d for d in range(len(e.shapes[2])) if d not in dn.update_window_dims]
        if isinstance(index, SortedAlong):  # a segment sum, the same in any order of rows
            same_rows = index.dim < len(index_dims) and updates == SortedAlong(index.order, index_dims[index.dim])
            return (
                None
                if e.primitive.is_additive and same_rows and not has_order(operand) and index.loop is None
                else UNKNOWN_ORDER
            )
        if not isinstance(index, IntegerRows) or index.order is None or index.loop is not None:
            return UNKNOWN_ORDER
        rows = tuple(dn.scatter_dims_to_operand_dims)
        if rows != tuple(dn.inserted_window_dims) or len(rows) != 1 or index.dim >= len(index_dims):
            return UNKNOWN_ORDER
        repeats, index_dim = index.table.repeats(e.shapes[0][rows[0]]), index_dims[index.dim]
        if (
            repeats is None
            or has_order(operand)
            or not (e.primitive.is_additive or (e.name == "scatter" and repeats == 1))
        ):
            return UNKNOWN_ORDER
        if index.inverse:
            if repeats != 1 or has_order(updates) or not self._is_operand_constant_along(e, 0, rows[0]):
                return UNKNOWN_ORDER
            self.lookups[e.index] = RowReordering(index.order, True, 1)
            return SortedAlong(index.order, rows[0])
        if isinstance(updates, IntegerRows) and updates.order is None and e.name == "scatter":  # inverse
            same_rows = updates.dim == index_dim and updates.loop is None
            return IntegerRows(rows[0], updates.table, index.order, inverse=True) if same_rows else UNKNOWN_ORDER
        if updates != SortedAlong(index.order, index_dim):
            return UNKNOWN_ORDER
        self.lookups[e.index] = RowReordering(index.order, False, repeats)
        return None

    # Values constant along a dimension.

    def _is_operand_constant_along(self, e: Equation, k: int, dim: int) -> bool:
        """Return whether operand `k` is constant along `dim`; literals are."""
        return not e.shapes[k] or (e.operands[k] is not None and self.is_constant_along(e.operands[k], dim))  # pyright: ignore[reportArgumentType]

    def is_constant_along(self, v: Value, dim: int) -> bool:
        """Return whether a value is constant along a dimension, as a broadcast is."""
        if (v, dim) not in self._constant_along:
            # Assumed while the producer is examined, which ends the recursion.
            self._constant_along[v, dim] = False
            self._constant_along[v, dim] = self._compute_constant_along(v, dim)
        return self._constant_along[v, dim]

    def _compute_constant_along(self, v: Value, dim: int) -> bool:
        """Compute `is_constant_along` from the equation that makes the value."""
        state, e = self.facts[v], self.program.producer.get(v)
        if isinstance(state, ConstantValue) or (isinstance(state, IntegerRows) and state.dim != dim):
            return True
        if e is None:
            outer = self.program.outer_value(v)
            return outer is not None and self.is_constant_along(outer, dim)
        if (factors := e.factors) is not None and e.operands[0] is not None:
            d = factors.inverse.unsplit_dim(dim)
            return dim in factors.repeated_dims or (d is not None and self.is_constant_along(e.operands[0], d))
        return e.primitive.is_elementwise and all(
            self._is_operand_constant_along(e, k, dim) for k in range(len(e.operands))
        )


def _is_vector_sort(e: Equation) -> bool:
    """Return whether an equation sorts vectors."""
    return e.name == "sort" and all(len(shape) == 1 for shape in e.shapes)


def _no_rule(_e: Equation, states: list[SortState]) -> SortState:
    """Return the state after an equation without a rule."""
    return UNKNOWN_ORDER if any(map(has_order, states)) else None
