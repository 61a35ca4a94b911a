"""What `jax.profiler` recorded -> the operations of a compiled step: device, run, instruction, start and end.

A recording is an XSpace: planes, of each lines, of each events. On CPU the lines are threads, and each operation is an
event with its device, its module and its instruction; a device of an accelerator has a plane of its own. Most events of
a CPU's are none of these and are told by their names: reading what an event says of itself is what takes time.
"""

import re
import warnings
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from .intervals import Span, union

MARK = "jaxshard_magic step"  # what a recording calls each call of the step
MOST = 150_000  # operations that are read, of as many whole runs as that is
_DEVICE = re.compile(r"/device:[A-Z]+:(\d+)")
_OPS, _STREAM = ("XLA Ops", "Async XLA Ops"), "Stream #"
_NAME = re.compile(r"%?([A-Za-z_][\w.\-]*)(?::| = |$)")  # of an instruction, alone or with what it is
_WAITS = "Wait: pending_threads"  # CPU: in a collective, until the other devices have come


class Op(NamedTuple):
    """One operation that ran, in nanoseconds of the recording's clock. `device`: its ordinal; `run`: the position of
    the step's call; `track`: the thread or the queue that it ran on, where nothing else ran but what is in it;
    `launch`: the same for all of one execution of a program, None where that is not told."""

    device: int
    run: int
    module: str | None
    name: str
    start: float
    end: float
    track: str
    launch: int | None = None


@dataclass(frozen=True)
class Trace:
    """The operations of `runs` runs of a step, of `recorded` ones. `calls`: when the step was called for each of them,
    and when that was over. `waits`: by track, when it waited for other devices; None where a trace does not tell that
    from what moves, as on accelerators. `events`: how many there are in all."""

    ops: tuple[Op, ...]
    calls: tuple[Span, ...]
    waits: Mapping[str, list[Span]] | None
    recorded: int
    events: int

    @property
    def runs(self) -> int:
        return len(self.calls)


def read(xspace: bytes, modules: Collection[str], skip: int = 1, most: int = MOST) -> Trace:
    """The operations of a step's calls, each of which stands in an annotation `MARK`.

    Args:
        xspace: a recording, serialized.
        modules: the names of the step's programs, as HLO has them: other programs are left out.
        skip: so many of the first calls are left out.
        most: about so many operations are read at most, of whole calls, the last ones; of one at least.

    Raises ValueError where no call of the step was recorded.
    """
    with _tolerant():
        return _read(list(_tracks(ProfileData.from_serialized_xspace(xspace))), modules, skip, most)


def _read(
    tracks: Sequence[tuple[str, int | None, Any]], modules: Collection[str], skip: int, most: int
) -> Trace:
    marks, named, events = _counted(tracks)
    calls = marks[skip:]
    if not calls:
        raise ValueError(f"no call of the step was recorded, of {skip + 1}")
    each = max(1, named // len(marks))
    calls = calls[-max(1, most // each) :]
    # A call ends when all of its results are there, so that its operations lie between two calls.
    first = len(marks) - len(calls)
    middles = [(a[1] + b[0]) / 2 for a, b in pairwise(marks)]
    borders = [middles[k - 1] if k else float("-inf") for k in range(first, len(marks))]
    ops: list[Op] = []
    waits: dict[str, list[Span]] = {}
    for key, device, line in tracks:
        names: dict[str, str | None] = {}
        for event in line.events:
            name = event.name
            start = event.start_ns
            run = bisect_right(borders, start) - 1
            if run < 0:
                continue
            if device is None and name.startswith(_WAITS):
                waits.setdefault(key, []).append((start, event.end_ns))
                continue
            if name not in names:
                names[name] = _instruction(name)
            if names[name] is None:
                continue
            stats = _told(event)
            module = stats.get("hlo_module")
            told = stats.get("hlo_op") or (names[name] if device is not None else None)
            if told is None or (module is not None and module not in modules):
                continue
            where = stats.get("device_ordinal", 0) if device is None else device
            ops.append(Op(int(where), run, module, str(told), start, event.end_ns, key, stats.get("run_id")))
    on_host = any(device is None and line.name.startswith("tf_XLA") for _, device, line in tracks)
    told_waits = {track: union(spans) for track, spans in waits.items()} if on_host else None
    return Trace(tuple(ops), tuple(calls), told_waits, len(marks) - skip, events)


def _tracks(profile: Any) -> Iterator[tuple[str, int | None, Any]]:
    """The lines that operations are on: a key, the device of an accelerator's, and the line."""
    for plane in profile.planes:
        device = _DEVICE.match(plane.name)
        lines = list(plane.lines)
        if device is not None:
            ops = [line for line in lines if line.name in _OPS]
            lines = ops or [line for line in lines if line.name.startswith(_STREAM)]
        elif not plane.name.startswith("/host:CPU"):
            continue
        for i, line in enumerate(lines):
            yield f"{plane.name}/{i}", None if device is None else int(device[1]), line


def _counted(tracks: Collection[tuple[str, int | None, Any]]) -> tuple[list[Span], int, int]:
    """The calls of the step in order, how many events could be operations, and how many there are in all."""
    marks, named, events = [], 0, 0
    could_be: dict[str, bool] = {}
    for _, _, line in tracks:
        for event in line.events:
            events += 1
            name = event.name
            if name == MARK:
                marks.append((event.start_ns, event.end_ns))
            if name not in could_be:
                could_be[name] = _instruction(name) is not None
            named += could_be[name]
    return sorted(marks), named, events


def _told(event: Any) -> dict[str, Any]:
    """What an event says of itself, as far as that is asked for: each thing read takes time."""
    told: dict[str, Any] = {}
    for name, value in event.stats:
        told[name] = value
        if name == "device_ordinal":  # behind the others, where there is one
            break
    return told


@contextmanager
def _tolerant() -> Iterator[None]:
    """Python 3.13 warns of a type that jaxlib makes when an event is first asked what it says of itself; where warnings
    are errors jaxlib ends the process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "builtin type .* has no __module__", DeprecationWarning)
        yield


def _instruction(name: str) -> str | None:
    """The instruction that an event's name is, or begins with; None for what is none, by its looks."""
    found = _NAME.match(name)
    return None if found is None or "::" in name or name.startswith("end: ") else found[1]
