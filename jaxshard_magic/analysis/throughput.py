"""What one call of a program gets done, by which a loop's seconds become rates."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from ..hardware import Chip, chip_of
from ..live import Known
from ..plan import LeafPlan, Plan
from ..program.flops import totals
from ..program.roles import BATCH
from .mesh_info import info_of

if TYPE_CHECKING:
    from ..step import Entry

TOKENS = ("int16", "int32", "int64", "uint16", "uint32")  # bytes are pixels


def known_of(entry: "Entry") -> Known:
    """What a call of `entry` does: examples by the size of its batch, tokens by its integer arrays, both without rows
    that it adds, FLOPs by its products, and the seconds that these take at the chip's peak where a chip is attached
    that is known."""
    plan, examples = entry.plan, entry.examples
    batch = [leaf for leaf in _given(entry) if leaf.role == BATCH]
    rows = next((leaf for leaf in batch if examples and examples in leaf.shape), None)
    tokens = max(
        filter(lambda leaf: _are_tokens(leaf, examples), batch), key=lambda x: prod(x.shape), default=None
    )
    work = totals(plan.work)
    exact = work.exact and not plan.unseen and bool(work.flops)
    info = info_of(plan.mesh)
    chip = chip_of(info.device_kind) if info.source == "attached" else None
    return Known(
        examples=examples,
        examples_by=None if rows is None else f"{examples:,} a step, of {_told(rows)}",
        tokens=None if tokens is None else prod(tokens.shape),
        tokens_by=None if tokens is None else f"{prod(tokens.shape):,} a step, {_told(tokens)}",
        flops=float(work.flops) if exact else None,
        ideal_s=ideal_seconds(plan, chip) if exact and chip is not None else None,
    )


def ideal_seconds(plan: Plan, chip: Chip) -> float | None:
    """Seconds that a step's products, those not done twice, take on the plan's devices at the chip's peak: over the
    measured ones it is the MFU (Chowdhery et al., "PaLM", 2022, appendix B). None where one has no published peak."""
    ideal = 0.0
    for w in plan.work:
        rate = chip.peak(w.dtype)
        if rate is None or not w.exact:
            return None
        ideal += 0.0 if w.recomputed else w.flops / rate / plan.mesh.size
    return ideal


def _given(entry: "Entry") -> Iterator[LeafPlan]:
    """The leaves as a call gives them, without rows that are added."""
    for i, leaf in enumerate(entry.plan.leaves):
        dim, more = entry.added.get(i - len(entry.consts), (0, 0))
        yield replace(leaf, shape=tuple(z - more * (d == dim) for d, z in enumerate(leaf.shape)))


def _are_tokens(leaf: LeafPlan, examples: int | None) -> bool:
    """Integers, a row of them an example."""
    if str(leaf.dtype) not in TOKENS or len(leaf.shape) != 2 or examples is None:
        return False
    return examples in leaf.shape and prod(leaf.shape) > examples


def _told(leaf: LeafPlan) -> str:
    return f"{leaf.path}[{','.join(map(str, leaf.shape))}]"
