"""Compute the bytes in use on a device while a step runs, and the buffers at the peak, from XLA's buffer assignment."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.stages import Compiled

from ..targets import CompileResult
from . import buffer_assignment as xla
from . import protobuf
from .buffer_assignment import Allocation, BufferAssignment, BufferSlot, ValueDefinition
from .hlo import BRANCHES, Computation, Instruction, Module, Shape, called_computations, shapes, tuple_types
from .liveness import Liveness, Range, ResultValues, liveness, values

_MOST_POINTS = 400
# Opcodes that return the results of other computations, and the attributes naming these.
_RETURNING = {"while": ("body",), "conditional": BRANCHES}

Point = tuple[int, int]  # position in the program, and bytes in use from there on


@dataclass(frozen=True)
class LiveBuffer:
    """Piece of device memory in use at the peak.

    Attributes:
        bytes: Size in bytes on one device.
        kind: "argument" (also for an output reusing an argument's memory), "output", "constant" or "temporary".
        instruction: Instruction computing the contents; for the state of a loop, the instruction in the loop's body.
        computation: Name of the computation with the instruction.
        index: Index of the contents in the result tuple; `()` for the whole result.
    """

    bytes: int
    kind: str
    instruction: Instruction
    computation: str
    index: tuple[int, ...] = ()

    @property
    def shape(self) -> Shape | None:
        """Array in the buffer; None for a tuple's table of addresses."""
        result = self.instruction.result
        for position in self.index:
            result = tuple_types(result)[position]
        return None if result.startswith("(") else shapes(result)[0]


@dataclass(frozen=True)
class LiveBytes:
    """Bytes in use on one device through a step.

    Arguments, outputs and constants count from the first instruction to the last. Temporaries count from their defining
    instruction to the last reader.

    Attributes:
        order: Instructions in the order of the compiler, each loop body once.
        positions: Positions in `order` at which the number of bytes changes.
        bytes: `bytes[i]` bytes are in use from `positions[i]` until `positions[i + 1]`.
        peak: Index of the largest entry in `bytes`.
        buffers: Buffers in use at the peak, largest first; their sizes add up to `bytes[peak]`.
        reserved: Bytes reserved by XLA for temporaries, `temp_size_in_bytes` of the memory analysis. The difference
            from the temporaries at the peak is fragmentation.
    """

    order: tuple[tuple[Computation, Instruction], ...]
    positions: tuple[int, ...]
    bytes: tuple[int, ...]
    peak: int
    buffers: tuple[LiveBuffer, ...]
    reserved: int

    def bytes_at_peak(self, kind: str) -> int:
        """Return the bytes at the peak in buffers of one kind."""
        return sum(buffer.bytes for buffer in self.buffers if buffer.kind == kind)


def serialized_assignment(compiled: Compiled | CompileResult, stats: Any = None) -> tuple[bytes, bytes] | None:
    """Return the buffer assignment and the `HloModuleProto` of a compiled step, both serialized by XLA.

    Args:
        compiled: Step compiled for attached devices, or for a target.
        stats: Memory analysis of `compiled` if already computed; XLA takes time for an analysis.

    Returns:
        None if the compiler does not export buffer assignments, as on TPU.
    """
    if isinstance(compiled, CompileResult):
        parts = dict(protobuf.fields(compiled.proto))  # HloProto: 1 hlo_module, 3 buffer_assignment
        return (protobuf.message(parts[3]), protobuf.message(parts[1])) if {1, 3} <= parts.keys() else None
    assignment = getattr(stats or compiled.memory_analysis(), "serialized_buffer_assignment_proto", b"")
    executable = compiled.runtime_executable()
    if not assignment or executable is None:
        return None
    return assignment, executable.hlo_modules()[0].as_serialized_hlo_module_proto()


def live_bytes(assignment: bytes, program: bytes, module: Module, host_bytes: int = 0) -> LiveBytes | None:
    """Compute the bytes in use through a step, and the buffers at the peak.

    Values sharing memory count once: an output in a donated argument's memory, an elementwise result in an operand's.

    Args:
        assignment: Serialized buffer assignment.
        program: Serialized `HloModuleProto`.
        module: Parsed text of the same program.
        host_bytes: Bytes of arguments and outputs on the host, counted by the compiler and not in use on the device.

    Returns:
        None without a readable buffer assignment, or with an empty one.
    """
    try:
        read = xla.parse_assignment(assignment, program, module)
        return _live_bytes(read, module, host_bytes) if read.allocations else None
    except ValueError:
        return None


def _live_bytes(assignment: BufferAssignment, module: Module, host_bytes: int) -> LiveBytes:
    live = liveness(module, assignment.definitions)
    ranges = _ranges_from_traces(assignment, live) if assignment.traces else live.ranges
    temporary = [a for a in assignment.allocations if a.kind == "temporary"]
    # Local memory, such as a TPU's VMEM, is not part of the device's main memory.
    permanent = [a for a in assignment.allocations if a.kind not in ("temporary", "local") and a.values]
    temporary_ranges = {value: ranges[value] for a in temporary for value in a.values if value in ranges}
    series = _bytes_over_time(
        temporary_ranges, assignment.slots, sum(a.size for a in permanent) - host_bytes, len(live.order)
    )
    peak = max(series, key=lambda point: point[1])
    points = _thinned(series, _MOST_POINTS)

    finder = _DefinitionFinder(assignment, live, module)
    buffers = [finder.buffer(a.size, a.kind, finder.naming_value(a)) for a in permanent]
    for slot, value in _live_at(peak[0], temporary_ranges, assignment.slots).items():
        buffers.append(finder.buffer(slot.size, "temporary", value))
    return LiveBytes(
        live.order,
        tuple(at for at, _ in points),
        tuple(held for _, held in points),
        points.index(peak),
        tuple(sorted(buffers, key=lambda b: -b.bytes)),
        sum(a.size for a in temporary),
    )


def _bytes_over_time(ranges: dict[int, Range], slots: dict[int, BufferSlot], always: int, length: int) -> list[Point]:
    """Return the bytes in use as (position, bytes), one point per change.

    A slot counts once, however many values share it. `always` bytes are in use throughout.
    """
    ranges_by_slot: dict[BufferSlot, list[Range]] = {}
    for value, live in ranges.items():
        ranges_by_slot.setdefault(slots[value], []).append(live)
    changes = Counter({0: always})
    for slot, lives in ranges_by_slot.items():
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


def _live_at(position: int, ranges: dict[int, Range], slots: dict[int, BufferSlot]) -> dict[BufferSlot, int]:
    """Return the slots in use at a position, each with the value written last."""
    live = [(start, value) for value, (start, end) in ranges.items() if start <= position <= end]
    return {slots[value]: value for _, value in sorted(live)}


def _ranges_from_traces(assignment: BufferAssignment, live: Liveness) -> dict[int, Range]:
    """Return the live ranges of all values, corrected by XLA's heap traces where available."""
    ranges = dict(live.ranges)
    for trace in assignment.traces:
        freed: list[int] = []
        # A trace gives no position for a free event, only the next allocation after it. The value counts until then.
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
    """Return at most `most` points, each the largest of a run of points; the first point stays."""
    if len(series) <= most:
        return list(series)
    width = -(-(len(series) - 1) // (most - 1))
    runs = (series[i : i + width] for i in range(1, len(series), width))
    return [series[0], *(max(run, key=lambda point: point[1]) for run in runs)]


class _DefinitionFinder:
    """Finder of the instructions that compute the contents of buffers."""

    def __init__(self, assignment: BufferAssignment, live: Liveness, module: Module):
        self.definitions = assignment.definitions
        self.live = live
        self.module = module
        self.lasting = set(values(live.roots[module.entry.name]))

    def buffer(self, size: int, kind: str, value: int) -> LiveBuffer:
        made = self.definition_of(value)
        return LiveBuffer(size, kind, self.instruction(made), made.computation, made.index)

    def naming_value(self, allocation: Allocation) -> int:
        """Return the value naming an allocation in use throughout: an argument, or an output of the program."""
        for value in allocation.values:
            argument = self.instruction(self.definitions[value]).opcode == "parameter"
            if argument if allocation.kind == "argument" else value in self.lasting:
                return value
        return allocation.values[0]

    def definition_of(self, value: int) -> ValueDefinition:
        """Return the definition of a value, followed into loop bodies and branches."""
        first, seen = self.definitions[value], set[int]()
        # A value that a loop passes on unchanged leads back to itself.
        while value not in seen:
            seen.add(value)
            made = self.definitions[value]
            inside = self.computes(made)
            result = self.live.roots.get(inside, ResultValues()) if inside else ResultValues()
            for position in made.index:
                result = result.elements[position] if position < len(result.elements) else ResultValues()
            if result.value is None:
                return made
            value = result.value
        return first

    def computes(self, made: ValueDefinition) -> str | None:
        """Return the computation with a value's contents as result; None if the defining instruction computes them."""
        instruction = self.instruction(made)
        if instruction.opcode == "parameter":
            return self.live.bodies.get(made.computation)
        if instruction.opcode not in _RETURNING:
            return None
        return next(iter(called_computations(instruction, *_RETURNING[instruction.opcode])), None)

    def instruction(self, made: ValueDefinition) -> Instruction:
        computation = self.module.computations.get(made.computation)
        if computation is None or made.instruction not in computation.instructions:
            raise ValueError(f"the program has no instruction {made.instruction!r} in {made.computation!r}")
        return computation.instructions[made.instruction]
