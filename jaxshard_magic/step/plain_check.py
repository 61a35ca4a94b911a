"""Compare a call of a sharded step with the plain step."""

from typing import TYPE_CHECKING, Any

import jax

from ..program.flatten_call import FlatCall
from ..program.per_device import PerDeviceTrace

if TYPE_CHECKING:
    from ..report import Check
    from .compiled_step import CompiledStep
    from .sharded_step import ShardedStep


def run_plain_step(step: "ShardedStep", flat_call: FlatCall) -> Any:
    """Run the plain step on the inputs of a call; return None if no check is requested or one is done."""
    if not step.check or step.checked is not None:
        return None
    from ..analysis.check import PlainStep

    return (step.reference or PlainStep)(flat_call)


def compare_with_plain(step: "ShardedStep", entry: "CompiledStep", plain: Any, outs: Any) -> "Check":
    """Return the comparison of a call's outputs with the plain step's, for the same inputs.

    Args:
        step: The sharded step.
        entry: Program of the call.
        plain: Result of `run_plain_step`.
        outs: Outputs of the program.
    """
    step.say("checking against the plain step")
    # The comparison takes time between two calls that is not step time.
    step.loops.discard_intervals()
    by_hand = entry.rewritten.reference_step() if entry.rewritten is not None else None
    flat = jax.tree.leaves(outs) if entry.takes_pytrees else outs
    if by_hand is not None and isinstance(entry.traced, PerDeviceTrace):
        by_hand = entry.traced.with_trace(by_hand)
    return plain.against(
        entry.traced,
        flat,
        by_hand,
        None if entry.padding else step.request.gradients.narrow,
        None if entry.padding or step.request.pipeline is not None else entry.plan,
    )
