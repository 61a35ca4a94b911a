"""A function followed from a microbatch to the whole batch, and its values put together again."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard_magic.program.batching.batch_labels import (
    ExampleSum,
    Identical,
    PerExample,
    Summed,
    output_combination,
)
from jaxshard_magic.program.batching.followed_program import FollowedProgram, follow_batch
from jaxshard_magic.program.emit import Emitter, Replay
from jaxshard_magic.program.ir import Program
from jaxshard_magic.program.primitives import bind

B, M = 12, 3
ROWS = np.arange(B).reshape(B // M, M).T  # every third example: no microbatch is a run of them
KEY = jax.random.key(0)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


W, X, Y = normal(1, 5, 4), normal(2, B, 5), jax.random.randint(jax.random.key(3), (B,), 0, 4)


class Whole(Emitter):
    """The whole batch, with all that its equations gave."""

    def __init__(self, program):
        super().__init__(program)
        self.values = {}

    def run_equation(self, e, values):
        outs = super().run_equation(e, values)
        self.values.update(zip(e.results, outs, strict=True))
        return outs


class Microbatch(Replay):
    """The small program on some rows of the batch, as `Followed` says that it has to be run."""

    def __init__(self, followed, rows, norms):
        super().__init__(followed.small)
        self.followed, self.rows, self.norms = followed, rows, norms

    def run_equation(self, e, values):
        values, dim = self.followed.scale_operands(e, values), self.followed.draw_dims.get(e.index)
        if dim is not None:
            whole = bind(self.followed.large.equations[e.index].jaxpr_eqn, values)[0]
            return [jnp.take(whole, places(self.rows, whole.shape[dim]), axis=dim)]
        outs = super().run_equation(e, values)
        return [self.norms.get(v, x) for v, x in zip(e.results, outs, strict=True)]


def places(rows, size):
    each = size // B
    return (np.asarray(rows)[:, None] * each + np.arange(each)).reshape(-1)


@dataclass
class Case:
    """A function of parameters and a batch; `dims`: the batch's dimension in each of its arrays."""

    f: Any
    params: Any
    batch: tuple
    dims: tuple[int, ...]
    followed: FollowedProgram

    @property
    def labels(self):
        return self.followed.output_labels

    def cut(self, rows):
        return [jnp.take(x, rows, axis=d) for x, d in zip(self.batch, self.dims, strict=True)]

    def parts(self, params):
        """Every output of every microbatch."""
        program, norms = Whole(self.followed.large), {}
        program(*jax.tree.leaves((params, self.batch)))
        norms = {v: program.values[w] for v, w in self.followed.full_batch_values.items()}
        return [Microbatch(self.followed, rows, norms)(*jax.tree.leaves(params), *self.cut(rows)) for rows in ROWS]


def case(f, params, *batch, dims=None, trained=True):
    dims = dims or (0,) * len(batch)
    n = len(jax.tree.leaves(params))

    def traced(rows):
        cut = [jnp.take(x, rows, axis=d) for x, d in zip(batch, dims, strict=True)]
        return Program(jax.make_jaxpr(f)(params, *cut))

    small, large = traced(ROWS[0]), traced(np.arange(B))
    named = {n + i: d for i, d in enumerate(dims)}
    return Case(f, params, batch, dims, follow_batch(small, large, named, range(n) if trained else None))


def together(how, parts):
    if isinstance(how, Identical):
        return parts[0]
    if isinstance(how, Summed):
        return sum(parts) * float(how.scale)
    whole = np.zeros([M * n if d == how.dim else n for d, n in enumerate(parts[0].shape)], parts[0].dtype)
    view = np.moveaxis(whole, how.dim, 0)
    for rows, part in zip(ROWS, parts, strict=True):
        view[places(rows, len(view))] = np.moveaxis(np.asarray(part) * float(how.scale), how.dim, 0)
    return whole


def check(made, *labels, rtol=2e-5):
    """The labels are these, and the microbatches of each known output make the whole batch's; so do the gradients of
    the first, where it is a sum."""
    assert made.labels == labels
    whole, parts, gradients = jax.jit(lambda p: numbers(made, p))(made.params)
    avals = made.followed.small.closed.out_avals, made.followed.large.closed.out_avals
    for o, (label, want) in enumerate(zip(labels, whole, strict=True)):
        how = output_combination(label, made.followed.ratio, avals[0][o], avals[1][o])
        if how.exact:
            np.testing.assert_allclose(together(how, [p[o] for p in parts]), want, rtol=rtol, atol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=2e-6), *gradients)


def numbers(made, params):
    """The outputs of the whole batch and of every microbatch; the gradients of the first by each, if it is a sum."""

    def whole(p):
        outs = jax.tree.leaves(made.f(p, *made.batch))
        return outs[0], outs

    def cut(p):
        parts = made.parts(p)
        return sum(part[0] for part in parts) * float(made.labels[0].scale), parts

    if not isinstance(made.labels[0], ExampleSum) or not jnp.issubdtype(whole(params)[0].dtype, jnp.inexact):
        return whole(params)[1], made.parts(params), ((), ())
    want, outs = jax.grad(whole, has_aux=True, allow_int=True)(params)
    got, parts = jax.grad(cut, has_aux=True, allow_int=True)(params)
    return outs, parts, (want, got)


MEAN, THIRD, ROW = ExampleSum(Fraction(1, M)), Fraction(1, M), PerExample(0)


def squares(w, x):
    return jnp.tanh(x @ w) ** 2
