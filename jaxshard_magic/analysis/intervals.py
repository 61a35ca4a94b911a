"""Intervals of time: unions, intersections, and the division of overlapping spans into disjoint pieces."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

Span = tuple[float, float]
What = TypeVar("What")


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the union of spans as disjoint, ordered spans; empty spans are left out, and touching spans are joined.

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


def intersection(a: Sequence[Span], b: Sequence[Span]) -> list[Span]:
    """Return the intersection of two unions.

    >>> intersection([(0, 3), (4, 6)], [(2, 5)])
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


def split_by_union(union: Sequence[Span], start: float, end: float) -> Iterator[tuple[float, float, bool]]:
    """Divide the time from `start` to `end` into pieces (from, to, inside the union).

    >>> list(split_by_union([(2, 3), (5, 9)], 1, 6))
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
    """Return the sum of the lengths of the spans."""
    return sum(end - start for start, end in spans)


def innermost(spans: Iterable[tuple[float, float, What]]) -> list[tuple[float, float, What]]:
    """Divide the spans of one track into disjoint pieces, each with the label of the innermost span.

    Spans nest as calls on a thread do. A span that begins inside another and ends after it takes the time from its own
    start.

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
        # A GPU starts a kernel some 100 ns before the previous one has ended: an overlap without nesting.
        while open_ and open_[-1][0] < end:
            open_.pop()
        open_.append((end, what))
    until(float("inf"))
    return pieces


class OwnedSpan(NamedTuple):
    """Piece of time owned by spans of the lowest rank.

    Attributes:
        start: Start of the piece.
        end: End of the piece.
        owners: Positions of the owning spans.
    """

    start: float
    end: float
    owners: tuple[int, ...]


def divide_by_rank(spans: Sequence[tuple[float, float, int]]) -> Iterator[OwnedSpan]:
    """Divide overlapping spans into disjoint pieces, each owned by all spans of the lowest rank at that time.

    Args:
        spans: Tuples (start, end, rank).

    Returns:
        Pieces in order of time, without time outside of all spans.

    >>> [(s.start, s.end, s.owners) for s in divide_by_rank([(0, 4, 1), (2, 6, 0)])]
    [(0, 2, (0,)), (2, 6, (1,))]
    """
    edges = sorted((time, ends, i) for i, span in enumerate(spans) for ends, time in enumerate(span[:2]))
    # A dict serves as an ordered set of the spans of a rank.
    active: dict[int, dict[int, None]] = {rank: {} for rank in sorted({rank for _, _, rank in spans})}
    last: OwnedSpan | None = None
    at = float("-inf")
    for time, ends, i in edges:
        if time > at:
            first: tuple[int, ...] = ()
            for each in active.values():
                if each:
                    first = tuple(each)
                    break
            if last is not None and (last.owners != first or last.end != at):
                yield last
                last = None
            if first:
                last = OwnedSpan(at if last is None else last.start, time, first)
            at = time
        if ends:
            active[spans[i][2]].pop(i, None)
        elif spans[i][1] > spans[i][0]:
            active[spans[i][2]][i] = None
    if last is not None:
        yield last
