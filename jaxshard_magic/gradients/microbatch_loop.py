"""Plain Python loop over microbatches: the reference of `--check` where a loss couples the examples of a batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from ..program.batching.batch_labels import Concatenated, Summed, output_combination, scaled
from ..program.gradient_calls import GradientCall, GradientEmitter, value_and_gradients
from ..program.ir import Equation, Program
from .accumulate import AccumulatedGradient
from .draws import BatchDrawReplay
from .rows import join_microbatches, microbatch_rows, split_microbatches


class MicrobatchLoop(GradientEmitter):
    """Differentiate a captured step in a Python loop.

    Args:
        program: The captured step.
        calls: Gradient calls to take in microbatches, by equation index.
    """

    def __init__(self, program: Program, calls: Mapping[int, AccumulatedGradient]):
        super().__init__(program)
        self._gradients = calls

    def take_gradient(self, e: Equation, operands: Sequence[Any]) -> list:
        """Run the unchanged loss on the rows of each microbatch, and average losses and gradients."""
        call, cut = self._gradients[e.index], self._gradients[e.index].cut
        followed, carried = call.followed, call.outputs.carried
        small = GradientCall(followed.small.closed, e.params["gradient"].num_closed_over)
        inputs, found = list(operands), []
        rows = microbatch_rows(cut.examples, cut.microbatches, cut.shards)
        parts = {k: split_microbatches(operands[k], dim, cut.microbatches, cut.shards) for k, dim in call.batch.items()}
        for i, mine in enumerate(rows):
            for k, part in parts.items():
                inputs[k] = part[i]
            loss = BatchDrawReplay(followed)
            loss.rows = mine
            outs = value_and_gradients(small, loss, inputs)
            # As a loop written by hand does, state goes on from one microbatch to the next.
            for j, k in carried.items():
                inputs[k] = outs[j]
            found.append(outs)
        n = small.num_outputs
        values = [self._whole(call, j, [outs[j] for outs in found], rows) for j in range(n)]
        return [*values, *(sum(parts) / cut.microbatches for parts in zip(*(outs[n:] for outs in found), strict=True))]

    def _whole(self, call: AccumulatedGradient, j: int, parts: list, rows: Any) -> Any:
        """Return output `j` of the whole batch from the outputs of the microbatches."""
        if j in call.outputs.carried:
            return parts[-1]
        followed = call.followed
        avals = followed.small.closed.out_avals[j], followed.large.closed.out_avals[j]
        how = output_combination(followed.output_labels[j], followed.ratio, *avals)
        if isinstance(how, Summed):
            return jnp.asarray(sum(parts) * float(how.scale), avals[1].dtype)
        if isinstance(how, Concatenated):
            return scaled(join_microbatches(jnp.stack(parts), how.dim, call.cut.shards), how.scale)
        return parts[-1]
