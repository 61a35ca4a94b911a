"""Steps run on batches with added rows, with the numbers of the real rows alone.

Padding needs no labels: it compares the shapes of two traces. Reductions see the neutral element of their primitive in
added rows, so that a new reduction needs a neutral element in its row of the primitive table.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...errors import ShardError
from ..emit import Emitter
from ..ir import Equation, Program, SubJaxpr, Value
from ..primitives import bind, is_literal, shape_of
from ..primitives.contractions import Contraction
from ..primitives.primitive import Kind
from ..primitives.sharding_rules import axis_dims
from .batch_rules import window_dims
from .followed_program import describe_equation


class PaddedEmitter(Emitter):
    """Run a step traced with added rows, with the numbers of the same step traced on the real rows.

    The real rows come first. Sums over rows see zeros in the added rows, maxima and minima the least or the greatest
    number. Numbers that depend on the number of rows, such as the divisor of a mean, are those of `small`, and so are
    random draws. Added rows hold arbitrary numbers in results with a row for each example: cut them off.

    Args:
        small: The step traced on the real rows.
        large: The same step traced with added rows.
        part: The same step traced with yet another number of rows, to run instead of `large`.

    Raises:
        ShardError: The step differs between the row counts, or mixes rows otherwise (a sort, a product of examples with
            each other).
    """

    def __init__(self, small: Program, large: Program, part: Program | None = None):
        super().__init__(large if part is None else part)
        self._small, self._large = small, large
        names = [[(e.name, e.operands, e.results) for e in p.equations] for p in (small, large, self.program)]
        if names[0] != names[1] or names[0] != names[2]:
            raise ShardError(
                "--pad: the step is another program for more examples; it must not decide in Python by how many there "
                "are, nor loop over them"
            )
        self._twins = dict(zip(self.program.sub_jaxprs(), small.sub_jaxprs(), strict=True))
        for e, f in zip(small.equations, large.equations, strict=True):
            if self.mixes_rows(e, f):
                raise ShardError(
                    f"--pad: {describe_equation(large, f.index)} works on several examples at once, so "
                    "that rows can't be added to "
                    "the batch; drop the last, uneven batch, or take a mesh that divides it"
                )

    def run(self, scope: SubJaxpr, args: Any) -> list:
        small = self._twins[scope]
        # Constants and literals are those of `small`: some depend on the number of rows, as the divisor of a mean.
        consts = zip(small.consts, scope.const_values, strict=True)
        outs = super().run(replace(scope, consts=tuple(self.pad_value(x, v) for x, v in consts)), args)
        pairs = zip(outs, small.jaxpr.outvars, strict=True)
        return [v.val if is_literal(v) else x for x, v in pairs]

    def run_equation(self, e: Equation, values: list) -> list:
        small = self._small.equations[e.index]
        pairs = zip(values, small.jaxpr_eqn.invars, strict=True)
        values = [v.val if is_literal(v) else x for x, v in pairs]
        if e.bodies or not self.has_padding(e):
            return super().run_equation(e, values)
        # The first numbers of a larger draw are other numbers.
        if e.primitive.size_dependent_draw:
            return self.draw_results(e, small, values)
        # In reverse, a real row depends on the added rows after it.
        backwards = e.primitive.kind is Kind.CUMULATIVE and e.params.get("reverse")
        scatters_padding = _scatters_padding(e, self.padded_dims)
        if e.primitive.identity is not None and (backwards or self.loses_rows(e) or scatters_padding):
            values = [self._fill_padding(x, v, e.primitive.identity) for x, v in zip(values, e.operands, strict=True)]
        elif scatters_padding:  # an index out of bounds, which the scatter drops
            values[1] = self._fill_padding(values[1], e.operands[1], lambda dtype: jnp.iinfo(dtype).max)
        return super().run_equation(e, values)

    def padded_dims(self, v: Value | None) -> list[int]:
        """Return the dimensions of `v` that have added rows."""
        if v is None:
            return []
        a, b = self._small.shapes[v], self._large.shapes[v]
        return [d for d, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]

    def has_padding(self, e: Equation) -> bool:
        """Return whether an operand or result has added rows."""
        return any(self.padded_dims(v) for v in (*e.operands, *e.results))

    def loses_rows(self, e: Equation) -> bool:
        """Return whether operands have added rows that a result lacks."""
        return any(self.padded_dims(v) for v in e.operands) and not all(self.padded_dims(v) for v in e.results)

    def row_numbers(self, size: int) -> Any:
        """Return the row numbers of a dimension, int32[size]; numbers of real rows are below the real size."""
        return lax.iota(jnp.int32, size)

    def draw_results(self, e: Equation, small: Equation, values: list) -> list:
        """Return the results of a random draw: those of a draw for the real rows.

        Args:
            e: The equation with added rows.
            small: The same equation on the real rows.
            values: Its operands.
        """
        real = [self._real_rows(x, v) for x, v in zip(values, e.operands, strict=True)]
        return [self.pad_value(x, v) for x, v in zip(bind(small.jaxpr_eqn, real), e.results, strict=True)]

    def pad_value(self, x: Any, v: Value) -> Any:
        """Return `x`, the value `v` of the real rows, with copies of the last row in place of added ones."""
        for d in self.padded_dims(v):
            # Mode "clip" repeats the last row. Copies of a real row keep derivatives finite.
            x = jnp.take(jnp.asarray(x), self.row_numbers(self.program.shapes[v][d]), axis=d, mode="clip")
        return x

    def _real_rows(self, x: Any, v: Value | None) -> Any:
        """Return the real rows of `x`, the value `v` with added rows."""
        for d in self.padded_dims(v):
            assert v is not None
            x = jnp.take(x, lax.iota(jnp.int32, self._small.shapes[v][d]), axis=d, mode="clip")
        return x

    def _fill_padding(self, x: Any, v: Value | None, fill: Any) -> Any:
        """Return `x` with the number `fill(dtype)` in the added rows."""
        for d in self.padded_dims(v):
            assert v is not None
            real = self.row_numbers(x.shape[d]) < self._small.shapes[v][d]
            x = jnp.where(lax.broadcast_in_dim(real, x.shape, (d,)), x, fill(x.dtype))
        return x

    def mixes_rows(self, small: Equation, large: Equation) -> bool:
        """Return whether an equation mixes rows so that added rows can't be kept out of the real results.

        Args:
            small: The equation on the real rows.
            large: The same equation with added rows.
        """
        is_mixing = any(len(self.padded_dims(v)) > 1 for v in (*large.operands, *large.results))
        if not large.bodies and self.has_padding(large):
            drops_rows = self.loses_rows(large)
            scatters_padding = _scatters_padding(large, self.padded_dims)
            drops_updates = scatters_padding and large.params["mode"] is lax.GatherScatterMode.FILL_OR_DROP
            is_mixing |= (drops_rows or scatters_padding) and large.primitive.identity is None and not drops_updates
            is_mixing |= _moves_padding(small, large, self.padded_dims)
            if (c := large.contraction) is not None:
                is_mixing |= (
                    not drops_rows
                    and all(self.padded_dims(v) for v in large.operands[:2])
                    and not _is_batch_product(large, c, self.padded_dims)
                )
                is_mixing |= c.ragged_dim in self.padded_dims(large.operands[0])
                is_mixing |= _convolves_rows(large, c, self.padded_dims)
        return is_mixing or (large.is_scan and small.params["length"] != large.params["length"])


def pad_with_last_row(x: Any, widths: Sequence[tuple[int, int]]) -> Any:
    """Return `x` with copies of its last rows added at the end of its dimensions.

    Copies of real rows keep derivatives finite.

    Args:
        x: The array, or an array of random keys.
        widths: (before, after) rows to add, for each dimension.
    """
    if not any(after for _, after in widths):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jnp.pad(jax.random.key_data(x), [*widths, (0, 0)], mode="edge")
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jnp.pad(x, widths, mode="edge")


def _moves_padding(small: Equation, large: Equation, padded_dims: Any) -> bool:
    """Return whether an equation that moves data does so along added rows."""
    if not large.jaxpr_eqn.invars:
        return False
    row_dims = {d for v in (*large.operands, *large.results) for d in padded_dims(v)}
    primitive, params, shape = large.primitive, large.params, shape_of(large.jaxpr_eqn.invars[0])
    if primitive.kind is Kind.WINDOW:
        return not row_dims.isdisjoint(window_dims(params, len(shape)))
    if primitive.kind is Kind.MATRIX:
        return len(shape) - (primitive.matrix_dims or len(params["fft_lengths"])) <= max(row_dims)
    if primitive.kind is Kind.SORT or (primitive.has_axis and primitive.kind is Kind.SLICE):
        return not row_dims.isdisjoint(axis_dims(params, len(shape)))
    if primitive.kind is Kind.SHAPE:
        after = [large.factors and large.factors.leading_dim(d) for d in padded_dims(large.operands[0])]
        return not set(after) <= {*padded_dims(large.results[0])}
    if large.name == "pad":
        return any(after > 0 or between for _, after, between in (params["padding_config"][d] for d in row_dims))
    if large.name == "slice":
        real_limits, padded_limits = (p["limit_indices"] for p in (small.params, large.params))
        real, starts = shape_of(small.jaxpr_eqn.invars[0]), params["start_indices"]
        return any(starts[d] or real_limits[d] != real[d] or padded_limits[d] != shape[d] for d in row_dims)
    after = shape_of(large.jaxpr_eqn.outvars[0])
    return primitive.resizes_dims and any(after[d] != shape[d] for d in row_dims)


def _is_batch_product(e: Equation, c: Contraction, padded_dims: Any) -> bool:
    """Return whether the rows of both operands of a product are batch dimensions."""
    left, right = ({pair[k] for pair in c.batch} for k in (0, 1))
    return left.issuperset(padded_dims(e.operands[0])) and right.issuperset(padded_dims(e.operands[1]))


def _convolves_rows(e: Equation, c: Contraction, padded_dims: Any) -> bool:
    """Return whether a convolution sees several rows at once, other than by a sum over all of them."""
    image, window, result = (shape_of(v) for v in (*e.jaxpr_eqn.invars[:2], e.jaxpr_eqn.outvars[0]))
    return any(
        (image[i], window[j]) != (result[k], 1) and (image[i], 1) != (window[j], result[k])
        for i, j, k in c.windowed
        if i in padded_dims(e.operands[0]) or j in padded_dims(e.operands[1]) or k in padded_dims(e.results[0])
    )


def _scatters_padding(e: Equation, padded_dims: Any) -> bool:
    """Return whether an equation sets or adds rows at places named by indices that have added rows."""
    if not e.primitive.is_scatter:
        return False
    batching_dims = e.params["dimension_numbers"].scatter_indices_batching_dims
    return not set(padded_dims(e.operands[1])).issubset(batching_dims)
