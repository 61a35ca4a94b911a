"""Time breakdown of a step by line, collective and device, and one step in lanes, from the totals of all hosts."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

from ..report import CollectiveTime, DeviceTime, LineTime, Measured, TimeSpread
from .host_totals import CollectiveKey, DeviceTotals, HostTotals
from .lanes import NS, Key, Lanes, merge_lanes

MOST_LINES, MOST_DEVICES = 48, 16


class StepPredictions(NamedTuple):
    """Predictions and other facts not in the trace.

    Attributes:
        sent_bytes: Bytes sent by a device in a step, by kind and axes of collectives.
        collective_seconds: Predicted seconds, by kind and axes of collectives.
        links: Bytes per second of the links, by mesh axis.
        lines: Predicted seconds, by line and phase.
        calling_lines: By file and number of a line, the line that called it.
    """

    sent_bytes: Mapping[CollectiveKey, int]
    collective_seconds: Mapping[CollectiveKey, float]
    links: Mapping[str, float]
    lines: Mapping[Key, float]
    calling_lines: Mapping[tuple[str | None, int | None], str] = MappingProxyType({})


class _Times(NamedTuple):
    """Nanoseconds over all devices and runs."""

    compute: float
    moving: float
    waiting: float
    host: float  # part of `waiting` spent waiting for Python


_NONE = _Times(0.0, 0.0, 0.0, 0.0)


def time_breakdown(
    hosts: Sequence[HostTotals],
    rates: StepPredictions,
    asked: int | None = None,
    stages: Mapping[int, int] | None = None,
) -> Measured:
    """Return the time breakdown of a step.

    Args:
        hosts: Totals of each host over the same runs, with files named as on this host.
        rates: Predictions and other facts not in the trace.
        asked: Number of runs requested; None for the number recorded.
        stages: For a pipeline, the rank of each device: only devices of a rank do the same work. None: all do the same.
    """
    lines: dict[Key, _Times] = defaultdict(lambda: _NONE)
    moves: dict[CollectiveKey, _Times] = defaultdict(lambda: _NONE)
    for sums in hosts:
        for line in sums.lines:
            lines[line.key] = _added(lines[line.key], line.compute, line.moving, line.waiting, line.host)
        for each in sums.moves:
            of = each.kind, each.axes
            moves[of] = _added(moves[of], 0.0, each.moving, each.waiting)
    devices = sorted(each for sums in hosts for each in sums.devices)
    n = sum(each.runs for each in devices)
    host = max(each.host / each.runs for each in devices)
    separates_waiting = all(sums.waits for sums in hosts)
    # Waiting for Python is measured even in a trace that does not separate other waiting from moving.
    waits = separates_waiting or host > 0
    rows, others, unknown = _lines(lines, n, waits, rates)
    busy = [_busy(each, waits) for each in devices]
    slowest, behind = _slowest(busy, stages or {})
    at = {(row.file, row.line, row.phase): i for i, row in enumerate(rows)}
    lanes = merge_lanes(
        [Lanes(sums.lanes, sums.tick, sums.grain) for sums in hosts],
        [[at.get(line.key, -1) for line in sums.lines] for sums in hosts],
        slowest,
    )
    takes = hosts[0].durations
    return Measured(
        asked=asked or hosts[0].recorded,
        recorded=hosts[0].recorded,
        read=len(takes),
        operations=round(sum(sums.operations for sums in hosts) / n),
        step_s=TimeSpread(_s(min(takes)), _s(median(takes)), _s(max(takes))),
        lines=rows,
        others=others,
        unknown=unknown,
        collectives=_moved(moves, n, separates_waiting, rates),
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
    lines: Mapping[Key, _Times], n: int, waits: bool, rates: StepPredictions
) -> tuple[tuple[LineTime, ...], LineTime | None, LineTime | None]:
    """Return the rows of the slowest lines, one row for all other lines, and one for time without a line."""
    rows = [
        replace(_row(key, times, n, waits, rates.lines.get(key)), called=rates.calling_lines.get(key[:2]))
        for key, times in lines.items()
    ]
    rows.sort(key=lambda row: (-row.seconds, row.file or "", row.line or 0))
    known = [row for row in rows if row.line is not None]
    unknown = [row for row in rows if row.line is None]
    return tuple(known[:MOST_LINES]), _together(known[MOST_LINES:]), _together(unknown)


def _row(key: Key, times: _Times, n: int, waits: bool, predicted: float | None) -> LineTime:
    waiting = _s(times.waiting / n) if waits else None
    return LineTime(*key, _s(times.compute / n), _s(times.moving / n), waiting, predicted, _s(times.host / n))


def _together(rows: Sequence[LineTime]) -> LineTime | None:
    if not rows:
        return None
    told = [row.waiting for row in rows if row.waiting is not None]
    waiting = sum(told) if told else None
    return LineTime(None, None, None, sum(r.compute for r in rows), sum(r.moving for r in rows), waiting)


def _moved(
    moves: Mapping[CollectiveKey, _Times], n: int, waits: bool, rates: StepPredictions
) -> tuple[CollectiveTime, ...]:
    moved = []
    for (kind, axes), took in moves.items():
        seconds, sent = took.moving / n * NS, rates.sent_bytes.get((kind, axes))
        links = [rates.links[axis] for axis in axes or () if axis in rates.links]
        moved.append(
            CollectiveTime(
                kind,
                axes,
                _s(took.moving / n),
                _s(took.waiting / n) if waits else None,
                sent,
                sent / seconds if sent and seconds else None,
                min(links) if links and len(links) == len(axes or ()) else None,
                rates.collective_seconds.get((kind, axes)),
            )
        )
    return tuple(sorted(moved, key=lambda m: (-m.seconds, m.kind)))


def _busy(of: DeviceTotals, waits: bool) -> DeviceTime:
    n = of.runs
    idle = max(0.0, of.window - (of.compute + of.moving + of.waiting))
    waiting = _s(of.waiting / n) if waits else None
    return DeviceTime(of.device, _s(of.compute / n), _s(of.moving / n), waiting, _s(of.overlap / n), _s(idle / n))


def _average(devices: Sequence[DeviceTotals], waits: bool) -> DeviceTime:
    """Return the time of a device in a step, the mean over all devices and runs."""
    every = [sum(column) for column in zip(*((d.runs, d.window, *_did(d)) for d in devices), strict=True)]
    runs, window, compute, moving, waiting, overlap, host = every
    return _busy(DeviceTotals(-1, int(runs), window, compute, moving, waiting, overlap, host), waits)


def _did(of: DeviceTotals) -> tuple[float, ...]:
    return of.compute, of.moving, of.waiting, of.overlap, of.host


def _slowest(busy: Sequence[DeviceTime], stages: Mapping[int, int]) -> tuple[int | None, float | None]:
    """Return the device with the longest compute relative to the median of its rank, and the excess in seconds.

    Both are None where no two devices do the same work.
    """
    alike: dict[int | None, list[DeviceTime]] = defaultdict(list)
    for each in busy:
        alike[stages.get(each.device)].append(each)
    excesses: list[tuple[float, int]] = []
    for own in alike.values():
        most = max(own, key=lambda each: each.compute)
        # A device alone on its rank has none to compare with.
        if len(own) > 1:
            excesses.append((most.compute - median(each.compute for each in own), most.device))
    if not excesses:
        return None, None
    behind, device = max(excesses, key=lambda each: each[0])
    return device, _s(behind / NS)


def _listed(busy: Sequence[DeviceTime], slowest: int | None) -> tuple[DeviceTime, ...]:
    """Return all devices, or an even sample of `MOST_DEVICES` with the slowest device."""
    if len(busy) <= MOST_DEVICES:
        return tuple(busy)
    spread = [busy[round(i * (len(busy) - 1) / (MOST_DEVICES - 1))] for i in range(MOST_DEVICES)]
    if slowest is not None and all(each.device != slowest for each in spread):
        spread[1] = next(each for each in busy if each.device == slowest)
    return tuple(sorted(spread, key=lambda each: each.device))


def _s(nanoseconds: float) -> float:
    """Return seconds."""
    # A recording has no finer times than nanoseconds.
    return round(nanoseconds * NS, 9)
