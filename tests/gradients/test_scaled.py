"""--precision fp16: the loss is scaled while it is differentiated, and steps that overflow are left out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxshard_magic

WEIGHTS = jax.random.normal(jax.random.key(0), (16, 16)) / 4


def step(state, x):
    def loss(w):
        return jnp.square(jnp.tanh(x @ w) @ w).mean()

    value, grad = jax.value_and_grad(loss)(state["w"])
    return {"w": state["w"] - 0.1 * grad, "count": state["count"] + 1}, value


def scale_of(sharded):
    value, good = sharded.entry.consts[:2]
    return float(value), int(good)


@pytest.mark.parametrize("options", [{}, {"microbatches": 2, "reduce": "once", "remat": "full"}])
def test_an_overflow_leaves_the_state_and_halves_the_scale(options):
    state, x = {"w": WEIGHTS, "count": jnp.int32(0)}, jax.random.normal(jax.random.key(1), (8, 16))
    sharded = jaxshard_magic.shard(step, "dp", mesh="data=2", precision="fp16", **options)
    after, _ = sharded(state, x * 1e6)
    assert scale_of(sharded) == (2.0**14, 0)
    np.testing.assert_array_equal(after["w"], WEIGHTS)
    assert int(after["count"]) == 0

    after, _ = sharded(after, x)
    assert scale_of(sharded) == (2.0**14, 1)
    want, _ = step(state, x)
    np.testing.assert_allclose(after["w"], want["w"], atol=1e-3)
    assert int(after["count"]) == 1


def test_gradients_that_float16_has_no_numbers_for_are_kept():
    tiny = 3e-8  # float16 ends at 6e-8

    def small(w, x):
        value, grad = jax.value_and_grad(lambda w: ((x @ w) * tiny).mean())(w)
        return w - grad, value

    x = jnp.ones((4, 16))
    sharded = jaxshard_magic.shard(small, "dp", mesh="data=2", precision="fp16")
    moved, _ = sharded(jnp.zeros_like(WEIGHTS), x)
    np.testing.assert_allclose(moved, np.full((16, 16), -tiny / 16), rtol=1e-2)


def test_timed_repeats_do_not_move_the_scale():
    sharded = jaxshard_magic.shard(step, "dp", mesh="data=2", precision="fp16")
    sharded.keep_arguments = True
    sharded({"w": WEIGHTS, "count": jnp.int32(0)}, jnp.ones((8, 16)))
    before = scale_of(sharded)
    sharded.repeat(3)
    assert scale_of(sharded) == before
