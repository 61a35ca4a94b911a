"""What values have to do with rows in another order, as `Orders` follows it."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .ir import Equation
from .primitives import shape_of


@dataclass(frozen=True)
class Sorted:
    """The rows along `dim` are in the order that the equation `order` sorted them in. `loop`: the scan that stacked it,
    each trip's rows in that trip's order."""

    order: int
    dim: int
    loop: int | None = None


class Table:
    """A whole number for each row; of as many rows as a batch has, so that values share it."""

    def __init__(self, numbers: np.ndarray):
        self.numbers = numbers
        self._each: dict[int, int | None] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    def each(self, rows: int) -> int | None:
        """How many rows have the same number, if number n is that of the rows from n times as many on, of `rows`
        numbers."""
        if rows not in self._each:
            each = len(self) // rows if rows and len(self) % rows == 0 else None
            even = each is not None and np.array_equal(self.numbers, np.arange(len(self)) // each)
            self._each[rows] = each if even else None
        return self._each[rows]


@dataclass(frozen=True)
class Numbers:
    """Row i along `dim` is `table[k]`, and k is i itself without `order`; else it is which row the equation `order`
    sorted to place i, or, `back`, the place that it sorted row i to."""

    dim: int
    table: Table
    order: int | None = None
    back: bool = False
    loop: int | None = None

    def of(self) -> tuple:
        """Whose numbers they are."""
        return self.dim, self.order, self.back, self.loop


@dataclass(frozen=True)
class Known:
    """A number written into the program, or an array of nothing else."""

    number: Any


@dataclass(frozen=True)
class Mixed:
    """Rows of different orders have met, or an order was used in a way that nothing is known of."""


@dataclass(frozen=True)
class Lookup:
    """An equation that brings rows `into` an order, or out of it. `each`: how many sorted rows are of one of them."""

    order: int
    into: bool
    each: int


@dataclass(frozen=True)
class Unreached:
    """Nothing has reached a value yet, while orders are solved for."""


State = Sorted | Numbers | Known | Mixed | Unreached | None  # None: rows as the program has them
MIXED, UNREACHED = Mixed(), Unreached()


def ordered(state: State) -> bool:
    """Has a value to do with an order?"""
    return isinstance(state, (Sorted, Mixed)) or (isinstance(state, Numbers) and state.order is not None)


def sorted_in(state: State, order: int) -> State:
    if isinstance(state, Numbers):
        return replace(state, order=order)
    return state if isinstance(state, Known) else Sorted(order, 0)


def sorted_back(state: State, key: Numbers) -> State:
    """What is sorted by the numbers `key` of an order, or, back, of places in it."""
    if isinstance(state, Numbers) and state.order is None:
        return replace(state, order=key.order, back=not key.back)
    unsorted = key.order is not None and not key.back and state == Sorted(key.order, 0)
    return None if unsorted else MIXED


def inside(state: State) -> State:
    """The state in one trip of a loop of what the loop steps over."""
    if not isinstance(state, (Sorted, Numbers)):
        return state
    if state.dim == 0:
        return MIXED if ordered(state) else None
    return replace(state, dim=state.dim - 1, loop=None)


def stacked(state: State, loop: int) -> State:
    if not isinstance(state, (Sorted, Numbers)):
        return state
    if state.loop is not None:
        return MIXED
    return replace(state, dim=state.dim + 1, loop=loop)


def operands(e: Equation, states: list[State]) -> list[np.ndarray]:
    """Operands along the one dimension that numbers are of; a number for all of them as often as needed."""
    size = next((len(s.table) for s in states if isinstance(s, Numbers)), 0)
    found = []
    for s, var in zip(states, e.eqn.invars, strict=True):
        dtype, many = var.aval.dtype, bool(shape_of(var) and size)  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(s, Numbers):
            found.append(s.table.numbers.astype(dtype, copy=False))
        else:
            assert isinstance(s, Known)
            found.append(np.full((size,) * many, s.number, dtype))
    return found
