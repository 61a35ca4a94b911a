"""The operations that one host recorded -> sums of where its devices' time went, small enough to be sent.

No instant of a device counts twice. Operations that lie in another on the same thread take its time; of what runs side
by side an instant belongs to what computes, else to what moves data, else to what waits. So the lines and what is idle
add up to the step.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from ..report import Lane
from ..report.measured import COMPUTE, MOVING, WAITING
from .instructions import CALLS_HOST, MOVES, RUNS, Instructions, Told
from .intervals import Span, common, dealt, innermost, length, union, within
from .lanes import Key, Piece, lanes_of
from .library_kernels import with_library_calls
from .traced import Op, Trace

_RANKS = {COMPUTE: 0, MOVING: 1, WAITING: 2}
_LAST = 3  # the rank of what runs others, as a loop does: what time is left is its own
_UNKNOWN = Told("computes")

Moves = tuple[str, tuple[str, ...] | None]  # the kind and the axes of collectives
Takes = Mapping[
    int, float
]  # nanoseconds of runs from their first operation to their last, by their numbers from the
# end: the last one is 0, on all hosts


class LineSum(NamedTuple):
    """Nanoseconds of one phase of a line; `host`: of what it waits, for Python. `name`: one of its instructions, by
    which another host finds the line in the same program, as files may have other names there."""

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


class MovesSum(NamedTuple):
    """Nanoseconds of the collectives of one kind over one set of axes."""

    kind: str
    axes: tuple[str, ...] | None
    moving: float
    waiting: float


class DeviceSum(NamedTuple):
    """Nanoseconds of one device over `runs` runs, which took `window`; `overlap`: it computes while data moves;
    `host`: of what it waits, for Python."""

    device: int
    runs: int
    window: float
    compute: float
    moving: float
    waiting: float
    overlap: float
    host: float


@dataclass(frozen=True)
class Sums:
    """Nanoseconds of what one host read of a recording, over all of its devices and runs.

    `recorded`: so many runs were. `takes`: of each run that was read, the longest of all hosts. `operations`: how many
    in all. `waits`: whether waiting is told from moving. `dispatch`: of each run,
    from the call to the first operation. `lanes`: of one run, from the host's first operation in it on, in ticks of
    `tick` seconds; they have lines by their positions in `lines`, and what is shorter than `grain` ticks as part of its
    neighbours.
    """

    recorded: int
    takes: tuple[float, ...]
    operations: int
    waits: bool
    dispatch: tuple[float, ...]
    lines: tuple[LineSum, ...]
    moves: tuple[MovesSum, ...]
    devices: tuple[DeviceSum, ...]
    lanes: tuple[Lane, ...]
    tick: float
    grain: int

    def to_json(self) -> str:
        """As text, for other hosts."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Sums":
        """What `to_json` has written."""
        told: dict[str, Any] = _tuples(json.loads(text))
        kinds = {"lines": LineSum, "moves": MovesSum, "devices": DeviceSum}
        told |= {name: tuple(kind(*each) for each in told[name]) for name, kind in kinds.items()}
        return cls(**{**told, "lanes": tuple(Lane(**each) for each in told["lanes"])})

    def by(self, told: Mapping[str, Instructions]) -> "Sums":
        """The same with files named as on this host, whose instructions are given."""
        return replace(self, lines=tuple(_named(each, told) for each in self.lines))


class _Part(NamedTuple):
    """A piece of one track, before it is known whose time it is; `host`: Python runs."""

    start: float
    end: float
    rank: int
    key: Key
    kind: str
    host: bool = False


@dataclass
class _Device:
    """Nanoseconds of one device over all runs: by c, m and w, of the first that data moves meanwhile, and of
    the last that Python runs."""

    window: float = 0.0
    runs: int = 0
    overlap: float = 0.0
    host: float = 0.0
    kinds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_RANKS, 0.0))


@dataclass
class _Adding:
    """Nanoseconds over runs and devices so far: by line and kind, with an instruction of each line; by collective,
    moving and waiting; by line, what devices wait for Python."""

    lines: dict[Key, dict[str, float]] = field(
        default_factory=lambda: defaultdict(lambda: dict.fromkeys(_RANKS, 0.0))
    )
    names: dict[Key, str] = field(default_factory=dict)
    moves: dict[Moves, dict[str, float]] = field(
        default_factory=lambda: defaultdict(lambda: dict.fromkeys((MOVING, WAITING), 0.0))
    )
    devices: dict[int, _Device] = field(default_factory=lambda: defaultdict(_Device))
    host: dict[Key, float] = field(default_factory=lambda: defaultdict(float))


def takes(trace: Trace, devices: Mapping[int, int]) -> dict[int, float]:
    """How long each run took on the devices of this host, whose ordinals are the keys of `devices`."""
    return {trace.runs - 1 - run: end - start for run, (start, end) in _windows(trace, devices).items()}


def longest(hosts: Sequence[Takes]) -> dict[int, float]:
    """How long each run took that all hosts have read: as on the host where it took longest."""
    return {run: max(each[run] for each in hosts) for run in hosts[0] if all(run in each for each in hosts)}


def typical(takes: Takes) -> int:
    """The run that takes longer than half of the others, by its key."""
    return sorted(takes, key=lambda run: takes[run])[(len(takes) - 1) // 2]


def summed(trace: Trace, told: Mapping[str, Instructions], devices: Mapping[int, int], takes: Takes) -> Sums:
    """Where the time of this host's devices went.

    Args:
        trace: the operations of a few runs.
        told: the instructions of each program by its module's name.
        devices: the numbers of the mesh's devices on this host by their ordinals.
        takes: how long each run took that is read, on all hosts.
    """
    windows = _windows(trace, devices)
    every = {trace.runs - 1 - run: took for run, took in takes.items()}
    took = {run: every[run] for run in sorted(every) if run in windows}
    drawn_run = typical(took)
    parts: dict[tuple[int, int], list[Op]] = defaultdict(list)
    for op in trace.ops:
        if op.device in devices and op.run in took:
            parts[op.run, devices[op.device]].append(op)
    adding, drawn = _Adding(), dict[int, list[Piece]]()
    for (run, device), ops in parts.items():
        of = adding.devices[device]
        of.window, of.runs = of.window + took[run], of.runs + 1
        pieces = _pieces(list(_parts(_named_ops(ops, told), trace.waits or {}, told, adding)), adding, of)
        if run == drawn_run:
            drawn[device] = pieces
    most = max(adding.devices, key=lambda device: adding.devices[device].kinds[COMPUTE])
    rows = {key: i for i, key in enumerate(adding.lines)}
    start = windows[drawn_run][0]
    lanes = lanes_of(drawn, (start, start + took[drawn_run]), rows, most)
    return Sums(
        recorded=trace.recorded,
        takes=tuple(took.values()),
        operations=sum(map(len, parts.values())),
        waits=trace.waits is not None,
        dispatch=tuple(max(0.0, windows[run][0] - trace.calls[run][0]) for run in took),
        lines=tuple(
            LineSum(adding.names[key], *key, kinds[COMPUTE], kinds[MOVING], kinds[WAITING], adding.host[key])
            for key, kinds in adding.lines.items()
        ),
        moves=tuple(MovesSum(*moves, times[MOVING], times[WAITING]) for moves, times in adding.moves.items()),
        devices=tuple(
            DeviceSum(
                device,
                of.runs,
                of.window,
                of.kinds[COMPUTE],
                of.kinds[MOVING],
                of.kinds[WAITING],
                of.overlap,
                of.host,
            )
            for device, of in sorted(adding.devices.items())
        ),
        lanes=lanes.lanes,
        tick=lanes.tick,
        grain=lanes.grain,
    )


def _named_ops(ops: Sequence[Op], told: Mapping[str, Instructions]) -> list[Op]:
    """Give kernels of libraries the names of their instructions, program by program and track by track."""
    tracks: dict[tuple[str | None, str], list[Op]] = defaultdict(list)
    for op in ops:
        tracks[op.module, op.track].append(op)
    named: list[Op] = []
    for (module, _), own in tracks.items():
        instructions = None if module is None else told.get(module)
        named += own if instructions is None else with_library_calls(own, instructions)
    return named


def _windows(trace: Trace, devices: Mapping[int, int]) -> dict[int, Span]:
    """From the first operation on these devices to the last, of each run by its position."""
    windows: dict[int, Span] = {}
    for op in trace.ops:
        if op.device in devices:
            start, end = windows.get(op.run, (op.start, op.end))
            windows[op.run] = min(start, op.start), max(end, op.end)
    return windows


def _named(line: LineSum, told: Mapping[str, Instructions]) -> LineSum:
    named = [here for each in told.values() if (here := each[line.name]) is not None]
    alike = [here.file for here in named if (here.line, here.phase) == (line.line, line.phase)]
    return line if line.file in alike or not alike else line._replace(file=alike[0])


def _parts(
    ops: Sequence[Op], waits: Mapping[str, Sequence[Span]], told: Mapping[str, Instructions], sums: _Adding
) -> Iterator[_Part]:
    """What each operation of a device does in one run; those on one track one after the other."""
    tracks: dict[str, list[tuple[float, float, Op]]] = defaultdict(list)
    of: dict[tuple[str | None, str], Told] = {}
    for op in ops:
        tracks[op.track].append((op.start, op.end, op))
        if (name := (op.module, op.name)) not in of:
            of[name] = _told(op, told)
    paired = set[Op]()
    for begun, ended in _pairs(ops, of):
        paired |= {begun, ended}
        one = of[begun.module, begun.name]
        if one.moves is not None:
            sums.names.setdefault((one.file, one.line, one.phase), begun.name)
            sums.moves[one.moves][MOVING] += ended.end - begun.start
            yield _Part(begun.start, ended.end, _RANKS[MOVING], (one.file, one.line, one.phase), MOVING)
    for track, own in tracks.items():
        for start, end, op in innermost(own):
            one = of[op.module, op.name]
            key = one.file, one.line, one.phase
            sums.names.setdefault(key, op.name)
            if one.does == MOVES:
                for low, high, waiting in within(waits.get(track, ()), start, end):
                    kind = WAITING if waiting else MOVING
                    yield _Part(low, high, _RANKS[kind], key, kind)
                    if one.moves is not None and op not in paired:
                        sums.moves[one.moves][kind] += high - low
            elif one.does == CALLS_HOST:
                yield _Part(start, end, _RANKS[WAITING], key, WAITING, True)
            else:
                yield _Part(start, end, _LAST if one.does == RUNS else _RANKS[COMPUTE], key, COMPUTE)


def _told(op: Op, told: Mapping[str, Instructions]) -> Told:
    programs = told.values() if op.module is None else [told[op.module]] if op.module in told else []
    return next((found for each in programs if (found := each[op.name]) is not None), _UNKNOWN)


def _pairs(ops: Iterable[Op], of: Mapping[tuple[str | None, str], Told]) -> Iterator[tuple[Op, Op]]:
    """What begins a collective with what waits for its end, the first with the first."""
    begun: dict[tuple[str | None, str], list[Op]] = defaultdict(list)
    for op in sorted(ops, key=lambda op: op.start):
        ends = of[op.module, op.name].ends
        if ends is None:
            begun[op.module, op.name].append(op)
        elif begun[op.module, ends]:
            yield begun[op.module, ends].pop(0), op


def _pieces(parts: Sequence[_Part], sums: _Adding, device: _Device) -> list[Piece]:
    """The time of a device in one run, each instant once; its sums are added up on the way."""
    pieces: list[Piece] = []
    for start, end, owners in dealt([part[:3] for part in parts]):
        each = (end - start) / len(owners)
        for i in owners:
            part = parts[i]
            sums.lines[part.key][part.kind] += each
            device.kinds[part.kind] += each
            if part.host:
                sums.host[part.key] += each
                device.host += each
        pieces.append(Piece(start, end, parts[owners[0]].key, parts[owners[0]].kind))
    moving = union(part[:2] for part in parts if part.kind == MOVING)
    compute = union(part[:2] for part in parts if part.rank == _RANKS[COMPUTE])
    device.overlap += length(common(compute, moving))
    return pieces


def _tuples(x: Any) -> Any:
    """JSON's lists as tuples, at any depth."""
    if isinstance(x, dict):
        return {key: _tuples(each) for key, each in x.items()}
    return tuple(map(_tuples, x)) if isinstance(x, list) else x
