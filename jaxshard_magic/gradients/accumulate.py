"""Gradient accumulation: one gradient call as a scan over microbatches.

The sums of the scan equal the full batch's loss, gradients and outputs.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr

from ..errors import ShardError
from ..program.batching.batch_labels import Concatenated, Constant, Summed, scaled
from ..program.batching.followed_program import (
    FollowedProgram,
    as_batch_independent,
    as_single_microbatch,
    describe_equation,
    follow_batch,
)
from ..program.batching.row_groups import row_group_size
from ..program.batching.single_example import follow_single_example
from ..program.gradient_calls import GradientCall
from ..program.ir import Equation, Program, Value
from ..program.replay import Replay, retrace, run_replay
from .draws import BatchDrawReplay
from .loss_scaling import LossScale
from .outputs import MicrobatchOutputs
from .partial_replay import PartialReplay
from .passes import Passes
from .rows import join_microbatches, microbatch_rows, split_microbatches
from .scaled_step import scaled_value_and_gradients

_SHORT = (jnp.bfloat16, jnp.float16)


def accumulation_dtype(dtype: Any) -> Any:
    """Return the dtype in which results of microbatches are added up: float32 for bfloat16 and float16, else
    `dtype`."""
    # In 16 bits a sum of many terms loses the small ones.
    return jnp.float32 if dtype in _SHORT else dtype


@dataclass(frozen=True)
class MicrobatchSplit:
    """Division of a batch into microbatches.

    Attributes:
        examples: Number of examples in the batch.
        microbatches: Number of microbatches, each an equal part of every shard.
        shards: Number of shards that the batch is divided into over devices.
    """

    examples: int
    microbatches: int
    shards: int

    @property
    def microbatch_size(self) -> int:
        """Number of examples in a microbatch."""
        return self.examples // self.microbatches


def _keep_together(followed: FollowedProgram, cut: MicrobatchSplit) -> None:
    """Raise ShardError where microbatches would separate neighbouring examples that the loss combines."""
    together, cause = row_group_size(followed.large, followed.value_labels, cut.examples)
    each = cut.examples // (cut.microbatches * cut.shards)
    if each % together == 0:
        return
    groups, rest = divmod(cut.examples, cut.shards * together)  # groups in a shard
    fits = [n for n in range(2, groups + 1) if groups % n == 0 and not rest]
    near = min(fits, key=lambda n: abs(n - cut.microbatches), default=None)
    line = "" if cause is None else f" ({describe_equation(followed.large, cause.index)})"
    shards = f" from each of {cut.shards} shards" if cut.shards > 1 else ""
    raise ShardError(
        f"the loss takes {together} examples that follow one another together{line}, and a microbatch would have "
        f"{each}{shards}; "
        + (f"--microbatches {near} keeps them together" if near else "no number of microbatches keeps them together"),
        option=f"--microbatches {cut.microbatches}",
    )


class AccumulatedGradient:
    """One gradient call of a step over microbatches, called with the operands of the full batch.

    Args:
        small: The call as traced at a microbatch.
        large: The call as traced at the full batch.
        batch: Dimension of the examples, by position of the operand.
        cut: Division of the batch.
        passes: Passes over the loss before differentiation.
        carried: Operand that holds the next value, by position of the aux output. State such as statistics of
            BatchNorm: a microbatch hands its value to the next where the loss couples its examples.
        data: Operands that hold examples, or, for a loss without examples, the operands that the loss is about.
        trace_at_two: Traces both calls with two examples in place of each, for a microbatch of one example.

    Raises:
        ShardError: The loss can't be taken in such microbatches.
    """

    def __init__(
        self,
        small: GradientCall,
        large: GradientCall,
        batch: Mapping[int, int],
        cut: MicrobatchSplit,
        passes: Passes,
        carried: Mapping[int, int],
        data: Collection[int] = (),
        trace_at_two: Callable[[], tuple[GradientCall, GradientCall]] | None = None,
    ):
        self.cut, self.batch, self._call = cut, batch, large
        self.data = frozenset(batch) | frozenset(data)
        self.large = _opened(large)
        self.small = self.large if small is large else _opened(small)
        if cut.microbatches == 1:
            self.followed = as_single_microbatch(self.large)
        elif not batch:
            self.followed = as_batch_independent(self.large, cut.microbatches)
        elif trace_at_two is None:
            self.followed = follow_batch(self.small, self.large, batch, trained=set(large.differentiated_positions))
        else:

            def opened() -> tuple[Program, Program]:
                one, whole = trace_at_two()
                return _opened(one), _opened(whole)

            try:
                self.followed = follow_single_example(
                    self.small, self.large, batch, set(large.differentiated_positions), opened
                )
            # `follow_single_example` doesn't know which option asked for microbatches.
            except ShardError as error:
                raise ShardError(str(error), option=f"--microbatches {cut.microbatches}") from None
            self.large = self.followed.large
        if cut.microbatches > 1 and batch:
            _keep_together(self.followed, cut)
        stateless = MicrobatchOutputs(self.followed, {})
        moving = {j: k for j, k in carried.items() if not isinstance(self.followed.output_labels[j], Constant)}
        # A microbatch hands state to the next only where the loss couples the examples of a batch.
        self.outputs = stateless if stateless.exact else MicrobatchOutputs(self.followed, moving)
        self.loss = Program(self._one(passes, small.known_constants))

    @property
    def cause(self) -> str | None:
        """Description of the equation at which the loss stops being a sum over examples; None for a sum."""
        causes = self.followed.unknown_causes
        return describe_equation(self.small, causes[0]) if causes and not self.outputs.exact else None

    def __call__(self, operands: Sequence[Any], loss_scale: LossScale | None = None) -> list:
        cut, outputs, places = self.cut, self.outputs, tuple(self.batch)
        # Values such as the count of a mask are computed once, for the whole batch.
        norms = PartialReplay(self.large, list(self.followed.full_batch_values.values()))(operands)
        # Each microbatch takes an equal part of every shard, so that no example moves between devices.
        whole = [split_microbatches(operands[k], self.batch[k], cut.microbatches, cut.shards) for k in places]
        rows = microbatch_rows(cut.examples, cut.microbatches, cut.shards)
        call = GradientCall(self.loss.closed, self._call.num_closed_over + 1 + len(norms))
        loss, seed, given = Replay(self.loss), self.seed, len(outputs.computed)

        def trip(acc, part):
            sums, state = acc
            mine, parts = part
            inputs = list(operands)
            for k, x in zip((*places, *outputs.carried.values()), (*parts, *state), strict=True):
                inputs[k] = x
            outs = scaled_value_and_gradients(call, loss, [mine, *norms, *inputs], seed, loss_scale)
            values, state, gradients = outs[:given], outs[given : call.num_outputs], outs[call.num_outputs :]
            terms = [*compress(values, self.is_sum), *gradients]
            parts = list(compress(values, map(not_, self.is_sum)))
            return ([a + x.astype(a.dtype) for a, x in zip(sums, terms, strict=True)], state), parts

        start = [operands[k] for k in outputs.carried.values()]
        (sums, state), parts = lax.scan(trip, (self._zeros(), start), (rows, whole))
        n = sum(self.is_sum)
        values = self.values(sums[:n], parts)
        pairs = zip(sums[n:], self._call.differentiated_positions, strict=True)
        # Sums of narrow gradients are float32; the step reads each gradient in its operand's dtype.
        gradients = [x.astype(self._call.loss.in_avals[k].dtype) for x, k in pairs]
        return [*outputs.whole(operands, values, state), *gradients]

    @property
    def is_sum(self) -> list[bool]:
        """Flag for each value of a microbatch: summed over the microbatches, or else concatenated."""
        return [isinstance(self.outputs.combinations[v], Summed) for v in self.outputs.computed]

    @property
    def seed(self) -> float:
        """Cotangent of each microbatch's loss, chosen so that the gradients sum to the gradient of the whole batch."""
        how = self.outputs.combinations[self.outputs.computed[0]]
        return float(how.scale)

    def _zeros(self) -> list:
        sums = [self.small.avals[v] for v in compress(self.outputs.computed, self.is_sum)]
        wide = [*sums, *(self._call.loss.in_avals[k] for k in self._call.differentiated_positions)]
        return [jnp.zeros(a.shape, accumulation_dtype(a.dtype)) for a in wide]

    def values(self, sums: Sequence[Any], parts: Sequence[Any]) -> dict[Value, Any]:
        """Return the values of the whole batch.

        Args:
            sums: Summed values of the microbatches.
            parts: Stacked values of the microbatches.
        """
        found = {}
        left, stacked = iter(sums), iter(parts)
        for v, how in self.outputs.combinations.items():
            x = (
                join_microbatches(next(stacked), how.dim, self.cut.shards)
                if isinstance(how, Concatenated)
                else next(left)
            )
            found[v] = scaled(x, how.scale).astype(self.large.avals[v].dtype)
        return found

    def _one(self, passes: Passes, known: Mapping[int, Any]) -> ClosedJaxpr:
        """Trace one microbatch: `(rows, full-batch values..., operands...)` to its values, the loss first, and its
        state."""
        norms = [self.small.avals[v] for v in self.followed.full_batch_values]
        avals = [jax.ShapeDtypeStruct((self.cut.microbatch_size,), jnp.int32), *norms, *self.small.closed.in_avals]
        one = retrace(_MicrobatchLoss(self.followed, [*self.outputs.computed, *self.outputs.state]), avals)
        first = 1 + len(norms)  # the full-batch values before the operands may need gradients as well
        moving = {*range(1, first), *(first + k for k in self._call.differentiated_positions)}
        return passes(one, {first + k: x for k, x in known.items()}, moving)


def _opened(call: GradientCall) -> Program:
    return Program(run_replay(call.loss, Replay))


class _MicrobatchLoss(BatchDrawReplay):
    """Loss of one microbatch.

    Called with the rows of the microbatch and the full-batch values, followed by the operands; returns `wanted`.
    """

    def __init__(self, followed: FollowedProgram, wanted: Sequence[Value]):
        super().__init__(followed)
        self._wanted = wanted

    def __call__(self, rows: Any, *args: Any) -> list:
        n = len(self.followed.full_batch_values)
        self.rows, self._given = rows, dict(zip(self.followed.full_batch_values, args[:n], strict=True))
        self._made: dict[Value, Any] = dict(zip(self.program.inputs, args[n:], strict=True))
        super().__call__(*args[n:])
        return [self._made[v] for v in self._wanted]

    def run_equation(self, e: Equation, values: list) -> list:
        outs = super().run_equation(e, self.followed.scale_operands(e, values))
        outs = [self._given.get(v, x) for v, x in zip(e.results, outs, strict=True)]
        self._made.update((v, x) for v, x in zip(e.results, outs, strict=True) if v in self._wanted)
        return outs
