"""Captured step on a padded batch, for `--pad` with `--microbatches`.

The loss is padded before differentiation. An extra operand holds the row numbers: added rows are left out by number,
and sums are divided by the number of real examples. The padded loss is a sum over rows like any other, and is taken in
microbatches like any other.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import ShardError
from ..program.batching.batch import Batch
from ..program.batching.followed_program import describe_equation
from ..program.batching.padding import PaddedEmitter
from ..program.emit import Replay, retrace
from ..program.gradient_calls import GradientCall, gradient_p
from ..program.ir import Equation, Program
from ..program.primitives import is_literal
from ..program.trace import Traced
from .rows import draw_rows, row_positions


def pad_step(real: Traced, large: Program, part: Traced, batch: Batch) -> Traced:
    """Return a step captured with added rows that computes the numbers of the real step.

    Args:
        real: The step captured with the real rows.
        large: The step captured with all added rows.
        part: The step captured with the number of rows to run.
        batch: Dimensions of the examples of `real`.
    """
    i, (dim,) = next(iter(batch.input_dims.items()))
    sizes = [closed.in_avals[i].shape[dim] for closed in (real.closed, large.closed, part.closed)]
    rows = [size * (batch.size or 0) // sizes[0] for size in sizes]
    step = _Step(Program(real.closed), large, Program(part.closed), rows)
    return Traced(retrace(step), real.in_paths, real.out_paths, real.consts)


class _Step(PaddedEmitter):
    """Captured step with padded losses in its gradient calls."""

    def __init__(self, small: Program, large: Program, part: Program, rows: Sequence[int]):
        self._rows = rows
        super().__init__(small, large, part)

    def mixes_rows(self, small: Equation, large: Equation) -> bool:
        # Losses are padded on their own, before differentiation.
        return large.jaxpr_eqn.primitive is not gradient_p and super().mixes_rows(small, large)

    def run_equation(self, e: Equation, values: list) -> list:
        if e.jaxpr_eqn.primitive is not gradient_p:
            return super().run_equation(e, values)
        small, large = (p.equations[e.index].params["gradient"].loss for p in (self._small, self._large))
        call: GradientCall = e.params["gradient"]
        real, whole, here = self._rows
        loss = _Loss(Program(small), Program(large), Program(call.loss), real, Fraction(whole, real))
        numbers = lax.iota(jnp.int32, here)
        closed = retrace(loss, [numbers, *call.loss.in_avals])
        known = {k + 1: x for k, x in call.known_constants.items()}
        return gradient_p.bind(numbers, *values, gradient=GradientCall(closed, call.num_closed_over + 1, known))


class _Loss(PaddedEmitter, Replay):
    """Loss `loss(numbers, *operands)` with the numbers of the real rows; `numbers` are the row numbers of the
    operands."""

    def __init__(self, small: Program, large: Program, part: Program, examples: int, growth: Fraction):
        self._examples, self._growth = examples, growth
        self._numbers: Any = None
        self._fixed = {
            e.index for outer in small.equations if outer.primitive.custom_derivative for e in outer.nested()
        }
        super().__init__(small, large, part)

    def __call__(self, numbers: Any, *operands: Any) -> list:
        self._numbers = numbers
        return super().__call__(*operands)

    def row_numbers(self, size: int) -> Any:
        return row_positions(self._numbers, size)

    def mixes_rows(self, small: Equation, large: Equation) -> bool:
        """Return whether added rows change the numbers of an equation.

        In addition to the cases of the base class: functions with a custom derivative rule, run unchanged, that would
        see added rows, and sizes not proportional to the number of examples.
        """
        values = [v for v in (*small.operands, *small.results) if v is not None]
        shapes = [(self._small.shapes[v], self._large.shapes[v], self.padded_dims(v)) for v in values]
        uneven = any(large[d] != self._growth * small[d] for small, large, dims in shapes for d in dims)
        return uneven or super().mixes_rows(small, large) or (small.index in self._fixed and self._counts(small, large))

    def _counts(self, small: Equation, large: Equation) -> bool:
        """Return whether an equation's results depend on the number of rows."""
        literals = zip(small.jaxpr_eqn.invars, large.jaxpr_eqn.invars, strict=True)
        other = any(is_literal(a) and is_literal(b) and np.any(np.not_equal(a.val, b.val)) for a, b in literals)
        return other or (
            not large.bodies
            and self.has_padding(large)
            and (self.loses_rows(large) or large.primitive.size_dependent_draw)
        )

    def draw_results(self, e: Equation, small: Equation, values: list) -> list:
        """Return a random draw: with one key for all rows, the draw of the real rows; with a key for each row, the draw
        as it is."""
        if self.padded_dims(e.operands[0]):
            return Replay.run_equation(self, e, values)
        if any(self.padded_dims(v) for v in e.operands):
            raise ShardError(
                f"--pad: {describe_equation(self._large, e.index)} works on several examples at once, so "
                "that rows can't be added "
                "to its microbatches; leave --microbatches out, or drop the last, uneven batch"
            )
        (dim,) = self.padded_dims(e.results[0])
        # Added rows repeat the draw of the last real row.
        return [draw_rows(e, small, dim, jnp.minimum(self._numbers, self._examples - 1), values)]
