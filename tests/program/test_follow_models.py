"""How what models are made of follows the batch: loops, products, lookups, draws, derivative rules."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from support.followed import KEY, MEAN, ROW, B, W, X, Y, case, check, normal, squares

from jaxshard_magic.program.batching.batch_labels import Constant, ExampleSum, PerExample, UnknownLabel

TIMES = normal(4, 7, B, 5)  # time first


def test_an_rnn_over_time_with_the_batch_second():
    def loss(p, xs):
        def step(h, x):
            h = jnp.tanh(h @ p["u"] + x @ p["w"])
            return h, (h**2).sum(-1)

        h, each = lax.scan(step, jnp.zeros((xs.shape[1], 4)), xs)
        return each.mean(), h, each, each.sum(0)

    params = {"u": normal(5, 4, 4), "w": W}
    # Without XLA's fusion emitters tanh is another approximation where fewer rows than a vector's are left: 3e-6 off.
    check(case(loss, params, TIMES, dims=(1,)), MEAN, ROW, PerExample(1), ROW, rtol=1e-4)


def test_a_loss_summed_from_step_to_step():
    def loss(w, xs, start):
        total, _ = lax.scan(lambda c, x: (0.5 * c + squares(w, x).sum(), None), start, xs)
        return total

    check(case(lambda w, xs: loss(w, xs, 0.0), W, TIMES, dims=(1,)), ExampleSum())
    check(case(lambda w, xs: loss(w, xs, 2.0), W, TIMES, dims=(1,)), ExampleSum())
    counted = case(lambda w, xs: lax.scan(lambda c, x: (c + (x > w[0, 0]).sum(), None), 0, xs)[0], W, TIMES, dims=(1,))
    check(counted, ExampleSum())


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
    check(made, UnknownLabel(made.followed.unknown_causes[0]))


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
    check(made, MEAN, ExampleSum(), UnknownLabel(made.followed.unknown_causes[0]))


def test_losses_under_vmap():
    def one(w, x, y):
        return jax.nn.logsumexp(x @ w) - (x @ w)[y]

    def loss(w, x, y):
        return jax.vmap(one, (None, 0, 0))(w, x, y).mean()

    check(case(loss, W, X, Y), MEAN)
    check(case(lambda w, x: jax.vmap(lambda a: squares(w, a), 1, 1)(x), W, X.T, dims=(1,)), PerExample(1))


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

    check(case(loss, W, TIMES, dims=(1,)), PerExample(2), PerExample(2), ExampleSum())


def test_tables_looked_up_and_added_into():
    def loss(table, y):
        found = table[y]
        counts = jnp.zeros(4).at[y].add(1.0)
        sums = jax.ops.segment_sum(found, y, 4) + 0.5
        return (found**2).mean(), found, counts, sums, jax.nn.one_hot(y, 4)

    check(case(loss, normal(3, 4, 6), Y), MEAN, ROW, ExampleSum(), ExampleSum(), ROW)


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
    check(made, UnknownLabel(made.followed.unknown_causes[0]))


def test_dropout_draws_are_the_rows_of_the_whole_batchs_draw():
    def loss(w, x):
        keep = jax.random.bernoulli(KEY, 0.5, x.shape)
        noise = jax.vmap(lambda k: jax.random.normal(k, (4,)))(jax.random.split(KEY, len(x)))
        return (jnp.where(keep, x, 0) @ w + noise).mean(), keep, jax.random.normal(KEY, (3,))

    made = case(loss, W, X)
    check(made, MEAN, ROW, Constant())
    assert sorted(made.followed.draw_dims.values()) == [0, 0]


@pytest.mark.ci
def test_gamma_draws_with_one_key_depend_on_all_examples():
    def one(w, x):
        return ((x @ w).sum(1) * jax.random.gamma(KEY, 2.0, (len(x),))).mean()

    def each(w, x):
        keys = jax.random.split(KEY, len(x))
        return ((x @ w).sum(1) * jax.vmap(lambda k: jax.random.gamma(k, 2.0))(keys)).mean()

    assert isinstance(case(one, W, X).labels[0], UnknownLabel)
    check(case(each, W, X), MEAN)


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
    assert all(isinstance(x, UnknownLabel) and x.cause in along.followed.unknown_causes for x in along.labels)


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
    assert isinstance(case(loss, W, X).labels[0], UnknownLabel)


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

    check(case(loss, W, normal(9, B, 4, 5)), ExampleSum(), ROW, ROW)
