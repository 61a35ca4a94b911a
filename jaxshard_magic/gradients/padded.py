"""A captured step on a batch with rows added to it, as `--pad` with `--microbatches` takes it.

The loss is padded before it is differentiated: it reads the numbers of its rows as an operand of its own, by which it
leaves out those that were added, and divides by the real examples alone. So it is a sum over rows like any other loss,
and is taken in microbatches like any other.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import ShardError
from ..program.batching.batch import Batch
from ..program.batching.follow import told
from ..program.batching.padding import Padded
from ..program.capture import Gradient, gradient_p
from ..program.ir import Equation, Program
from ..program.primitives import is_literal
from ..program.replay import Replay, retraced
from ..program.trace import Traced
from .draws import drawn
from .rows import places_of


def with_rows(real: Traced, large: Program, part: Traced, batch: Batch) -> Traced:
    """`part`, a step captured with some number of rows, with the numbers of `real`, the step of the real rows.

    `large`: the step captured with all rows that are added; `batch`: where the examples of `real` are.
    """
    i, (dim,) = next(iter(batch.dims.items()))
    sizes = [closed.in_avals[i].shape[dim] for closed in (real.closed, large.closed, part.closed)]
    rows = [size * (batch.size or 0) // sizes[0] for size in sizes]
    step = _Step(Program(real.closed), large, Program(part.closed), rows)
    return Traced(retraced(step), real.in_paths, real.out_paths, real.consts)


class _Step(Padded):
    """A captured step, whose gradient calls become those of padded losses."""

    def __init__(self, small: Program, large: Program, part: Program, rows: Sequence[int]):
        self._rows = rows
        super().__init__(small, large, part)

    def mixes(self, small: Equation, large: Equation) -> bool:
        return large.eqn.primitive is not gradient_p and super().mixes(small, large)

    def equation(self, e: Equation, values: list) -> list:
        if e.eqn.primitive is not gradient_p:
            return super().equation(e, values)
        small, large = (p.equations[e.index].params["gradient"].loss for p in (self._small, self._large))
        call: Gradient = e.params["gradient"]
        real, whole, here = self._rows
        loss = _Loss(Program(small), Program(large), Program(call.loss), real, Fraction(whole, real))
        numbers = lax.iota(jnp.int32, here)
        closed = retraced(loss, [numbers, *call.loss.in_avals])
        known = {k + 1: x for k, x in call.known.items()}
        return gradient_p.bind(numbers, *values, gradient=Gradient(closed, call.closed_over + 1, known))


class _Loss(Padded, Replay):
    """`loss(numbers, *operands)`: a loss with the numbers of the real rows, `numbers` being those of its rows."""

    def __init__(self, small: Program, large: Program, part: Program, examples: int, growth: Fraction):
        self._examples, self._growth = examples, growth
        self._numbers: Any = None
        self._fixed = {e.index for outer in small.equations if outer.primitive.custom for e in outer.inside()}
        super().__init__(small, large, part)

    def __call__(self, numbers: Any, *operands: Any) -> list:
        self._numbers = numbers
        return super().__call__(*operands)

    def numbers(self, size: int) -> Any:
        return places_of(self._numbers, size)

    def mixes(self, small: Equation, large: Equation) -> bool:
        """Also where a custom derivative rule, whose function runs as it is, would see the rows that are added, and
        where rows are not in proportion to the examples."""
        values = [v for v in (*small.ins, *small.outs) if v is not None]
        shapes = [(self._small.shapes[v], self._large.shapes[v], self.dims(v)) for v in values]
        uneven = any(large[d] != self._growth * small[d] for small, large, dims in shapes for d in dims)
        return (
            uneven
            or super().mixes(small, large)
            or (small.index in self._fixed and self._counts(small, large))
        )

    def _counts(self, small: Equation, large: Equation) -> bool:
        """Do the numbers of an equation's results depend on how many rows there are?"""
        literals = zip(small.eqn.invars, large.eqn.invars, strict=True)
        other = any(
            is_literal(a) and is_literal(b) and np.any(np.not_equal(a.val, b.val)) for a, b in literals
        )
        return other or (
            not large.doors and self.grown(large) and (self.loses_rows(large) or large.primitive.counted)
        )

    def drawn(self, e: Equation, small: Equation, values: list) -> list:
        """One key for all: the real rows' draw. A key for each row: as it is."""
        if self.dims(e.ins[0]):
            return Replay.equation(self, e, values)
        if any(self.dims(v) for v in e.ins):
            raise ShardError(
                f"--pad: {told(self._large, e.index)} works on several examples at once, so that rows can't be added "
                "to its microbatches; leave --microbatches out, or drop the last, uneven batch"
            )
        (dim,) = self.dims(e.outs[0])
        return [drawn(e, small, dim, jnp.minimum(self._numbers, self._examples - 1), values)]
