"""Describe the memory in use through a step and the largest buffers at the peak, as parts of a report."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import TypeVar

from ..program.op_labels import GRADIENT, parse_label
from ..report import Buffer, Collective, Leaf, LineTime, LiveMemory, Memory
from .buffers import LiveBuffer, LiveBytes
from .hlo import Instruction, Module
from .origin import HloOrigins, calling_line, op_name, operation_of, phase_of

Named = TypeVar("Named", Buffer, LiveMemory, Collective, LineTime)

MOST = 10  # buffers with a row of their own
_PRODUCTS = ("dot_general", "conv_general_dilated")
_SLICE_BY_SLICE = "dynamic_update_slice"
_BY_XLA = ("partition-id", "replica-id")  # instructions of XLA, with the `op_name` of the operation that they serve


@dataclass(frozen=True)
class TimelineProgram:
    """Compiled program with everything needed to describe its buffers.

    Attributes:
        module: Parsed program.
        origins: Origins of the values of the program.
        leaves: Input arrays of the step.
        devices: Number of devices in the mesh.
    """

    module: Module
    origins: HloOrigins
    leaves: Sequence[Leaf]
    devices: int


def with_timeline(memory: Memory, live: LiveBytes, program: TimelineProgram) -> Memory:
    """Return `memory` with the bytes in use through the step, and the largest temporaries at the peak.

    Scalars and a tuple's table of addresses get no row. Files carry the names used by Python.

    Args:
        memory: Memory of each device.
        live: Bytes in use through the step.
        program: Program of the step.
    """
    phases = _phases([phase_of(op_name(i)) for _, i in live.order])
    kept = _forward_instructions(live, dict(phases).get("backward"))
    temporaries = [buffer for buffer in live.buffers if buffer.kind == "temporary"]
    rows = _merged(
        replace(_row(buffer, program), kept=(buffer.computation, buffer.instruction.name) in kept)
        for buffer in temporaries
        if buffer.shape is not None and buffer.shape.dims
    )
    shown = rows[:MOST]
    others = (
        len(temporaries) - sum(row.count for row in shown),
        sum(buffer.bytes for buffer in temporaries) - sum(row.bytes for row in shown),
    )
    where, peak = live.order[live.positions[live.peak]]
    top = program.origins.of_value(where, peak)
    frame = top.frame
    timeline = LiveMemory(
        at=live.positions,
        bytes=live.bytes,
        instructions=len(live.order),
        peak=live.peak,
        phases=phases,
        file=frame and frame.file,
        line=frame and frame.line,
        called=calling_line(top),
    )
    return replace(memory, buffers=tuple(shown), others=others, live=timeline)


def rename_files(memory: Memory, name_of: Callable[[str], str]) -> Memory:
    """Return `memory` with files renamed for the reader by `name_of`."""
    live, buffers = memory.live, memory.buffers
    return replace(
        memory,
        live=None if live is None else with_file_names(live, name_of),
        buffers=None if buffers is None else tuple(with_file_names(b, name_of) for b in buffers),
    )


def with_file_names(part: Named, name_of: Callable[[str], str]) -> Named:
    """Return a part of a report with its files renamed for the reader: the file of its line, and of the calling line.

    Args:
        part: Part of a report.
        name_of: Maps a file, by the name used by Python, to the name shown to the reader.
    """
    if part.file is None:
        return part
    file, _, line = (part.called or "").rpartition(":")
    return replace(part, file=name_of(part.file), called=f"{name_of(file)}:{line}" if part.called else None)


def _row(buffer: LiveBuffer, program: TimelineProgram) -> Buffer:
    computation = program.module.computations[buffer.computation]
    made = program.origins.naming_instruction(computation, buffer.instruction, buffer.index)
    origin = program.origins.of_value(computation, made)
    shape = buffer.shape
    assert shape is not None
    label, operation = parse_label(op_name(made)), _operation(made, program.module)
    what, toward, reads, trips, leaf_path = operation, None, None, None, None
    if label is not None and label[1] < len(program.leaves):
        leaf, gradient = program.leaves[label[1]], label[0] == GRADIENT
        part = _describe_part(shape.dims, leaf, program.devices)
        if part is not None:
            what, leaf_path = (
                f"gradient of {leaf.path}{part}" if gradient else f"{leaf.path}{part}, gathered",
                leaf.path,
            )
        elif gradient and prod(shape.dims) >= prod(leaf.shape) // program.devices:
            toward = leaf.path
    if what in _PRODUCTS:
        reads = _weight(program, buffer)
    # A scan writes stacked results slice by slice: the leading dimension is its number of trips.
    if operation == _SLICE_BY_SLICE and computation is not program.module.entry and shape.dims:
        trips = shape.dims[0]
    return Buffer(
        bytes=buffer.bytes,
        count=1,
        dtype=shape.dtype,
        shape=shape.dims,
        what=what,
        phase=origin.phase,
        file=origin.frame and origin.frame.file,
        line=origin.frame and origin.frame.line,
        reads=reads,
        toward=toward,
        trips=trips,
        of=leaf_path,
        called=calling_line(origin),
    )


def _operation(instruction: Instruction, module: Module) -> str:
    """Return JAX's name of an operation; for an instruction made by XLA its opcode, for a fusion the last operation
    inside."""
    last = "" if instruction.opcode in _BY_XLA else operation_of(op_name(instruction))
    if last and parse_label(last) is None:
        return last
    body = module.find_computation(instruction.attribute("calls")) if instruction.opcode == "fusion" else None
    root = None if body is None else next((i for i in body.instructions.values() if i.root), None)
    return instruction.opcode if root is None or root.opcode == "tuple" else _operation(root, module)


def _describe_part(dims: Sequence[int], leaf: Leaf, devices: int) -> str | None:
    """Return the text describing `dims` as part of a leaf, or None if the number of elements fits no part.

    The text is empty for the leaf or a device's share, and `, one of 12` for a layer of a stack.
    """
    # The name of a value is no proof: XLA also gives it to intermediate results and to broadcasts of the value.
    has, whole = prod(dims), prod(leaf.shape)
    if not has or whole % has:
        return None
    parts, stack = whole // has, (*leaf.shape, 1)[0]
    if devices % parts == 0:
        return ""
    layer = len([n for n in dims if n > 1]) == len([n for n in leaf.shape[1:] if n > 1]) > 0
    return f", one of {stack}" if layer and parts % stack == 0 and devices % (parts // stack) == 0 else None


def _weight(program: TimelineProgram, buffer: LiveBuffer) -> str | None:
    """Return the path of the largest parameter read by a product; None if none is read."""
    found = program.origins.inputs_of(program.module.computations[buffer.computation], buffer.instruction)
    weights = [leaf for i in found if (leaf := program.leaves[i]).role == "params"]
    return max(weights, key=lambda leaf: leaf.bytes).path if weights else None


def _forward_instructions(live: LiveBytes, backward: int | None) -> set[tuple[str, str]]:
    """Return the instructions of the forward pass by computation and name; empty unless the peak comes after the start
    of a backward pass."""
    if backward is None or live.positions[live.peak] < backward:
        return set()
    return {(where.name, i.name) for where, i in live.order[:backward] if phase_of(op_name(i)) == "forward"}


def _merged(rows: Iterable[Buffer]) -> list[Buffer]:
    """Merge equal rows, adding bytes and counts, largest first."""
    sizes: dict[Buffer, tuple[int, int]] = {}
    for row in rows:
        alike = replace(row, bytes=0, count=0)
        nbytes, count = sizes.get(alike, (0, 0))
        sizes[alike] = nbytes + row.bytes, count + 1
    merged = [replace(row, bytes=nbytes, count=count) for row, (nbytes, count) in sizes.items()]
    return sorted(merged, key=lambda row: -row.bytes)


def _phases(names: Sequence[str | None]) -> tuple[tuple[str, int], ...]:
    """Return the first position of each phase of the step."""
    if "backward" not in names:
        return ()
    # The compiler moves single operations across phases: the split leaves the fewest operations in a wrong phase.
    begins = _split(names, {"forward"}, {"backward", "update"})
    ends = _split(names, {"forward", "backward"}, {"update"})
    phases = ("forward", 0), ("backward", begins)
    return (*phases, ("update", ends)) if begins < ends < len(names) else phases


def _split(names: Sequence[str | None], before: set[str], after: set[str]) -> int:
    """Return the position with the most names of `before` in front and the most names of `after` behind."""
    steps = ((name in before) - (name in after) for name in names)
    score = list(accumulate(steps, initial=0))
    return score.index(max(score))
