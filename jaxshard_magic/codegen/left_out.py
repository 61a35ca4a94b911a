"""What a step was asked for that its program of plain JAX has not, and what that changes."""

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..step import ShardedStep

_CHANGES = {
    "microbatches": "the batch is taken whole, which gives the numbers of one pass and holds more activations",
    "reduce": "devices add gradients up where they are made, at every trip of a loop; the numbers are the same",
    "remat": (
        "the numbers are the same, and the backward pass keeps more: nothing around calls, loops or statements of "
        "these cells does it"
    ),
    "precision": "products run in the types that the cells give them, so that the numbers are others",
    "reduce_dtype": "gradients are added up in the type that they are computed in",
    "pad": "a batch that does not divide over the devices is refused",
}


def left_out(step: "ShardedStep", done: Collection[str]) -> Iterator[str]:
    """One sentence for each option that the program has not; `done` are those that it has."""
    for option, value in step.request.gradients.given.items():
        if option in done:
            continue
        said = f"--{option.replace('_', '-')}" + ("" if value is True else f" {value}")
        yield f"Without {said}: {_CHANGES[option]}."
    if step.request.donate and "donate" not in done:
        yield "Without --donate: the old state stays until the new one is made."
    held = (
        [leaf.path for leaf in step.entry.plan.leaves if leaf.path.startswith("closure.")]
        if step.entry
        else []
    )
    if held:
        yield f"{len(held)} array{'s' * (len(held) > 1)} that the step closes over: every device has the whole of each."
    if step.request.pipeline is not None:
        yield (
            "Without the pipeline: plain JAX runs no schedule of stages. Here every device along its axis holds the\n"
            "whole model and does the whole step; the numbers are the same."
        )
