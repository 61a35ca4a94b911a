"""One step in lanes: what each device does, in so few pieces that they can be kept."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..report import Lane
from .intervals import Span

TICKS = 2000  # that a step is cut into
MOST_LANES, MOST_PIECES = 8, 480
NS = 1e-9

Key = tuple[str | None, int | None, str | None]  # file, line, phase


class Piece(NamedTuple):
    """A part of a device's time, in nanoseconds, and what it is for: its line and phase, and c, m or w (compute,
    moving, waiting)."""

    start: float
    end: float
    key: Key
    kind: str


class Lanes(NamedTuple):
    """Lanes in ticks of `tick` seconds; what is shorter than `grain` ticks may be drawn as part of its neighbours."""

    lanes: tuple[Lane, ...]
    tick: float
    grain: int


class _Block(NamedTuple):
    start: int
    end: int
    of: int
    kind: str


def lanes_of(
    pieces: Mapping[int, Sequence[Piece]], window: Span, rows: Mapping[Key, int], first: int | None
) -> Lanes:
    """The pieces of each device in the time of `window`; of more than a few devices some, evenly spread, `first` among
    them. `rows`: the position of each line that has one."""
    tick = max(1.0, (window[1] - window[0]) / TICKS)
    exact = {
        d: [
            _Block(
                round((p.start - window[0]) / tick),
                round((p.end - window[0]) / tick),
                rows.get(p.key, -1),
                p.kind,
            )
            for p in pieces[d]
        ]
        for d in _some(pieces, first)
    }
    return _few(exact, NS * tick, 1)


def together(hosts: Sequence[Lanes], rows: Sequence[Sequence[int]], first: int | None) -> Lanes:
    """Lanes of one step, of which each host has those of its own devices, as lanes of all; `first` is among them.
    `rows`: of each host, the new positions of its lines."""
    every = {
        lane.device: [
            _Block(start, start + takes, of[i], kind)
            for start, takes, i, kind in zip(lane.starts, lane.takes, lane.of, lane.kinds, strict=True)
        ]
        for host, of in zip(hosts, rows, strict=True)
        for lane in host.lanes
    }
    return _few({d: every[d] for d in _some(every, first)}, hosts[0].tick, max(host.grain for host in hosts))


def _some(devices: Iterable[int], first: int | None) -> list[int]:
    """All of a few devices, of more some that are evenly spread, `first` among them."""
    every = sorted(devices)
    if len(every) <= MOST_LANES:
        return every
    spread = [every[round(i * (len(every) - 1) / (MOST_LANES - 1))] for i in range(MOST_LANES)]
    return spread if first is None or first in spread else sorted([first, *spread[1:]])


def _few(exact: Mapping[int, Sequence[_Block]], tick: float, grain: int) -> Lanes:
    """Lanes of few pieces, of a grain that may have to be larger."""
    while True:
        drawn = {d: _coarse(blocks, grain) for d, blocks in exact.items()}
        if sum(map(len, drawn.values())) <= MOST_PIECES:
            return Lanes(tuple(_lane(d, blocks) for d, blocks in drawn.items()), tick, grain)
        grain *= 2


def _coarse(blocks: Iterable[_Block], grain: int) -> list[_Block]:
    """Blocks of `grain` ticks at least: shorter ones that follow each other become one, of what takes most of it."""
    drawn: list[_Block] = []
    few: list[_Block] = []

    def close() -> None:
        if few:
            takes: dict[tuple[int, str], int] = defaultdict(int)
            for block in few:
                takes[block.of, block.kind] += block.end - block.start
            of, kind = max(takes, key=lambda what: takes[what])
            add(_Block(few[0].start, few[-1].end, of, kind))
            few.clear()

    def add(block: _Block) -> None:
        last = drawn[-1] if drawn else None
        alike = last is not None and (last.of, last.kind) == (block.of, block.kind)
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


def _lane(device: int, blocks: Sequence[_Block]) -> Lane:
    return Lane(
        device,
        tuple(b.start for b in blocks),
        tuple(b.end - b.start for b in blocks),
        tuple(b.of for b in blocks),
        "".join(b.kind for b in blocks),
    )
