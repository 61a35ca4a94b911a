"""Gradient accumulation: one gradient call as a scan over microbatches.

The sums of the scan equal the full batch's loss, gradients and outputs. `MicrobatchLoop` is a plain Python loop over
microbatches: the reference of `--check` where a loss couples the examples of a batch.
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
from ..program.batching.batch_labels import (
    Concatenated,
    Constant,
    Identical,
    Summed,
    UnknownLabel,
    output_combination,
    scaled,
)
from ..program.batching.followed_program import (
    FollowedProgram,
    as_batch_independent,
    as_single_microbatch,
    describe_equation,
    follow_batch,
    follow_single_example,
)
from ..program.batching.row_groups import row_group_size
from ..program.emit import Replay, retrace, run_replay
from ..program.gradient_calls import GradientCall, GradientEmitter, value_and_gradients
from ..program.ir import Equation, Program, Value
from ..program.primitives import is_literal
from ..program.sizes import nbytes
from .loss_scaling import LossScale, scaled_value_and_gradients
from .partial_replay import PartialReplay
from .passes import Passes
from .rows import BatchDrawReplay, join_microbatches, microbatch_rows, split_microbatches

_ROOM = 2**16  # bytes that a metric's values of the whole batch may take even if the batch is smaller
_SHORT = (jnp.bfloat16, jnp.float16)


class _MicrobatchOutputs:
    """Values computed by a scan over microbatches.

    An output that is neither a sum over examples nor has a row for each example, such as the largest loss or a
    perplexity, is computed for the whole batch from values that are, where this takes no product.

    Args:
        followed: Loss of a microbatch with a batch label for each value.
        carried: Operand that holds the next value, by position of the aux output, for state handed from one microbatch
            to the next.

    Attributes:
        computed: Values of each microbatch, the loss first.
        combinations: Rule that combines each of `computed` over the microbatches.
        exact: Whether the rule of the loss is exact: a sum over examples, a value for each, or no examples in it.
        averaged: Positions of outputs without an exact rule, averaged or concatenated by a guess.
        state: Values of the carried outputs.
    """

    def __init__(self, followed: FollowedProgram, carried: Mapping[int, int]):
        self.followed, self.carried = followed, dict(carried)
        self._small, self._large = followed.small, followed.large
        self._makers = self._small.producer
        self.exact = output_combination(
            followed.output_labels[0], followed.ratio, *self._avals(self._small.outputs[0])
        ).exact
        self.combinations: dict[Value, Concatenated | Summed] = {}
        self.averaged: list[int] = []
        for j, v in enumerate(self._small.outputs):
            if j not in self.carried:
                self._take(j, v)
        state = [self._small.outputs[j] for j in self.carried]
        self.state = [v for v in state if v is not None]
        self.computed = tuple(self.combinations)

    def _avals(self, v: Value | None) -> tuple[Any, Any]:
        if v is None:
            return self._small.closed.out_avals[0], self._large.closed.out_avals[0]
        return self._small.avals[v], self._large.avals[v]

    def _take(self, j: int, v: Value | None) -> None:
        if v is None or (v in self._small.inputs and j):
            return
        label = self.followed.value_labels[v]
        if isinstance(label, UnknownLabel) and self.exact:
            behind = self._behind(v)
            if behind is not None:
                for w in behind:
                    self._give(w)
                return
        if j == 0 or not isinstance(label, Constant):
            self._give(v)
            if not self.how_of(v).exact:
                self.averaged.append(j)

    def how_of(self, v: Value) -> Identical | Concatenated | Summed:
        return output_combination(self.followed.value_labels[v], self.followed.ratio, *self._avals(v))

    def _give(self, v: Value) -> None:
        how = self.how_of(v)
        self.combinations[v] = Summed(1 / self.followed.ratio, how.exact) if isinstance(how, Identical) else how

    def _behind(self, v: Value) -> list[Value] | None:
        """Return the values with a known label from which an unknown one is computed.

        None where they can't be determined, where the computation has a product, or where the values take more bytes
        than both the batch and `_ROOM`.
        """
        found, seen, todo = [], {v}, [v]
        while todo:
            e = self._makers.get(todo.pop())
            if e is None or any(i.primitive.is_product for i in (e, *e.nested())):
                return None
            for w in e.operands:
                if w is None or w in seen or isinstance(self.followed.value_labels[w], Constant):
                    continue
                seen.add(w)
                if isinstance(self.followed.value_labels[w], UnknownLabel):
                    todo.append(w)
                elif w not in self._small.inputs:
                    found.append(w)
        size = sum(nbytes(self._large.avals[w]) for w in found)
        batch = sum(
            nbytes(self._large.avals[v])
            for v in self._large.inputs
            if not isinstance(self.followed.value_labels[v], Constant)
        )
        return found if size <= max(_ROOM, batch) else None

    def whole(self, operands: Sequence[Any], values: Mapping[Value, Any], state: Sequence[Any]) -> list:
        """Return the loss's outputs for the whole batch.

        Args:
            operands: Operands of the whole batch.
            values: Combined values of the microbatches.
            state: State after the last microbatch.
        """
        outs = self._large.outputs
        wanted = [v for j, v in enumerate(outs) if v is not None and j not in self.carried]
        made = dict(zip(wanted, PartialReplay(self._large, wanted, values.keys())(operands, values), strict=True))
        last = dict(zip(self.carried, state, strict=True))
        literals = self._large.closed.jaxpr.outvars
        return [
            last[j] if j in last else made[v] if v is not None else _literal(literals[j]) for j, v in enumerate(outs)
        ]


def _literal(v: Any) -> Any:
    assert is_literal(v)
    return v.val


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
        stateless = _MicrobatchOutputs(self.followed, {})
        moving = {j: k for j, k in carried.items() if not isinstance(self.followed.output_labels[j], Constant)}
        # A microbatch hands state to the next only where the loss couples the examples of a batch.
        self.outputs = stateless if stateless.exact else _MicrobatchOutputs(self.followed, moving)
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
        values = [self._whole(call, j, [outs[j] for outs in found]) for j in range(n)]
        return [*values, *(sum(parts) / cut.microbatches for parts in zip(*(outs[n:] for outs in found), strict=True))]

    def _whole(self, call: AccumulatedGradient, j: int, parts: list) -> Any:
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
