"""Parse XLA's buffer assignment: allocation, offset and size of each array of a compiled program.

Message and field numbers follow `BufferAssignmentProto` and `HloModuleProto` in XLA's `xla/service/hlo.proto`.
"""

from collections.abc import Collection, Sequence
from itertools import compress, islice
from typing import NamedTuple

from . import protobuf
from .hlo import Module

ALLOC, FREE = 0, 1  # `HeapSimulatorTrace.Event.Kind`; kind 2 puts a value into the memory of another
# Name of the computation run by an asynchronous operation. HLO text shows such a pair as `all-gather-start`.
_INLINED = "async_computation"
# Kind of an allocation, by the number of the field that is set; 8 is the color, a memory space.
_KINDS = {8: "local", 5: "argument", 12: "constant", 7: "output"}


class ValueDefinition(NamedTuple):
    """Instruction defining a value.

    Attributes:
        computation: Name of the computation.
        instruction: Name of the instruction.
        index: Index of the value in the result tuple; `()` for the whole result.
    """

    computation: str
    instruction: str
    index: tuple[int, ...] = ()


class BufferSlot(NamedTuple):
    """Byte range of one allocation. Values with the same slot share memory.

    Attributes:
        allocation: Index of the allocation.
        offset: Start in bytes.
        size: Size in bytes.
    """

    allocation: int
    offset: int
    size: int


class Allocation(NamedTuple):
    """Contiguous piece of device memory.

    Attributes:
        index: Number of the allocation.
        size: Size in bytes.
        kind: "argument" (also for an output reusing an argument's memory), "output", "constant", "temporary", or
            "local" for memory other than the device's main memory, such as a TPU's VMEM.
        values: Ids of all values placed in the allocation at any time.
    """

    index: int
    size: int
    kind: str
    values: tuple[int, ...]


class BufferAssignment(NamedTuple):
    """Memory of all values in a program.

    Values on a thread's stack, used to evaluate the function of a reduction, are left out.

    Attributes:
        allocations: Allocations of the program.
        definitions: Defining instruction, by value id.
        slots: Byte range, by value id.
        traces: Allocation and free events in program order as (kind, value id); empty if the compiler drops them, as
            the CPU compiler does.
    """

    allocations: tuple[Allocation, ...]
    definitions: dict[int, ValueDefinition]
    slots: dict[int, BufferSlot]
    traces: tuple[tuple[tuple[int, int], ...], ...]


def parse_assignment(assignment: bytes, program: bytes, module: Module) -> BufferAssignment:
    """Parse a serialized `BufferAssignmentProto`.

    Args:
        assignment: Serialized buffer assignment.
        program: Serialized `HloModuleProto` with the instruction ids used in the assignment.
        module: Parsed text of the same program.

    Raises:
        ValueError: The bytes are neither message, or belong to different programs.
    """
    # `BufferAssignmentProto`: 1 logical buffers, 3 allocations, 4 heap simulator traces.
    fields = protobuf.fields(assignment)
    allocations, slots = _allocations(protobuf.messages(fields, 3))
    instruction_ids = _definitions(protobuf.messages(fields, 1), slots)
    if slots.keys() != instruction_ids.keys():
        raise ValueError("the buffer assignment places a value that no instruction makes")
    names, inlined = _names(program, module, {instruction for instruction, _ in instruction_ids.values()})
    definitions = {
        value: ValueDefinition(*names[instruction], index)
        for value, (instruction, index) in instruction_ids.items()
        if instruction not in inlined
    }
    if len(definitions) < len(instruction_ids):
        slots = {value: slot for value, slot in slots.items() if value in definitions}
        allocations = tuple(a._replace(values=tuple(v for v in a.values if v in slots)) for a in allocations)
    return BufferAssignment(allocations, definitions, slots, tuple(map(_trace, protobuf.messages(fields, 4))))


def _allocations(messages: Sequence[bytes]) -> tuple[tuple[Allocation, ...], dict[int, BufferSlot]]:
    """Return all allocations except thread-local ones, and the slots of their values."""
    # `BufferAllocationProto`: 1 index, 2 size, 3 thread-local, 9 assigned values.
    (numbers, sizes, threads, *marks), _ = protobuf.columns(messages, (1, 2, 3, *_KINDS))
    kept: list[tuple[int, int, str, int]] = []
    assigned: list[bytes] = []
    for data, number, size, thread, *marked in zip(messages, numbers, sizes, threads, *marks, strict=True):
        # Thread-local allocations are on the stack of a thread, not in device memory.
        if not thread:
            inside = protobuf.messages(protobuf.fields(data), 9)
            kind = next(compress(_KINDS.values(), marked), "temporary")
            kept.append((number, size, kind, len(inside)))
            assigned += inside
    (values, offsets, sizes), _ = protobuf.columns(assigned, (1, 2, 3))
    owners = [index for index, _, _, count in kept for _ in range(count)]
    slots = dict(zip(values, map(BufferSlot, owners, offsets, sizes), strict=True))
    ids = iter(values)
    allocations = (Allocation(index, size, kind, tuple(islice(ids, count))) for index, size, kind, count in kept)
    return tuple(allocations), slots


def _definitions(messages: Sequence[bytes], wanted: Collection[int]) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Return the defining instruction id and tuple index of each value in `wanted`, by value id."""
    # `LogicalBufferProto`: 1 id, 3 location, with 3 tuple index and 4 instruction id.
    (values,), (places,) = protobuf.columns(messages, (1,), (3,))
    (instructions,), (indices,) = protobuf.columns(places, (4,), (3,))
    return {
        value: (instruction, tuple(protobuf.integers(index)) if index else ())
        for value, instruction, index in zip(values, instructions, indices, strict=True)
        if value in wanted
    }


def _trace(data: bytes) -> tuple[tuple[int, int], ...]:
    events = protobuf.messages(protobuf.fields(data), 1)
    (kinds, values), _ = protobuf.columns(events, (1, 2))
    return tuple(zip(kinds, values, strict=True))


def _names(program: bytes, module: Module, wanted: set[int]) -> tuple[dict[int, tuple[str, str]], set[int]]:
    """Return computation and instruction names by instruction id, and the ids of instructions missing in the text.

    Covers the computations with at least one instruction in `wanted`. HLO text omits the computation run by an
    asynchronous operation.
    """
    # `HloModuleProto`: 3 computations, 7 schedule.
    fields = protobuf.fields(program)
    entries = [e for schedule in protobuf.messages(fields, 7) for e in protobuf.messages(protobuf.fields(schedule), 1)]
    (numbers,), (sequences,) = protobuf.columns(entries, (1,), (2,))
    _, (packed,) = protobuf.columns(sequences, (), (1,))
    sequences = {number: protobuf.integers(part) for number, part in zip(numbers, packed, strict=True)}
    # The schedule lists instruction ids in the order of the text. Reading the schedule alone saves parsing thousands of
    # instruction messages.
    sequences = {number: ids for number, ids in sequences.items() if not wanted.isdisjoint(ids)}
    names = _computation_names(protobuf.messages(fields, 3), set(sequences))
    places: dict[int, tuple[str, str]] = {}
    inlined = set[int]()
    for number, ids in sequences.items():
        name = names.get(number, "")
        if name.startswith(_INLINED) and name not in module.computations:
            inlined.update(ids)
            continue
        instructions = module.computations[name].instructions if name in module.computations else {}
        if len(ids) != len(instructions):
            raise ValueError(f"the schedule runs {len(ids)} instructions of {name!r}, which has {len(instructions)}")
        places.update(zip(ids, ((name, instruction) for instruction in instructions), strict=True))
    unknown = next((i for i in wanted if i not in places and i not in inlined), None)
    if unknown is not None:
        raise ValueError(f"the buffer assignment names instruction {unknown}, which is not scheduled")
    return places, inlined


def _computation_names(messages: Sequence[bytes], wanted: set[int]) -> dict[int, str]:
    """Return the names of the computations in `wanted`, by id."""
    names: dict[int, str] = {}
    # XLA lists callees before callers, with thousands of fused computations first. Scheduled computations are near the
    # end.
    for data in reversed(messages):
        if len(names) == len(wanted):
            break
        # `HloComputationProto`: 1 name, 5 id.
        fields = protobuf.fields_by_number(data)
        number = fields.get(5)
        if isinstance(number, int) and number in wanted:
            names[number] = protobuf.message(fields.get(1, b"")).decode()
    return names
