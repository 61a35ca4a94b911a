"""XLA's buffer assignment: which array of a program lies where in memory.

Message and field numbers are those of `BufferAssignmentProto` and `HloModuleProto` in XLA's `xla/service/hlo.proto`.
"""

from collections.abc import Collection, Sequence
from itertools import compress, islice
from typing import NamedTuple

from . import wire
from .hlo import Module

ALLOC, FREE = 0, 1  # HeapSimulatorTrace.Event.Kind; 2 makes a value in the memory of another
_INLINED = "async_computation"  # the text writes `all-gather-start` for the start of one that gathers
_KINDS = {8: "local", 5: "argument", 12: "constant", 7: "output"}  # by the field that says so; 8 is the color


class Definition(NamedTuple):
    """Where a value is made: element `index` of what `instruction` of `computation` returns, `()` for all of it."""

    computation: str
    instruction: str
    index: tuple[int, ...] = ()


class Slot(NamedTuple):
    """`size` bytes at `offset` of one allocation; values that lie in the same slot share its memory."""

    allocation: int
    offset: int
    size: int


class Allocation(NamedTuple):
    """One piece of memory, `size` bytes; `values` are the ids of those that lie in it at some time.

    `kind` is "argument" (also where an output takes it over), "output", "constant", "temporary", or "local": in another
    memory than the device's main one, as a TPU's VMEM.
    """

    index: int
    size: int
    kind: str
    values: tuple[int, ...]


class Assignment(NamedTuple):
    """`definitions` and `slots` are by value id, of every value that lies in one of the `allocations`.

    What lies on the stack of a thread, which evaluates a reduction's function, is left out. `traces` are XLA's
    makings and freeings of values in the order of the program, as (kind, value); empty where the compiler dropped
    them, as CPU's does.
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
    fields = wire.fields(assignment)
    allocations, slots = _allocations(wire.messages(fields, 3))
    made = _made(wire.messages(fields, 1), slots)
    if slots.keys() != made.keys():
        raise ValueError("the buffer assignment places a value that no instruction makes")
    names, inlined = _names(program, module, {instruction for instruction, _ in made.values()})
    definitions = {
        value: Definition(*names[instruction], index)
        for value, (instruction, index) in made.items()
        if instruction not in inlined
    }
    if len(definitions) < len(made):
        slots = {value: slot for value, slot in slots.items() if value in definitions}
        allocations = tuple(a._replace(values=tuple(v for v in a.values if v in slots)) for a in allocations)
    return Assignment(allocations, definitions, slots, tuple(map(_trace, wire.messages(fields, 4))))


def _allocations(messages: Sequence[bytes]) -> tuple[tuple[Allocation, ...], dict[int, Slot]]:
    """All but those of threads, and the slots of what lies in them."""
    (numbers, sizes, threads, *marks), _ = wire.columns(messages, (1, 2, 3, *_KINDS))
    kept: list[tuple[int, int, str, int]] = []
    assigned: list[bytes] = []
    for data, number, size, thread, *marked in zip(messages, numbers, sizes, threads, *marks, strict=True):
        if not thread:
            inside = wire.messages(wire.fields(data), 9)
            kind = next(compress(_KINDS.values(), marked), "temporary")
            kept.append((number, size, kind, len(inside)))
            assigned += inside
    (values, offsets, sizes), _ = wire.columns(assigned, (1, 2, 3))
    owners = [index for index, _, _, count in kept for _ in range(count)]
    slots = dict(zip(values, map(Slot, owners, offsets, sizes), strict=True))
    ids = iter(values)
    allocations = (
        Allocation(index, size, kind, tuple(islice(ids, count))) for index, size, kind, count in kept
    )
    return tuple(allocations), slots


def _made(messages: Sequence[bytes], wanted: Collection[int]) -> dict[int, tuple[int, tuple[int, ...]]]:
    """By the id of a logical buffer: that of its instruction, and the element of the result."""
    (values,), (places,) = wire.columns(messages, (1,), (3,))
    (instructions,), (indices,) = wire.columns(places, (4,), (3,))
    return {
        value: (instruction, tuple(wire.integers(index)) if index else ())
        for value, instruction, index in zip(values, instructions, indices, strict=True)
        if value in wanted
    }


def _trace(data: bytes) -> tuple[tuple[int, int], ...]:
    events = wire.messages(wire.fields(data), 1)
    (kinds, values), _ = wire.columns(events, (1, 2))
    return tuple(zip(kinds, values, strict=True))


def _names(program: bytes, module: Module, wanted: set[int]) -> tuple[dict[int, tuple[str, str]], set[int]]:
    """Computation and name of instructions by their ids, for all computations that have a `wanted` one; and the ids of
    those whose computation the text leaves out, as it does with what an asynchronous operation runs.

    The schedule lists the ids in the order in which the text has the instructions: the thousands of messages that
    describe them need not be read.
    """
    fields = wire.fields(program)
    entries = [e for schedule in wire.messages(fields, 7) for e in wire.messages(wire.fields(schedule), 1)]
    (numbers,), (sequences,) = wire.columns(entries, (1,), (2,))
    _, (packed,) = wire.columns(sequences, (), (1,))
    sequences = {number: wire.integers(part) for number, part in zip(numbers, packed, strict=True)}
    sequences = {number: ids for number, ids in sequences.items() if not wanted.isdisjoint(ids)}
    names = _named(wire.messages(fields, 3), set(sequences))
    places: dict[int, tuple[str, str]] = {}
    inlined = set[int]()
    for number, ids in sequences.items():
        name = names.get(number, "")
        if name.startswith(_INLINED) and name not in module.computations:
            inlined.update(ids)
            continue
        instructions = module.computations[name].instructions if name in module.computations else {}
        if len(ids) != len(instructions):
            raise ValueError(
                f"the schedule runs {len(ids)} instructions of {name!r}, which has {len(instructions)}"
            )
        places.update(zip(ids, ((name, instruction) for instruction in instructions), strict=True))
    unknown = next((i for i in wanted if i not in places and i not in inlined), None)
    if unknown is not None:
        raise ValueError(f"the buffer assignment names instruction {unknown}, which is not scheduled")
    return places, inlined


def _named(messages: Sequence[bytes], wanted: set[int]) -> dict[int, str]:
    """The names of some computations by their ids. XLA lists what is called before its callers, fused computations by
    the thousand: those that run by themselves are near the end."""
    names: dict[int, str] = {}
    for data in reversed(messages):
        if len(names) == len(wanted):
            break
        fields = wire.record(data)
        number = fields.get(5)
        if isinstance(number, int) and number in wanted:
            names[number] = wire.message(fields.get(1, b"")).decode()
    return names
