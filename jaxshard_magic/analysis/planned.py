"""What the plan of a step says where no compiler does: its memory and its communication, as predicted."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..plan import Finding, Sent
from ..report import Collective, Leaf, Memory
from ..strategies.footprint import footprint
from ..strategies.hold import Hold
from ..strategies.traffic import traffic
from .collectives import wire_bytes
from .memory import memory, with_temporaries

if TYPE_CHECKING:
    from ..step import Entry


def plan_alone(
    entry: "Entry", failed: str, read: Sequence[Leaf]
) -> tuple[Memory, tuple[Collective, ...] | None, Finding]:
    """What is known of a step whose compiler `failed`: memory, communication without the lines that cause it, and what
    is to be said. Where the compiler decides the layout, arrays at rest alone. `read`: the arguments that the program
    reads."""
    plan, run = entry.plan, entry.plan.run
    held, sent = replace(memory(None, read, plan.mesh, None), source="planned"), None
    if isinstance(run, Hold):
        closed_over = len(plan.in_specs) - len(entry.shardings)
        peak = footprint(run, [closed_over + i for i in entry.donated]).peak
        held = with_temporaries(held, lambda arrays: max(peak - arrays, 0))
        sent = tuple(map(collective, traffic(run)))
    known = (
        "Arrays at rest are exact, and no more is known"
        if sent is None
        else "All figures are the plan's prediction"
    )
    return held, sent, Finding("compiler-failed", "error", f"Not compiled: {failed}. {known}.")


def collective(move: Sent) -> Collective:
    """A collective of a plan as a report lists it."""
    n = move.group_size
    sent = wire_bytes(move.kind, n, move.count * move.bytes)
    return Collective(move.kind, move.axes, n, move.count, move.bytes, sent, apart=move.apart)
