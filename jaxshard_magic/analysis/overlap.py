"""Estimate the communication hidden behind compute, from the instruction order chosen by the compiler.

In a scheduled program the start and the end of an asynchronous collective are separate instructions; compute between
them hides communication. `read_schedule` reads the order once, into a few events per collective. `exposed_times`
simulates the events on a chip's links.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from ..hardware import Chip
from ..links import AxisLink, collective_latency
from ..plan import wire_bytes
from .collectives import HloCollective
from .hlo import BRANCHES, Computation, Instruction, Module, called_computations, trip_count

_SCHEDULED = "is_scheduled=true"
_ESTIMATED = '"estimated_cycles":"'
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CHAIN = re.compile(r'chain_id="(\d+)"')
_START, _DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
_SUMMED = re.compile(r'lhs_contracting_dim(?:s=|ensions":)[{\[]([\d,"]*)[}\]]')
# Opcodes that run other computations, and the attributes naming these.
_RUN = {"while": ("body",), "conditional": BRANCHES, "call": ("to_apply", "calls")}
_NOTHING = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota"))


class ComputeEvent(NamedTuple):
    """Compute between two other events, in cycles estimated by XLA; FLOPs and bytes in a program without such
    estimates."""

    cycles: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0


class CollectiveStart(NamedTuple):
    """Start of collectives.

    Attributes:
        moves: Positions in the list of collectives.
        name: Name for the matching end; empty for blocking collectives.
        beside: Compute done meanwhile in the same instruction.
    """

    moves: tuple[int, ...]
    name: str = ""
    beside: ComputeEvent = ComputeEvent()


class CollectiveEnd(NamedTuple):
    """End of the collectives started under `name`: the device waits for them."""

    name: str


class BodyRuns(NamedTuple):
    """Run of another computation, `times` times."""

    body: str
    times: int


Event = ComputeEvent | CollectiveStart | CollectiveEnd | BodyRuns


@dataclass(frozen=True)
class CollectiveSchedule:
    """Events of a scheduled program.

    Attributes:
        entry: Name of the entry computation.
        events: Events in order, for every computation that runs on its own, by name.
    """

    entry: str
    events: Mapping[str, tuple[Event, ...]]


@dataclass(frozen=True)
class Exposed:
    """Seconds of communication in a step, for each collective.

    Attributes:
        wait_seconds: Seconds a device waits.
        link_seconds: Seconds on the links.
    """

    wait_seconds: tuple[float, ...]
    link_seconds: tuple[float, ...]


@dataclass
class _Ran:
    """Times of one run of a computation.

    Attributes:
        seconds: Duration.
        takes: Seconds on the links, by collective.
        busy: Seconds the links of an axis are busy, by axis.
        exposed: Seconds the device waits, by collective.
    """

    seconds: float = 0.0
    takes: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    exposed: dict[int, float] = field(default_factory=lambda: defaultdict(float))


def read_schedule(module: Module, moves: Sequence[HloCollective]) -> CollectiveSchedule | None:
    """Return the order in which the collectives of a program start and end.

    Args:
        module: Parsed program.
        moves: Collectives of the program.

    Returns:
        None if the text is not marked as scheduled, or if a collective runs an unknown number of times.
    """
    if _SCHEDULED not in module.header.partition("\n")[0] or not all(move.exact for move in moves):
        return None
    reader = _Reader(module, moves)
    events: dict[str, tuple[Event, ...]] = {}
    waiting = [module.entry]
    while waiting:
        computation = waiting.pop()
        if computation.name not in events:
            made = events[computation.name] = tuple(_merged(reader.events(computation)))
            waiting += [module.computations[e.body] for e in made if isinstance(e, BodyRuns)]
    return CollectiveSchedule(module.entry.name, events)


class _Reader:
    def __init__(self, module: Module, moves: Sequence[HloCollective]):
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
                yield from (
                    BodyRuns(name, 1 if times is None else times) for name in called_computations(i, *_RUN[opcode])
                )
            elif i.name in here:
                name = begun[i.name] = i.name if opcode.endswith("-start") else ""
                yield CollectiveStart(tuple(here[i.name]), name)
            elif opcode.endswith(("-done", "-update")) and i.operands:
                name = begun[i.name] = begun.get(i.operands[0], "")
                if name and opcode.endswith("-done"):
                    yield CollectiveEnd(name)
            elif (
                inside := self._module.find_computation(i.attribute("calls") if " calls=" in i.rest else None)
            ) is not None:
                yield from self._calls(computation, i, inside, begun)
            else:
                yield self._work(computation, i)

    def _calls(
        self, computation: Computation, i: Instruction, inside: Computation, begun: dict[str, str]
    ) -> Iterator[Event]:
        """Yield the events of a fusion or an `async-start`: a collective, a piece of one (TPU), or compute."""
        # TPU splits a collective over fusions with the same chain id; a fusion may start it, end it, or both.
        moves = tuple(k for ks in self._at.get(inside.name, {}).values() for k in ks)
        starts, ends = _START in inside.text, _DONE in inside.text
        chain = _CHAIN.search(inside.text) if starts or ends else None
        name = f"chain {chain[1]}" if chain else ""
        if ends and not starts:
            yield CollectiveEnd(name)
        elif not moves:
            yield self._work(computation, i, inside)
        elif starts and ends:
            yield CollectiveStart(moves, "", self._work(computation, i, inside))
        elif starts:
            yield CollectiveStart(moves, name)
        elif i.opcode.endswith("-start"):
            begun[i.name] = i.name
            yield CollectiveStart(moves, i.name)
        else:
            yield CollectiveStart(moves)

    def _work(self, computation: Computation, i: Instruction, inside: Computation | None = None) -> ComputeEvent:
        if self._cycles:
            cycles = _CYCLES.search(i.rest)
            return ComputeEvent(cycles=float(cycles[1])) if cycles else ComputeEvent()
        if i.opcode.endswith(("-start", "-done")):
            return ComputeEvent()
        made = [computation.instructions[name] for name in i.operands if name in computation.instructions]
        moved = sum(shape.bytes for each in (i, *made) for shape in each.shapes)
        if inside is None:
            return ComputeEvent(0.0, _flops(computation, i), float(moved))
        dots = (d for d in inside.instructions.values() if d.opcode == "dot") if " dot(" in inside.text else ()
        return ComputeEvent(0.0, sum(_flops(inside, d) for d in dots), float(moved))


def _flops(computation: Computation, i: Instruction) -> float:
    """Return the FLOPs of a matrix product, written as `dot` or as a library call; 0 for other instructions.

    Two for each number of the result and each position of the contracted dimensions.
    """
    summed = _SUMMED.search(i.rest)
    left = computation.instructions.get(i.operands[0]) if summed and i.operands else None
    if summed is None or left is None or not left.shapes or not i.shapes:
        return 0.0
    dims = left.shapes[0].dims
    return 2.0 * prod(i.shapes[0].dims) * prod(dims[int(d)] for d in re.findall(r"\d+", summed[1]))


def _merged(events: Iterator[Event]) -> Iterator[Event]:
    """Merge successive cycles into one event, and drop events without work."""
    cycles = 0.0
    for event in events:
        # FLOPs and bytes stay separate: each instruction is bound by one of the two, and a sum would hide which.
        if isinstance(event, ComputeEvent) and not event.flops and not event.bytes:
            cycles += event.cycles
            continue
        if cycles:
            yield ComputeEvent(cycles)
        cycles = 0.0
        yield event
    if cycles:
        yield ComputeEvent(cycles)


def exposed_times(
    schedule: CollectiveSchedule,
    moves: Sequence[HloCollective],
    chip: Chip,
    wires: Mapping[str, AxisLink],
    own: float,
    share: float = 1.0,
) -> Exposed | None:
    """Simulate the collectives of a schedule on a chip.

    Each mesh axis has links of its own, used by one collective at a time. A collective over several axes uses the links
    of all of them.

    Args:
        schedule: Events of the program.
        moves: Collectives of the program.
        chip: Chip to simulate.
        wires: Links of each mesh axis.
        own: Seconds of compute in the step. The work of the program is scaled to this total.
        share: Share of the published bandwidth reached by collectives.

    Returns:
        None if the axes of a collective, or the bandwidth of an axis, are unknown.
    """
    running = _Simulation(schedule, moves, chip, wires, share)
    if any(axes is None or not all(wires[a].bandwidth for a in axes) for axes in (m.axes for m in moves)):
        return None
    worked = running.worked(schedule.entry)
    # XLA's cycle estimates are proportions inside a program, not absolute times.
    running.scale = own / worked if worked else 0.0
    ran = running.times_of(schedule.entry)
    every = range(len(moves))
    return Exposed(tuple(ran.exposed[k] for k in every), tuple(ran.takes[k] for k in every))


class _Simulation:
    """Simulation of a schedule on a chip; `scale` is the number of seconds for one unit of work."""

    def __init__(
        self,
        schedule: CollectiveSchedule,
        moves: Sequence[HloCollective],
        chip: Chip,
        wires: Mapping[str, AxisLink],
        share: float,
    ):
        self._events, self._moves, self._wires, self._share = schedule.events, moves, wires, share
        self._peak, self._memory = chip.peak("bfloat16") or chip.peak("float32") or 1.0, chip.hbm_bandwidth
        self._worked: dict[str, float] = {}
        self._ran: dict[str, _Ran] = {}
        self.scale = 0.0

    def worked(self, name: str) -> float:
        """Return the work in one run of a computation."""
        if name not in self._worked:
            total = 0.0
            for event in self._events[name]:
                if isinstance(event, BodyRuns):
                    total += event.times * self.worked(event.body)
                elif isinstance(event, CollectiveStart):
                    total += self._units(event.beside)
                elif isinstance(event, ComputeEvent):
                    total += self._units(event)
            self._worked[name] = total
        return self._worked[name]

    def times_of(self, name: str) -> _Ran:
        """Return the times of one run of a computation, with free links at the start."""
        if name not in self._ran:
            self._ran[name] = self._run(self._events[name])
        return self._ran[name]

    def _run(self, events: Sequence[Event]) -> _Ran:
        times, free, now = _Ran(), defaultdict[str, float](float), 0.0
        under_way: dict[str, tuple[tuple[int, ...], float]] = {}
        for event in events:
            if isinstance(event, ComputeEvent):
                now += self.scale * self._units(event)
            elif isinstance(event, BodyRuns):
                inner = self.times_of(event.body)
                for axis, busy in inner.busy.items():
                    times.busy[axis] += event.times * busy
                    free[axis] = max(free[axis], now) + event.times * busy
                for k, waited in inner.exposed.items():
                    times.exposed[k] += event.times * waited
                for k, takes in inner.takes.items():
                    times.takes[k] += event.times * takes
                now += event.times * inner.seconds
            elif isinstance(event, CollectiveStart):
                axes, takes = self._takes(event.moves)
                end = max(now, *(free[a] for a in axes)) + takes
                for k, part in self._parts(event.moves):
                    times.takes[k] += part * takes
                for axis in axes:
                    free[axis] = end
                    times.busy[axis] += takes
                if event.name:
                    under_way[event.name] = event.moves, end
                else:
                    now += self.scale * self._units(event.beside)
                    now = self._waited(times, event.moves, now, end)
            elif event.name in under_way:
                moves, end = under_way.pop(event.name)
                now = self._waited(times, moves, now, end)
        # Collectives without an end in a loop body end in the next trip, which has to wait for the links.
        for moves, _ in under_way.values():
            now = self._waited(times, moves, now, max(times.busy.values()))
        times.seconds = now
        return times

    def _waited(self, made: _Ran, moves: Sequence[int], now: float, end: float) -> float:
        """Return the time at which collectives have ended, adding the wait from `now` on to `made`."""
        if end > now:
            for k, part in self._parts(moves):
                made.exposed[k] += (end - now) * part
        return max(now, end)

    def _parts(self, moves: Sequence[int]) -> Iterator[tuple[int, float]]:
        """Yield the share of each collective of one instruction, by bytes."""
        sizes = [self._moves[k].bytes for k in moves]
        for k, size in zip(moves, sizes, strict=True):
            yield k, size / sum(sizes) if sum(sizes) else 1 / len(sizes)

    def _takes(self, moves: Sequence[int]) -> tuple[tuple[str, ...], float]:
        """Return the axes and seconds of one instruction's collectives.

        The seconds are the bytes at the bandwidth of the slowest axis, and at least the latency of the hops.
        """
        first = self._moves[moves[0]]
        wires = [self._wires[a].sub_ring(first.group_size, first.stride) for a in first.axes or ()]
        size = sum(wire_bytes(m.kind, m.group_size, m.bytes) for m in (self._moves[k] for k in moves))
        rate = self._share * min(w.bandwidth or 0.0 for w in wires)
        return first.axes or (), max(size / rate, collective_latency(first.kind, wires))

    def _units(self, work: ComputeEvent) -> float:
        return work.cycles or max(work.flops / self._peak, work.bytes / self._memory)
