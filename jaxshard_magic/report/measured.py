"""The measured part of a report: where the time of a step went, as the profiler saw its operations."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from jaxshard_magic.report.parts import Spread
from jaxshard_magic.report.written import saved

COMPUTE, MOVING, WAITING = "c", "m", "w"  # what a device does, as lanes have it


@dataclass(frozen=True)
class Spent:
    """Seconds of a step that a device spends for one phase of one line, the mean over devices and steps; no instant
    counts twice, so that all lines and what is idle together are the step.

    `line` of `file`, one of the report's `sources`; both None where no line is known. `phase`: forward, backward,
    recomputed (done again for the backward pass) or update. `compute`: the device computes. `moving`: it does nothing
    but move data between devices. `waiting`: it waits in a collective until others have come, or for Python on the
    host; None where the trace does not tell this from moving. `predicted`: seconds that the same is predicted to take
    on the chip of the report's timing, None where that is not known. `host`: of `waiting`, for Python. `called`: the
    line that led to it, as of `Collective`.
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
        """All of them together."""
        return self.compute + self.moving + (self.waiting or 0.0)


@dataclass(frozen=True)
class Moved:
    """The collectives of one kind over one set of mesh axes in a step, the mean over devices and steps.

    `seconds`: that data moves, hidden by compute or not; `waiting`: that a device waits in them for others, None where
    the trace does not tell. `wire_bytes`: what one device sends for them. `bandwidth`: the bytes a second that this
    is; `link`: those of the links along these axes, where they are known. `predicted`: seconds that they
    are predicted to be on the links.
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
class Busy:
    """Seconds of a step on one device, the mean over steps; together, but for `overlap`, they are the step.

    `compute`: it computes; `moving`: it does nothing but move data; `waiting`: nothing but wait for other devices or
    the host; `idle`: nothing at all. `overlap`: of `compute`, that data moves meanwhile.
    """

    device: int
    compute: float
    moving: float
    waiting: float | None
    overlap: float
    idle: float


@dataclass(frozen=True)
class Lane:
    """What one device does in one step. Piece i is from `starts[i]` on, `takes[i]` long, both in the report's ticks;
    `kinds[i]` is c, m or w (compute, moving, waiting), `of[i]` the position of its line among `Measured.lines`, -1 for
    what none of them is."""

    device: int
    starts: tuple[int, ...]
    takes: tuple[int, ...]
    of: tuple[int, ...]
    kinds: str


@dataclass(frozen=True)
class Measured:
    """Where the time of a step went, from the operations that the profiler recorded in steps on copies of the last
    arguments.

    `step_s`: seconds from a step's first operation on any device to its last one. `lines`: those that take longest,
    by phase; `others`: all other lines, `unknown`: what no line is known of, None where there is none.
    `collectives`: by kind and axes. `devices`: the slowest one and others, of `of_devices`; `average`: the mean of all.
    `slowest` computes `behind` seconds longer than the median device, of a pipeline than the median one of its stage;
    both None where no other device does the same. `lanes`: one typical step, in ticks of `tick` seconds from its first
    operation on; what is shorter than `grain` ticks may be drawn as a part of what lies beside it.
    `host`: seconds that the device waits for Python which does so longest. `dispatch`: seconds from a step's call
    to its first operation. Of `asked` steps `recorded` were recorded and `read` read, in which a device ran
    `operations` operations a step: of a step that has very many only a few are.
    """

    asked: int
    recorded: int
    read: int
    operations: int
    step_s: Spread
    lines: tuple[Spent, ...]
    others: Spent | None
    unknown: Spent | None
    collectives: tuple[Moved, ...]
    devices: tuple[Busy, ...]
    of_devices: int
    slowest: int | None
    behind: float | None
    lanes: tuple[Lane, ...]
    tick: float
    grain: int
    host: float
    dispatch: float
    average: Busy | None = None

    @overload
    def to_chrome_trace(self, path: None = None) -> str: ...
    @overload
    def to_chrome_trace(self, path: str | os.PathLike[str]) -> Path: ...

    def to_chrome_trace(self, path: str | os.PathLike[str] | None = None) -> str | Path:
        """The lanes as a trace that Perfetto and chrome://tracing open, a thread a device: JSON text, or a file written
        to `path`. Returns the text, or the path that was written."""
        from jaxshard_magic.views import chrome_trace

        text = chrome_trace.lanes_to_json(self)
        return text if path is None else saved(path, text)

    @property
    def mean(self) -> Busy:
        """What a device does in a step, the mean over all of them; its `device` is -1."""
        return self.average or _mean(self.devices)

    @property
    def seconds(self) -> float:
        """A step, the mean of those that were read: what the lines take and what is idle together."""
        mean = self.mean
        return mean.compute + mean.moving + (mean.waiting or 0.0) + mean.idle


def _mean(devices: tuple[Busy, ...]) -> Busy:
    n = len(devices)
    told = [each.waiting for each in devices if each.waiting is not None]
    return Busy(
        -1,
        sum(each.compute for each in devices) / n,
        sum(each.moving for each in devices) / n,
        sum(told) / n if len(told) == n else None,
        sum(each.overlap for each in devices) / n,
        sum(each.idle for each in devices) / n,
    )
