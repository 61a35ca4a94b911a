"""What of a program's communication is hidden behind its compute, from the order that the compiler gave it.

In a scheduled program the start and the end of a collective stand apart where it runs beside others; what lies between
hides it. `scheduled` reads that order once, into a few events a collective; `exposed` lets it run on a chip's links.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from ..hardware import Chip
from ..wires import Wire, latency
from .collectives import Move, wire_bytes
from .hlo import BRANCHES, Computation, Instruction, Module, called, trip_count

_SCHEDULED = "is_scheduled=true"
_ESTIMATED = '"estimated_cycles":"'
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CHAIN = re.compile(r'chain_id="(\d+)"')
_START, _DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
_SUMMED = re.compile(r'lhs_contracting_dim(?:s=|ensions":)[{\[]([\d,"]*)[}\]]')
_RUN = {"while": ("body",), "conditional": BRANCHES, "call": ("to_apply", "calls")}  # and what names them
_NOTHING = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota"))


class Work(NamedTuple):
    """What a device computes between two other events: XLA's estimate of cycles, or, in a program that prints none,
    FLOPs and bytes."""

    cycles: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0


class Start(NamedTuple):
    """Collectives, by their positions among the moves, that begin under `name`; where that is empty the device waits
    for their end. `beside`: what the device does meanwhile in the same instruction."""

    moves: tuple[int, ...]
    name: str = ""
    beside: Work = Work()


class Done(NamedTuple):
    """The device waits for what began under `name`."""

    name: str


class Loop(NamedTuple):
    """Another computation, run so many times."""

    body: str
    times: int


Event = Work | Start | Done | Loop


@dataclass(frozen=True)
class Schedule:
    """The events of every computation that runs by itself, in order; `entry` is the one that is run."""

    entry: str
    events: Mapping[str, tuple[Event, ...]]


@dataclass(frozen=True)
class Exposed:
    """Seconds of a step that a device waits for each move, and those that each `takes` on the links."""

    waits: tuple[float, ...]
    takes: tuple[float, ...]


@dataclass
class _Ran:
    """One run of a computation: its seconds, those that each axis' links are busy, and of each move those that it takes
    on them and those that the device waits for it."""

    seconds: float = 0.0
    takes: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    exposed: dict[int, float] = field(default_factory=lambda: defaultdict(float))


def scheduled(module: Module, moves: Sequence[Move]) -> Schedule | None:
    """The order in which a program's `moves` start and end; None where its text does not say that it is scheduled, or
    where the program decides while it runs how often one of them runs."""
    if _SCHEDULED not in module.header.partition("\n")[0] or not all(move.exact for move in moves):
        return None
    reader = _Reader(module, moves)
    events: dict[str, tuple[Event, ...]] = {}
    waiting = [module.entry]
    while waiting:
        computation = waiting.pop()
        if computation.name not in events:
            made = events[computation.name] = tuple(_merged(reader.events(computation)))
            waiting += [module.computations[e.body] for e in made if isinstance(e, Loop)]
    return Schedule(module.entry.name, events)


class _Reader:
    def __init__(self, module: Module, moves: Sequence[Move]):
        self._module = module
        self._cycles = any(_ESTIMATED in c.text for c in module.computations.values())
        self._at: dict[str, dict[str, list[int]]] = {}
        for k, move in enumerate(moves):
            self._at.setdefault(move.computation, {}).setdefault(move.instruction.name, []).append(k)

    def events(self, computation: Computation) -> Iterator[Event]:
        here, begun = self._at.get(computation.name, {}), dict[str, str]()
        for i in computation.instructions.values():
            opcode = i.opcode
            if opcode in _NOTHING:
                continue
            if opcode in _RUN:
                times = trip_count(self._module, computation, i) if opcode == "while" else 1
                yield from (Loop(name, 1 if times is None else times) for name in called(i, *_RUN[opcode]))
            elif i.name in here:
                name = begun[i.name] = i.name if opcode.endswith("-start") else ""
                yield Start(tuple(here[i.name]), name)
            elif opcode.endswith(("-done", "-update")) and i.operands:
                name = begun[i.name] = begun.get(i.operands[0], "")
                if name and opcode.endswith("-done"):
                    yield Done(name)
            elif (
                inside := self._module.named(i.attribute("calls") if " calls=" in i.rest else None)
            ) is not None:
                yield from self._calls(computation, i, inside, begun)
            else:
                yield self._work(computation, i)

    def _calls(
        self, computation: Computation, i: Instruction, inside: Computation, begun: dict[str, str]
    ) -> Iterator[Event]:
        """A fusion, or `async-start`: it may hold a collective, or on TPU a piece of one."""
        moves = tuple(k for ks in self._at.get(inside.name, {}).values() for k in ks)
        starts, ends = _START in inside.text, _DONE in inside.text
        chain = _CHAIN.search(inside.text) if starts or ends else None
        name = f"chain {chain[1]}" if chain else ""
        if ends and not starts:
            yield Done(name)
        elif not moves:
            yield self._work(computation, i, inside)
        elif starts and ends:
            yield Start(moves, "", self._work(computation, i, inside))
        elif starts:
            yield Start(moves, name)
        elif i.opcode.endswith("-start"):
            begun[i.name] = i.name
            yield Start(moves, i.name)
        else:
            yield Start(moves)

    def _work(self, computation: Computation, i: Instruction, inside: Computation | None = None) -> Work:
        if self._cycles:
            cycles = _CYCLES.search(i.rest)
            return Work(cycles=float(cycles[1])) if cycles else Work()
        if i.opcode.endswith(("-start", "-done")):
            return Work()
        made = [computation.instructions[name] for name in i.operands if name in computation.instructions]
        moved = sum(shape.bytes for each in (i, *made) for shape in each.shapes)
        if inside is None:
            return Work(0.0, _flops(computation, i), float(moved))
        dots = (
            (d for d in inside.instructions.values() if d.opcode == "dot") if " dot(" in inside.text else ()
        )
        return Work(0.0, sum(_flops(inside, d) for d in dots), float(moved))


def _flops(computation: Computation, i: Instruction) -> float:
    """Of a product, written as `dot` or as a call of a library: two for each number of the result and each that is
    summed over. 0 of all else."""
    summed = _SUMMED.search(i.rest)
    left = computation.instructions.get(i.operands[0]) if summed and i.operands else None
    if summed is None or left is None or not left.shapes or not i.shapes:
        return 0.0
    dims = left.shapes[0].dims
    return 2.0 * prod(i.shapes[0].dims) * prod(dims[int(d)] for d in re.findall(r"\d+", summed[1]))


def _merged(events: Iterator[Event]) -> Iterator[Event]:
    """The same with cycles that follow cycles as one, and without what takes none. FLOPs and bytes stay apart: which of
    the two an instruction waits for is its own."""
    cycles = 0.0
    for event in events:
        if isinstance(event, Work) and not event.flops and not event.bytes:
            cycles += event.cycles
            continue
        if cycles:
            yield Work(cycles)
        cycles = 0.0
        yield event
    if cycles:
        yield Work(cycles)


def exposed(
    schedule: Schedule,
    moves: Sequence[Move],
    chip: Chip,
    wires: Mapping[str, Wire],
    own: float,
    share: float = 1.0,
) -> Exposed | None:
    """How a schedule's collectives run on a chip; None where the bandwidth of an axis is not known.

    Each mesh axis has links of its own, on which collectives go one after the other; one over several axes takes those
    of all. `own`: seconds that the step computes, which the program's work is scaled to, as XLA's estimates of cycles
    tell ratios inside a program and no times. `share`: of the published bandwidth that collectives get.
    """
    running = _Running(schedule, moves, chip, wires, share)
    if any(axes is None or not all(wires[a].bandwidth for a in axes) for axes in (m.axes for m in moves)):
        return None
    worked = running.worked(schedule.entry)
    running.scale = own / worked if worked else 0.0
    ran = running.ran(schedule.entry)
    every = range(len(moves))
    return Exposed(tuple(ran.exposed[k] for k in every), tuple(ran.takes[k] for k in every))


class _Running:
    """A schedule on a chip. `scale`: seconds of a unit of work."""

    def __init__(
        self, schedule: Schedule, moves: Sequence[Move], chip: Chip, wires: Mapping[str, Wire], share: float
    ):
        self._events, self._moves, self._wires, self._share = schedule.events, moves, wires, share
        self._peak, self._memory = chip.peak("bfloat16") or chip.peak("float32") or 1.0, chip.hbm_bandwidth
        self._worked: dict[str, float] = {}
        self._ran: dict[str, _Ran] = {}
        self.scale = 0.0

    def worked(self, name: str) -> float:
        """The work of one run of a computation."""
        if name not in self._worked:
            total = 0.0
            for event in self._events[name]:
                if isinstance(event, Loop):
                    total += event.times * self.worked(event.body)
                elif isinstance(event, Start):
                    total += self._units(event.beside)
                elif isinstance(event, Work):
                    total += self._units(event)
            self._worked[name] = total
        return self._worked[name]

    def ran(self, name: str) -> _Ran:
        """One run of a computation, its links free at the start."""
        if name not in self._ran:
            self._ran[name] = self._run(self._events[name])
        return self._ran[name]

    def _run(self, events: Sequence[Event]) -> _Ran:
        made, free, now = _Ran(), defaultdict[str, float](float), 0.0
        under_way: dict[str, tuple[tuple[int, ...], float]] = {}
        for event in events:
            if isinstance(event, Work):
                now += self.scale * self._units(event)
            elif isinstance(event, Loop):
                inner = self.ran(event.body)
                for axis, busy in inner.busy.items():
                    made.busy[axis] += event.times * busy
                    free[axis] = max(free[axis], now) + event.times * busy
                for k, waited in inner.exposed.items():
                    made.exposed[k] += event.times * waited
                for k, takes in inner.takes.items():
                    made.takes[k] += event.times * takes
                now += event.times * inner.seconds
            elif isinstance(event, Start):
                axes, takes = self._takes(event.moves)
                end = max(now, *(free[a] for a in axes)) + takes
                for k, part in self._parts(event.moves):
                    made.takes[k] += part * takes
                for axis in axes:
                    free[axis] = end
                    made.busy[axis] += takes
                if event.name:
                    under_way[event.name] = event.moves, end
                else:
                    now += self.scale * self._units(event.beside)
                    now = self._waited(made, event.moves, now, end)
            elif event.name in under_way:
                moves, end = under_way.pop(event.name)
                now = self._waited(made, moves, now, end)
        for moves, _ in under_way.values():  # they end in the next trip, which has to wait for the links
            now = self._waited(made, moves, now, max(made.busy.values()))
        made.seconds = now
        return made

    def _waited(self, made: _Ran, moves: Sequence[int], now: float, end: float) -> float:
        """The time at which `moves` are over, waited for from `now` on."""
        if end > now:
            for k, part in self._parts(moves):
                made.exposed[k] += (end - now) * part
        return max(now, end)

    def _parts(self, moves: Sequence[int]) -> Iterator[tuple[int, float]]:
        """The share of each move of one instruction, by its bytes."""
        sizes = [self._moves[k].bytes for k in moves]
        for k, size in zip(moves, sizes, strict=True):
            yield k, size / sum(sizes) if sum(sizes) else 1 / len(sizes)

    def _takes(self, moves: Sequence[int]) -> tuple[tuple[str, ...], float]:
        """The axes that collectives of one instruction go along, and their seconds: what they send at the bandwidth of
        the slowest of them, and at least the hops."""
        first = self._moves[moves[0]]
        wires = [self._wires[a].part(first.group_size, first.apart) for a in first.axes or ()]
        size = sum(wire_bytes(m.kind, m.group_size, m.bytes) for m in (self._moves[k] for k in moves))
        rate = self._share * min(w.bandwidth or 0.0 for w in wires)
        return first.axes or (), max(size / rate, latency(first.kind, wires))

    def _units(self, work: Work) -> float:
        return work.cycles or max(work.flops / self._peak, work.bytes / self._memory)
