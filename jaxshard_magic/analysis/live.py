"""What fills memory through a step and at its peak, as a Report tells it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from ..program.labels import GRADIENT, label_of
from ..report import Buffer, Leaf, Live, Memory
from .buffers import LiveBuffer, LiveBytes
from .hlo import Module
from .origin import Origins, op_name, phase_of

MOST = 10  # buffers that get a row of their own


def with_live(
    memory: Memory, live: LiveBytes, module: Module, origins: Origins, leaves: Sequence[Leaf]
) -> Memory:
    """`memory` with the bytes live through the step and the largest temporaries at the peak; files have the names that
    Python knows them by."""
    rows = _merged(
        _row(buffer, module, origins, leaves) for buffer in live.buffers if buffer.kind == "temporary"
    )
    rest = rows[MOST:]
    others = sum(row.count for row in rest), sum(row.bytes for row in rest)
    where, peak = live.order[live.at[live.peak]]
    frame = origins.of_value(where, peak).frame
    through = Live(
        at=live.at,
        bytes=live.bytes,
        instructions=len(live.order),
        peak=live.peak,
        phases=_phases([phase_of(op_name(i)) for _, i in live.order]),
        file=frame and frame.file,
        line=frame and frame.line,
    )
    return replace(memory, buffers=tuple(rows[:MOST]), others=others, live=through)


def renamed(memory: Memory, name_of: Callable[[str], str]) -> Memory:
    """The same with the reader's names for files."""
    live, buffers = memory.live, memory.buffers
    if live is not None and live.file is not None:
        live = replace(live, file=name_of(live.file))
    if buffers is not None:
        buffers = tuple(b if b.file is None else replace(b, file=name_of(b.file)) for b in buffers)
    return replace(memory, buffers=buffers, live=live)


def _row(buffer: LiveBuffer, module: Module, origins: Origins, leaves: Sequence[Leaf]) -> Buffer:
    computation = module.computations[buffer.computation]
    origin = origins.of_value(computation, buffer.instruction)
    shape = buffer.shape
    return Buffer(
        bytes=buffer.bytes,
        count=1,
        dtype=shape.dtype if shape else "",
        shape=shape.dims if shape else (),
        what=_what(buffer, leaves),
        phase=origin.phase,
        file=origin.frame and origin.frame.file,
        line=origin.frame and origin.frame.line,
    )


def _what(buffer: LiveBuffer, leaves: Sequence[Leaf]) -> str:
    """The operation that made it, and the leaf that it is a form of."""
    name = op_name(buffer.instruction)
    label = label_of(name)
    if label is not None and label[1] < len(leaves):
        path = leaves[label[1]].path
        return f"gradient of {path}" if label[0] == GRADIENT else f"{path}, gathered"
    if buffer.shape is None:
        return "addresses"
    last = name.rpartition("/")[2] if name.startswith("jit(") else ""
    return last or buffer.instruction.opcode


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
