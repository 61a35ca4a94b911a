"""How many steps the loops that run will make, from lengths that cost nothing to know."""

import operator
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
    """A loop in a cell's code, by its lines. `steps`: how often one pass calls the step, where the code alone
    tells; None otherwise."""

    filename: str
    first: int
    last: int
    steps: int | None

    def runs(self, lines: Iterable[tuple[str, int]]) -> bool:
        """Is one of these lines, of the frames of a stack, inside the loop?"""
        return any(name == self.filename and self.first <= line <= self.last for name, line in lines)


@dataclass(eq=False)
class Run:
    """One run of `loop` over so many passes, entered after `calls` calls of the step.

    Its passes are seen by the first loop inside it: how often that was entered, and after how many calls first
    and last.
    """

    loop: Loop
    passes: int | None
    calls: int
    inner: Loop | None = None
    entered: int = 0
    first_at: int = 0
    last_at: int = 0

    def enters(self, loop: Loop, calls: int) -> None:
        if self.inner is None:
            self.inner, self.first_at = loop, calls
        if self.inner is loop:
            self.last_at = calls
            self.entered += 1


class Lengths:
    """The loops that run, outermost first, while the calls of a step are counted."""

    def __init__(self) -> None:
        self.endless: set[Loop] = set()  # those whose passes nobody knows: `while`
        self._calls: Callable[[], int] | None = None
        self._runs: list[Run] = []
        self._unknown = False

    @contextmanager
    def counting(self, calls: Callable[[], int]) -> Iterator[None]:
        """Loops that are entered meanwhile are followed; `calls()` is how often the step was called."""
        self._calls = calls
        try:
            yield
        finally:
            self._calls, self._runs = None, []

    @property
    def counts(self) -> bool:
        return self._calls is not None

    def enter(self, loop: Loop, passes: int | None, frame: types.FrameType | None) -> None:
        """`loop` begins in `frame`. The loops that still run are those that the stack's lines lie in."""
        if self._calls is None:
            return
        calls, lines = self._calls(), _lines(frame)
        running: list[Run] = []
        for run in self._runs:
            if run.loop is loop or not run.loop.runs(lines):
                break
            running.append(run)
        if running:
            running[-1].enters(loop, calls)
        self._unknown = any(loop.runs(lines) for loop in self.endless)
        self._runs = [*running, Run(loop, passes, calls)]

    def total(self) -> int | None:
        """How many calls there will be when the outermost loop ends as it goes now; None when not known."""
        runs = self._runs
        if not runs or self._unknown:
            return None
        calls = _calls_in(runs)
        return None if calls is None else runs[0].calls + round(calls)


def _calls_in(runs: list[Run]) -> float | None:
    """The calls in the whole of `runs[0]`: of a pass as many as the passes before had, in the first one as many
    as the loop inside it will make."""
    calls, inside = None, None
    for run in reversed(runs):
        if run.entered > 1:
            in_pass = (run.last_at - run.first_at) / (run.entered - 1)
        elif inside is None:
            in_pass = run.loop.steps
        else:
            in_pass = None if calls is None else inside.calls - run.calls + calls
        calls = None if in_pass is None or run.passes is None else in_pass * run.passes
        inside = run
    return calls


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
