"""Timeline of a pipeline in letters: a line for each rank, a column for each slot of time, letters by kind of action,
and dots for idle time."""

from collections.abc import Iterable, Iterator, Sequence
from math import floor
from statistics import fmean

from jaxshard_magic.report import Pipeline
from jaxshard_magic.views import words
from jaxshard_magic.views.format import count_text
from jaxshard_magic.views.terminal import pad, plain_signs, wrap
from jaxshard_magic.views.timeline import data
from jaxshard_magic.views.timeline.data import ticks

IDLE, GOES_ON = "\u00b7", "\u2500"
WITH_IDEAL = 12  # ranks up to which ideal lanes are shown
MOST_RANKS = 32  # ranks shown, at most
GAP = 2  # columns
KEPT = "\u00a0"  # no-break space


def grid(p: Pipeline, width: int) -> list[str]:
    """Return the axis of time, then for each rank its name, actions, bubble, and the most activations held."""
    ideal = data.has_ideal(p) and len(p.ranks) <= WITH_IDEAL
    shown = _shown(len(p.ranks))
    names = [words.rank_name(p, rank) for rank in shown]
    left = 2 + max(len("ideal") if ideal else 0, *map(len, names)) + GAP
    figures = [_figures(p, rank) for rank in shown]
    right = max(map(len, ["bubble holds", *figures]))
    end = data.end_of(p)
    columns = _columns(p, width - left - right - GAP, end)
    every, every_ideal = data.lanes(p, p.events), data.lanes(p, p.ideal_events)
    rows = [" " * left + pad(_axis(end, columns, p.unit), columns + GAP) + pad("bubble holds", right)]
    for name, rank, figure in zip(names, shown, figures, strict=True):
        rows.append(_line(name, left, _row(every[rank], end, columns), columns, figure, right))
        if ideal:
            share = plain_signs(words.percent_text(p.ranks[rank].ideal)).rjust(len("bubble"))
            row = _row(every_ideal[rank], end, columns)
            rows.append(_line("ideal", left, row.rstrip(IDLE), columns, share, right))
    return [*rows, *_legend(p, end / columns if columns else 0.0, width, len(shown))]


def _shown(ranks: int) -> Sequence[int]:
    """Return the ranks to show: all, or `MOST_RANKS` evenly spread ones."""
    if ranks <= MOST_RANKS:
        return range(ranks)
    return sorted({round(i * (ranks - 1) / (MOST_RANKS - 1)) for i in range(MOST_RANKS)})


def _line(name: str, left: int, row: str, columns: int, figure: str, right: int) -> str:
    return pad(name, left - GAP, "right") + " " * GAP + pad(row, columns + GAP) + pad(figure, right)


def _figures(p: Pipeline, rank: int) -> str:
    """Return bubble and activations below the head `bubble holds`: ` 27.9%     4`."""
    peak = p.ranks[rank].peak_activations
    holds = plain_signs("\u2013" if peak is None else words.number_text(peak))
    return f"{plain_signs(words.percent_text(p.ranks[rank].bubble)):>6} {holds:>5}"


def _columns(p: Pipeline, room: int, end: float) -> int:
    """Return the number of columns for the whole time.

    If all actions take a multiple of the shortest, each gets a whole number of columns. Otherwise an action has as many
    columns as its name has letters, if that is about the available room; else all available columns are used.

    Args:
        p: Pipeline.
        room: Available columns.
        end: End of the time.
    """
    takes = [event.end - event.start for event in p.events if event.end > event.start]
    least = min(takes, default=0.0)
    if not least or end <= 0:
        return room
    # 1e-9: a quotient that is whole but for rounding must not lose a column.
    units, each = end / least, floor(room * least / end + 1e-9)
    regular = all(abs(take / least - round(take / least)) < 1e-6 for take in takes)
    if each and regular and abs(units - round(units)) < 1e-6:
        return round(units) * each
    letters = 1 + len(str(p.microbatches - 1))
    mean = fmean(takes) / end * room
    return floor(room * letters / mean) if letters < mean < letters + 1 else room


def _row(lane: Sequence[data.LaneEvent], end: float, columns: int) -> str:
    """Return the lane of a rank: each action as its letter and microbatch, if actions have a column of their own."""
    slot = end / columns if columns else 0.0
    if not slot or not lane:
        return IDLE * columns
    if sum(mark.end - mark.start for mark in lane) < len(lane) * slot:
        # Actions are shorter than a column on average, so a column shows the kind with the largest share.
        return "".join(_mixed(data.kind_shares(lane, end, columns)))
    row = [IDLE] * columns
    for parts, start, stop in lane:
        first, last = floor(start / slot + 0.5), min(columns, floor(stop / slot + 0.5))
        name = "+".join(f"{kind}{microbatch}" for _, kind, microbatch in parts)
        if len(name) > last - first:
            name = "".join(kind for _, kind, _ in parts)
        row[first:last] = name[: last - first].ljust(last - first, GOES_ON)
    return "".join(row)


def _mixed(shares: Iterable[dict[str, float]]) -> Iterator[str]:
    """Yield one kind for each column, so that along the row each kind, and idle time, gets its share of columns."""
    owed: dict[str, float] = {}
    for share in shares:
        for kind, part in ({IDLE: 1.0 - sum(share.values())} | share).items():
            # Shares that got no column are carried over, so kinds with small shares show up as well.
            owed[kind] = owed.get(kind, 0.0) + part
        most = max(owed, key=lambda kind: owed[kind])
        owed[most] -= 1.0
        yield most


def _axis(end: float, columns: int, unit: str) -> str:
    """Return tick labels above their columns, without those that lack room: `0 ms            10              20`."""
    line = ""
    for at, label in ticks(end, max(2, columns // 10), unit):
        place = round(at / end * columns) if end else 0
        if place + len(label) <= columns and (not line or place > len(line)):
            line = line.ljust(place) + label
    return line


def _legend(p: Pipeline, slot: float, width: int, shown: int) -> list[str]:
    kinds = [f"{kind} {words.KINDS[kind]}" for kind in data.kinds_of(p)]
    pieces = [*kinds, f"{IDLE} bubble", f"1 column = {words.time_text(slot, p.unit)}"]
    unbroken = (f"{piece.replace(' ', KEPT)}{KEPT}{KEPT}" for piece in pieces)
    lines = wrap(plain_signs(" ".join(unbroken)), width + 2, "  ", "  ")
    if shown < len(p.ranks):
        lines.append(f"  {count_text(shown)} of {count_text(len(p.ranks))} ranks")
    return lines
