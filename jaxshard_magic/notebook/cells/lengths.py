"""How many steps the loops that run will make, from lengths that cost nothing to know and the passes so far."""

import operator
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ...temporary import Joined, Replaced, attribute

# What a `__len__` that has no answer raises. The loop itself never asks for it, so none of these is the cell's.
_NO_LENGTH = (
    TypeError,
    NotImplementedError,
    AttributeError,
    ValueError,
    OverflowError,
    LookupError,
    RuntimeError,
)
_ITERATORS = ("builtins", "itertools")  # modules whose iterators know what is left without making it


@dataclass(frozen=True)
class Loop:
    """A loop in a cell's code, by its lines."""

    filename: str
    first: int
    last: int

    def runs(self, lines: Iterable[tuple[str, int]]) -> bool:
        """Is one of these lines, of the frames of a stack, inside the loop?"""
        return any(name == self.filename and self.first <= line <= self.last for name, line in lines)


class Run:
    """One run of `loop` over `iterable`, of `passes` passes, None where nobody knows. It iterates in its place: which
    pass has `begun`, and after how many `calls()` of the step."""

    def __init__(self, loop: Loop, iterable: Iterable[Any], passes: int | None, calls: Callable[[], int]):
        self.loop, self.passes, self.begun = loop, passes, 0
        self._items, self._calls = iter(iterable), calls
        self.first = self.last = (
            calls()
        )  # calls of the step before the first pass, and before the one that runs

    def __iter__(self) -> "Run":
        return self

    def __next__(self) -> Any:
        self.begun, self.last = self.begun + 1, self._calls()
        return next(self._items)

    def calls_in(self, inside: "Run | None", calls_inside: float | None) -> float | None:
        """The calls in all passes: of a pass as many as in those that ended, while the first runs as many as the loop
        `inside` it will make."""
        ended, calls = self.begun - 1, self.last - self.first
        if ended < 1:
            in_pass = (
                None if inside is None or calls_inside is None else inside.first - self.first + calls_inside
            )
        elif inside is None and (not calls or calls % ended):
            in_pass = None  # under a condition
        else:
            in_pass = calls / ended
        return None if in_pass is None or self.passes is None else in_pass * self.passes


class Lengths:
    """The loops that run, outermost first, while the calls of a step are counted."""

    def __init__(self) -> None:
        self.endless: set[Loop] = set()  # those whose passes nobody knows: `while`
        self._calls: Callable[[], int] | None = None
        self._runs: list[Run] = []
        self._unknown = False

    def counting(self, calls: Callable[[], int]) -> Joined:
        """Loops that are entered meanwhile are followed; `calls()` is how often the step was called."""
        return Joined(Replaced(attribute(self, "_runs"), []), Replaced(attribute(self, "_calls"), calls))

    def enter(self, loop: Loop, iterable: Any, passes: int | None, frame: types.FrameType | None) -> Any:
        """What `loop`, which begins in `frame`, is to iterate over instead; while nothing is counted `iterable` itself.
        The loops that still run are those that the stack's lines lie in."""
        if self._calls is None:
            return iterable
        lines = _lines(frame)
        running = takewhile(lambda run: run.loop is not loop and run.loop.runs(lines), self._runs)
        self._unknown = any(each.runs(lines) for each in self.endless)
        self._runs = [*running, Run(loop, iterable, passes, self._calls)]
        return self._runs[-1]

    def total(self) -> int | None:
        """How many calls there will be when the outermost loop ends as it goes now; None when not known."""
        inside, calls = None, None
        for run in reversed(self._runs):
            inside, calls = run, run.calls_in(inside, calls)
        return None if inside is None or calls is None or self._unknown else inside.first + round(calls)


def _lines(frame: types.FrameType | None) -> list[tuple[str, int]]:
    lines = []
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno or 0))
        frame = frame.f_back
    return lines


def length(iterable: Any) -> int | None:
    """How many items a loop over `iterable` takes, as far as it says so itself; nothing is taken from it."""
    counts_itself = type(iterable).__module__ in _ITERATORS
    try:
        known = operator.length_hint(iterable, -1) if counts_itself else len(iterable)
    except _NO_LENGTH:
        return None
    return known if known >= 0 else None
