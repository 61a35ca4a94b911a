"""XLA's buffer assignment: which array of a program lies where in memory.

Message and field numbers are those of `BufferAssignmentProto` and `HloModuleProto` in XLA's `xla/service/hlo.proto`.
"""

from dataclasses import dataclass

from . import wire
from .hlo import Module

ALLOC, FREE = 0, 1  # HeapSimulatorTrace.Event.Kind; 2 makes a value in the memory of another


@dataclass(frozen=True)
class Definition:
    """Where a value is made: element `index` of what `instruction` of `computation` returns, `()` for all of it."""

    computation: str
    instruction: str
    index: tuple[int, ...] = ()


@dataclass(frozen=True)
class Slot:
    """`size` bytes at `offset` of one allocation; values that lie in the same slot share its memory."""

    allocation: int
    offset: int
    size: int


@dataclass(frozen=True)
class Allocation:
    """One piece of memory, `size` bytes; `values` are the ids of those that lie in it at some time.

    `kind` is "argument" (also where an output takes it over), "output", "constant", "temporary", or "local": on the
    stack of a thread that evaluates a reduction's function.
    """

    index: int
    size: int
    kind: str
    values: tuple[int, ...]


@dataclass(frozen=True)
class Assignment:
    """`definitions` and `slots` are by value id; every value that has a slot has a definition.

    `traces` are XLA's makings and freeings of values in the order of the program, as (kind, value); empty where the
    compiler dropped them, as CPU's does.
    """

    allocations: tuple[Allocation, ...]
    definitions: dict[int, Definition]
    slots: dict[int, Slot]
    traces: tuple[tuple[tuple[int, int], ...], ...]


def read(assignment: bytes, program: bytes, module: Module) -> Assignment:
    """Read a serialized `BufferAssignmentProto`.

    `program` is the `HloModuleProto` that its instruction ids refer to, `module` the text of the same program.
    Raises ValueError for bytes that are neither, and where they speak of different programs.
    """
    parts: dict[int, list[bytes]] = {}
    for number, value in wire.fields(assignment):
        parts.setdefault(number, []).append(wire.message(value))
    names = _names(program, module)
    definitions: dict[int, Definition] = {}
    for value, instruction, index in (_made(data) for data in parts.get(1, ())):
        if instruction not in names:
            raise ValueError(f"the buffer assignment names instruction {instruction}, which is not scheduled")
        definitions[value] = Definition(*names[instruction], index)
    slots: dict[int, Slot] = {}
    allocations = tuple(_allocation(data, slots) for data in parts.get(3, ()))
    if not slots.keys() <= definitions.keys():
        raise ValueError("the buffer assignment places a value that no instruction makes")
    return Assignment(allocations, definitions, slots, tuple(_trace(data) for data in parts.get(4, ())))


def _made(data: bytes) -> tuple[int, int, tuple[int, ...]]:
    """Of one logical buffer: its id, the id of its instruction and the element of the result."""
    buffer = wire.record(data)
    instruction, index = 0, ()
    for number, value in wire.fields(wire.message(buffer.get(3, b""))):
        if number == 4:
            instruction = wire.integer(value)
        elif number == 3:
            index += tuple(wire.integers(value))
    return wire.integer(buffer.get(1, 0)), instruction, index


def _allocation(data: bytes, slots: dict[int, Slot]) -> Allocation:
    """One allocation; the slots of its values are added to `slots`."""
    assigned = []
    parts: dict[int, wire.Value] = {}
    for number, value in wire.fields(data):
        if number == 9:
            assigned.append(wire.record(wire.message(value)))
        else:
            parts[number] = value
    index = wire.integer(parts.get(1, 0))
    values = []
    for at in assigned:
        value, offset, size = (wire.integer(at.get(number, 0)) for number in (1, 2, 3))
        slots[value] = Slot(index, offset, size)
        values.append(value)
    return Allocation(index, wire.integer(parts.get(2, 0)), _kind(parts), tuple(values))


def _kind(parts: dict[int, wire.Value]) -> str:
    kinds = {3: "local", 5: "argument", 12: "constant", 7: "output"}
    return next((kind for number, kind in kinds.items() if parts.get(number)), "temporary")


def _trace(data: bytes) -> tuple[tuple[int, int], ...]:
    events = (wire.record(wire.message(value)) for number, value in wire.fields(data) if number == 1)
    return tuple((wire.integer(e.get(1, ALLOC)), wire.integer(e.get(2, 0))) for e in events)


def _names(program: bytes, module: Module) -> dict[int, tuple[str, str]]:
    """The names of computation and instruction by instruction id, of what is scheduled.

    The schedule lists the ids in the order in which the text has the instructions: the thousands of messages that
    describe them need not be read.
    """
    computations: dict[int, str] = {}
    schedule = b""
    for number, value in wire.fields(program):
        if number == 3:
            once = wire.record(wire.message(value))
            computations[wire.integer(once.get(5, 0))] = wire.message(once.get(1, b"")).decode()
        elif number == 7:
            schedule = wire.message(value)
    found: dict[int, tuple[str, str]] = {}
    for _, entry in wire.fields(schedule):
        at = wire.record(wire.message(entry))
        name = computations.get(wire.integer(at.get(1, 0)), "")
        ids = [i for _, part in wire.fields(wire.message(at.get(2, b""))) for i in wire.integers(part)]
        instructions = module.computations[name].instructions if name in module.computations else {}
        if len(ids) != len(instructions):
            raise ValueError(
                f"the schedule runs {len(ids)} instructions of {name!r}, which has {len(instructions)}"
            )
        found |= {i: (name, instruction) for i, instruction in zip(ids, instructions, strict=True)}
    return found
