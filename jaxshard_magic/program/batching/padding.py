"""A step run on a batch with rows added to it, with the numbers of the real rows alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...errors import ShardError
from ..emit import Emitter
from ..ir import Equation, Program, Scope, Value
from ..primitives import bind, is_literal, shape_of
from ..primitives.contractions import Contraction
from ..primitives.primitive import Kind
from ..primitives.sharding_rules import along
from .follow import told
from .indexing import windowed


class Padded(Emitter):
    """Runs `large`, a step traced with rows added to its batch, as `small`, the same step on the real rows, computes.

    The real rows come first. What sums over rows sees zeros in the added ones, what takes the largest or the smallest
    the least or the most; numbers that depend on how many rows there are, such as the divisor of a mean, are those of
    `small`, and so are random draws. Rows added are rubbish in what has a row for each example: they are to be cut off.
    `part`: the step traced with yet another number of rows, to be run in the place of `large`.

    Raises ShardError where a step mixes rows otherwise (a sort, a product of examples with each other).
    """

    def __init__(self, small: Program, large: Program, part: Program | None = None):
        super().__init__(large if part is None else part)
        self._small, self._large = small, large
        names = [[(e.name, e.ins, e.outs) for e in p.equations] for p in (small, large, self.program)]
        if names[0] != names[1] or names[0] != names[2]:
            raise ShardError(
                "--pad: the step is another program for more examples; it must not decide in Python by how many there "
                "are, nor loop over them"
            )
        self._twins = dict(zip(self.program.scopes(), small.scopes(), strict=True))
        for e, f in zip(small.equations, large.equations, strict=True):
            if self.mixes(e, f):
                raise ShardError(
                    f"--pad: {told(large, f.index)} works on several examples at once, so that rows can't be added to "
                    "the batch; drop the last, uneven batch, or take a mesh that divides it"
                )

    def run(self, scope: Scope, args: Any) -> list:
        small = self._twins[scope]
        consts = zip(small.consts, scope.const_values, strict=True)
        outs = super().run(replace(scope, consts=tuple(self.as_rows(x, v) for x, v in consts)), args)
        pairs = zip(outs, small.jaxpr.outvars, strict=True)
        return [v.val if is_literal(v) else x for x, v in pairs]

    def equation(self, e: Equation, values: list) -> list:
        small = self._small.equations[e.index]
        pairs = zip(values, small.eqn.invars, strict=True)
        values = [v.val if is_literal(v) else x for x, v in pairs]
        if e.doors or not self.grown(e):
            return super().equation(e, values)
        if e.primitive.counted:
            return self.drawn(e, small, values)
        backwards = e.primitive.kind is Kind.RUNNING and e.params.get(
            "reverse"
        )  # a row depends on those after it
        sets_rows = _sets_rows(e, self.dims)
        if e.primitive.fill is not None and (backwards or self.loses_rows(e) or sets_rows):
            values = [self._filled(x, v, e.primitive.fill) for x, v in zip(values, e.ins, strict=True)]
        elif sets_rows:  # at no place
            values[1] = self._filled(values[1], e.ins[1], lambda dtype: jnp.iinfo(dtype).max)
        return super().equation(e, values)

    def dims(self, v: Value | None) -> list[int]:
        """The dimensions of a value that have rows added."""
        if v is None:
            return []
        a, b = self._small.shapes[v], self._large.shapes[v]
        return [d for d, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]

    def grown(self, e: Equation) -> bool:
        """Have operands or results rows added?"""
        return any(self.dims(v) for v in (*e.ins, *e.outs))

    def loses_rows(self, e: Equation) -> bool:
        """Do operands have rows that the results have no more?"""
        return any(self.dims(v) for v in e.ins) and not all(self.dims(v) for v in e.outs)

    def numbers(self, size: int) -> Any:
        """The numbers of the rows of a dimension of `size`, int32[size]; those of real rows are below the real size."""
        return lax.iota(jnp.int32, size)

    def drawn(self, e: Equation, small: Equation, values: list) -> list:
        """The results of a random draw: those of the real rows' draw."""
        real = [self._real(x, v) for x, v in zip(values, e.ins, strict=True)]
        return [self.as_rows(x, v) for x, v in zip(bind(small.eqn, real), e.outs, strict=True)]

    def as_rows(self, x: Any, v: Value) -> Any:
        """`x`, the value `v` of the real rows, for the rows that the program runs on: copies of the last one in the
        place of those added."""
        for d in self.dims(v):
            x = jnp.take(jnp.asarray(x), self.numbers(self.program.shapes[v][d]), axis=d, mode="clip")
        return x

    def _real(self, x: Any, v: Value | None) -> Any:
        """The real rows of `x`, the value `v` of the rows that the program runs on."""
        for d in self.dims(v):
            assert v is not None
            x = jnp.take(x, lax.iota(jnp.int32, self._small.shapes[v][d]), axis=d, mode="clip")
        return x

    def _filled(self, x: Any, v: Value | None, fill: Any) -> Any:
        for d in self.dims(v):
            assert v is not None
            real = self.numbers(x.shape[d]) < self._small.shapes[v][d]
            x = jnp.where(lax.broadcast_in_dim(real, x.shape, (d,)), x, fill(x.dtype))
        return x

    def mixes(self, small: Equation, large: Equation) -> bool:
        """Does an equation mix rows so that those added can't be kept out?"""
        wrong = any(len(self.dims(v)) > 1 for v in (*large.ins, *large.outs))
        if not large.doors and self.grown(large):
            lost = self.loses_rows(large)
            sets_rows = _sets_rows(large, self.dims)
            left_out = sets_rows and large.params["mode"] is lax.GatherScatterMode.FILL_OR_DROP
            wrong |= (lost or sets_rows) and large.primitive.fill is None and not left_out
            wrong |= _touches(small, large, self.dims)
            if (c := large.contraction) is not None:
                wrong |= (
                    not lost
                    and all(self.dims(v) for v in large.ins[:2])
                    and not _batched(large, c, self.dims)
                )
                wrong |= c.ragged in self.dims(large.ins[0])
                wrong |= _convolves(large, c, self.dims)
        return wrong or (large.is_scan and small.params["length"] != large.params["length"])


def padded(x: Any, widths: Sequence[tuple[int, int]]) -> Any:
    """`x` with copies of its last rows added at the end of its dimensions: they compute what real ones do, so that the
    derivatives of nothing overflow."""
    if not any(after for _, after in widths):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jnp.pad(jax.random.key_data(x), [*widths, (0, 0)], mode="edge")
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jnp.pad(x, widths, mode="edge")


def _touches(small: Equation, large: Equation, dims: Any) -> bool:
    """Does an equation that moves rows about do so along those that were added?"""
    if not large.eqn.invars:
        return False
    grown = {d for v in (*large.ins, *large.outs) for d in dims(v)}
    does, params, shape = large.primitive, large.params, shape_of(large.eqn.invars[0])
    if does.kind is Kind.WINDOW:
        return not grown.isdisjoint(windowed(params, len(shape)))
    if does.kind is Kind.MATRIX:
        return len(shape) - (does.inner or len(params["fft_lengths"])) <= max(grown)
    if does.kind is Kind.ORDER or (does.along and does.kind is Kind.CUT):
        return not grown.isdisjoint(along(params, len(shape)))
    if does.kind is Kind.SHAPE:
        after = [large.factors and large.factors.leading(d) for d in dims(large.ins[0])]
        return not set(after) <= {*dims(large.outs[0])}
    if large.name == "pad":
        return any(after > 0 or between for _, after, between in (params["padding_config"][d] for d in grown))
    if large.name == "slice":
        ours, theirs = (p["limit_indices"] for p in (small.params, large.params))
        real, starts = shape_of(small.eqn.invars[0]), params["start_indices"]
        return any(starts[d] or ours[d] != real[d] or theirs[d] != shape[d] for d in grown)
    after = shape_of(large.eqn.outvars[0])
    return does.cuts and any(after[d] != shape[d] for d in grown)


def _batched(e: Equation, c: Contraction, dims: Any) -> bool:
    """Are the rows of both operands of a product the same examples?"""
    left, right = ({pair[k] for pair in c.batch} for k in (0, 1))
    return left.issuperset(dims(e.ins[0])) and right.issuperset(dims(e.ins[1]))


def _convolves(e: Equation, c: Contraction, dims: Any) -> bool:
    """Does a convolution see several rows at once, and not the sum over all?"""
    image, window, result = (shape_of(v) for v in (*e.eqn.invars[:2], e.eqn.outvars[0]))
    return any(
        (image[i], window[j]) != (result[k], 1) and (image[i], 1) != (window[j], result[k])
        for i, j, k in c.windowed
        if i in dims(e.ins[0]) or j in dims(e.ins[1]) or k in dims(e.outs[0])
    )


def _sets_rows(e: Equation, dims: Any) -> bool:
    """Does an equation set rows, or add them, where indices with a row for each say?"""
    if not e.primitive.scatters:
        return False
    beside = e.params["dimension_numbers"].scatter_indices_batching_dims
    return not set(dims(e.ins[1])).issubset(beside)
