"""What fills memory through a step and at its peak, as a Report tells it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import TypeVar

from ..program.labels import GRADIENT, label_of
from ..report import Buffer, Collective, Leaf, Live, Memory, Spent
from .buffers import LiveBuffer, LiveBytes
from .hlo import Instruction, Module
from .origin import Origins, called_at, op_name, operation_of, phase_of

Named = TypeVar("Named", Buffer, Live, Collective, Spent)

MOST = 10  # buffers that get a row of their own
_PRODUCTS = ("dot_general", "conv_general_dilated")
_SLICE_BY_SLICE = "dynamic_update_slice"
_BY_XLA = ("partition-id", "replica-id")  # named after what they are made for


@dataclass(frozen=True)
class Program:
    """A compiled program whose buffers are told of: its text, the origins of its values, the step's leaves, and the
    devices of its mesh."""

    module: Module
    origins: Origins
    leaves: Sequence[Leaf]
    devices: int


def with_live(memory: Memory, live: LiveBytes, program: Program) -> Memory:
    """`memory` with the bytes live through the step and the largest temporaries at the peak; files have the names that
    Python knows them by. What is no array, a single number or a tuple's table of addresses, has no row."""
    phases = _phases([phase_of(op_name(i)) for _, i in live.order])
    kept = _kept(live, dict(phases).get("backward"))
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
    where, peak = live.order[live.at[live.peak]]
    top = program.origins.of_value(where, peak)
    frame = top.frame
    through = Live(
        at=live.at,
        bytes=live.bytes,
        instructions=len(live.order),
        peak=live.peak,
        phases=phases,
        file=frame and frame.file,
        line=frame and frame.line,
        called=called_at(top),
    )
    return replace(memory, buffers=tuple(shown), others=others, live=through)


def renamed(memory: Memory, name_of: Callable[[str], str]) -> Memory:
    """The same with the reader's names for files."""
    live, buffers = memory.live, memory.buffers
    return replace(
        memory,
        live=None if live is None else with_names(live, name_of),
        buffers=None if buffers is None else tuple(with_names(b, name_of) for b in buffers),
    )


def with_names(part: Named, name_of: Callable[[str], str]) -> Named:
    """A part of a report with the reader's names for its files: that of its line, and that of the line that led to
    it."""
    if part.file is None:
        return part
    file, _, line = (part.called or "").rpartition(":")
    return replace(part, file=name_of(part.file), called=f"{name_of(file)}:{line}" if part.called else None)


def _row(buffer: LiveBuffer, program: Program) -> Buffer:
    computation = program.module.computations[buffer.computation]
    made = program.origins.part(computation, buffer.instruction, buffer.index)
    origin = program.origins.of_value(computation, made)
    shape = buffer.shape
    assert shape is not None
    label, does = label_of(op_name(made)), _operation(made, program.module)
    what, toward, reads, trips, of = does, None, None, None, None
    if label is not None and label[1] < len(program.leaves):
        leaf, gradient = program.leaves[label[1]], label[0] == GRADIENT
        part = _part_of(shape.dims, leaf, program.devices)
        if part is not None:
            what, of = (
                f"gradient of {leaf.path}{part}" if gradient else f"{leaf.path}{part}, gathered",
                leaf.path,
            )
        elif gradient and prod(shape.dims) >= prod(leaf.shape) // program.devices:
            toward = leaf.path
    if what in _PRODUCTS:
        reads = _weight(program, buffer)
    if does == _SLICE_BY_SLICE and computation is not program.module.entry and shape.dims:
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
        of=of,
        called=called_at(origin),
    )


def _operation(instruction: Instruction, module: Module) -> str:
    """What an instruction computes: jax's name for it; of one that XLA made itself its own, of a fusion that of what
    it ends with."""
    last = "" if instruction.opcode in _BY_XLA else operation_of(op_name(instruction))
    if last and label_of(last) is None:
        return last
    body = module.named(instruction.attribute("calls")) if instruction.opcode == "fusion" else None
    root = None if body is None else next((i for i in body.instructions.values() if i.root), None)
    return instruction.opcode if root is None or root.opcode == "tuple" else _operation(root, module)


def _part_of(dims: Sequence[int], leaf: Leaf, devices: int) -> str | None:
    """`""` where an array of `dims` may be a leaf, or its share of one device; `, one of 12` of a stack of layers; None
    where it has not as many elements as any of them, whatever its name says: XLA gives what leads up to a value, and
    what it is broadcast to, the name of the value."""
    has, whole = prod(dims), prod(leaf.shape)
    if not has or whole % has:
        return None
    parts, stack = whole // has, (*leaf.shape, 1)[0]
    if devices % parts == 0:
        return ""
    layer = len([n for n in dims if n > 1]) == len([n for n in leaf.shape[1:] if n > 1]) > 0
    return f", one of {stack}" if layer and parts % stack == 0 and devices % (parts // stack) == 0 else None


def _weight(program: Program, buffer: LiveBuffer) -> str | None:
    """The largest parameter that a product reads."""
    found = program.origins.inputs_of(program.module.computations[buffer.computation], buffer.instruction)
    weights = [leaf for i in found if (leaf := program.leaves[i]).role == "params"]
    return max(weights, key=lambda leaf: leaf.bytes).path if weights else None


def _kept(live: LiveBytes, backward: int | None) -> set[tuple[str, str]]:
    """Where the instructions of the forward pass stand, by computation and name, where the peak is behind it."""
    if backward is None or live.at[live.peak] < backward:
        return set()
    return {(where.name, i.name) for where, i in live.order[:backward] if phase_of(op_name(i)) == "forward"}


def _merged(rows: Iterable[Buffer]) -> list[Buffer]:
    """Alike ones together, largest first."""
    sizes: dict[Buffer, tuple[int, int]] = {}
    for row in rows:
        alike = replace(row, bytes=0, count=0)
        nbytes, count = sizes.get(alike, (0, 0))
        sizes[alike] = nbytes + row.bytes, count + 1
    merged = [replace(row, bytes=nbytes, count=count) for row, (nbytes, count) in sizes.items()]
    return sorted(merged, key=lambda row: -row.bytes)


def _phases(names: Sequence[str | None]) -> tuple[tuple[str, int], ...]:
    """Where each phase begins, in a program whose compiler moves single operations across: with the fewest of them on
    the wrong side."""
    if "backward" not in names:
        return ()
    begins = _split(names, {"forward"}, {"backward", "update"})
    ends = _split(names, {"forward", "backward"}, {"update"})
    phases = ("forward", 0), ("backward", begins)
    return (*phases, ("update", ends)) if begins < ends < len(names) else phases


def _split(names: Sequence[str | None], before: set[str], after: set[str]) -> int:
    """The position with most of `before` in front of it and most of `after` from it on."""
    steps = ((name in before) - (name in after) for name in names)
    score = list(accumulate(steps, initial=0))
    return score.index(max(score))
