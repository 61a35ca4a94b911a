"""Rows in another order: which values have their rows as a sort put them, and what leads there and back.

Tokens are sorted by their expert, multiplied group by group and put back. What is made on the way depends on the order
row by row alone, so that any other batch sorted by itself gives the same rows. `Orders` follows that through a program:
a value whose rows and those of another order meet is `Mixed`, and nothing is said of it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from .counts import Counts
from .ir import Equation, Program, Value
from .order_states import (
    MIXED,
    UNREACHED,
    Known,
    Lookup,
    Mixed,
    Numbers,
    Sorted,
    State,
    Table,
    inside,
    operands,
    ordered,
    sorted_back,
    sorted_in,
    stacked,
)
from .primitives import bind, is_literal
from .primitives.primitive import Kind
from .primitives.sharding_rules import along, reduced
from .solver import Domain, solve

_INTEGERS_OR_TRUTH = "iub"  # kinds of numpy's types of whole numbers and truth values


class Orders(Domain[State]):
    """What `program` sorts, and what becomes of the rows.

    `of[v]`: the state of a value, of those that have one. `lookups`: what brings rows into an order and out of it, by
    the equation's index; `sorts`: what sorts by keys, and the order that it makes, one for all that sort the same;
    `backs`: what sorts an order back. `products`: those of groups whose rows were sorted by group. `lost`: orders whose
    rows were mixed with others, shown or returned, by what first.
    """

    bottom: State = UNREACHED

    def __init__(self, program: Program):
        self.program = program
        self.of: dict[Value, State] = {}
        self.lookups: dict[int, Lookup] = {}
        self.sorts: dict[int, int] = {}
        self.backs: set[int] = set()
        self.products: set[int] = set()
        self.lost: dict[int, int] = {}
        self._even: dict[tuple[Value, int], bool] = {}
        self._made: dict[tuple, Table | Known] = {}
        self.facts: Sequence[State] = [None] * len(program.avals)
        if any(_sorts_rows(e) for e in program.equations):
            solve(program, self, [None] * len(program.inputs))
            self._read_off()

    @cached_property
    def counts(self) -> Counts:
        return Counts(self.program)

    def takes_part(self, e: Equation) -> bool:
        """Has an operand or a result to do with an order?"""
        return any(ordered(self.of.get(v)) for v in (*e.ins, *e.outs) if v is not None)

    def sorted_by(self, v: Value) -> int | None:
        """The order of the rows of a value; None where these are in none, or in one for each trip of a loop."""
        state = self.of.get(v)
        return state.order if isinstance(state, Sorted) and state.loop is None else None

    def by_group(self, order: int, sizes: Value | None) -> bool:
        """Were the rows of an order sorted by group, `sizes` being how many rows each group has?"""
        keys = self.program.equations[order].ins[0]
        return sizes is not None and self.counts.same(keys, self.counts.keys(sizes))

    # Through the program.

    def join(self, first: State, second: State) -> State:
        """Return the state of what is one or the other: mixed, if either has to do with an order."""
        if second in (first, UNREACHED):
            return first
        if first == UNREACHED:
            return second
        self._even.clear()  # what was one number may be several now
        return MIXED if ordered(first) or ordered(second) else None

    def constant(self, number: Any) -> State:
        return None if isinstance(number, jax.Array) or np.ndim(number) else Known(number)

    def enter(self, eqn: Equation, operand: State, lead: int) -> State:
        """Return what goes into a body; into branches and loops whose trips are not known no order does."""
        if eqn.is_cond or eqn.is_while or (lead and self._steps_already(eqn, operand)):
            return MIXED if ordered(operand) else operand
        return inside(operand) if lead else operand

    def leave(self, eqn: Equation, result: State, lead: int) -> State:
        """Return what comes out of a body: stacked by a scan, or in no order, where other branches or trips may have
        others."""
        if lead:
            return stacked(result, eqn.index)
        others = eqn.is_cond or eqn.is_while or (eqn.is_scan and self._sorted_inside(result, eqn))
        return MIXED if ordered(result) and others else result

    def control(self, eqn: Equation, result: State, decider: State) -> State:
        return MIXED if ordered(decider) else result

    def _steps_already(self, eqn: Equation, operand: State) -> bool:
        """Return whether a loop around `eqn` steps over what the loop stacked that stacked the operand, so that the
        orders of two trips would meet in the body of `eqn`."""
        loop = operand.loop if isinstance(operand, (Sorted, Numbers)) else None
        outer = None if loop is None else eqn.outer
        while outer is not None:
            around = (
                self.facts[v] for door in outer.doors for v, _, lead in door.into if lead and v is not None
            )
            if any(isinstance(state, (Sorted, Numbers)) and state.loop == loop for state in around):
                return True
            outer = outer.outer
        return False

    def _sorted_inside(self, state: State, eqn: Equation) -> bool:
        """Return whether the order of a state is made in a body of `eqn`, for each trip anew."""
        order = state.order if isinstance(state, (Sorted, Numbers)) else None
        outer = None if order is None else self.program.equations[order].outer
        while outer is not None and outer is not eqn:
            outer = outer.outer
        return outer is not None

    def _read_off(self) -> None:
        """Note once more what each equation does, now that all states are known: what was noted in the first trips of
        loops need not hold in later ones."""
        self.of = {v: s for v, s in enumerate(self.facts) if s not in (None, UNREACHED)}
        self.lookups, self.backs, self.products = {}, set(), set()
        for e in self.program.equations:
            if not e.doors:
                self.transfer(e, [self._operand(e, k) for k in range(len(e.ins))])
        firsts = {i: self.of.get(self.program.equations[i].outs[0]) for i in self.sorts}
        self.sorts = {i: order for i, order in self.sorts.items() if not isinstance(firsts[i], Mixed)}
        for e in sorted(self.program.equations, key=lambda e: bool(e.doors)):  # those inside of bodies first
            ends = [*e.outs, *(v for door in e.doors for v in (*door.scope.ins, *door.scope.outs))]
            # what has no result is there to show its operands
            if not ends or any(isinstance(self.of.get(v), Mixed) for v in ends if v is not None):
                self._lose([*e.ins, *ends], e)
        for v in self.program.outputs:  # whoever takes one reads its rows in the order of all of them
            if v in self.program.maker:
                self._lose([v], self.program.maker[v])

    def _lose(self, values: Iterable[Value | None], at: Equation) -> None:
        """Note that the orders of values are lost in an equation, where none was before."""
        for state in (self.of.get(v) for v in values if v is not None):
            if isinstance(state, (Sorted, Numbers)) and state.order is not None:
                self.lost.setdefault(state.order, at.index)

    def _operand(self, e: Equation, k: int) -> State:
        v, var = e.ins[k], e.eqn.invars[k]
        return self.constant(var.val) if is_literal(var) else self.of.get(v) if v is not None else None

    # One equation.

    def transfer(self, eqn: Equation, operands: Sequence[State]) -> list[State]:
        """Return the states of the results, and note what the equation does to orders."""
        e, states = eqn, list(operands)
        if e.name == "iota":
            dim = e.params["dimension"]
            return [Numbers(dim, self._counting(e.params["shape"][dim], e.params["dtype"]))]
        if e.name == "sort":
            return self._sort(e, states)
        if e.primitive.kind is Kind.EACH:
            return states
        if all(s is None for s in states):
            return [None] * len(e.outs)
        found = self._rule(e)(e, states)
        return [found] * len(e.outs)

    def _rule(self, e: Equation) -> Callable[[Equation, list[State]], State]:
        kind = e.primitive.kind
        if kind is Kind.ELEMENTWISE:
            return self._elementwise
        if kind is Kind.SHAPE:
            return self._relaid
        if e.primitive.gathers:
            return self._gather
        if e.primitive.scatters:
            return self._scatter
        if e.primitive.product:
            return self._product
        if kind is Kind.REDUCTION:
            return self._reduction
        return self._beside if kind in (Kind.CUT, Kind.RUNNING, Kind.ORDER) else _unknown

    def _sort(self, e: Equation, states: list[State]) -> list[State]:
        if not _sorts_rows(e):
            return [self._beside(e, [s]) for s in states]
        key = states[0]
        if isinstance(key, Numbers) and key.order is not None:
            if key.loop is not None or key.table.each(len(key.table)) != 1:
                return [MIXED] * len(states)
            self.backs.add(e.index)
            return [Numbers(0, key.table), *(sorted_back(s, key) for s in states[1:])]
        if e.params["num_keys"] != 1 or any(map(ordered, states)):
            return [MIXED] * len(states)
        before = (
            o for o in self.sorts.values() if self.counts.same(e.ins[0], self.program.equations[o].ins[0])
        )
        self.sorts[e.index] = next(before, e.index)
        return [sorted_in(s, self.sorts[e.index]) for s in states]

    def _elementwise(self, e: Equation, states: list[State]) -> State:
        rows = [s for s in states if isinstance(s, Sorted)]
        if any(isinstance(s, Mixed) for s in states):
            return MIXED
        if not rows:
            return self._numbers(e, states)
        first = rows[0]
        if any(s != first for s in rows) or any(
            isinstance(s, Numbers) and s.order is not None for s in states
        ):
            return MIXED
        rest = [k for k, s in enumerate(states) if not isinstance(s, Sorted)]
        return first if all(self._even_operand(e, k, first.dim) for k in rest) else MIXED

    def _numbers(self, e: Equation, states: list[State]) -> State:
        """The same function of each number; of what nothing is known there are none."""
        numbers = [s for s in states if isinstance(s, Numbers)]
        lost = MIXED if any(map(ordered, states)) else None
        kinds = {
            getattr(getattr(v.aval, "dtype", None), "kind", "V") for v in (*e.eqn.invars, *e.eqn.outvars)
        }
        if not kinds <= {*_INTEGERS_OR_TRUTH} or not all(isinstance(s, (Numbers, Known)) for s in states):
            return lost
        if len({s.of() for s in numbers}) > 1:
            return lost
        given = [
            s.table if isinstance(s, Numbers) else np.asarray(s.number).item()
            for s in states
            if isinstance(s, (Numbers, Known))
        ]
        key = e.name, str(e.params), *map(str, (v.aval.dtype for v in e.eqn.invars)), *given  # pyright: ignore[reportAttributeAccessIssue]
        if key not in self._made:
            with jax.ensure_compile_time_eval():
                found = np.asarray(bind(e.eqn, operands(e, states))[0])
            alike = found.size and (found == found.flat[0]).all()  # the same in any order
            self._made[key] = Known(found.flat[0]) if alike else Table(found)
        made = self._made[key]
        return made if isinstance(made, Known) else replace(numbers[0], table=made)

    def _counting(self, size: int, dtype: Any) -> Table:
        made = self._made.setdefault(("iota", size, dtype), Table(np.arange(size).astype(dtype)))
        assert isinstance(made, Table)
        return made

    def _relaid(self, e: Equation, states: list[State]) -> State:
        state = states[0]
        if isinstance(state, Known):
            return state
        if not isinstance(state, (Sorted, Numbers)):
            return MIXED if ordered(state) else None
        d = None if e.factors is None else e.factors.whole(state.dim)
        if d is None or state.loop is not None:
            return MIXED if ordered(state) else None
        return replace(state, dim=d)

    def _beside(self, e: Equation, states: list[State]) -> State:
        """Works along other dimensions than the one that is in an order."""
        first = next((s for s in states if ordered(s)), None)
        if first is None:
            return None
        if not isinstance(first, Sorted) or first.loop is not None:
            return MIXED
        d, out = first.dim, e.shapes[len(e.ins)]
        named = e.primitive.along and d in along(e.params, len(out))
        rest = [k for k, s in enumerate(states) if s != first]
        same = all(len(shape) in (0, len(out)) for shape in e.shapes[: len(e.ins)])
        kept = d < len(out) and out[d] == e.shapes[states.index(first)][d] and same and not named
        return first if kept and all(self._even_operand(e, k, d) for k in rest) else MIXED

    def _reduction(self, e: Equation, states: list[State]) -> State:
        first = next((s for s in states if ordered(s)), None)
        if first is None:
            return None
        if any(s != first for s in states) or not isinstance(first, Sorted) or first.loop is not None:
            return MIXED
        gone = reduced(e.params)
        if first.dim in gone:
            return None if e.primitive.reduces else MIXED  # a sum is the same in any order
        return replace(first, dim=first.dim - sum(d < first.dim for d in gone))

    def _product(self, e: Equation, states: list[State]) -> State:
        c, (left, right) = e.contraction, states[:2]
        assert c is not None
        if not any(map(ordered, states)):
            return None
        mine, theirs = (s if isinstance(s, Sorted) else None for s in (left, right))
        orders = {(s.order, s.loop) for s in states if isinstance(s, Sorted)}
        lost = any(ordered(s) for s in states[2:]) or any(ordered(s) != isinstance(s, Sorted) for s in states)
        if lost or len(orders) != 1:
            return MIXED
        ((order, loop),) = orders
        if loop is not None:
            return MIXED
        if c.ragged is not None:
            if mine is None or mine.dim != c.ragged or not self.by_group(order, e.ins[2]):
                return MIXED
            self.products.add(e.index)
        if mine is not None and theirs is not None:
            pairs = [out for a, b, out in c.batch if (a, b) == (mine.dim, theirs.dim)]
            if pairs:
                return Sorted(order, pairs[0])
            return None if (mine.dim, theirs.dim) in c.contracted else MIXED
        one, free = (mine, c.left) if mine is not None else (theirs, c.right)
        out = next((o for d, o in free if one is not None and d == one.dim), None)
        return MIXED if out is None else Sorted(order, out)

    def _gather(self, e: Equation, states: list[State]) -> State:
        dn, (operand, index) = e.params["dimension_numbers"], states[:2]
        if not any(map(ordered, states)):
            return None
        spots = [d for d in range(len(e.shapes[len(e.ins)])) if d not in dn.offset_dims]
        if isinstance(index, Sorted) and not ordered(operand) and index.loop is None:  # a table, row by row
            return Sorted(index.order, spots[index.dim]) if index.dim < len(spots) else MIXED
        if not ordered(index) and isinstance(operand, Sorted) and operand.loop is None:
            return self._slices(e, operand)
        if not isinstance(index, Numbers) or index.order is None or index.loop is not None:
            return MIXED
        if tuple(dn.start_index_map) != tuple(dn.collapsed_slice_dims) or len(dn.start_index_map) != 1:
            return MIXED
        (looked,) = dn.start_index_map
        each = index.table.each(e.shapes[0][looked])
        if each is None or index.dim >= len(spots):
            return MIXED
        if index.back:
            if each != 1 or operand != Sorted(index.order, looked):
                return MIXED
            self.lookups[e.index] = Lookup(index.order, False, 1)
            return None
        if isinstance(operand, Numbers) and operand.of() == (looked, index.order, True, None) and each == 1:
            return Numbers(spots[index.dim], operand.table)  # where each row went, looked up by which it is
        if isinstance(operand, (Sorted, Numbers, Mixed)):
            return MIXED
        self.lookups[e.index] = Lookup(index.order, True, each)
        return Sorted(index.order, spots[index.dim])

    def _slices(self, e: Equation, operand: Sorted) -> State:
        """Slices that hold all of the rows."""
        dn, d = e.params["dimension_numbers"], operand.dim
        gone = (*dn.collapsed_slice_dims, *dn.operand_batching_dims)
        if d in gone or e.params["slice_sizes"][d] != e.shapes[0][d]:
            return MIXED
        kept = [k for k in range(len(e.shapes[0])) if k not in gone]
        return replace(operand, dim=dn.offset_dims[kept.index(d)])

    def _scatter(self, e: Equation, states: list[State]) -> State:
        dn, (operand, index, updates) = e.params["dimension_numbers"], states[:3]
        if not any(map(ordered, states)):
            return None
        spots = [d for d in range(len(e.shapes[2])) if d not in dn.update_window_dims]
        if isinstance(index, Sorted):  # sums, in any order
            own = index.dim < len(spots) and updates == Sorted(index.order, spots[index.dim])
            return None if e.primitive.adds and own and not ordered(operand) and index.loop is None else MIXED
        if not isinstance(index, Numbers) or index.order is None or index.loop is not None:
            return MIXED
        rows = tuple(dn.scatter_dims_to_operand_dims)
        if rows != tuple(dn.inserted_window_dims) or len(rows) != 1 or index.dim >= len(spots):
            return MIXED
        each, spot = index.table.each(e.shapes[0][rows[0]]), spots[index.dim]
        if each is None or ordered(operand) or not (e.primitive.adds or (e.name == "scatter" and each == 1)):
            return MIXED
        if index.back:
            if each != 1 or ordered(updates) or not self._even_operand(e, 0, rows[0]):
                return MIXED
            self.lookups[e.index] = Lookup(index.order, True, 1)
            return Sorted(index.order, rows[0])
        if (
            isinstance(updates, Numbers) and updates.order is None and e.name == "scatter"
        ):  # where each row went
            own = updates.dim == spot and updates.loop is None
            return Numbers(rows[0], updates.table, index.order, back=True) if own else MIXED
        if updates != Sorted(index.order, spot):
            return MIXED
        self.lookups[e.index] = Lookup(index.order, False, each)
        return None

    # What is the same along a dimension.

    def _even_operand(self, e: Equation, k: int, dim: int) -> bool:
        return not e.shapes[k] or (e.ins[k] is not None and self.even(e.ins[k], dim))  # pyright: ignore[reportArgumentType]

    def even(self, v: Value, dim: int) -> bool:
        """Is a value the same at all places along a dimension, as what is repeated along it is?"""
        if (v, dim) not in self._even:
            self._even[v, dim] = False
            self._even[v, dim] = self._is_even(v, dim)
        return self._even[v, dim]

    def _is_even(self, v: Value, dim: int) -> bool:
        state, e = self.facts[v], self.program.maker.get(v)
        if isinstance(state, Known) or (isinstance(state, Numbers) and state.dim != dim):
            return True
        if e is None:
            outside = self.program.outside(v)
            return outside is not None and self.even(outside, dim)
        if (factors := e.factors) is not None and e.ins[0] is not None:
            d = factors.inverse.whole(dim)
            return dim in factors.repeated or (d is not None and self.even(e.ins[0], d))
        return e.primitive.elementwise and all(self._even_operand(e, k, dim) for k in range(len(e.ins)))


def _sorts_rows(e: Equation) -> bool:
    return e.name == "sort" and all(len(shape) == 1 for shape in e.shapes)


def _unknown(_e: Equation, states: list[State]) -> State:
    return MIXED if any(map(ordered, states)) else None
