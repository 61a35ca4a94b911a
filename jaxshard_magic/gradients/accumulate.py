"""A gradient call over microbatches: one scan, whose sums are the full batch's loss, gradients and outputs."""

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
from ..program.batching.examples import Constant, Joined, Summed, times
from ..program.batching.follow import Followed, follow, told, unfollowed, unvaried
from ..program.batching.neighbours import taken_together
from ..program.batching.one_example import follow_one
from ..program.capture import Gradient
from ..program.ir import Equation, Program, Value
from ..program.replay import Replay, replayed, retraced
from .draws import Drawing
from .outputs import Outputs
from .part import Part
from .passes import Passes
from .rows import join, rows_of, split
from .scaled import taken_scaled
from .scaling import Scale

_SHORT = (jnp.bfloat16, jnp.float16)


def summed_in(dtype: Any) -> Any:
    """The dtype in which what microbatches give is added up: float32 for shorter ones."""
    return jnp.float32 if dtype in _SHORT else dtype


@dataclass(frozen=True)
class Cut:
    """How a batch of `examples` is taken in `microbatches`, each an equal part of what every of `shards` holds."""

    examples: int
    microbatches: int
    shards: int

    @property
    def each(self) -> int:
        """Examples in a microbatch."""
        return self.examples // self.microbatches


def _keep_together(followed: Followed, cut: Cut) -> None:
    """Raise ShardError where microbatches would part examples that the loss takes together."""
    together, cause = taken_together(followed.large, followed.of, cut.examples)
    each = cut.examples // (cut.microbatches * cut.shards)
    if each % together == 0:
        return
    groups, rest = divmod(cut.examples, cut.shards * together)  # of a shard
    fits = [n for n in range(2, groups + 1) if groups % n == 0 and not rest]
    near = min(fits, key=lambda n: abs(n - cut.microbatches), default=None)
    line = "" if cause is None else f" ({told(followed.large, cause.index)})"
    shards = f" from each of {cut.shards} shards" if cut.shards > 1 else ""
    raise ShardError(
        f"the loss takes {together} examples that follow one another together{line}, and a microbatch would have "
        f"{each}{shards}; "
        + (
            f"--microbatches {near} keeps them together"
            if near
            else "no number of microbatches keeps them together"
        ),
        option=f"--microbatches {cut.microbatches}",
    )


class Accumulated:
    """One gradient call of a step over microbatches.

    `small` and `large` are the call as traced at a microbatch and at the full batch; `batch[k]` is the dimension of
    operand k that the examples run along. `data`: the operands that hold examples, or what a loss without any is about.
    `carried`: aux output -> the operand whose next value it is, for state that
    a microbatch hands to the next where the loss couples its examples (statistics of BatchNorm). `twice`: traces both
    with two examples for each, for a microbatch of one.
    """

    def __init__(
        self,
        small: Gradient,
        large: Gradient,
        batch: Mapping[int, int],
        cut: Cut,
        passes: Passes,
        carried: Mapping[int, int],
        data: Collection[int] = (),
        twice: Callable[[], tuple[Gradient, Gradient]] | None = None,
    ):
        self.cut, self.batch, self._call = cut, batch, large
        self.data = frozenset(batch) | frozenset(data)
        self.large = _opened(large)
        self.small = self.large if small is large else _opened(small)
        if cut.microbatches == 1:
            self.followed = unfollowed(self.large)
        elif not batch:
            self.followed = unvaried(self.large, cut.microbatches)
        elif twice is None:
            self.followed = follow(self.small, self.large, batch, trained=set(large.differentiated))
        else:

            def opened() -> tuple[Program, Program]:
                one, whole = twice()
                return _opened(one), _opened(whole)

            try:
                self.followed = follow_one(self.small, self.large, batch, set(large.differentiated), opened)
            except ShardError as error:
                raise ShardError(str(error), option=f"--microbatches {cut.microbatches}") from None
            self.large = self.followed.large
        if cut.microbatches > 1 and batch:
            _keep_together(self.followed, cut)
        stateless = Outputs(self.followed, {})
        moving = {j: k for j, k in carried.items() if not isinstance(self.followed.outputs[j], Constant)}
        self.outputs = stateless if stateless.exact else Outputs(self.followed, moving)
        self.loss = Program(self._one(passes, small.known))

    @property
    def cause(self) -> str | None:
        """Where the loss stops being a sum over examples; None where it is one."""
        causes = self.followed.causes
        return told(self.small, causes[0]) if causes and not self.outputs.exact else None

    def __call__(self, operands: Sequence[Any], loss_scale: Scale | None = None) -> list:
        cut, outputs, places = self.cut, self.outputs, tuple(self.batch)
        norms = Part(self.large, list(self.followed.norms.values()))(operands)
        whole = [split(operands[k], self.batch[k], cut.microbatches, cut.shards) for k in places]
        rows = rows_of(cut.examples, cut.microbatches, cut.shards)
        call = Gradient(self.loss.closed, self._call.closed_over + 1 + len(norms))
        loss, seed, given = Replay(self.loss), self.seed, len(outputs.given)

        def trip(acc, part):
            sums, state = acc
            mine, parts = part
            inputs = list(operands)
            for k, x in zip((*places, *outputs.carried.values()), (*parts, *state), strict=True):
                inputs[k] = x
            outs = taken_scaled(call, loss, [mine, *norms, *inputs], seed, loss_scale)
            values, state, gradients = outs[:given], outs[given : call.outs], outs[call.outs :]
            terms = [*compress(values, self.is_sum), *gradients]
            parts = list(compress(values, map(not_, self.is_sum)))
            return ([a + x.astype(a.dtype) for a, x in zip(sums, terms, strict=True)], state), parts

        start = [operands[k] for k in outputs.carried.values()]
        (sums, state), parts = lax.scan(trip, (self._zeros(), start), (rows, whole))
        n = sum(self.is_sum)
        values = self.values(sums[:n], parts)
        pairs = zip(sums[n:], self._call.differentiated, strict=True)
        gradients = [x.astype(self._call.loss.in_avals[k].dtype) for x, k in pairs]
        return [*outputs.whole(operands, values, state), *gradients]

    @property
    def is_sum(self) -> list[bool]:
        """Whether each value that a microbatch gives is summed; else it is put beside the others."""
        return [isinstance(self.outputs.how[v], Summed) for v in self.outputs.given]

    @property
    def seed(self) -> float:
        """The cotangent of each microbatch's loss with which gradients sum to those of the whole batch."""
        how = self.outputs.how[self.outputs.given[0]]
        return float(how.scale)

    def _zeros(self) -> list:
        sums = [self.small.avals[v] for v in compress(self.outputs.given, self.is_sum)]
        wide = [*sums, *(self._call.loss.in_avals[k] for k in self._call.differentiated)]
        return [jnp.zeros(a.shape, summed_in(a.dtype)) for a in wide]

    def values(self, sums: Sequence[Any], parts: Sequence[Any]) -> dict[Value, Any]:
        """The values of the whole batch, from the sums of the microbatches' and from those that were stacked."""
        found = {}
        left, stacked = iter(sums), iter(parts)
        for v, how in self.outputs.how.items():
            x = join(next(stacked), how.dim, self.cut.shards) if isinstance(how, Joined) else next(left)
            found[v] = times(x, how.scale).astype(self.large.avals[v].dtype)
        return found

    def _one(self, passes: Passes, known: Mapping[int, Any]) -> ClosedJaxpr:
        """`(rows, norms..., operands...)` of one microbatch -> what it gives, the loss first, and its state."""
        norms = [self.small.avals[v] for v in self.followed.norms]
        avals = [jax.ShapeDtypeStruct((self.cut.each,), jnp.int32), *norms, *self.small.closed.in_avals]
        one = retraced(_One(self.followed, [*self.outputs.given, *self.outputs.state]), avals)
        first = 1 + len(norms)  # sums of the whole batch before it may have gradients as well
        moving = {*range(1, first), *(first + k for k in self._call.differentiated)}
        return passes(one, {first + k: x for k, x in known.items()}, moving)


def _opened(call: Gradient) -> Program:
    return Program(replayed(call.loss, Replay))


class _One(Drawing):
    """The loss of one microbatch: called with its rows and with the sums of the whole batch before its operands, it
    gives the values `wanted`."""

    def __init__(self, followed: Followed, wanted: Sequence[Value]):
        super().__init__(followed)
        self._wanted = wanted

    def __call__(self, rows: Any, *args: Any) -> list:
        n = len(self.followed.norms)
        self.rows, self._given = rows, dict(zip(self.followed.norms, args[:n], strict=True))
        self._made: dict[Value, Any] = dict(zip(self.program.inputs, args[n:], strict=True))
        super().__call__(*args[n:])
        return [self._made[v] for v in self._wanted]

    def equation(self, e: Equation, values: list) -> list:
        outs = super().equation(e, self.followed.rescaled(e, values))
        outs = [self._given.get(v, x) for v, x in zip(e.outs, outs, strict=True)]
        self._made.update((v, x) for v, x in zip(e.outs, outs, strict=True) if v in self._wanted)
        return outs
