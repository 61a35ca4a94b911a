"""Work of one program call (examples, tokens, FLOPs), which turns step times into rates."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from ..compilation.compiled_step import CompiledStep
from ..hardware import Chip, chip_of
from ..live import CallWork
from ..plan import LeafPlan, Plan
from ..program.flops import total_work
from ..program.roles import BATCH
from .mesh_info import detect_mesh_info

TOKENS = ("int16", "int32", "int64", "uint16", "uint32")  # without 8 bits: bytes are pixels


def work_per_call(entry: CompiledStep) -> CallWork:
    """Return the work of one call: examples, tokens, FLOPs and ideal seconds.

    Examples are counted by batch size, tokens by integer arrays, both without padding rows; FLOPs by products. Ideal
    seconds need an attached chip with known peak.
    """
    plan, examples = entry.plan, entry.examples
    batch = [leaf for leaf in _given(entry) if leaf.role == BATCH]
    rows = next((leaf for leaf in batch if examples and examples in leaf.shape), None)
    tokens = max(filter(lambda leaf: _are_tokens(leaf, examples), batch), key=lambda x: prod(x.shape), default=None)
    work = total_work(plan.work)
    exact = work.exact and not plan.uncounted_primitives and bool(work.flops)
    info = detect_mesh_info(plan.mesh)
    chip = chip_of(info.device_kind) if info.source == "attached" else None
    return CallWork(
        examples=examples,
        examples_rule=None if rows is None else f"{examples:,} a step, of {_leaf_text(rows)}",
        tokens=None if tokens is None else prod(tokens.shape),
        tokens_rule=None if tokens is None else f"{prod(tokens.shape):,} a step, {_leaf_text(tokens)}",
        flops=float(work.flops) if exact else None,
        ideal_s=ideal_seconds(plan, chip) if exact and chip is not None else None,
    )


def ideal_seconds(plan: Plan, chip: Chip) -> float | None:
    """Return the seconds of a step's products at the chip's peak, on all devices of the plan; None without a published
    peak.

    Recomputed products are left out. Divided by the measured seconds this is the MFU (Chowdhery et al., "PaLM", 2022,
    appendix B).
    """
    ideal = 0.0
    for w in plan.work:
        rate = chip.peak(w.dtype)
        if rate is None or not w.exact:
            return None
        ideal += 0.0 if w.recomputed else w.flops / rate / plan.mesh.size
    return ideal


def _given(entry: CompiledStep) -> Iterator[LeafPlan]:
    """Yield the leaves as passed to a call, without padding rows."""
    for i, leaf in enumerate(entry.plan.leaves):
        dim, more = entry.padding.get(i - len(entry.consts), (0, 0))
        yield replace(leaf, shape=tuple(z - more * (d == dim) for d, z in enumerate(leaf.shape)))


def _are_tokens(leaf: LeafPlan, examples: int | None) -> bool:
    """Return whether a leaf is integers with a row per example."""
    if str(leaf.dtype) not in TOKENS or len(leaf.shape) != 2 or examples is None:
        return False
    # A single integer per example is a label.
    return examples in leaf.shape and prod(leaf.shape) > examples


def _leaf_text(leaf: LeafPlan) -> str:
    return f"{leaf.path}[{','.join(map(str, leaf.shape))}]"
