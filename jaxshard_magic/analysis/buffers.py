"""Compute the bytes in use on a device while a step runs, and the buffers at the peak, from XLA's buffer assignment.

`liveness` gives the live range of every value in a scheduled program, through loops, calls and branches. The rules are
XLA's own (`HloDataflowAnalysis`, `HloLiveRange`): a value lives from its defining instruction to the last instruction
that reads it or passes it on.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.stages import Compiled

from ..targets import CompileResult
from . import buffer_assignment as xla
from . import protobuf
from .buffer_assignment import Allocation, BufferAssignment, BufferSlot, ValueDefinition
from .hlo import BRANCHES, Computation, Instruction, Module, Shape, called_computations, shapes, tuple_types

_MOST_POINTS = 400
# Opcodes that return the results of other computations, and the attributes naming these.
_RETURNING = {"while": ("body",), "conditional": BRANCHES}

Point = tuple[int, int]  # position in the program, and bytes in use from there on

_SAME = frozenset({"bitcast", "opt-barrier", "optimization-barrier", "add-dependency", "domain"})
_MOST_ELEMENTS = 1 << 20  # elements of a tuple; a larger index comes from damaged bytes
_NUMBER = re.compile(r"\d+")

Range = tuple[int, int]  # first and last position


class ResultValues(NamedTuple):
    """Values in the result of an instruction.

    Attributes:
        value: Id of the value; None for an undefined value.
        elements: Results of the elements of a tuple.
    """

    value: int | None = None
    elements: tuple["ResultValues", ...] = ()


_NOTHING = ResultValues()


@dataclass(frozen=True)
class Liveness:
    """Live ranges of a program.

    Attributes:
        order: Instructions in execution order; condition and body of a loop once, before the loop itself.
        ranges: First and last live position in `order`, by value id.
        roots: Result of each computation, by name.
        bodies: Body of a loop, by the names of the condition and of the body.
    """

    order: tuple[tuple[Computation, Instruction], ...]
    ranges: dict[int, Range]
    roots: dict[str, ResultValues]
    bodies: dict[str, str]


def liveness(module: Module, definitions: Mapping[int, ValueDefinition]) -> Liveness:
    """Follow values through a scheduled program and return their live ranges.

    An instruction without a definition passes values on: elements of tuples, constants of a loop, the operand of a
    bitcast.

    Args:
        module: Parsed program.
        definitions: Defining instruction, by value id.

    Raises:
        ValueError: The program calls a missing computation, or a tuple index is too large.
    """
    walk = _Walk(module, definitions)
    walk.enter(module.entry, ())
    ranges = {value: (start, walk.ends.get(value, start)) for value, start in walk.starts.items()}
    return Liveness(tuple(walk.order), ranges, walk.roots, walk.bodies)


def values(result: ResultValues) -> Iterator[int]:
    """Yield the value ids of a result and of its elements."""
    if result.value is not None:
        yield result.value
    for element in result.elements:
        yield from values(element)


class _Walk:
    """State of one walk through a program in execution order."""

    def __init__(self, module: Module, definitions: Mapping[int, ValueDefinition]):
        self.module = module
        self.made: dict[str, dict[str, list[tuple[tuple[int, ...], int]]]] = {}
        for value, (computation, instruction, index) in definitions.items():
            inside = self.made.setdefault(computation, {})
            inside.setdefault(instruction, []).append((index, value))
        self.order: list[tuple[Computation, Instruction]] = []
        self.starts: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.roots: dict[str, ResultValues] = {}
        self.bodies: dict[str, str] = {}
        self.parameters: dict[str, int] = {}  # position of the last parameter, by computation

    def enter(self, computation: Computation, arguments: Sequence[ResultValues]) -> ResultValues:
        """Walk through a computation once and return its result."""
        if computation.name in self.roots:
            return self.roots[computation.name]
        made_here = self.made.get(computation.name, {})
        results: dict[str, ResultValues] = {}
        root = _NOTHING
        for name, i in computation.instructions.items():
            operands = [results.get(operand, _NOTHING) for operand in i.operands]
            result = self.forwarded_values(i, operands, arguments)
            made = made_here.get(name)
            if made:
                result = _with_definitions(result, made)
                for _, value in made:
                    self.starts[value] = len(self.order)
            results[name] = result
            self.step(computation, i, operands, result)
            root = result if i.root else root
        self.extend(root, len(self.order))
        self.roots[computation.name] = root
        return root

    def step(
        self, computation: Computation, i: Instruction, operands: list[ResultValues], result: ResultValues
    ) -> None:
        """Run one instruction: its result and its operands are live at this position."""
        now, opcode = len(self.order), i.opcode
        self.order.append((computation, i))
        if opcode == "parameter":
            self.parameters[computation.name] = now
        self.extend(result, now)
        # The operands are elements of the result, extended above.
        if opcode == "tuple":
            return
        if opcode in ("while", "call"):
            # Operands live until the parameters of the body: from there on the state of the loop, or the readers of the
            # parameter, keep them alive.
            now = min(self.parameters.get(name, now) for name in called_computations(i, "body", "to_apply"))
        # These read the tuple itself, not its elements.
        ends, whole = self.ends, opcode not in ("get-tuple-element", "copy")
        for operand in operands:
            value, elements = operand
            if elements and whole:
                self.extend(operand, now)
            elif value is not None and ends.get(value, -1) < now:
                ends[value] = now

    def named(self, name: str) -> Computation:
        if name not in self.module.computations:
            raise ValueError(f"the program calls computation {name!r}, which it does not have")
        return self.module.computations[name]

    def extend(self, result: ResultValues, until: int) -> None:
        """Extend the live ranges of a result and its elements to at least `until`."""
        value, elements = result
        if value is not None and self.ends.get(value, -1) < until:
            self.ends[value] = until
        for element in elements:
            self.extend(element, until)

    def forwarded_values(
        self, i: Instruction, operands: list[ResultValues], arguments: Sequence[ResultValues]
    ) -> ResultValues:
        """Return the values of other instructions in an instruction's result; walk through called computations."""
        match i.opcode:
            case "fusion":  # the most frequent opcode, so tested first
                return _NOTHING
            case "parameter":
                number = _NUMBER.match(i.rest)
                position = int(number[0]) if number else 0
                return arguments[position] if position < len(arguments) else _NOTHING
            case "tuple":
                return ResultValues(None, tuple(operands))
            case "get-tuple-element":
                return _element(operands[0], int(i.attribute("index") or 0))
            case "while":
                condition, body = called_computations(i, "condition", "body")
                self.bodies |= {condition: body, body: body}
                for name in (condition, body):
                    self.enter(self.named(name), operands)
                return operands[0]
            case "call" | "async-start":
                roots = [self.enter(self.named(name), operands) for name in called_computations(i, "to_apply", "calls")]
                return roots[0] if i.opcode == "call" else _NOTHING
            case "conditional":
                names = called_computations(i, *BRANCHES)
                branches = zip(names, operands[1:], strict=True)
                roots = [self.enter(self.named(name), (operand,)) for name, operand in branches]
                return roots[0]
            case opcode if opcode in _SAME:
                return operands[0]
            case opcode if opcode.endswith("-done"):
                whole = operands[0]
                # `copy-start` returns (result, operand, context), other starts (operand, result).
                return _element(whole, 0 if opcode == "copy-done" else 1) if whole.elements else whole
        return _NOTHING


def _with_definitions(passed: ResultValues, made: Sequence[tuple[tuple[int, ...], int]]) -> ResultValues:
    """Return a result with the values defined by its instruction inserted at their tuple indices."""
    if len(made) == 1 and not made[0][0]:
        return ResultValues(made[0][1], passed.elements)
    value = passed.value
    inside: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for index, identity in made:
        if index:
            inside.setdefault(index[0], []).append((index[1:], identity))
        else:
            value = identity
    if not inside:
        return ResultValues(value, passed.elements)
    elements = list(passed.elements)
    last = max(inside)
    if last >= _MOST_ELEMENTS:
        raise ValueError(f"element {last} of a tuple; they have at most {_MOST_ELEMENTS}")
    elements += [_NOTHING] * (last + 1 - len(elements))
    for position, deeper in inside.items():
        elements[position] = _with_definitions(elements[position], deeper)
    return ResultValues(value, tuple(elements))


def _element(whole: ResultValues, index: int) -> ResultValues:
    return whole.elements[index] if index < len(whole.elements) else _NOTHING


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
