"""Values that a loss leaves in an object, and that the step reads after the gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.refusals import refusal

import jaxshard_magic

PARAMS = [0.1 * jax.random.normal(k, (32, 32)) for k in jax.random.split(jax.random.key(0), 4)]
X, KEY = jax.random.normal(jax.random.key(1), (32, 32)), jax.random.PRNGKey(2)


class Keys:
    """A key that moves on whenever it is asked for another."""

    def __init__(self, key):
        self.key = key

    def __call__(self):
        self.key, key = jax.random.split(self.key)
        return key


def blocks(params, h, seen=lambda h: None):
    for w in params:
        h = jax.nn.relu(h @ w)
        seen(h)
    return h


def updated(params, loss):
    value, grads = jax.value_and_grad(loss)(params)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value


def asked_again(params, key, x):
    keys = Keys(key)

    def loss(params):
        return jnp.mean((blocks(params, x * jax.random.bernoulli(keys(), 0.9, x.shape)) - x) ** 2)

    params, value = updated(params, loss)
    return params, keys(), value


def two_losses(params, key, x):
    keys = Keys(jax.random.wrap_key_data(key))

    def loss(params):
        return jnp.mean((blocks(params, x * jax.random.bernoulli(keys(), 0.9, x.shape)) - x) ** 2)

    params, first = updated(params, loss)
    params, second = updated(params, loss)
    return params, jax.random.key_data(keys()), first + second


def read_in_a_loop(params, key, x):
    params, key, value = asked_again(params, key, x)
    noise, _ = lax.scan(lambda c, _: (c + jax.random.normal(key), None), 0.0, None, length=3)
    return params, key, value + noise


def counted(params, key, x):
    calls = {"n": jnp.int32(0)}

    def loss(params):
        calls["n"] += 1
        key_of_call = jax.random.fold_in(key, calls["n"])
        return jnp.mean((blocks(params, x * jax.random.bernoulli(key_of_call, 0.9, x.shape)) - x) ** 2)

    params, value = updated(params, loss)
    return params, calls["n"], value


def stopped(params, key, x):
    """Activations that are not differentiated: jax lets the step read those."""
    seen = []

    def loss(params):
        h = blocks(params, x, lambda h: seen.extend([lax.stop_gradient(h).mean(), jnp.argmax(h, -1)]))
        return jnp.mean((h - x) ** 2)

    params, value = updated(params, loss)
    return params, seen[0] + seen[1].sum(), value


def in_a_scan(params, key, x):
    def part(carry, x):
        params, key, value = asked_again(*carry, x)
        return (params, key), value

    (params, key), values = lax.scan(part, (params, key), jnp.stack([x, x + 1]))
    return params, key, values.mean()


STEPS = [asked_again, two_losses, read_in_a_loop, counted, stopped, in_a_scan]
WAYS = {
    "pp": ("pipe=2", {}),
    "dp": ("data=4", {"microbatches": 2}),
    "fsdp": ("data=4", {"remat": "dots"}),
    "fsdp+tp": ("data=2 model=2", {"precision": "bf16"}),
}
PAIRS = {(asked_again, "pp"), (two_losses, "dp"), (in_a_scan, "fsdp")}
LINES = {(in_a_scan, "pp"): "in a loop of its own", (in_a_scan, "dp"): "can't be traced for"}


@pytest.mark.parametrize(
    ("step", "strategy"),
    [pytest.param(f, s, marks=() if (f, s) in PAIRS else pytest.mark.full) for f in STEPS for s in WAYS],
)
def test_what_a_loss_left_is_read_after_it(step, strategy):
    mesh, options = WAYS[strategy]
    sharded = jaxshard_magic.shard(step, strategy, mesh=mesh, **options)
    if (step, strategy) in LINES:
        assert LINES[step, strategy] in refusal(sharded, PARAMS, KEY, X)
        return
    tolerance = 2e-2 if "precision" in options else 2e-5
    for _ in range(2):
        pairs = zip(*(jax.tree.leaves(f(PARAMS, KEY, X)) for f in (sharded, jax.jit(step))), strict=True)
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance / 10)


def differentiated(params, key, x):
    seen = []
    params, value = updated(params, lambda p: jnp.mean((blocks(p, x, seen.append) - x) ** 2))
    return params, seen[0].sum(), value


def of_a_jit(params, key, x):
    keys = Keys(key)

    def loss(params):
        noise = jax.jit(lambda x: x * jax.random.bernoulli(keys(), 0.9, x.shape))(x)
        return jnp.mean((blocks(params, noise) - x) ** 2)

    params, value = updated(params, loss)
    return params, keys(), value


@pytest.mark.parametrize("options", [{}, {"remat": "dots"}], ids=str)
@pytest.mark.parametrize("step", [differentiated, of_a_jit])
def test_what_jax_lets_nobody_read_is_refused_with_the_line(step, options):
    with pytest.raises(jax.errors.UnexpectedTracerError):
        jax.jit(step)(PARAMS, KEY, X)
    line = refusal(jaxshard_magic.shard(step, "dp", mesh="data=4", **options), PARAMS, KEY, X)
    assert "test_escapes.py, line" in line


def test_what_nobody_reads_stands_in_no_step_s_way():
    def step(params, key, x):
        seen = []
        return updated(params, lambda p: jnp.mean((blocks(p, x, seen.append) - x) ** 2))

    value = jaxshard_magic.shard(step, "pp", mesh="pipe=2")(PARAMS, KEY, X)[1]
    np.testing.assert_allclose(value, jax.jit(step)(PARAMS, KEY, X)[1], rtol=1e-5)
