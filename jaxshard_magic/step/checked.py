"""A call of a step compared with one of the plain step."""

from typing import TYPE_CHECKING, Any

import jax

from ..program.mapped import PerDevice
from ..program.peel import Peeled

if TYPE_CHECKING:
    from ..report import Check
    from .entry import Entry
    from .sharded import ShardedStep


def plain_of(step: "ShardedStep", peeled: Peeled) -> Any:
    """Return the plain step that a call is compared with, run on its inputs; None where it is not to be."""
    if not step.check or step.checked is not None:
        return None
    from ..analysis.check import Plain

    return (step.reference or Plain)(peeled)


def against_plain(step: "ShardedStep", entry: "Entry", plain: Any, outs: Any) -> "Check":
    """Return how the outputs of a call compare with those of the plain step, which ran on the same inputs."""
    step.say("checking against the plain step")
    step.loops.breaks()
    by_hand = entry.rewritten.by_hand() if entry.rewritten is not None else None
    flat = jax.tree.leaves(outs) if entry.whole else outs
    if by_hand is not None and isinstance(entry.traced, PerDevice):
        by_hand = entry.traced.like(by_hand)
    return plain.against(
        entry.traced,
        flat,
        by_hand,
        None if entry.added else step.request.gradients.narrow,
        None if entry.added or step.request.pipeline is not None else entry.plan,
    )
