"""What fills the memory of a GPT-2-sized step at its peak, and what its devices measured."""

from dataclasses import replace
from itertools import accumulate

from support.sample_collectives import AT

from jaxshard_magic.report import Buffer, LiveMemory, Memory

MIB = 2**20

# Of what makes it, its type on one device, phase and line, which is one of gpt2.py, called at line 12 of the cell, from
# 28 on; sizes worked out from the shapes.
_BUFFERS = (
    ("softmax", "f32", (12, 4, 6, 1024, 1024), "forward", 36),
    ("logits", "f32", (4, 1024, 50257), "forward", 14),
    ("subtract", "f32", (4, 1024, 50257), "backward", 15),
    ("convert", "bf16", (12, 4, 6, 1024, 1024), "forward", 36),
    ("select", "pred", (12, 4, 6, 1024, 1024), "forward", 35),
    ("params.wte.embedding, gathered", "f32", (50257, 768), "forward", 14),
    ("concatenate", "f32", (4, 1024, 768), None, None),
)
_ITEM = {"f32": 4, "bf16": 2, "pred": 1}


def _buffer(what: str, dtype: str, shape: tuple[int, ...], phase: str | None, line: int | None) -> Buffer:
    *_, size = accumulate((_ITEM[dtype], *shape), int.__mul__)
    deeper = line is not None and line >= AT
    file, called = ("gpt2.py", "cell [7]:12") if deeper else (line and "cell [7]", None)
    return Buffer(size, 1, dtype, shape, what, phase, file, line, kept=phase == "forward", called=called)


BUFFERS = tuple(_buffer(*row) for row in _BUFFERS)
LOGITS = _buffer("dot_general", "f32", (16, 1024, 50257), "forward", 14)
LIVE = LiveMemory(
    at=tuple(range(0, 400, 20)),
    bytes=tuple(MIB * (300 + 430 * min(i, 19 - i)) for i in range(20)),
    instructions=400,
    peak=9,
    phases=(("forward", 0), ("backward", 170), ("update", 370)),
    file="cell [7]",
    line=15,
)


def with_measured(memory: Memory) -> Memory:
    """`memory` with its buffers, and peaks that lie 1% to 2% above the computed ones; of the last device none."""
    rows = tuple(
        replace(d, measured=None if d is memory.per_device[-1] else (d.peak or 0) * (101 + d.device % 2) // 100)
        for d in memory.per_device
    )
    return replace(memory, per_device=rows, buffers=BUFFERS, others=(81, 152 * MIB), live=LIVE)
