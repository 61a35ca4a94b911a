"""Operations of a compiled step in a recording of `jax.profiler`: device, run, instruction, start and end.

A recording is an XSpace, which consists of planes, lines and events.
- CPU: Lines are threads. An operation is an event with its device, module and instruction. Most other events are no
  operations, and are recognised by name, because reading the stats of an event is slow.
- TPU: Each device has a plane. Where operations don't name their program, the line "XLA Modules" has an event for each
  execution, and an operation belongs to the execution in which it begins.
- GPU: Lines are streams, and each event is a kernel or a copy, whatever its name. XLA runs most kernels out of CUDA
  graphs (its "command buffers"), whose events name the graph instead of the instruction (jax 0.11.2, H100). XLA's own
  kernels have the instruction's name, with "_" for "."; kernels of libraries don't name their instruction.
"""

import re
import warnings
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from ..temporary import Replaced, attribute
from .intervals import Span, union

STEP_ANNOTATION = "jaxshard_magic step"  # annotation of each call of the step in a recording
MOST = 120_000  # operations to read, rounded to whole runs
_DEVICE = re.compile(r"/device:[A-Z]+:(\d+)")
_OPS, _STREAM, _MODULES = ("XLA Ops", "Async XLA Ops"), "Stream #", "XLA Modules"
_GRAPH = "cuda_graph_id"  # stat of a kernel launched by a CUDA graph
_NUMBERED = re.compile(r"\(\d+\)$")  # number at the end of a module's name
_NAME = re.compile(r"%?([A-Za-z_][\w.\-]*)(?::| = |$)")  # name of an instruction, alone or with its text
_WAITS = "Wait: pending_threads"  # CPU: waits in a collective until the other devices arrive
_NONE = frozenset({"Rendezvous", "InvokeRendezvous"})  # CPU: also inside a collective, with names like instructions


class RecordedOp(NamedTuple):
    """One recorded operation.

    Attributes:
        device: Ordinal of the device.
        run: Position of the step's call.
        module: Name of the program; None where not recorded.
        name: Name of the instruction.
        start: Start, in nanoseconds of the recording's clock.
        end: End, in the same unit.
        track: Thread or queue. Operations of a track are sequential or nested.
        launch: Number shared by all operations of one execution of a program; None where not recorded.
    """

    device: int
    run: int
    module: str | None
    name: str
    start: float
    end: float
    track: str
    launch: int | None = None


@dataclass(frozen=True)
class StepTrace:
    """Operations of several runs of a step.

    Attributes:
        ops: The operations.
        calls: Per run, the span of the step's call.
        waits: By track, the spans spent waiting for other devices; None where a trace does not distinguish waiting from
            moving data, as on accelerators.
        recorded: Number of runs recorded, without the calls skipped at the start.
        events: Number of events in the recording.
    """

    ops: tuple[RecordedOp, ...]
    calls: tuple[Span, ...]
    waits: Mapping[str, list[Span]] | None
    recorded: int
    events: int

    @property
    def runs(self) -> int:
        """Number of runs read."""
        return len(self.calls)


def read_trace(xspace: bytes, modules: Collection[str], skip: int = 1, most: int = MOST) -> StepTrace:
    """Read the operations of a step's calls, each call inside an annotation `STEP_ANNOTATION`.

    Args:
        xspace: A serialized recording.
        modules: HLO names of the step's programs; operations of other programs are left out.
        skip: Number of first calls to leave out.
        most: Approximate limit on operations. The last whole calls within it are read, at least one.

    Raises:
        ValueError: No call of the step was recorded.
    """
    with _tolerant():
        return _read(_tracks(ProfileData.from_serialized_xspace(xspace)), modules, skip, most)


def _read(tracks: Iterable["_Line"], modules: Collection[str], skip: int, most: int) -> StepTrace:
    found = _classify_events(tracks)
    marks = sorted(found.marks)
    calls = marks[skip:]
    if not calls:
        raise ValueError(f"no call of the step was recorded, of {skip + 1}")
    each = max(1, sum(len(track.named) for track in found.tracks) // len(marks))
    calls = calls[-max(1, most // each) :]
    # A call ends when all of its results are ready, so that its operations are between the middles of two gaps.
    first = len(marks) - len(calls)
    middles = [(a[1] + b[0]) / 2 for a, b in pairwise(marks)]
    borders = [middles[k - 1] if k else float("-inf") for k in range(first, len(marks))]
    ops: list[RecordedOp] = []
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
            stats = _event_stats(event)
            module, launch = stats.get("hlo_module"), stats.get("run_id")
            # TPU operations may not name their program: the execution under way does.
            if module is None and (at := _launch_at(launches, start)) is not None:
                module, launch = launches[at].module, at if launch is None else launch
            # A kernel of a CUDA graph has the graph's name in place of the instruction's.
            instruction = None if _GRAPH in stats else stats.get("hlo_op")
            # On accelerators the event itself has the instruction's name; on CPU only its stats do.
            instruction = instruction or (name if device is not None else None)
            if instruction is None or (module is not None and module not in modules):
                continue
            where = stats.get("device_ordinal", 0) if device is None else device
            ops.append(RecordedOp(int(where), run, module, str(instruction), start, event.end_ns, key, launch))
    told_waits = {track: union(spans) for track, spans in waits.items()} if found.on_host else None
    return StepTrace(tuple(ops), tuple(calls), told_waits, len(marks) - skip, found.events)


class _Launch(NamedTuple):
    """One execution of a program on a device."""

    start: float
    end: float
    module: str


class _Line(NamedTuple):
    """Line with operations.

    Attributes:
        key: Unique key.
        device: Ordinal for an accelerator's line; None for a CPU.
        recorded: The line of the recording.
        launches: Executions of programs on the device, in order.
    """

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
    """Return the position of the execution at a time; None without one."""
    at = bisect_right(launches, time, key=_start_of) - 1
    return at if at >= 0 and time < launches[at].end else None


def _start_of(launch: _Launch) -> float:
    return launch.start


class _Track(NamedTuple):
    """Events of one line.

    Attributes:
        line: The line.
        named: Possible operations, with the instruction given by their name.
        waiting: Events that wait for other devices.
    """

    line: _Line
    named: list[tuple[str, Any]]
    waiting: list[Any]


class _ClassifiedEvents(NamedTuple):
    """Events of a recording by purpose.

    Attributes:
        marks: Spans of the step's calls.
        tracks: Events of each line.
        events: Number of events.
        on_host: Whether the recording has operations of a CPU.
    """

    marks: list[Span]
    tracks: list[_Track]
    events: int
    on_host: bool


def _classify_events(tracks: Iterable[_Line]) -> _ClassifiedEvents:
    """Classify events by name, in one pass."""
    marks: list[Span] = []
    found: list[_Track] = []
    instruction_of: dict[str, str | None] = {}
    events, on_host = 0, False
    for line in tracks:
        device = line.device
        on_stream = device is not None and line.recorded.name.startswith(_STREAM)
        on_host = on_host or (device is None and line.recorded.name.startswith("tf_XLA"))
        named: list[tuple[str, Any]] = []
        waiting: list[Any] = []
        # Reading an attribute of an event takes time, and most events are of no use.
        for event in line.recorded.events:
            events += 1
            name = event.name
            if name not in instruction_of:
                instruction_of[name] = None if device is None and name.startswith(_WAITS) else _instruction(name)
            # An event of a stream is a kernel or a copy, whatever its name.
            if on_stream and instruction_of[name] is None:
                named.append((name, event))
            elif (instruction := instruction_of[name]) is not None:
                named.append((instruction, event))
            elif name == STEP_ANNOTATION:
                marks.append((event.start_ns, event.end_ns))
            elif device is None and name.startswith(_WAITS):
                waiting.append(event)
        found.append(_Track(line, named, waiting))
    return _ClassifiedEvents(marks, found, events, on_host)


def _event_stats(event: Any) -> dict[str, Any]:
    """Return the stats of an event up to the device ordinal."""
    told: dict[str, Any] = {}
    for name, value in event.stats:
        told[name] = value
        # Reading a stat takes time, and this one comes last.
        if name == "device_ordinal":
            break
    return told


def _tolerant() -> Replaced:
    """Return a context without a deprecation warning of jaxlib."""
    # Python 3.13 warns about a type that jaxlib makes at the first access to an event's stats; where warnings are
    # errors, jaxlib ends the process.
    ignored = "ignore", re.compile("builtin type .* has no __module__"), DeprecationWarning, None, 0
    return Replaced(attribute(warnings, "filters"), [ignored, *warnings.filters])


def _instruction(name: str) -> str | None:
    """Return the instruction named by an event, or by the start of its name; None for other events."""
    found = _NAME.match(name)
    return None if found is None or name in _NONE or "::" in name or name.startswith("end: ") else found[1]
