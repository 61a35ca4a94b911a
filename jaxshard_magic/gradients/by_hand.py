"""The loop over microbatches that a person would write, one after the other: what `--check` compares with where a loss
couples the examples of a batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from ..program.batching.examples import Joined, Summed, combine
from ..program.capture import Gradient, Taking, taken
from ..program.ir import Equation, Program
from .accumulate import Accumulated
from .draws import Drawing
from .rows import join, rows_of, split


class ByHand(Taking):
    """Takes the gradients of a captured step in a loop in Python; `calls` are those to be taken so, by their index."""

    def __init__(self, program: Program, calls: Mapping[int, Accumulated]):
        super().__init__(program)
        self._gradients = calls

    def take(self, e: Equation, operands: Sequence[Any]) -> list:
        """Each microbatch with the loss as it is, on its own rows; losses and gradients averaged."""
        call, cut = self._gradients[e.index], self._gradients[e.index].cut
        followed, carried = call.followed, call.outputs.carried
        small = Gradient(followed.small.closed, e.params["gradient"].closed_over)
        inputs, found = list(operands), []
        rows = rows_of(cut.examples, cut.microbatches, cut.shards)
        parts = {k: split(operands[k], dim, cut.microbatches, cut.shards) for k, dim in call.batch.items()}
        for i, mine in enumerate(rows):
            for k, part in parts.items():
                inputs[k] = part[i]
            loss = Drawing(followed)
            loss.rows = mine
            outs = taken(small, loss, inputs)
            for j, k in carried.items():
                inputs[k] = outs[j]
            found.append(outs)
        n = small.outs
        values = [self._whole(call, j, [outs[j] for outs in found], rows) for j in range(n)]
        return [
            *values,
            *(sum(parts) / cut.microbatches for parts in zip(*(outs[n:] for outs in found), strict=True)),
        ]

    def _whole(self, call: Accumulated, j: int, parts: list, rows: Any) -> Any:
        """An output of the whole batch from those of the microbatches."""
        if j in call.outputs.carried:
            return parts[-1]
        followed = call.followed
        avals = followed.small.closed.out_avals[j], followed.large.closed.out_avals[j]
        how = combine(followed.outputs[j], followed.ratio, *avals)
        if isinstance(how, Summed):
            return jnp.asarray(sum(parts) * float(how.scale), avals[1].dtype)
        if isinstance(how, Joined):
            return join(jnp.stack(parts), how.dim, call.cut.shards)
        return parts[-1]
