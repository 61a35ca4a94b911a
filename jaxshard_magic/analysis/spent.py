"""The sums of all hosts -> where the time of a step went: by line, collective and device, and one step in lanes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

from ..report import Busy, Measured, Moved, Spent, Spread
from .lanes import NS, Key, Lanes, together
from .summed import DeviceSum, Moves, Sums

MOST_LINES, MOST_DEVICES = 48, 16


class Rates(NamedTuple):
    """What is known beside the trace. Of collectives by kind and axes: bytes that a device sends in a step, and
    predicted seconds; of mesh axes the bytes a second of their links; by line and phase predicted seconds; and of a
    line, by its file and number, the one that led to it."""

    sent: Mapping[Moves, int]
    seconds: Mapping[Moves, float]
    links: Mapping[str, float]
    lines: Mapping[Key, float]
    calls: Mapping[tuple[str | None, int | None], str] = MappingProxyType({})


class _Times(NamedTuple):
    """Nanoseconds over all devices and runs."""

    compute: float
    moving: float
    waiting: float
    host: float  # of what is waited, for Python


_NONE = _Times(0.0, 0.0, 0.0, 0.0)


def spent(
    hosts: Sequence[Sums], rates: Rates, asked: int | None = None, stages: Mapping[int, int] | None = None
) -> Measured:
    """Where the time of a step went.

    Args:
        hosts: what each host read of the same runs, with files named as on this one.
        rates: what is known beside the traces.
        asked: for so many runs; None for those that were recorded.
        stages: of a pipeline the rank of each device, as those of one do the same; else all do.
    """
    lines: dict[Key, _Times] = defaultdict(lambda: _NONE)
    moves: dict[Moves, _Times] = defaultdict(lambda: _NONE)
    for sums in hosts:
        for line in sums.lines:
            lines[line.key] = _added(lines[line.key], line.compute, line.moving, line.waiting, line.host)
        for each in sums.moves:
            of = each.kind, each.axes
            moves[of] = _added(moves[of], 0.0, each.moving, each.waiting)
    devices = sorted(each for sums in hosts for each in sums.devices)
    n = sum(each.runs for each in devices)
    host = max(each.host / each.runs for each in devices)
    tells = all(sums.waits for sums in hosts)
    waits = tells or host > 0
    rows, others, unknown = _lines(lines, n, waits, rates)
    busy = [_busy(each, waits) for each in devices]
    slowest, behind = _slowest(busy, stages or {})
    at = {(row.file, row.line, row.phase): i for i, row in enumerate(rows)}
    lanes = together(
        [Lanes(sums.lanes, sums.tick, sums.grain) for sums in hosts],
        [[at.get(line.key, -1) for line in sums.lines] for sums in hosts],
        slowest,
    )
    takes = hosts[0].takes
    return Measured(
        asked=asked or hosts[0].recorded,
        recorded=hosts[0].recorded,
        read=len(takes),
        operations=round(sum(sums.operations for sums in hosts) / n),
        step_s=Spread(_s(min(takes)), _s(median(takes)), _s(max(takes))),
        lines=rows,
        others=others,
        unknown=unknown,
        collectives=_moved(moves, n, tells, rates),
        devices=_listed(busy, slowest),
        of_devices=len(busy),
        slowest=slowest,
        behind=behind,
        lanes=lanes.lanes,
        tick=lanes.tick,
        grain=lanes.grain,
        host=_s(host),
        dispatch=_s(median(each for sums in hosts for each in sums.dispatch)),
        average=_average(devices, waits),
    )


def _added(times: _Times, compute: float, moving: float, waiting: float, host: float = 0.0) -> _Times:
    return _Times(times.compute + compute, times.moving + moving, times.waiting + waiting, times.host + host)


def _lines(
    lines: Mapping[Key, _Times], n: int, waits: bool, rates: Rates
) -> tuple[tuple[Spent, ...], Spent | None, Spent | None]:
    """The lines that take longest, the others together, and what no line is known of."""
    rows = [
        replace(_row(key, times, n, waits, rates.lines.get(key)), called=rates.calls.get(key[:2]))
        for key, times in lines.items()
    ]
    rows.sort(key=lambda row: (-row.seconds, row.file or "", row.line or 0))
    known = [row for row in rows if row.line is not None]
    unknown = [row for row in rows if row.line is None]
    return tuple(known[:MOST_LINES]), _together(known[MOST_LINES:]), _together(unknown)


def _row(key: Key, times: _Times, n: int, waits: bool, predicted: float | None) -> Spent:
    waiting = _s(times.waiting / n) if waits else None
    return Spent(*key, _s(times.compute / n), _s(times.moving / n), waiting, predicted, _s(times.host / n))


def _together(rows: Sequence[Spent]) -> Spent | None:
    if not rows:
        return None
    told = [row.waiting for row in rows if row.waiting is not None]
    waiting = sum(told) if told else None
    return Spent(None, None, None, sum(r.compute for r in rows), sum(r.moving for r in rows), waiting)


def _moved(moves: Mapping[Moves, _Times], n: int, waits: bool, rates: Rates) -> tuple[Moved, ...]:
    moved = []
    for (kind, axes), took in moves.items():
        seconds, sent = took.moving / n * NS, rates.sent.get((kind, axes))
        links = [rates.links[axis] for axis in axes or () if axis in rates.links]
        moved.append(
            Moved(
                kind,
                axes,
                _s(took.moving / n),
                _s(took.waiting / n) if waits else None,
                sent,
                sent / seconds if sent and seconds else None,
                min(links) if links and len(links) == len(axes or ()) else None,
                rates.seconds.get((kind, axes)),
            )
        )
    return tuple(sorted(moved, key=lambda m: (-m.seconds, m.kind)))


def _busy(of: DeviceSum, waits: bool) -> Busy:
    n = of.runs
    idle = max(0.0, of.window - (of.compute + of.moving + of.waiting))
    waiting = _s(of.waiting / n) if waits else None
    return Busy(of.device, _s(of.compute / n), _s(of.moving / n), waiting, _s(of.overlap / n), _s(idle / n))


def _average(devices: Sequence[DeviceSum], waits: bool) -> Busy:
    """What a device does in a step, the mean over all devices and runs."""
    every = [sum(column) for column in zip(*((d.runs, d.window, *_did(d)) for d in devices), strict=True)]
    runs, window, compute, moving, waiting, overlap, host = every
    return _busy(DeviceSum(-1, int(runs), window, compute, moving, waiting, overlap, host), waits)


def _did(of: DeviceSum) -> tuple[float, ...]:
    return of.compute, of.moving, of.waiting, of.overlap, of.host


def _slowest(busy: Sequence[Busy], stages: Mapping[int, int]) -> tuple[int | None, float | None]:
    """The device that computes longest beside the median one of those that do the same, and how much longer; None where
    each does its own."""
    alike: dict[int | None, list[Busy]] = defaultdict(list)
    for each in busy:
        alike[stages.get(each.device)].append(each)
    found: list[tuple[float, int]] = []
    for own in alike.values():
        most = max(own, key=lambda each: each.compute)
        if len(own) > 1:
            found.append((most.compute - median(each.compute for each in own), most.device))
    if not found:
        return None, None
    behind, device = max(found, key=lambda each: each[0])
    return device, _s(behind / NS)


def _listed(busy: Sequence[Busy], slowest: int | None) -> tuple[Busy, ...]:
    """All devices, or some that are evenly spread, the slowest among them."""
    if len(busy) <= MOST_DEVICES:
        return tuple(busy)
    spread = [busy[round(i * (len(busy) - 1) / (MOST_DEVICES - 1))] for i in range(MOST_DEVICES)]
    if all(each.device != slowest for each in spread):
        spread[1] = next(each for each in busy if each.device == slowest)
    return tuple(sorted(spread, key=lambda each: each.device))


def _s(nanoseconds: float) -> float:
    """Seconds, to the nanosecond that a recording has."""
    return round(nanoseconds * NS, 9)
