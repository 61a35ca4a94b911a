"""Draw one step as a lane per device, with few enough pieces to store."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..report import DeviceLane
from .intervals import Span

TICKS = 2000  # ticks per step
MOST_LANES, MOST_PIECES = 8, 480
NS = 1e-9

Key = tuple[str | None, int | None, str | None]  # file, line, phase


class LanePiece(NamedTuple):
    """Part of a device's time.

    Attributes:
        start: Start in nanoseconds.
        end: End in nanoseconds.
        key: File, line and phase.
        kind: "c" (compute), "m" (communication) or "w" (waiting).
    """

    start: float
    end: float
    key: Key
    kind: str


class Lanes(NamedTuple):
    """Lanes of several devices.

    Attributes:
        lanes: Lane of each device, in ticks.
        tick: Seconds of a tick.
        grain: Shortest exact piece in ticks; shorter ones may be drawn as part of their neighbours.
    """

    lanes: tuple[DeviceLane, ...]
    tick: float
    grain: int


class _Block(NamedTuple):
    start: int
    end: int
    row: int
    kind: str


def lanes_of(
    pieces: Mapping[int, Sequence[LanePiece]], window: Span, rows: Mapping[Key, int], first: int | None
) -> Lanes:
    """Draw the pieces of each device within a window of time.

    Args:
        pieces: Pieces of each device, by device id.
        window: Start and end in nanoseconds.
        rows: Position of each listed line.
        first: Device to include. Of more than `MOST_LANES` devices an evenly spaced selection is drawn.
    """
    # A recording has no finer times than nanoseconds.
    tick = max(1.0, (window[1] - window[0]) / TICKS)
    exact = {
        d: [
            _Block(round((p.start - window[0]) / tick), round((p.end - window[0]) / tick), rows.get(p.key, -1), p.kind)
            for p in pieces[d]
        ]
        for d in _select_devices(pieces, first)
    }
    return _limit_pieces(exact, NS * tick, 1)


def merge_lanes(hosts: Sequence[Lanes], rows: Sequence[Sequence[int]], first: int | None) -> Lanes:
    """Merge the lanes of one step from several hosts, each with the lanes of local devices.

    Args:
        hosts: Lanes of each host.
        rows: New positions of the lines, for each host.
        first: Device to include in the selection.
    """
    every = {
        lane.device: [
            _Block(start, start + takes, of[i], kind)
            for start, takes, i, kind in zip(lane.starts, lane.takes, lane.of, lane.kinds, strict=True)
        ]
        for host, of in zip(hosts, rows, strict=True)
        for lane in host.lanes
    }
    return _limit_pieces(
        {d: every[d] for d in _select_devices(every, first)}, hosts[0].tick, max(host.grain for host in hosts)
    )


def _select_devices(devices: Iterable[int], first: int | None) -> list[int]:
    """Return all of a few devices, else an evenly spaced selection including `first`."""
    every = sorted(devices)
    if len(every) <= MOST_LANES:
        return every
    spread = [every[round(i * (len(every) - 1) / (MOST_LANES - 1))] for i in range(MOST_LANES)]
    return spread if first is None or first in spread else sorted([first, *spread[1:]])


def _limit_pieces(exact: Mapping[int, Sequence[_Block]], tick: float, grain: int) -> Lanes:
    """Return lanes with at most `MOST_PIECES` pieces, at a larger grain if needed."""
    while True:
        drawn = {d: _coarse(blocks, grain) for d, blocks in exact.items()}
        if sum(map(len, drawn.values())) <= MOST_PIECES:
            return Lanes(tuple(_lane(d, blocks) for d, blocks in drawn.items()), tick, grain)
        grain *= 2


def _coarse(blocks: Iterable[_Block], grain: int) -> list[_Block]:
    """Return blocks of at least `grain` ticks: successive shorter blocks become one, with the line and kind taking most
    time."""
    drawn: list[_Block] = []
    few: list[_Block] = []

    def close() -> None:
        if few:
            takes: dict[tuple[int, str], int] = defaultdict(int)
            for block in few:
                takes[block.row, block.kind] += block.end - block.start
            of, kind = max(takes, key=lambda what: takes[what])
            add(_Block(few[0].start, few[-1].end, of, kind))
            few.clear()

    def add(block: _Block) -> None:
        last = drawn[-1] if drawn else None
        alike = last is not None and (last.row, last.kind) == (block.row, block.kind)
        if alike and last is not None and block.start - last.end < grain:
            drawn[-1] = last._replace(end=max(last.end, block.end))
        elif block.end > block.start:
            drawn.append(block)

    for block in blocks:
        if few and block.start - few[-1].end >= grain:
            close()
        if block.end - block.start >= grain:
            close()
            add(block)
            continue
        few.append(block)
        if few[-1].end - few[0].start >= grain:
            close()
    close()
    return drawn


def _lane(device: int, blocks: Sequence[_Block]) -> DeviceLane:
    return DeviceLane(
        device,
        tuple(b.start for b in blocks),
        tuple(b.end - b.start for b in blocks),
        tuple(b.row for b in blocks),
        "".join(b.kind for b in blocks),
    )
