"""What `jax.profiler` recorded -> the operations of a compiled step: device, run, instruction, start and end.

A recording is an XSpace: planes, of each lines, of each events. On CPU the lines are threads, and each operation is an
event with its device, its module and its instruction; a device of an accelerator has a plane of its own. Where its
operations don't say which program they are of, as on a TPU, a line beside theirs, "XLA Modules", has an event for each
time that a program ran, and an operation is of the one in which it begins. Most events of a CPU's are no operations and
are told by their names: reading what an event says of itself is what takes time.

A GPU's lines are streams, and each event on one is a kernel or a copy, whatever its name. XLA runs most kernels out of
CUDA graphs (its "command buffers"), whose events name the graph in the place of the instruction (jax 0.11.2, H100).
XLA's own kernels have the instruction's name, with "_" for "."; those of libraries do not say what they are of.
"""

import re
import warnings
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from .intervals import Span, union

MARK = "jaxshard_magic step"  # what a recording calls each call of the step
MOST = 120_000  # operations that are read, of as many whole runs as that is
_DEVICE = re.compile(r"/device:[A-Z]+:(\d+)")
_OPS, _STREAM, _MODULES = ("XLA Ops", "Async XLA Ops"), "Stream #", "XLA Modules"
_GRAPH = "cuda_graph_id"  # told of a kernel that was launched as part of a CUDA graph
_NUMBERED = re.compile(r"\(\d+\)$")  # behind a module's name
_NAME = re.compile(r"%?([A-Za-z_][\w.\-]*)(?::| = |$)")  # of an instruction, alone or with what it is
_WAITS = "Wait: pending_threads"  # CPU: in a collective, until the other devices have come
_NONE = frozenset(
    {"Rendezvous", "InvokeRendezvous"}
)  # CPU: in a collective, too; they look like instructions


class Op(NamedTuple):
    """One operation that ran, in nanoseconds of the recording's clock. `device`: its ordinal; `run`: the position of
    the step's call; `module`: the program's name, None where that is not told; `track`: the thread or the queue that it
    ran on, where nothing else ran but what is in it; `launch`: the same for all of one execution of a program, None
    where that is not told."""

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
        return _read(_tracks(ProfileData.from_serialized_xspace(xspace)), modules, skip, most)


def _read(tracks: Iterable["_Line"], modules: Collection[str], skip: int, most: int) -> Trace:
    found = _found(tracks)
    marks = sorted(found.marks)
    calls = marks[skip:]
    if not calls:
        raise ValueError(f"no call of the step was recorded, of {skip + 1}")
    each = max(1, sum(len(track.named) for track in found.tracks) // len(marks))
    calls = calls[-max(1, most // each) :]
    # A call ends when all of its results are there, so that its operations lie between two calls.
    first = len(marks) - len(calls)
    middles = [(a[1] + b[0]) / 2 for a, b in pairwise(marks)]
    borders = [middles[k - 1] if k else float("-inf") for k in range(first, len(marks))]
    ops: list[Op] = []
    waits: dict[str, list[Span]] = {}
    for (key, device, _, launches), named, waiting in found.tracks:
        spans = ((event.start_ns, event.end_ns) for event in waiting)
        if own := [span for span in spans if span[0] >= borders[0]]:
            waits[key] = own
        for name, event in named:
            start = event.start_ns
            run = bisect_right(borders, start) - 1
            if run < 0:
                continue
            stats = _told(event)
            module, launch = stats.get("hlo_module"), stats.get("run_id")
            if module is None and (at := _launch_at(launches, start)) is not None:
                module, launch = launches[at].module, at if launch is None else launch
            told = None if _GRAPH in stats else stats.get("hlo_op")
            told = told or (name if device is not None else None)
            if told is None or (module is not None and module not in modules):
                continue
            where = stats.get("device_ordinal", 0) if device is None else device
            ops.append(Op(int(where), run, module, str(told), start, event.end_ns, key, launch))
    told_waits = {track: union(spans) for track, spans in waits.items()} if found.on_host else None
    return Trace(tuple(ops), tuple(calls), told_waits, len(marks) - skip, found.events)


class _Launch(NamedTuple):
    """A program that ran on a device."""

    start: float
    end: float
    module: str


class _Line(NamedTuple):
    """A line that operations are on: a key, the device of an accelerator's, the line as it was recorded, and which
    programs that device says it ran, in order."""

    key: str
    device: int | None
    recorded: Any
    launches: Sequence[_Launch]


def _tracks(profile: Any) -> Iterator[_Line]:
    for plane in profile.planes:
        device = _DEVICE.match(plane.name)
        lines = list(plane.lines)
        launches = [] if device is None else _launches(lines)
        if device is not None:
            ops = [line for line in lines if line.name in _OPS]
            lines = ops or [line for line in lines if line.name.startswith(_STREAM)]
        elif not plane.name.startswith("/host:CPU"):
            continue
        for i, line in enumerate(lines):
            yield _Line(f"{plane.name}/{i}", None if device is None else int(device[1]), line, launches)


def _launches(lines: Iterable[Any]) -> list[_Launch]:
    events = (event for line in lines if line.name == _MODULES for event in line.events)
    return sorted(_Launch(event.start_ns, event.end_ns, _NUMBERED.sub("", event.name)) for event in events)


def _launch_at(launches: Sequence[_Launch], time: float) -> int | None:
    """The position of what ran at that time; None where nothing did."""
    at = bisect_right(launches, time, key=_start_of) - 1
    return at if at >= 0 and time < launches[at].end else None


def _start_of(launch: _Launch) -> float:
    return launch.start


class _Track(NamedTuple):
    """Of the events of one track those that could be operations, with the instruction that their names are, and those
    that wait for other devices."""

    line: _Line
    named: list[tuple[str, Any]]
    waiting: list[Any]


class _Found(NamedTuple):
    """The calls of the step, the tracks, how many events there are, and whether a CPU's operations are among them."""

    marks: list[Span]
    tracks: list[_Track]
    events: int
    on_host: bool


def _found(tracks: Iterable[_Line]) -> _Found:
    """Events told by their names, in one pass: most are of no use, and each thing read of one takes time."""
    marks: list[Span] = []
    found: list[_Track] = []
    of: dict[str, str | None] = {}
    events, on_host = 0, False
    for line in tracks:
        device = line.device
        on_stream = device is not None and line.recorded.name.startswith(_STREAM)
        on_host = on_host or (device is None and line.recorded.name.startswith("tf_XLA"))
        named: list[tuple[str, Any]] = []
        waiting: list[Any] = []
        for event in line.recorded.events:
            events += 1
            name = event.name
            if name not in of:
                of[name] = None if device is None and name.startswith(_WAITS) else _instruction(name)
            if on_stream and of[name] is None:
                named.append((name, event))
            elif (instruction := of[name]) is not None:
                named.append((instruction, event))
            elif name == MARK:
                marks.append((event.start_ns, event.end_ns))
            elif device is None and name.startswith(_WAITS):
                waiting.append(event)
        found.append(_Track(line, named, waiting))
    return _Found(marks, found, events, on_host)


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
    return None if found is None or name in _NONE or "::" in name or name.startswith("end: ") else found[1]
