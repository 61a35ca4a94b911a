"""A step run on arrays in pieces, which stay in pieces where it works on them row by row."""

from functools import reduce
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..program.emit import Emitter
from ..program.ir import Equation
from ..program.primitives import bind
from .kinds import by_row
from .layers import Pieces

_SHAPES = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}  # parameters that name the rows of a result


class Piecewise(Emitter):
    """Runs a program some of whose inputs are `Pieces`. What reads one otherwise than row by row, or to reduce it along
    its rows, joins it."""

    def equation(self, e: Equation, values: list) -> list:
        if not any(isinstance(x, Pieces) for x in values):
            return super().equation(e, values)
        if self._by_piece(e):
            bounds = next(x.bounds for x in values if isinstance(x, Pieces))
            parts = zip(*(_parts(x, bounds) for x in values), strict=True)
            made = [
                bind(_with_rows(e, b - a), list(xs))
                for xs, (a, b) in zip(parts, pairwise(bounds), strict=True)
            ]
            return [Pieces(xs, bounds, -1) for xs in zip(*made, strict=True)]
        if e.primitive.joins is not None and len(values) == 1:
            made = [bind(e.eqn, [x])[0] for x in values[0].arrays]
            return [reduce(e.primitive.joins, made)]
        if e.name == "reshape" and (each := self._rows_of_each(e)):
            return [_reshaped(e, values[0], each)]
        return super().equation(e, [laid_out(x, None) for x in values])

    def _rows_of_each(self, e: Equation) -> int:
        """How many rows of a reshaped array one row becomes; 0 where rows are torn."""
        before, after = self.program.shapes[e.ins[0] or 0], self.program.shapes[e.outs[0]]
        if not after or after[0] % before[0] or e.params["dimensions"] is not None:
            return 0
        return after[0] // before[0]

    def _by_piece(self, e: Equation) -> bool:
        shapes = self.program.shapes
        own = {shapes[v] for v in (*e.ins, *e.outs) if v is not None and shapes[v]}
        return len(own) == 1 if e.primitive.elementwise else by_row(e, self.program)


def laid_out(x: Any, bounds: tuple[int, ...] | None) -> Any:
    """`x` in the pieces of `bounds`, or whole for None."""
    if isinstance(x, Pieces):
        if x.bounds == bounds:
            return x
        x = jnp.concatenate(x.arrays)
    return x if bounds is None else Pieces(_slices(x, bounds), bounds, -1)


def _parts(x: Any, bounds: tuple[int, ...]) -> list:
    if not isinstance(x, Pieces) and not jnp.shape(x):
        return [x] * (len(bounds) - 1)
    return list(laid_out(x, bounds).arrays)


def _reshaped(e: Equation, x: Pieces, each: int) -> Pieces:
    bounds = tuple(each * b for b in x.bounds)
    made = [
        bind(_with_rows(e, b - a), [piece])[0]
        for piece, (a, b) in zip(x.arrays, pairwise(bounds), strict=True)
    ]
    return Pieces(made, bounds, -1)


def _slices(x: Any, bounds: tuple[int, ...]) -> list:
    return [lax.slice_in_dim(x, a, b) for a, b in pairwise(bounds)]


def _with_rows(e: Equation, rows: int) -> Any:
    """The equation for a piece of so many rows."""
    name = _SHAPES.get(e.name)
    if name is None:
        return e.eqn
    return e.eqn.replace(params={**e.params, name: (rows, *e.params[name][1:])})
