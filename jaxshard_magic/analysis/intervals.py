"""Intervals of time: unions, what they have in common, and which of several that overlap an instant belongs to."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

Span = tuple[float, float]
What = TypeVar("What")


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that neither overlap nor touch, in order; empty ones are left out.

    >>> union([(4, 6), (0, 2), (1, 3)])
    [(0, 3), (4, 6)]
    """
    merged: list[Span] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def common(a: Sequence[Span], b: Sequence[Span]) -> list[Span]:
    """The time that two unions have in common.

    >>> common([(0, 3), (4, 6)], [(2, 5)])
    [(2, 3), (4, 5)]
    """
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def within(union: Sequence[Span], start: float, end: float) -> Iterator[tuple[float, float, bool]]:
    """`start` to `end` in pieces: (from, to, whether the piece is of the union).

    >>> list(within([(2, 3), (5, 9)], 1, 6))
    [(1, 2, False), (2, 3, True), (3, 5, False), (5, 6, True)]
    """
    at = start
    for low, high in (union[i] for i in range(bisect_right(union, start, key=_end_of), len(union))):
        if low >= end:
            break
        if at < low:
            yield at, low, False
        yield max(start, low), min(end, high), True
        at = min(end, high)
    if at < end:
        yield at, end, False


def _end_of(span: Span) -> float:
    return span[1]


def length(spans: Iterable[Span]) -> float:
    """The sum of what the spans take."""
    return sum(end - start for start, end in spans)


def innermost(spans: Iterable[tuple[float, float, What]]) -> list[tuple[float, float, What]]:
    """Divide the spans of one track into pieces, each of the innermost span there, so that no instant counts twice.

    Spans nest as calls on a thread do. One that begins inside of another and ends after it can't be called by it: a GPU
    starts a kernel some 100 ns before the one in front has ended. It takes the time from its start on.

    >>> innermost([(0, 10, "while"), (2, 4, "dot"), (5, 6, "add")])
    [(0, 2, 'while'), (2, 4, 'dot'), (4, 5, 'while'), (5, 6, 'add'), (6, 10, 'while')]
    >>> innermost([(0, 5, "first"), (4, 9, "second")])
    [(0, 4, 'first'), (4, 9, 'second')]
    """
    pieces: list[tuple[float, float, What]] = []
    open_: list[tuple[float, What]] = []
    at = float("-inf")

    def until(time: float) -> None:
        nonlocal at
        while open_ and open_[-1][0] <= time:
            end, what = open_.pop()
            if at < end:
                pieces.append((at, end, what))
                at = end
        if open_ and at < time:
            pieces.append((at, time, open_[-1][1]))
        at = max(at, time)

    for start, end, what in sorted(spans, key=lambda span: (span[0], -span[1])):
        until(start)
        while open_ and open_[-1][0] < end:
            open_.pop()
        open_.append((end, what))
    until(float("inf"))
    return pieces


class Dealt(NamedTuple):
    """From `start` to `end` runs what `of` says: the positions of the spans that this time belongs to."""

    start: float
    end: float
    of: tuple[int, ...]


def dealt(spans: Sequence[tuple[float, float, int]]) -> Iterator[Dealt]:
    """Spans (start, end, rank) that overlap, so that no time counts twice: each instant belongs to those of the lowest
    rank there, to all of these alike. In order of time; where there is none, nothing.

    >>> [(d.start, d.end, d.of) for d in dealt([(0, 4, 1), (2, 6, 0)])]
    [(0, 2, (0,)), (2, 6, (1,))]
    """
    edges = sorted((time, ends, i) for i, span in enumerate(spans) for ends, time in enumerate(span[:2]))
    active: dict[int, dict[int, None]] = {rank: {} for rank in sorted({rank for _, _, rank in spans})}
    last: Dealt | None = None
    at = float("-inf")
    for time, ends, i in edges:
        if time > at:
            first: tuple[int, ...] = ()
            for each in active.values():
                if each:
                    first = tuple(each)
                    break
            if last is not None and (last.of != first or last.end != at):
                yield last
                last = None
            if first:
                last = Dealt(at if last is None else last.start, time, first)
            at = time
        if ends:
            active[spans[i][2]].pop(i, None)
        elif spans[i][1] > spans[i][0]:
            active[spans[i][2]][i] = None
    if last is not None:
        yield last
