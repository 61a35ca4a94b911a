"""How values follow the batch: labels by hand, and microbatches put together against the whole batch."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

from jaxshard_magic.errors import ShardError
from jaxshard_magic.program.emit import Emitter
from jaxshard_magic.program.examples import (
    Constant,
    Joined,
    Kept,
    Rows,
    Size,
    Sum,
    Summed,
    Unknown,
    combine,
)
from jaxshard_magic.program.follow import Followed, follow, told
from jaxshard_magic.program.ir import Program
from jaxshard_magic.program.primitives import bind
from jaxshard_magic.program.replay import Replay

B, M = 12, 3
ROWS = np.arange(B).reshape(B // M, M).T  # every third example: no microbatch is a run of them
KEY = jax.random.key(0)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


W, X, Y = normal(1, 5, 4), normal(2, B, 5), jax.random.randint(jax.random.key(3), (B,), 0, 4)
MASK = (jnp.arange(B) % 5 > 0).astype(jnp.float32)
TIMES = normal(4, 7, B, 5)  # time first


class Whole(Emitter):
    """The whole batch, with all that its equations gave."""

    def __init__(self, program):
        super().__init__(program)
        self.values = {}

    def equation(self, e, values):
        outs = super().equation(e, values)
        self.values.update(zip(e.outs, outs, strict=True))
        return outs


class Microbatch(Replay):
    """The small program on some rows of the batch, as `Followed` says that it has to be run."""

    def __init__(self, followed, rows, norms):
        super().__init__(followed.small)
        self.followed, self.rows, self.norms = followed, rows, norms

    def equation(self, e, values):
        values, dim = self.followed.rescaled(e, values), self.followed.draws.get(e.index)
        if dim is not None:
            whole = bind(self.followed.large.equations[e.index].eqn, values)[0]
            return [jnp.take(whole, places(self.rows, whole.shape[dim]), axis=dim)]
        outs = super().equation(e, values)
        return [self.norms.get(v, x) for v, x in zip(e.outs, outs, strict=True)]


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
    followed: Followed

    @property
    def labels(self):
        return self.followed.outputs

    def cut(self, rows):
        return [jnp.take(x, rows, axis=d) for x, d in zip(self.batch, self.dims, strict=True)]

    def parts(self, params):
        """Every output of every microbatch."""
        program, norms = Whole(self.followed.large), {}
        program(*jax.tree.leaves((params, self.batch)))
        norms = {v: program.values[w] for v, w in self.followed.norms.items()}
        return [
            Microbatch(self.followed, rows, norms)(*jax.tree.leaves(params), *self.cut(rows)) for rows in ROWS
        ]


def case(f, params, *batch, dims=None, trained=True):
    dims = dims or (0,) * len(batch)
    n = len(jax.tree.leaves(params))

    def traced(rows):
        cut = [jnp.take(x, rows, axis=d) for x, d in zip(batch, dims, strict=True)]
        return Program(jax.make_jaxpr(f)(params, *cut))

    small, large = traced(ROWS[0]), traced(np.arange(B))
    named = {n + i: d for i, d in enumerate(dims)}
    return Case(f, params, batch, dims, follow(small, large, named, range(n) if trained else None))


def together(how, parts):
    if isinstance(how, Kept):
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
        how = combine(label, made.followed.ratio, avals[0][o], avals[1][o])
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

    if not isinstance(made.labels[0], Sum) or not jnp.issubdtype(whole(params)[0].dtype, jnp.inexact):
        return whole(params)[1], made.parts(params), ((), ())
    want, outs = jax.grad(whole, has_aux=True, allow_int=True)(params)
    got, parts = jax.grad(cut, has_aux=True, allow_int=True)(params)
    return outs, parts, (want, got)


MEAN, THIRD, ROW = Sum(Fraction(1, M)), Fraction(1, M), Rows(0)


def squares(w, x):
    return jnp.tanh(x @ w) ** 2


def crossentropy(logits, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)[:, 0]


def test_the_mean_over_examples_is_a_sum_times_one_over_the_microbatches():
    check(case(lambda w, x: squares(w, x).mean(), W, X), MEAN)


def test_the_mean_of_per_example_losses_that_were_divided_before():
    check(case(lambda w, x: ((squares(w, x) / x.shape[0]).sum(), x / x.shape[0]), W, X), MEAN, Rows(0, THIRD))


def test_a_sum_loss_is_a_sum():
    made = case(lambda w, x: (squares(w, x).sum(), x @ w, w * 2, jnp.float32(len(x))), W, X)
    check(made, Sum(), ROW, Constant(), Size(Fraction(M)))
    assert not made.followed.scales


def test_weight_decay_counts_a_part_in_each_microbatch_of_a_sum_and_whole_in_those_of_a_mean():
    def loss(w, x, total):
        return getattr(squares(w, x), total)() + 0.1 * (w**2).sum()

    summed, mean = case(lambda w, x: loss(w, x, "sum"), W, X), case(lambda w, x: loss(w, x, "mean"), W, X)
    check(summed, Sum())
    check(mean, MEAN)
    assert list(summed.followed.scales.values()) == [THIRD]
    assert not mean.followed.scales


def test_terms_of_different_scale_are_added():
    def loss(w, x):
        return squares(w, x).mean() + 0.3 * jnp.sin(x @ w).sum() - 2 * x.shape[0] + jnp.log(x.shape[0] * 1.0)

    check(case(loss, W, X), MEAN)


def test_a_running_total_is_a_sum():
    def loss(p, x):
        each = squares(p["w"], x)
        return each.mean(), p["total"] + each.sum(), 0.9 * p["mean"] + 0.1 * x.mean(0)

    made = case(loss, {"mean": jnp.ones(5), "total": jnp.float32(3), "w": W}, X)
    check(made, MEAN, Sum(), MEAN)


def test_a_whole_number_that_cannot_be_divided_among_microbatches_is_unknown():
    made = case(lambda n, y: (n + (y > 1).sum(), (y > 1).sum()), jnp.int32(5), Y, trained=False)
    check(made, Unknown(made.followed.causes[0]), Sum())
    assert told(made.followed.small, made.followed.causes[0]).startswith("add, line ")


def test_a_constant_beside_examples_that_were_divided_by_the_batch_size():
    check(case(lambda w, x: jnp.exp(squares(w, x) / x.shape[0] + 0.5), W, X), ROW)


def test_per_example_outputs_and_accuracy():
    def loss(w, x, y):
        logits = x @ w
        each = crossentropy(logits, y)
        right = logits.argmax(-1) == y
        return each.mean(), each, right.mean(), right.sum(), logits.max(-1)

    check(case(loss, W, X, Y), MEAN, ROW, MEAN, Sum(), ROW)


def masked(w, x, mask):
    each = squares(w, x).sum(-1)
    return (each * mask).sum() / jnp.maximum(mask.sum(), 1), each


def test_a_masked_mean_divides_by_the_count_of_the_whole_batch():
    made = case(masked, W, X, MASK)
    check(made, Sum(), ROW)
    assert made.followed.norms
    without = case(masked, W, X, MASK, trained=False)
    assert isinstance(without.labels[0], Unknown)
    assert not without.followed.norms


def test_a_masked_mean_inside_a_jitted_or_rematerialised_loss():
    check(case(jax.jit(masked), W, X, MASK), Sum(), ROW)
    check(case(jax.checkpoint(masked), W, X, MASK), Sum(), ROW)


def test_a_masked_mean_by_where():
    check(case(lambda w, x, mask: jnp.mean(squares(w, x).sum(-1), where=mask > 0), W, X, MASK), Sum())


def test_what_depends_on_parameters_is_no_norm():
    made = case(lambda w, x: squares(w, x).sum() / jnp.abs(x @ w).sum(), W, X)
    check(made, Unknown(made.followed.causes[0]))
    assert told(made.followed.small, made.followed.causes[0]).startswith("div, line ")


def test_an_rnn_over_time_with_the_batch_second():
    def loss(p, xs):
        def step(h, x):
            h = jnp.tanh(h @ p["u"] + x @ p["w"])
            return h, (h**2).sum(-1)

        h, each = lax.scan(step, jnp.zeros((xs.shape[1], 4)), xs)
        return each.mean(), h, each, each.sum(0)

    params = {"u": normal(5, 4, 4), "w": W}
    check(case(loss, params, TIMES, dims=(1,)), MEAN, ROW, Rows(1), ROW)


def test_a_loss_summed_from_step_to_step():
    def loss(w, xs, start):
        total, _ = lax.scan(lambda c, x: (0.5 * c + squares(w, x).sum(), None), start, xs)
        return total

    check(case(lambda w, xs: loss(w, xs, 0.0), W, TIMES, dims=(1,)), Sum())
    check(case(lambda w, xs: loss(w, xs, 2.0), W, TIMES, dims=(1,)), Sum())
    counted = case(
        lambda w, xs: lax.scan(lambda c, x: (c + (x > w[0, 0]).sum(), None), 0, xs)[0], W, TIMES, dims=(1,)
    )
    check(counted, Sum())


def test_loops_in_loops_over_remat_layers():
    def loss(ws, x):
        def layer(h, w):
            h = lax.fori_loop(0, 2, lambda _i, a: jnp.tanh(a @ w) + a, h)
            return h, (h**2).mean()

        h, aux = lax.scan(jax.checkpoint(layer), x, ws)
        return h.mean() + 0.1 * aux.sum(), aux, h

    check(case(loss, normal(6, 3, 5, 5), X), MEAN, MEAN, ROW)


def test_a_while_loop_that_asks_for_the_examples_is_unknown():
    def loss(w, x):
        return lax.while_loop(lambda h: (h**2).sum() > 1, lambda h: h / 2, x @ w).mean()

    made = case(loss, W, X)
    check(made, Unknown(made.followed.causes[0]))


def test_branches_that_agree_and_branches_that_do_not():
    def loss(p, x):
        on = p["on"] > 0
        each = squares(p["w"], x)
        return (
            lax.cond(on, lambda: each.mean(), lambda: jnp.abs(each).mean()),
            lax.cond(on, lambda: each.sum(), lambda: 0.0),
            lax.cond(on, lambda: each.sum(), lambda: each.mean()),
        )

    made = case(loss, {"on": jnp.float32(1), "w": W}, X)
    check(made, MEAN, Sum(), Unknown(made.followed.causes[0]))


def test_losses_under_vmap():
    def one(w, x, y):
        return jax.nn.logsumexp(x @ w) - (x @ w)[y]

    def loss(w, x, y):
        return jax.vmap(one, (None, 0, 0))(w, x, y).mean()

    check(case(loss, W, X, Y), MEAN)
    check(case(lambda w, x: jax.vmap(lambda a: squares(w, a), 1, 1)(x), W, X.T, dims=(1,)), Rows(1))


def test_attention():
    def loss(p, x):
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[n]) for n in "qkv")
        scores = jnp.einsum("bthk,bshk->bhts", q, k)
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        heads = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
        out = jnp.einsum("bhts,bshk->bthk", heads, v)
        return (out.reshape(*x.shape[:2], -1) @ p["o"]).var(axis=-1).mean(), heads

    params = {n: normal(i, 5, 2, 3) for i, n in enumerate("qkv")} | {"o": normal(8, 6, 5)}
    check(case(loss, params, normal(9, B, 4, 5)), MEAN, ROW)


def test_convolution_and_global_pooling():
    def loss(p, x):
        h = lax.conv_general_dilated(x, p["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        h = lax.reduce_window(jnp.tanh(h), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        each = (h.mean((1, 2)) @ p["w"]) ** 2
        return each.mean(), each

    params = {"k": normal(1, 3, 3, 2, 5), "w": W}
    check(case(loss, params, normal(2, B, 6, 6, 2)), MEAN, ROW)


def test_einsum_with_the_batch_in_the_middle():
    def loss(w, x):
        return (
            jnp.einsum("tbd,dk->tkb", x, w),
            jnp.einsum("tbd,sbd->tsb", x, x),
            jnp.einsum("tbd,sbd->ts", x, x),
        )

    check(case(loss, W, TIMES, dims=(1,)), Rows(2), Rows(2), Sum())


def test_tables_looked_up_and_added_into():
    def loss(table, y):
        found = table[y]
        counts = jnp.zeros(4).at[y].add(1.0)
        sums = jax.ops.segment_sum(found, y, 4) + 0.5
        return (found**2).mean(), found, counts, sums, jax.nn.one_hot(y, 4)

    check(case(loss, normal(3, 4, 6), Y), MEAN, ROW, Sum(), Sum(), ROW)


def test_own_rows_named_by_their_numbers():
    def loss(w, x, y):
        logits = x @ w
        n = jnp.arange(len(y))
        return -jax.nn.log_softmax(logits)[n, y].mean(), logits.at[n, y].set(0.0), logits[n]

    check(case(loss, W, X, Y), MEAN, ROW, ROW)


def test_rows_repeated_cut_and_put_side_by_side():
    def loss(p, x):
        tokens = jnp.concatenate([jnp.tile(p["first"], (len(x), 1, 1)), x], axis=1)
        at = p["at"].astype(int)
        part = lax.dynamic_slice_in_dim(tokens, at, 2, axis=1)
        beside = jnp.stack([tokens, 2 * tokens], axis=1).reshape(len(x), -1)
        return (
            jnp.tanh(part).mean() + beside.mean(),
            beside,
            lax.dynamic_update_slice_in_dim(tokens, 2 * part, at, axis=1),
        )

    params = {"at": jnp.float32(1), "first": normal(7, 1, 1, 5)}
    check(case(loss, params, normal(9, B, 3, 5)), MEAN, ROW, ROW)


def test_numbers_of_rows_used_otherwise_are_unknown():
    made = case(lambda w, x: ((x @ w).sum(-1) * jnp.arange(len(x))).mean(), W, X)
    check(made, Unknown(made.followed.causes[0]))


def test_dropout_draws_are_the_rows_of_the_whole_batchs_draw():
    def loss(w, x):
        keep = jax.random.bernoulli(KEY, 0.5, x.shape)
        noise = jax.vmap(lambda k: jax.random.normal(k, (4,)))(jax.random.split(KEY, len(x)))
        return (jnp.where(keep, x, 0) @ w + noise).mean(), keep, jax.random.normal(KEY, (3,))

    made = case(loss, W, X)
    check(made, MEAN, ROW, Constant())
    assert sorted(made.followed.draws.values()) == [0, 0]


def test_a_draw_for_positions_merged_with_the_batch():
    def loss(w, x):
        flat = x.reshape(-1, 5)
        return (flat * jax.random.uniform(KEY, flat.shape) @ w).mean(), flat

    check(case(loss, W, normal(9, B, 3, 5)), MEAN, ROW)


def test_sorting_and_running_sums_along_another_dimension():
    def loss(w, x):
        h = x @ w
        top, where = lax.top_k(h, 2)
        return top.mean(), where, jnp.sort(h), jnp.cumsum(h, 1), jnp.flip(h, 1), jnp.pad(h, ((0, 0), (1, 1)))

    check(case(loss, W, X), MEAN, *[ROW] * 5)
    along = case(
        lambda w, x: (jnp.sort(x @ w, 0), jnp.cumsum(x @ w, 0), jnp.flip(x, 0), x[:3], jnp.arange(len(x))),
        W,
        X,
    )
    assert all(isinstance(x, Unknown) and x.cause in along.followed.causes for x in along.labels)


def test_custom_derivatives():
    @jax.custom_vjp
    def clipped(x):
        return jnp.sqrt(x**2 + 1)

    clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (jnp.clip(g * x, -0.1, 0.1),))

    def loss(w, x):
        h = jax.nn.relu(clipped(x @ w / x.shape[0]))
        return jax.nn.silu(h).mean(), h

    check(case(loss, W, X), MEAN, ROW)


def test_what_cannot_be_scaled_inside_a_custom_derivative_is_unknown():
    @jax.custom_jvp
    def loss(w, x):
        return squares(w, x).sum() + (w**2).sum()

    loss.defjvp(lambda p, t: (loss(*p), t[0].sum()))
    assert isinstance(case(loss, W, X).labels[0], Unknown)


def test_low_precision_and_casts():
    def loss(w, x):
        h = (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)
        return h.mean(dtype=jnp.float32), lax.reduce_precision(h, 8, 7)

    check(case(loss, W, X), MEAN, ROW, rtol=1e-2)


def test_barriers_names_and_copies_pass_labels_on():
    def loss(w, x):
        h, v = lax.optimization_barrier((jnp.copy(x), w))
        h = checkpoint_name(h, "h")
        return (h @ v).mean(), h, v

    check(case(loss, W, X), MEAN, ROW, Constant())


def test_matrices_of_each_example():
    def loss(w, x):
        gram = jnp.einsum("bij,bik->bjk", x, x) + jnp.eye(5)
        low = jnp.linalg.cholesky(gram + w @ w.T)
        return (
            low.sum(),
            jax.scipy.linalg.solve_triangular(low, x.swapaxes(1, 2), lower=True),
            jnp.fft.rfft(x),
        )

    check(case(loss, W, normal(9, B, 4, 5)), Sum(), ROW, ROW)


def test_batchnorm_is_unknown_and_says_where():
    def loss(w, x):
        h = x @ w
        mean, var = h.mean(0), h.var(0)
        h = (h - mean) / jnp.sqrt(var + 1e-5)
        return (h**4).mean(), 0.9 * 1.0 + 0.1 * mean

    made = case(loss, W, X)
    assert isinstance(made.labels[0], Unknown)
    assert made.labels[1] == MEAN
    says = [told(made.followed.small, c) for c in made.followed.causes]
    assert says
    assert all(s.startswith("sub, line ") and "of test_follow.py" in s for s in says)


def test_a_contrastive_loss_is_unknown_from_its_matrix_on():
    def loss(w, x):
        h = x @ w
        return jax.nn.logsumexp(h @ h.T, axis=-1).mean()

    made = case(loss, W, X)
    assert [told(made.followed.small, c).split(",")[0] for c in made.followed.causes] == ["dot_general"]


def test_nothing_is_scaled_on_the_way_to_what_is_averaged_anyhow():
    made = case(lambda w, x: jnp.sqrt(squares(w, x).sum() + 1e-3), W, X)
    assert isinstance(made.labels[0], Unknown)
    assert not made.followed.scales


def test_both_examples_crossed_with_each_other_are_unknown():
    made = case(lambda w, x: (x @ w)[:, None, :] - (x @ w)[None, :, :], W, X)
    assert isinstance(made.labels[0], Unknown)


def test_a_gradient_that_is_not_yet_taken_is_unknown_without_being_a_cause():
    later = Primitive("jaxshard_gradient")
    later.multiple_results = True
    later.def_abstract_eval(lambda *avals: list(avals))

    def step(w, x):
        _, g = later.bind(x, w)
        return w - g, (x / 255).mean()

    made = case(step, W, X)
    assert made.labels == (Unknown(), MEAN)
    assert made.followed.causes == ()


def test_batches_that_are_no_multiple():
    def traced(n):
        return Program(jax.make_jaxpr(lambda w, x: (squares(w, x).mean(), x @ w, n))(W, X[:n]))

    found = follow(traced(7), traced(8), {1: 0})
    assert found.outputs == (Sum(Fraction(7, 8)), ROW, Size(Fraction(8, 7)))


def test_an_input_of_another_size_that_is_not_named_is_unknown():
    def traced(n):
        return Program(jax.make_jaxpr(lambda x, z: (x.sum(), z.sum()))(X[:n], X[:n]))

    assert follow(traced(4), traced(8), {0: 0}).outputs == (Sum(), Unknown())


def test_inputs_may_have_other_labels_than_a_batch():
    def traced(n):
        return Program(jax.make_jaxpr(lambda x, n: x.sum() / n)(X[:n], 1.0))

    assert follow(traced(4), traced(12), {0: 0, 1: Size(Fraction(3))}).outputs == (MEAN,)


def test_a_function_that_is_another_one_for_another_size_is_refused():
    def traced(n):
        return Program(jax.make_jaxpr(lambda x: sum(jnp.tanh(r).sum() for r in x))(X[:n]))

    with pytest.raises(ShardError, match="another one for another batch size"):
        follow(traced(4), traced(8), {0: 0})


def test_batches_that_do_not_grow_alike_are_refused():
    def traced(n, m):
        return Program(jax.make_jaxpr(lambda x, y: x.sum() + y.sum())(X[:n], X[:m]))

    with pytest.raises(ShardError, match="input 0: 2, input 1: 3"):
        follow(traced(4, 2), traced(8, 6), {0: 0, 1: 0})
    with pytest.raises(ShardError, match="another factor than 1"):
        follow(traced(4, 2), traced(4, 2), {0: 0, 1: 0})


def test_what_is_unknown_is_joined_by_its_shape_else_averaged_and_called_a_guess():
    row, number, key = jnp.ones((2, 4)), jnp.ones(()), KEY
    assert combine(Unknown(), Fraction(M), row, jnp.ones((2, 12))) == Joined(1, exact=False)
    assert combine(Unknown(), Fraction(M), number, number) == Summed(THIRD, exact=False)
    assert combine(Unknown(), Fraction(M), key, key) == Kept(exact=False)
