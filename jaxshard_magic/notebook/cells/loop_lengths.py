"""Predict the number of steps of running loops, from known lengths and the passes so far."""

import operator
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ...temporary import ChangeGroup, Replaced, attribute

# Exceptions of a `__len__` without an answer. A loop never calls `__len__`, so the cell itself would not raise them.
_NO_LENGTH = (TypeError, NotImplementedError, AttributeError, ValueError, OverflowError, LookupError, RuntimeError)
_ITERATORS = ("builtins", "itertools")  # iterators of these modules have a length hint that takes no items


@dataclass(frozen=True)
class CellLoop:
    """Loop in a cell's code.

    Attributes:
        filename: File of the cell.
        first: First line.
        last: Last line.
    """

    filename: str
    first: int
    last: int

    def runs(self, lines: Iterable[tuple[str, int]]) -> bool:
        """Return whether one of a stack's `(file, line)` pairs is inside the loop."""
        return any(name == self.filename and self.first <= line <= self.last for name, line in lines)


class LoopRun:
    """Iterator over one run of a loop that counts passes.

    Args:
        loop: Loop in the code.
        iterable: Iterated values.
        passes: Number of passes; None if unknown.
        calls: Returns the number of calls of the step so far.
    """

    def __init__(self, loop: CellLoop, iterable: Iterable[Any], passes: int | None, calls: Callable[[], int]):
        self.loop, self.passes, self.begun = loop, passes, 0
        self._items, self._calls = iter(iterable), calls
        self.first = self.last = calls()  # calls of the step before the first and the current pass

    def __iter__(self) -> "LoopRun":
        return self

    def __next__(self) -> Any:
        self.begun, self.last = self.begun + 1, self._calls()
        return next(self._items)

    def expected_calls(self, inside: "LoopRun | None", calls_inside: float | None) -> float | None:
        """Return the expected number of calls in all passes; None if unknown.

        A pass is expected to make the mean number of calls of the passes that ended; during the first pass, the calls
        before the inner loop and the expected calls of the inner loop.

        Args:
            inside: Run of the next inner loop; None without any.
            calls_inside: Expected calls of the inner loop.
        """
        ended, calls = self.begun - 1, self.last - self.first
        if ended < 1:
            in_pass = None if inside is None or calls_inside is None else inside.first - self.first + calls_inside
        elif inside is None and (not calls or calls % ended):
            in_pass = None  # the step is called under a condition
        else:
            in_pass = calls / ended
        return None if in_pass is None or self.passes is None else in_pass * self.passes


class LoopLengths:
    """Running loops, outermost first, while the calls of a step are counted.

    Attributes:
        endless: Loops of an unknown number of passes, as `while`.
    """

    def __init__(self) -> None:
        self.endless: set[CellLoop] = set()
        self._calls: Callable[[], int] | None = None
        self._runs: list[LoopRun] = []
        self._unknown = False

    def counting(self, calls: Callable[[], int]) -> ChangeGroup:
        """Return a context in which entered loops are tracked.

        Args:
            calls: Returns the number of calls of the step so far.
        """
        return ChangeGroup(Replaced(attribute(self, "_runs"), []), Replaced(attribute(self, "_calls"), calls))

    def enter_loop(self, loop: CellLoop, iterable: Any, passes: int | None, frame: types.FrameType | None) -> Any:
        """Return a counting iterator to use in place of a loop's iterable; the iterable itself while nothing is
        counted.

        Args:
            loop: Loop in the code.
            iterable: Iterated values.
            passes: Number of passes; None if unknown.
            frame: Frame that begins the loop.
        """
        if self._calls is None:
            return iterable
        lines = _lines(frame)
        # A loop left by `break` or an error reports no end: a loop still runs if a frame of the stack is inside it.
        running = takewhile(lambda run: run.loop is not loop and run.loop.runs(lines), self._runs)
        self._unknown = any(each.runs(lines) for each in self.endless)
        self._runs = [*running, LoopRun(loop, iterable, passes, self._calls)]
        return self._runs[-1]

    def expected_total(self) -> int | None:
        """Return the expected number of calls at the end of the outermost loop; None if unknown."""
        inside, calls = None, None
        for run in reversed(self._runs):
            inside, calls = run, run.expected_calls(inside, calls)
        return None if inside is None or calls is None or self._unknown else inside.first + round(calls)


def _lines(frame: types.FrameType | None) -> list[tuple[str, int]]:
    lines = []
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno or 0))
        frame = frame.f_back
    return lines


def known_length(iterable: Any) -> int | None:
    """Return the number of items of an iterable, if known without taking any; else None."""
    counts_itself = type(iterable).__module__ in _ITERATORS
    try:
        known = operator.length_hint(iterable, -1) if counts_itself else len(iterable)
    except _NO_LENGTH:
        return None
    return known if known >= 0 else None
