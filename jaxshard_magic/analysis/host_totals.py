"""Totals of one host's recorded operations: the time of its devices, small enough to send to other hosts.

No instant of a device counts twice. An operation nested in another on the same thread takes time from the outer one. Of
concurrent operations an instant goes to one that computes, else to one that moves data, else to one that waits. The
lines and the idle time therefore add up to the step.

cuBLAS and cuDNN kernels are mapped to the instructions that launched them, by the order of the compiled program. XLA
runs library kernels inside CUDA graphs, where an event has the name of the kernel and of no instruction (jax 0.11.2,
H100). XLA's own kernels do have instruction names, and instructions run in the order of the text. Library kernels
between two known instructions therefore belong to the custom calls between the same two.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from ..report import DeviceLane
from ..report.measured import COMPUTE, MOVING, WAITING
from .instructions import CALLS_HOST, MOVES, RUNS, InstructionInfo, Instructions
from .intervals import Span, divide_by_rank, innermost, intersection, length, split_by_union, union
from .lanes import Key, LanePiece, lanes_of
from .xplane import RecordedOp, StepTrace

# Of concurrent operations, the one with the lowest rank gets the time.
_RANKS = {COMPUTE: 0, MOVING: 1, WAITING: 2}
# Rank of instructions that run others, such as loops: they get the time in which nothing else runs.
_LAST = 3
_UNKNOWN = InstructionInfo("computes")

CollectiveKey = tuple[str, tuple[str, ...] | None]  # kind and mesh axes
# Nanoseconds from the first operation of a run to the last. Runs are numbered from the end: 0 is the last run on every
# host, however many each has recorded.
Takes = Mapping[int, float]

# XLA launches these itself as well, so that their order identifies no call.
_FILLS = re.compile(r"mem(set|cpy)", re.IGNORECASE)


class LineTotals(NamedTuple):
    """Nanoseconds of one phase of a line.

    Attributes:
        name: One of the line's instructions, by which another host finds the line in the same program: file names can
            differ.
        file: The file; None where unknown.
        line: The line number; None where unknown.
        phase: The phase; None where unknown.
        compute: Time computing.
        moving: Time only moving data.
        waiting: Time only waiting.
        host: Part of `waiting` spent waiting for Python.
    """

    name: str
    file: str | None
    line: int | None
    phase: str | None
    compute: float
    moving: float
    waiting: float
    host: float

    @property
    def key(self) -> Key:
        return self.file, self.line, self.phase


class CollectiveTotals(NamedTuple):
    """Nanoseconds of the collectives of one kind over one set of axes."""

    kind: str
    axes: tuple[str, ...] | None
    moving: float
    waiting: float


class DeviceTotals(NamedTuple):
    """Nanoseconds of one device.

    Attributes:
        device: Device number.
        runs: Number of runs.
        window: Total duration of the runs.
        compute: Time computing.
        moving: Time only moving data.
        waiting: Time only waiting.
        overlap: Part of `compute` during which data moves.
        host: Part of `waiting` spent waiting for Python.
    """

    device: int
    runs: int
    window: float
    compute: float
    moving: float
    waiting: float
    overlap: float
    host: float


@dataclass(frozen=True)
class HostTotals:
    """Nanoseconds of one host's devices, over all runs read from a recording.

    Attributes:
        recorded: Number of runs recorded.
        durations: Per run read, the longest duration of all hosts.
        operations: Number of operations.
        waits: Whether waiting is distinguished from moving.
        dispatch: Per run, the time from the call to the first operation.
        lines: Time by line and phase.
        moves: Time by kind and axes of collectives.
        devices: Time by device.
        lanes: One run, from the host's first operation; lines are given by their position in `lines`.
        tick: Unit of the lanes, in seconds.
        grain: Shortest piece of a lane, in ticks; shorter ones are merged into their neighbors.
    """

    recorded: int
    durations: tuple[float, ...]
    operations: int
    waits: bool
    dispatch: tuple[float, ...]
    lines: tuple[LineTotals, ...]
    moves: tuple[CollectiveTotals, ...]
    devices: tuple[DeviceTotals, ...]
    lanes: tuple[DeviceLane, ...]
    tick: float
    grain: int

    def to_json(self) -> str:
        """Return the totals as text for other hosts."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "HostTotals":
        """Return the totals written by `to_json`."""
        # JSON has lists alone, and the fields are tuples.
        told: dict[str, Any] = _tuples(json.loads(text))
        kinds = {"lines": LineTotals, "moves": CollectiveTotals, "devices": DeviceTotals}
        told |= {name: tuple(kind(*each) for each in told[name]) for name, kind in kinds.items()}
        return cls(**{**told, "lanes": tuple(DeviceLane(**each) for each in told["lanes"])})

    def with_local_files(self, told: Mapping[str, Instructions]) -> "HostTotals":
        """Return the totals with files named as on this host.

        Args:
            told: The instructions of each program on this host.
        """
        return replace(self, lines=tuple(_named(each, told) for each in self.lines))


class _Part(NamedTuple):
    """Piece of one track, before overlaps are resolved; `host`: Python runs."""

    start: float
    end: float
    rank: int
    key: Key
    kind: str
    host: bool = False


@dataclass
class _Device:
    """Nanoseconds of one device over all runs.

    Attributes:
        window: Total duration of the runs.
        runs: Number of runs.
        overlap: Part of computing during which data moves.
        host: Part of waiting spent waiting for Python.
        kinds: Time by kind: computing, moving, waiting.
    """

    window: float = 0.0
    runs: int = 0
    overlap: float = 0.0
    host: float = 0.0
    kinds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_RANKS, 0.0))


@dataclass
class _Adding:
    """Running totals in nanoseconds over runs and devices.

    Attributes:
        lines: By line and kind.
        names: One instruction of each line.
        moves: By collective, moving and waiting.
        devices: By device.
        host: By line, waiting for Python.
    """

    lines: dict[Key, dict[str, float]] = field(default_factory=lambda: defaultdict(lambda: dict.fromkeys(_RANKS, 0.0)))
    names: dict[Key, str] = field(default_factory=dict)
    moves: dict[CollectiveKey, dict[str, float]] = field(
        default_factory=lambda: defaultdict(lambda: dict.fromkeys((MOVING, WAITING), 0.0))
    )
    devices: dict[int, _Device] = field(default_factory=lambda: defaultdict(_Device))
    host: dict[Key, float] = field(default_factory=lambda: defaultdict(float))


def run_durations(trace: StepTrace, devices: Mapping[int, int]) -> dict[int, float]:
    """Return the duration of each run on this host's devices, by run number.

    Runs are numbered from the end, so that 0 is the last run on all hosts.

    Args:
        trace: Recorded operations.
        devices: Device numbers of the mesh, by ordinal.
    """
    return {trace.runs - 1 - run: end - start for run, (start, end) in _windows(trace, devices).items()}


def longest(hosts: Sequence[Takes]) -> dict[int, float]:
    """Return the longest duration over hosts of each run read by all of them."""
    return {run: max(each[run] for each in hosts) for run in hosts[0] if all(run in each for each in hosts)}


def median_run(takes: Takes) -> int:
    """Return the number of the run with median duration, the shorter of two."""
    return sorted(takes, key=lambda run: takes[run])[(len(takes) - 1) // 2]


def host_totals(
    trace: StepTrace, told: Mapping[str, Instructions], devices: Mapping[int, int], takes: Takes
) -> HostTotals:
    """Return the totals of this host's devices.

    Args:
        trace: Operations of a few runs.
        told: The instructions of each program, by name of its module.
        devices: Device numbers of the mesh on this host, by ordinal.
        takes: Durations over all hosts of the runs to read.
    """
    windows = _windows(trace, devices)
    every = {trace.runs - 1 - run: took for run, took in takes.items()}
    took = {run: every[run] for run in sorted(every) if run in windows}
    drawn_run = median_run(took)
    parts: dict[tuple[int, int], list[RecordedOp]] = defaultdict(list)
    for op in trace.ops:
        if op.device in devices and op.run in took:
            parts[op.run, devices[op.device]].append(op)
    adding, drawn = _Adding(), dict[int, list[LanePiece]]()
    for (run, device), ops in parts.items():
        device_totals = adding.devices[device]
        device_totals.window, device_totals.runs = device_totals.window + took[run], device_totals.runs + 1
        pieces = _pieces(list(_parts(_named_ops(ops, told), trace.waits or {}, told, adding)), adding, device_totals)
        if run == drawn_run:
            drawn[device] = pieces
    busiest = max(adding.devices, key=lambda device: adding.devices[device].kinds[COMPUTE])
    rows = {key: i for i, key in enumerate(adding.lines)}
    start = windows[drawn_run][0]
    # The duration is that of all hosts: lanes of different hosts are merged, and need the same ticks.
    lanes = lanes_of(drawn, (start, start + took[drawn_run]), rows, busiest)
    return HostTotals(
        recorded=trace.recorded,
        durations=tuple(took.values()),
        operations=sum(map(len, parts.values())),
        waits=trace.waits is not None,
        dispatch=tuple(max(0.0, windows[run][0] - trace.calls[run][0]) for run in took),
        lines=tuple(
            LineTotals(adding.names[key], *key, kinds[COMPUTE], kinds[MOVING], kinds[WAITING], adding.host[key])
            for key, kinds in adding.lines.items()
        ),
        moves=tuple(CollectiveTotals(*moves, times[MOVING], times[WAITING]) for moves, times in adding.moves.items()),
        devices=tuple(
            DeviceTotals(
                device, of.runs, of.window, of.kinds[COMPUTE], of.kinds[MOVING], of.kinds[WAITING], of.overlap, of.host
            )
            for device, of in sorted(adding.devices.items())
        ),
        lanes=lanes.lanes,
        tick=lanes.tick,
        grain=lanes.grain,
    )


def _named_ops(ops: Sequence[RecordedOp], told: Mapping[str, Instructions]) -> list[RecordedOp]:
    """Rename kernels of libraries to their instructions, by program and track."""
    tracks: dict[tuple[str | None, str], list[RecordedOp]] = defaultdict(list)
    for op in ops:
        tracks[op.module, op.track].append(op)
    named: list[RecordedOp] = []
    for (module, _), own in tracks.items():
        instructions = None if module is None else told.get(module)
        named += own if instructions is None else with_library_calls(own, instructions)
    return named


def _windows(trace: StepTrace, devices: Mapping[int, int]) -> dict[int, Span]:
    """Return, by position of the run, the span from the first to the last operation on these devices."""
    windows: dict[int, Span] = {}
    for op in trace.ops:
        if op.device in devices:
            start, end = windows.get(op.run, (op.start, op.end))
            windows[op.run] = min(start, op.start), max(end, op.end)
    return windows


def _named(line: LineTotals, told: Mapping[str, Instructions]) -> LineTotals:
    """Return the line with its file named as on this host."""
    # Hosts run the same program, but their file names can differ: the instruction finds the line.
    named = [here for each in told.values() if (here := each[line.name]) is not None]
    alike = [here.file for here in named if (here.line, here.phase) == (line.line, line.phase)]
    return line if line.file in alike or not alike else line._replace(file=alike[0])


def _parts(
    ops: Sequence[RecordedOp], waits: Mapping[str, Sequence[Span]], told: Mapping[str, Instructions], sums: _Adding
) -> Iterator[_Part]:
    """Yield the pieces of a device's operations in one run; pieces of one track don't overlap.

    Time of collectives and instruction names are added to `sums`.
    """
    tracks: dict[str, list[tuple[float, float, RecordedOp]]] = defaultdict(list)
    instruction_of: dict[tuple[str | None, str], InstructionInfo] = {}
    for op in ops:
        tracks[op.track].append((op.start, op.end, op))
        if (name := (op.module, op.name)) not in instruction_of:
            instruction_of[name] = _instruction_of(op, told)
    paired = set[RecordedOp]()
    for begun, ended in _pairs(ops, instruction_of):
        paired |= {begun, ended}
        instruction = instruction_of[begun.module, begun.name]
        if instruction.collective is not None:
            sums.names.setdefault((instruction.file, instruction.line, instruction.phase), begun.name)
            # An asynchronous collective moves data from its start operation to its done operation.
            sums.moves[instruction.collective][MOVING] += ended.end - begun.start
            yield _Part(
                begun.start, ended.end, _RANKS[MOVING], (instruction.file, instruction.line, instruction.phase), MOVING
            )
    for track, own in tracks.items():
        for start, end, op in innermost(own):
            instruction = instruction_of[op.module, op.name]
            key = instruction.file, instruction.line, instruction.phase
            sums.names.setdefault(key, op.name)
            if instruction.activity == MOVES:
                for low, high, waiting in split_by_union(waits.get(track, ()), start, end):
                    kind = WAITING if waiting else MOVING
                    yield _Part(low, high, _RANKS[kind], key, kind)
                    if instruction.collective is not None and op not in paired:
                        sums.moves[instruction.collective][kind] += high - low
            elif instruction.activity == CALLS_HOST:
                yield _Part(start, end, _RANKS[WAITING], key, WAITING, True)
            else:
                yield _Part(start, end, _LAST if instruction.activity == RUNS else _RANKS[COMPUTE], key, COMPUTE)


def _instruction_of(op: RecordedOp, told: Mapping[str, Instructions]) -> InstructionInfo:
    """Return the instruction of an operation."""
    programs = told.values() if op.module is None else [told[op.module]] if op.module in told else []
    return next((found for each in programs if (found := each[op.name]) is not None), _UNKNOWN)


def _pairs(
    ops: Iterable[RecordedOp], of: Mapping[tuple[str | None, str], InstructionInfo]
) -> Iterator[tuple[RecordedOp, RecordedOp]]:
    """Yield the start and the done operation of each asynchronous collective, first in, first out."""
    begun: dict[tuple[str | None, str], list[RecordedOp]] = defaultdict(list)
    for op in sorted(ops, key=lambda op: op.start):
        ends = of[op.module, op.name].ends
        if ends is None:
            begun[op.module, op.name].append(op)
        elif begun[op.module, ends]:
            yield begun[op.module, ends].pop(0), op


def _pieces(parts: Sequence[_Part], sums: _Adding, device: _Device) -> list[LanePiece]:
    """Return the time of a device in one run, each instant once, and add it to `sums`."""
    pieces: list[LanePiece] = []
    for start, end, owners in divide_by_rank([part[:3] for part in parts]):
        each = (end - start) / len(owners)
        for i in owners:
            part = parts[i]
            sums.lines[part.key][part.kind] += each
            device.kinds[part.kind] += each
            if part.host:
                sums.host[part.key] += each
                device.host += each
        pieces.append(LanePiece(start, end, parts[owners[0]].key, parts[owners[0]].kind))
    moving = union(part[:2] for part in parts if part.kind == MOVING)
    compute = union(part[:2] for part in parts if part.rank == _RANKS[COMPUTE])
    device.overlap += length(intersection(compute, moving))
    return pieces


def _tuples(x: Any) -> Any:
    """Return JSON data with lists as tuples, at any depth."""
    if isinstance(x, dict):
        return {key: _tuples(each) for key, each in x.items()}
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


def with_library_calls(ops: Sequence[RecordedOp], instructions: Instructions) -> list[RecordedOp]:
    """Return the operations, with unknown kernels renamed after their custom calls where the order identifies them.

    Args:
        ops: Operations of one program in one run on one track.
        instructions: Instructions of the program.
    """
    ordered = sorted(ops, key=lambda op: op.start)
    names = [instructions.name_of(op.name) for op in ordered]
    seen = {name for name in names if name is not None}
    named = list(ordered)
    before = 0  # position of the last operation with a known instruction
    for at, name in enumerate(names):
        if name is None:
            continue
        first, unknown = (names[before], [k for k in range(before + 1, at) if not _FILLS.match(ordered[k].name)])
        if unknown and first is not None:
            # A call that appears under its own name launched no unnamed kernel.
            calls = [call for call in instructions.custom_calls(first, name) if call not in seen]
            # One call may launch several kernels, such as the sum of a split-K product: surplus kernels count with the
            # last call.
            for i, k in enumerate(unknown if calls else ()):
                named[k] = ordered[k]._replace(name=calls[min(i, len(calls) - 1)])
        before = at
    return named
