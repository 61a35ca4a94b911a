"""What fills a device's memory while a step runs, and at its peak, from XLA's own buffer assignment."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.stages import Compiled

from ..targets import Built
from . import assignment as xla
from . import wire
from .assignment import Allocation, Assignment, Definition, Slot
from .hlo import BRANCHES, Computation, Instruction, Module, Shape, called, elements, shapes
from .liveness import Liveness, Range, Result, liveness, values

_MOST_POINTS = 400
_RETURNING = {"while": ("body",), "conditional": BRANCHES}  # attributes: whose results the opcode returns

Point = tuple[int, int]  # position in the program, bytes from there on


@dataclass(frozen=True)
class LiveBuffer:
    """One piece of memory that is in use at the peak: `bytes` of it, on one device.

    `kind` is "argument" (also where an output takes it over), "output", "constant" or "temporary". `instruction` of
    `computation` makes what lies there, as element `index` of its result; for the state of a loop it is what the
    body puts there.
    """

    bytes: int
    kind: str
    instruction: Instruction
    computation: str
    index: tuple[int, ...] = ()

    @property
    def shape(self) -> Shape | None:
        """The array that lies there; None for a tuple's table of addresses."""
        result = self.instruction.result
        for position in self.index:
            result = elements(result)[position]
        return None if result.startswith("(") else shapes(result)[0]


@dataclass(frozen=True)
class LiveBytes:
    """Bytes in use on one device through a step, in the compiler's order of instructions, `order`.

    `bytes[i]` holds from position `at[i]` of `order` until `at[i + 1]`; the largest is `bytes[peak]`. Arguments,
    outputs and constants count from the first instruction to the last, temporaries from the one that makes them to
    the last that reads them; a loop's body stands in `order` once. `buffers` are those in use at the peak, largest
    first, and add up to `bytes[peak]`. `reserved` is the memory that XLA lays the temporaries out in,
    `temp_size_in_bytes` of its memory analysis: what they leave of it at the peak are the gaps between them.
    """

    order: tuple[tuple[Computation, Instruction], ...]
    at: tuple[int, ...]
    bytes: tuple[int, ...]
    peak: int
    buffers: tuple[LiveBuffer, ...]
    reserved: int

    def held(self, kind: str) -> int:
        """Bytes at the peak of the buffers of one kind."""
        return sum(buffer.bytes for buffer in self.buffers if buffer.kind == kind)


def serialized(compiled: Compiled | Built, stats: Any = None) -> tuple[bytes, bytes] | None:
    """The buffer assignment of a compiled step and the program it speaks of, as XLA writes them.

    `stats` is its memory analysis where that was asked for already: XLA takes its time. None where the compiler does
    not hand them out, as TPU's does not.
    """
    if isinstance(compiled, Built):
        parts = dict(wire.fields(compiled.proto))  # HloProto: 1 hlo_module, 3 buffer_assignment
        return (wire.message(parts[3]), wire.message(parts[1])) if {1, 3} <= parts.keys() else None
    assignment = getattr(stats or compiled.memory_analysis(), "serialized_buffer_assignment_proto", b"")
    executable = compiled.runtime_executable()
    if not assignment or executable is None:
        return None
    return assignment, executable.hlo_modules()[0].as_serialized_hlo_module_proto()


def live_bytes(assignment: bytes, program: bytes, module: Module, host_bytes: int = 0) -> LiveBytes | None:
    """The bytes in use through a step and what they are at the peak; None where the compiler does not tell.

    `assignment` and `program` are `serialized`, `module` is the text of the same program. Values that share memory,
    outputs in a donated argument's, an elementwise operation in its operand's, count once. `host_bytes`: those of
    arguments and outputs on the host in the compiler's figures; they are not in use on the device.
    """
    try:
        read = xla.read(assignment, program, module)
        return _live_bytes(read, module, host_bytes) if read.allocations else None
    except ValueError:
        return None


def _live_bytes(assignment: Assignment, module: Module, host_bytes: int) -> LiveBytes:
    live = liveness(module, assignment.definitions)
    ranges = _traced(assignment, live) if assignment.traces else live.ranges
    temporary = [a for a in assignment.allocations if a.kind == "temporary"]
    kept = [a for a in assignment.allocations if a.kind not in ("temporary", "local") and a.values]
    passing = {value: ranges[value] for a in temporary for value in a.values if value in ranges}
    series = _series(passing, assignment.slots, sum(a.size for a in kept) - host_bytes, len(live.order))
    peak = max(series, key=lambda point: point[1])
    points = _thinned(series, _MOST_POINTS)

    find = _Makers(assignment, live, module)
    buffers = [find.buffer(a.size, a.kind, find.keeper(a)) for a in kept]
    for slot, value in _live_at(peak[0], passing, assignment.slots).items():
        buffers.append(find.buffer(slot.size, "temporary", value))
    return LiveBytes(
        live.order,
        tuple(at for at, _ in points),
        tuple(held for _, held in points),
        points.index(peak),
        tuple(sorted(buffers, key=lambda b: -b.bytes)),
        sum(a.size for a in temporary),
    )


def _series(ranges: dict[int, Range], slots: dict[int, Slot], always: int, length: int) -> list[Point]:
    """Bytes in use from each position on at which they change; a slot counts once, however many values are in it."""
    taken: dict[Slot, list[Range]] = {}
    for value, live in ranges.items():
        taken.setdefault(slots[value], []).append(live)
    changes = Counter({0: always})
    for slot, lives in taken.items():
        until = -1
        for start, end in sorted(lives):
            if end > until:
                changes[max(start, until + 1)] += slot.size
                changes[end + 1] -= slot.size
                until = end
    series: list[Point] = []
    held = 0
    for position in sorted(p for p in changes if p < length):
        held += changes[position]
        if not series or series[-1][1] != held:
            series.append((position, held))
    return series


def _live_at(position: int, ranges: dict[int, Range], slots: dict[int, Slot]) -> dict[Slot, int]:
    """The slots in use at a position, each with the value that came into it last."""
    live = [(start, value) for value, (start, end) in ranges.items() if start <= position <= end]
    return {slots[value]: value for _, value in sorted(live)}


def _traced(assignment: Assignment, live: Liveness) -> dict[int, Range]:
    """The ranges of all values, from XLA's traces where they tell.

    A trace does not say when a value is freed, only before which next one is made: until then it counts.
    """
    ranges = dict(live.ranges)
    for trace in assignment.traces:
        freed: list[int] = []
        for kind, value in trace:
            if value not in live.ranges:
                continue
            if kind == xla.FREE:
                freed.append(value)
                continue
            start = live.ranges[value][0]
            _end(freed, start - 1, ranges)
            ranges[value] = start, len(live.order) - 1
            freed.clear()
        _end(freed, len(live.order) - 1, ranges)
    return ranges


def _end(freed: Iterable[int], position: int, ranges: dict[int, Range]) -> None:
    for value in freed:
        start, _ = ranges[value]
        ranges[value] = start, max(start, position)


def _thinned(series: Sequence[Point], most: int) -> list[Point]:
    """At most `most` points, each the largest of those that it stands for; the first position stays."""
    if len(series) <= most:
        return list(series)
    width = -(-(len(series) - 1) // (most - 1))
    runs = (series[i : i + width] for i in range(1, len(series), width))
    return [series[0], *(max(run, key=lambda point: point[1]) for run in runs)]


class _Makers:
    """Which instruction makes what lies in a piece of memory."""

    def __init__(self, assignment: Assignment, live: Liveness, module: Module):
        self.definitions = assignment.definitions
        self.live = live
        self.module = module
        self.lasting = set(values(live.roots[module.entry.name]))

    def buffer(self, size: int, kind: str, value: int) -> LiveBuffer:
        made = self.maker(value)
        return LiveBuffer(size, kind, self.instruction(made), made.computation, made.index)

    def keeper(self, allocation: Allocation) -> int:
        """The value to name memory by that is kept throughout: an argument, or what leaves the program."""
        for value in allocation.values:
            argument = self.instruction(self.definitions[value]).opcode == "parameter"
            if argument if allocation.kind == "argument" else value in self.lasting:
                return value
        return allocation.values[0]

    def maker(self, value: int) -> Definition:
        """Where a value is computed: behind the state of loops and the results of branches."""
        first, seen = self.definitions[value], set[int]()
        while value not in seen:
            seen.add(value)
            made = self.definitions[value]
            inside = self.computes(made)
            result = self.live.roots.get(inside, Result()) if inside else Result()
            for position in made.index:
                result = result.elements[position] if position < len(result.elements) else Result()
            if result.value is None:
                return made
            value = result.value
        return first

    def computes(self, made: Definition) -> str | None:
        """The computation whose result a value stands for, if it does for one."""
        instruction = self.instruction(made)
        if instruction.opcode == "parameter":
            return self.live.bodies.get(made.computation)
        if instruction.opcode not in _RETURNING:
            return None
        return next(iter(called(instruction, *_RETURNING[instruction.opcode])), None)

    def instruction(self, made: Definition) -> Instruction:
        computation = self.module.computations.get(made.computation)
        if computation is None or made.instruction not in computation.instructions:
            raise ValueError(f"the program has no instruction {made.instruction!r} in {made.computation!r}")
        return computation.instructions[made.instruction]
