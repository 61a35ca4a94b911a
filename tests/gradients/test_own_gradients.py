"""What microbatches and pipelines make of gradients that a step differentiates again, or has a rule of its own for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxshard_magic
from jaxshard_magic import ShardError

WIDTH, ROWS = 8, 16


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


@jax.custom_vjp
def normalised(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale


def _forward(x, scale):
    root = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
    return x * root * scale, (x, root, scale)


def _backward(kept, g):
    x, root, scale = kept
    given = g * scale
    moved = root * given - x * root**3 * jnp.mean(given * x, -1, keepdims=True)
    return moved, jnp.sum(g * x * root, 0)


normalised.defvjp(_forward, _backward)


@jax.custom_vjp
def mean_error(x, w, wanted):
    return jnp.mean((x @ w - wanted) ** 2)


def _error(x, w, wanted):
    off = x @ w - wanted
    return jnp.mean(off**2), (x, w, off)


def _error_back(kept, g):
    x, w, off = kept
    change = 2 * g * off / off.size
    return change @ w.T, x.T @ change, -change


mean_error.defvjp(_error, _error_back)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def reversed_by(x, factor):
    return x


reversed_by.defvjp(lambda x, factor: (x, None), lambda factor, _, g: (-factor * g,))


@jax.custom_vjp
def frozen(x, w):
    return x @ w


frozen.defvjp(lambda x, w: (x @ w, w), lambda w, g: (g @ w.T, jnp.zeros_like(w)))


@jax.custom_vjp
def calling_itself(x, y):
    return jnp.sin(x) * y


calling_itself.defvjp(
    lambda x, y: (calling_itself(x, y), (jnp.cos(x), jnp.sin(x), y)),
    lambda kept, g: (kept[0] * g * kept[2], kept[1] * g),
)


@jax.custom_vjp
def counting(h, n):
    return jnp.where(n[:, None] > 0, h, 0.5 * h), n + 1


counting.defvjp(
    lambda h, n: (counting(h, n), n),
    lambda n, g: (jnp.where(n[:, None] > 0, g[0], 0.5 * g[0]), None),
)


@jax.custom_vjp
def in_chunks(h, w, y):
    return jnp.sum((h @ w - y) ** 2)


def _chunked(h, w, y):
    def chunk(summed, rows):
        off = 2 * (rows[0] @ w - rows[1])
        return summed + rows[0].T @ off, off @ w.T

    parts = h.reshape(-1, 2, WIDTH), y.reshape(-1, 2, WIDTH)
    of_w, of_h = jax.lax.scan(chunk, jnp.zeros_like(w), parts)
    return in_chunks(h, w, y), (of_h.reshape(h.shape), of_w, y)


in_chunks.defvjp(_chunked, lambda kept, g: (kept[0] * g, kept[1] * g, jnp.zeros_like(kept[2])))


@jax.custom_vjp
def by_norm(x):
    """Each row's gradient depends on those of all rows."""
    return 1.5 * x


by_norm.defvjp(lambda x: (1.5 * x, None), lambda _, g: (g / jnp.sqrt(jnp.sum(g * g)),))


@jax.custom_gradient
def by_mean(x):
    return 1.5 * x, lambda g: g * (1 + jnp.mean(x, 0))


BY_ROW = {
    "clipped": lambda w, x, y: jnp.mean((clipped(jnp.tanh(x @ w[0])) @ w[1] - y) ** 2),
    "normalised": lambda w, x, y: jnp.mean((normalised(x @ w[0], w[1][0]) @ w[2] - y) ** 2),
    "its mean inside": lambda w, x, y: mean_error(jnp.tanh(x @ w[0]), w[1], y),
    "reversed": lambda w, x, y: jnp.mean((reversed_by(jnp.tanh(x @ w[0]), 0.3) @ w[1] - y) ** 2),
    "frozen": lambda w, x, y: jnp.mean((jnp.tanh(frozen(x, w[0])) @ w[1] - y) ** 2),
    "calling itself": lambda w, x, y: jnp.mean((calling_itself(x @ w[0], y) @ w[1]) ** 2),
    "counting": lambda w, x, y: jnp.mean((counting(x @ w[0], jnp.int32(y[:, 0] * 9))[0] @ w[1] - y) ** 2),
    "in chunks of rows": lambda w, x, y: in_chunks(jnp.tanh(x @ w[0]), w[1], y) / ROWS,
    "in a loop": lambda w, x, y: jnp.mean(
        (jax.lax.scan(lambda h, v: (normalised(h @ v, w[0][0]), None), x, jnp.stack(w))[0] - y) ** 2
    ),
    "of one example": lambda w, x, y: jnp.mean(
        jax.vmap(lambda x, y: jnp.mean((normalised(x[None] @ w[0], w[1][0]) - y) ** 2))(x, y)
    ),
}
OF_ALL = {
    "by the norm": lambda w, x, y: jnp.mean((by_norm(jnp.tanh(x @ w[0])) @ w[1] - y) ** 2),
    "by a mean": lambda w, x, y: jnp.mean((by_mean(jnp.tanh(x @ w[0])) @ w[1] - y) ** 2),
}


def given():
    draw = np.random.default_rng(0)

    def numbers(*shape):
        return (0.5 * draw.normal(size=shape)).astype(np.float32)

    return [numbers(WIDTH, WIDTH) for _ in range(4)], numbers(ROWS, WIDTH), numbers(ROWS, WIDTH)


def training(loss):
    def step(w, x, y):
        value, gradients = jax.value_and_grad(lambda w: loss(w, x, y))(w)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, gradients), value

    return step


def close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())


@pytest.mark.parametrize("name", BY_ROW)
def test_a_rule_that_gives_each_row_its_own_gradient_is_taken_in_microbatches(name):
    step = training(BY_ROW[name])
    sharded = jaxshard_magic.shard(step, "dp", mesh="cpu:2 data=2", microbatches=4, check=False)
    assert not [a for a in sharded.plan(*given()).advice if a.code == "microbatches"]
    close(sharded(*given()), jax.jit(step)(*given()))


@pytest.mark.parametrize("name", OF_ALL)
def test_a_rule_that_mixes_rows_is_refused_or_taken_whole_by_a_pipeline(name):
    step = training(OF_ALL[name])
    sharded = jaxshard_magic.shard(step, "dp", mesh="cpu:2 data=2", microbatches=4, check=False)
    (told,) = [a.message for a in sharded.plan(*given()).advice if a.code == "microbatches"]
    assert "custom_vjp_call" in told and "averaged" in told
    pipelined = jaxshard_magic.shard(step, "pp", mesh="cpu:2 stage=2", check=False)
    close(pipelined(*given()), jax.jit(step)(*given()))


def test_of_a_function_that_mixes_the_rows_itself_its_own_line_is_told():
    @jax.custom_vjp
    def summed(x):
        return x - jnp.cumsum(x, 0)

    summed.defvjp(lambda x: (summed(x), None), lambda _, g: (g,))
    step = training(lambda w, x, y: jnp.mean((summed(x @ w[0]) - y) ** 2))
    sharded = jaxshard_magic.shard(step, "dp", mesh="cpu:2 data=2", microbatches=4, check=False)
    (told,) = [a.message for a in sharded.plan(*given()).advice if a.code == "microbatches"]
    assert "cumsum at" in told


def curvature(w, x, y):
    def loss(w):
        for v in w:
            x_ = jnp.tanh(x @ v) + w[0][jnp.int32(jnp.abs(y[:, 0]))]
        return jnp.mean((x_ - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(w)
    moved = jax.jvp(jax.grad(loss), (w,), (gradients,))[1]
    steps = jax.tree.map(lambda w, g, h: w - 0.1 * g - 0.01 * h, w, gradients, moved)
    return steps, value, sum(map(jnp.vdot, gradients, moved))


@pytest.mark.parametrize(
    ("strategy", "mesh", "options"),
    [
        ("dp", "cpu:2 data=2", {"microbatches": 4}),
        ("dp", "cpu:2 data=2", {"remat": "full"}),
        ("pp", "cpu:2 stage=2", {}),
    ],
)
def test_a_gradient_is_differentiated_once_more_forward(strategy, mesh, options):
    """A product with the Hessian, of the whole batch, beside the gradient that options are for."""
    sharded = jaxshard_magic.shard(curvature, strategy, mesh=mesh, check=False, **options)
    close(sharded(*given()), jax.jit(curvature)(*given()))


def grouped(w, x, y):
    """Four answers to each prompt, one after another; each is judged beside the others of its group."""
    h = jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])
    rewards = h[:, 1].reshape(-1, 4)
    advantage = jax.lax.stop_gradient(rewards - rewards.mean(1, keepdims=True)).reshape(-1)
    return -jnp.mean(advantage * jax.nn.log_softmax(h @ w[2])[:, 0])


def signed(w, x, y):
    """The rows of a group are told apart by their places."""
    h = jnp.tanh(x @ w[0]).reshape(-1, 4, WIDTH) * jnp.array([1.0, -1.0, 1.0, -1.0])[:, None]
    return jnp.mean((h.reshape(-1, WIDTH) @ w[1] - y) ** 2)


def beside_each_other(w, x, y):
    """Rows of a group never meet."""
    h = jax.nn.relu(jnp.tanh(x @ w[0]).reshape(-1, 4, WIDTH) @ w[1])
    return jnp.mean((h.reshape(-1, WIDTH) @ w[2] - y) ** 2)


@pytest.mark.parametrize(
    ("strategy", "mesh", "options"),
    [
        ("dp", "cpu:2 data=2", {"microbatches": 2}),
        ("pp+dp", "cpu:4 stage=2 data=2", {"microbatches": 2}),
    ],
)
def test_rows_that_belong_together_stay_in_one_microbatch(strategy, mesh, options):
    sharded = jaxshard_magic.shard(training(grouped), strategy, mesh=mesh, check=False, **options)
    close(sharded(*given()), jax.jit(training(grouped))(*given()))


@pytest.mark.parametrize(
    ("loss", "mesh", "microbatches", "remedy"),
    [
        (grouped, "cpu:2 data=2", 4, "--microbatches 2 keeps them together"),
        (grouped, "cpu:4 data=4", 2, "no number of microbatches keeps them together"),
        (signed, "cpu:2 data=2", 4, "--microbatches 2 keeps them together"),
    ],
)
def test_microbatches_that_part_rows_that_belong_together_are_refused(loss, mesh, microbatches, remedy):
    sharded = jaxshard_magic.shard(training(loss), "dp", mesh=mesh, microbatches=microbatches, check=False)
    with pytest.raises(ShardError, match=rf"takes 4 examples that follow one another together \(reshape at .*{remedy}"):
        sharded(*given())


def test_rows_that_only_lie_in_groups_may_be_parted():
    step = training(beside_each_other)
    sharded = jaxshard_magic.shard(step, "dp", mesh="cpu:4 data=4", microbatches=4, check=False)
    close(sharded(*given()), jax.jit(step)(*given()))
