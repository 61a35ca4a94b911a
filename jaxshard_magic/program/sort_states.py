"""Lattice of facts about row order, used by `SortAnalysis`.

A state of None means program order: nothing has sorted the rows. An *order* is the index of the `sort` equation that
made it.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .ir import Equation
from .primitives import shape_of


@dataclass(frozen=True)
class SortedAlong:
    """Rows along a dimension are in the order made by a sort.

    Attributes:
        order: Index of the `sort` equation.
        dim: Dimension of the rows.
        loop: Index of the scan that stacked the value, each trip's rows in the order of that trip. None outside of
            loops.
    """

    order: int
    dim: int
    loop: int | None = None


class IntegerTable:
    """Array with an integer per row.

    Has as many rows as a batch, so values share an instance.
    """

    def __init__(self, numbers: np.ndarray):
        self.integers = numbers
        self._repeats: dict[int, int | None] = {}

    def __len__(self) -> int:
        return len(self.integers)

    def repeats(self, rows: int) -> int | None:
        """Return n if the table counts 0, 1, ... up to `rows` - 1 with every number n times in a row; else None."""
        if rows not in self._repeats:
            each = len(self) // rows if rows and len(self) % rows == 0 else None
            even = each is not None and np.array_equal(self.integers, np.arange(len(self)) // each)
            self._repeats[rows] = each if even else None
        return self._repeats[rows]


@dataclass(frozen=True)
class IntegerRows:
    """Integers read from a table: row i along `dim` is `table[k]`.

    Attributes:
        dim: Dimension of the rows.
        table: Integers by k.
        order: Index of the `sort` equation that defines k. None: k is i.
        inverse: k is the position to which the sort moved row i. False: k is the row that the sort moved to position i.
        loop: Index of the scan that stacked the value, None outside of loops.
    """

    dim: int
    table: IntegerTable
    order: int | None = None
    inverse: bool = False
    loop: int | None = None

    def index_key(self) -> tuple:
        """Return all that decides on k: values with equal keys are read by the same index."""
        return self.dim, self.order, self.inverse, self.loop


@dataclass(frozen=True)
class ConstantValue:
    """Constant written into the program, or an array filled with a single constant."""

    value: Any


@dataclass(frozen=True)
class UnknownOrder:
    """Rows in no known order: rows of different orders were combined, or an order was used in an unsupported way."""


@dataclass(frozen=True)
class RowReordering:
    """Gather or scatter that moves rows into or out of a sorted order.

    Attributes:
        order: Index of the `sort` equation.
        into: Rows go into the order. False: they go back to program order.
        copies_per_row: Number of sorted rows per row of the program (k for top-k routing).
    """

    order: int
    into: bool
    copies_per_row: int


@dataclass(frozen=True)
class Unreached:
    """Bottom of the lattice: no fact has reached the value yet."""


SortState = SortedAlong | IntegerRows | ConstantValue | UnknownOrder | Unreached | None
UNKNOWN_ORDER, UNREACHED = UnknownOrder(), Unreached()


def has_order(state: SortState) -> bool:
    """Return whether a value depends on a sorted order."""
    return isinstance(state, (SortedAlong, UnknownOrder)) or (
        isinstance(state, IntegerRows) and state.order is not None
    )


def after_sort(state: SortState, order: int) -> SortState:
    """Return the state of a value sorted by the keys of `order`."""
    if isinstance(state, IntegerRows):
        return replace(state, order=order)
    return state if isinstance(state, ConstantValue) else SortedAlong(order, 0)


def after_inverse_sort(state: SortState, key: IntegerRows) -> SortState:
    """Return the state of a value sorted by the integers `key`.

    Sorting by the row numbers of an order restores program order. Sorting by positions is followed for integers only.
    """
    if isinstance(state, IntegerRows) and state.order is None:
        return replace(state, order=key.order, inverse=not key.inverse)
    unsorted = key.order is not None and not key.inverse and state == SortedAlong(key.order, 0)
    return None if unsorted else UNKNOWN_ORDER


def in_trip(state: SortState) -> SortState:
    """Return the state in a trip of a loop, for an operand that the loop steps over."""
    if not isinstance(state, (SortedAlong, IntegerRows)):
        return state
    # The loop steps over the rows themselves, so a trip sees a single row.
    if state.dim == 0:
        return UNKNOWN_ORDER if has_order(state) else None
    return replace(state, dim=state.dim - 1, loop=None)


def after_stacking(state: SortState, loop: int) -> SortState:
    """Return the state of results that scan number `loop` stacks."""
    if not isinstance(state, (SortedAlong, IntegerRows)):
        return state
    # A state has room for one loop.
    if state.loop is not None:
        return UNKNOWN_ORDER
    return replace(state, dim=state.dim + 1, loop=loop)


def numpy_operands(e: Equation, states: list[SortState]) -> list[np.ndarray]:
    """Return an equation's operands as NumPy arrays along the dimension of the integers.

    Constants are repeated to that size, except scalar operands.
    """
    size = next((len(state.table) for state in states if isinstance(state, IntegerRows)), 0)
    arrays = []
    for s, var in zip(states, e.jaxpr_eqn.invars, strict=True):
        dtype, repeated = var.aval.dtype, bool(shape_of(var) and size)  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(s, IntegerRows):
            arrays.append(s.table.integers.astype(dtype, copy=False))
        else:
            assert isinstance(s, ConstantValue)
            arrays.append(np.full((size,) * repeated, s.value, dtype))
    return arrays
