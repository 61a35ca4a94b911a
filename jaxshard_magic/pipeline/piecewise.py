"""Run the outer program on arrays in pieces, and keep them in pieces through row-wise equations."""

from functools import reduce
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..program.emit import Emitter
from ..program.ir import Equation
from ..program.primitives import bind
from .split_scans import Pieces
from .value_classes import is_rowwise

_SHAPES = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}  # jaxpr parameters with the shape of the result


class PiecewiseEmitter(Emitter):
    """Emit a program with some inputs in `Pieces`.

    Row-wise equations run once per piece. A reduction over the rows runs per piece, with the partial results combined.
    Any other equation reads the concatenated array.
    """

    def run_equation(self, e: Equation, values: list) -> list:
        if not any(isinstance(x, Pieces) for x in values):
            return super().run_equation(e, values)
        if self._by_piece(e):
            bounds = next(x.bounds for x in values if isinstance(x, Pieces))
            parts = zip(*(_aligned_pieces(x, bounds) for x in values), strict=True)
            results = [
                bind(_with_row_count(e, b - a), list(xs)) for xs, (a, b) in zip(parts, pairwise(bounds), strict=True)
            ]
            return [Pieces(xs, bounds, -1) for xs in zip(*results, strict=True)]
        if e.primitive.combiner is not None and len(values) == 1:
            results = [bind(e.jaxpr_eqn, [x])[0] for x in values[0].arrays]
            return [reduce(e.primitive.combiner, results)]
        if e.name == "reshape" and (rows_per_row := self._rows_per_row(e)):
            return [_reshaped(e, values[0], rows_per_row)]
        return super().run_equation(e, [to_pieces(x, None) for x in values])

    def _rows_per_row(self, e: Equation) -> int:
        """Return the number of result rows per operand row of a reshape; 0 if a reshape cuts through rows."""
        before, after = self.program.shapes[e.operands[0] or 0], self.program.shapes[e.results[0]]
        # With `dimensions`, a reshape transposes as well.
        if not after or after[0] % before[0] or e.params["dimensions"] is not None:
            return 0
        return after[0] // before[0]

    def _by_piece(self, e: Equation) -> bool:
        """Return whether `e` can run on each piece by itself."""
        shapes = self.program.shapes
        own = {shapes[v] for v in (*e.operands, *e.results) if v is not None and shapes[v]}
        return len(own) == 1 if e.primitive.is_elementwise else is_rowwise(e, self.program)


def to_pieces(x: Any, bounds: tuple[int, ...] | None) -> Any:
    """Return `x` in the pieces of `bounds`, or as one array for None."""
    if isinstance(x, Pieces):
        if x.bounds == bounds:
            return x
        x = jnp.concatenate(x.arrays)
    return x if bounds is None else Pieces(_slices(x, bounds), bounds, -1)


def _aligned_pieces(x: Any, bounds: tuple[int, ...]) -> list:
    """Return `x` as one operand per piece: its pieces, or a scalar repeated."""
    if not isinstance(x, Pieces) and not jnp.shape(x):
        return [x] * (len(bounds) - 1)
    return list(to_pieces(x, bounds).arrays)


def _reshaped(e: Equation, x: Pieces, each: int) -> Pieces:
    """Reshape piece by piece, for a reshape that turns each row into `each` rows."""
    bounds = tuple(each * b for b in x.bounds)
    made = [
        bind(_with_row_count(e, b - a), [piece])[0] for piece, (a, b) in zip(x.arrays, pairwise(bounds), strict=True)
    ]
    return Pieces(made, bounds, -1)


def _slices(x: Any, bounds: tuple[int, ...]) -> list:
    return [lax.slice_in_dim(x, a, b) for a, b in pairwise(bounds)]


def _with_row_count(e: Equation, rows: int) -> Any:
    """Return the equation with its result shape changed to a piece of so many rows."""
    name = _SHAPES.get(e.name)
    if name is None:
        return e.jaxpr_eqn
    return e.jaxpr_eqn.replace(params={**e.params, name: (rows, *e.params[name][1:])})
