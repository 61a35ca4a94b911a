"""Measured part of a report: time of a step by line, collective and device, from profiler events."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from jaxshard_magic.display import renderer
from jaxshard_magic.report.parts import TimeSpread
from jaxshard_magic.report.records import write_file

COMPUTE, MOVING, WAITING = "c", "m", "w"  # activities of a device, as in `DeviceLane.kinds`


@dataclass(frozen=True)
class LineTime:
    """Seconds per step of a phase of a line, averaged over devices and steps.

    Each instant is counted once: all lines and the idle time add up to the step.

    Attributes:
        file: File of the line, one of the report's `sources`; None if no line is known.
        line: Number of the line; None if no line is known.
        phase: forward, backward, recomputed (repeated for the backward pass) or update.
        compute: The device computes.
        moving: The device only moves data between devices.
        waiting: The device waits in a collective for other devices, or for Python on the host; None if the trace does
            not separate waiting from moving.
        predicted: Predicted seconds on the chip of the report's timing; None if unknown.
        host: Part of `waiting` spent on Python.
        called: Line that led to the line, as in `Collective`.
    """

    file: str | None
    line: int | None
    phase: str | None
    compute: float
    moving: float
    waiting: float | None
    predicted: float | None = None
    host: float = 0.0
    called: str | None = None

    @property
    def seconds(self) -> float:
        """Sum of compute, moving and waiting."""
        return self.compute + self.moving + (self.waiting or 0.0)


@dataclass(frozen=True)
class CollectiveTime:
    """Collectives of a kind over a set of mesh axes in a step, averaged over devices and steps.

    Attributes:
        kind: Kind of collective.
        axes: Mesh axes; None if unknown.
        seconds: Time in which data moves, hidden by compute or not.
        waiting: Time in which a device waits in the collectives for others; None if the trace does not separate waiting
            from moving.
        wire_bytes: Bytes sent by a device.
        bandwidth: Resulting bytes per second.
        link: Bytes per second of the links along these axes, if known.
        predicted: Predicted seconds on the links.
    """

    kind: str
    axes: tuple[str, ...] | None
    seconds: float
    waiting: float | None
    wire_bytes: int | None
    bandwidth: float | None
    link: float | None = None
    predicted: float | None = None


@dataclass(frozen=True)
class DeviceTime:
    """Seconds per step on a device, averaged over steps. All fields except `overlap` add up to the step.

    Attributes:
        device: Id of the device.
        compute: Time of computation.
        moving: Time in which the device only moves data.
        waiting: Time in which the device only waits for other devices or the host; None if the trace does not separate
            waiting from moving.
        overlap: Part of `compute` with simultaneous data movement.
        idle: Time without any activity.
    """

    device: int
    compute: float
    moving: float
    waiting: float | None
    overlap: float
    idle: float


@dataclass(frozen=True)
class DeviceLane:
    """Activity of a device in a single step, as a sequence of pieces.

    Attributes:
        device: Id of the device.
        starts: Start of each piece in ticks of the report.
        takes: Length of each piece in ticks.
        of: For each piece, the index of its line in `Measured.lines`; -1 for pieces of other lines.
        kinds: A character per piece: c, m or w (compute, moving, waiting).
    """

    device: int
    starts: tuple[int, ...]
    takes: tuple[int, ...]
    of: tuple[int, ...]
    kinds: str


@dataclass(frozen=True)
class Measured:
    """Time of a step by line, collective and device, from operations recorded by the profiler.

    The recorded steps run on copies of the last arguments.

    Attributes:
        asked: Number of steps requested.
        recorded: Number of steps recorded.
        read: Number of steps read: only a few if a step has very many operations.
        operations: Operations per step on a device.
        step_s: Seconds from the first operation of a step on any device to the last.
        lines: Lines with the longest times, by phase.
        others: All other lines; None if there are none.
        unknown: Time without a known line; None if there is none.
        collectives: Collectives by kind and axes.
        devices: The slowest device and some others.
        of_devices: Number of all devices.
        slowest: Id of the slowest device; None if no other device has the same work.
        behind: Seconds for which `slowest` computes longer than the median device, in a pipeline than the median device
            of its stage; None as `slowest`.
        lanes: A typical step.
        tick: Seconds per tick of the lanes, counted from the first operation.
        grain: Pieces shorter than this number of ticks may be drawn as part of a neighbor.
        host: Seconds for which a device waits for Python, on the device with the longest wait.
        dispatch: Seconds from the call of a step to its first operation.
        average: Mean over all devices.
    """

    asked: int
    recorded: int
    read: int
    operations: int
    step_s: TimeSpread
    lines: tuple[LineTime, ...]
    others: LineTime | None
    unknown: LineTime | None
    collectives: tuple[CollectiveTime, ...]
    devices: tuple[DeviceTime, ...]
    of_devices: int
    slowest: int | None
    behind: float | None
    lanes: tuple[DeviceLane, ...]
    tick: float
    grain: int
    host: float
    dispatch: float
    average: DeviceTime | None = None

    @overload
    def to_chrome_trace(self, path: None = None) -> str: ...
    @overload
    def to_chrome_trace(self, path: str | os.PathLike[str]) -> Path: ...

    def to_chrome_trace(self, path: str | os.PathLike[str] | None = None) -> str | Path:
        """Return the lanes as a trace for Perfetto and chrome://tracing, with a thread per device.

        Args:
            path: File for the trace. Without a path the JSON text is returned.

        Returns:
            The JSON text, or the path of the file.
        """
        text = renderer(self, "chrome_trace")(self)
        return text if path is None else write_file(path, text)

    @property
    def mean(self) -> DeviceTime:
        """Mean over all devices. Its `device` is -1."""
        return self.average or _mean(self.devices)

    @property
    def seconds(self) -> float:
        """Mean seconds of the steps read: all lines and the idle time."""
        mean = self.mean
        return mean.compute + mean.moving + (mean.waiting or 0.0) + mean.idle


def _mean(devices: tuple[DeviceTime, ...]) -> DeviceTime:
    n = len(devices)
    waiting = [each.waiting for each in devices if each.waiting is not None]
    return DeviceTime(
        -1,
        sum(each.compute for each in devices) / n,
        sum(each.moving for each in devices) / n,
        sum(waiting) / n if len(waiting) == n else None,
        sum(each.overlap for each in devices) / n,
        sum(each.idle for each in devices) / n,
    )
