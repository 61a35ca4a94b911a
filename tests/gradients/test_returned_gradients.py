"""Steps that return gradients, and leave the update to other code."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxshard_magic

MESHES = {"fsdp": "cpu:8 data=8", "tp": "cpu:8 model=8", "fsdp+tp": "cpu:8 data=4 model=2"}


def loss(params, rows):
    return jnp.mean((jnp.tanh(rows @ params["up"]) @ params["down"] - rows) ** 2)


def alone(params, rows):
    return jax.grad(loss)(params, rows)


def with_the_loss(params, rows):
    return jax.value_and_grad(loss)(params, rows)


def clipped(params, rows):
    grads = jax.grad(loss)(params, rows)
    norm = optax.tree.norm(grads)
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / norm), grads)


def of_two_calls(params, rows):
    first, second = (
        jax.grad(loss)(params, rows[: len(rows) // 2]),
        jax.grad(loss)(params, rows[len(rows) // 2 :]),
    )
    return jax.tree.map(lambda a, b: (a + b) / 2, first, second)


def in_an_inner_jit(params, rows):
    return jax.jit(jax.value_and_grad(loss))(params, rows)


def arguments():
    draw = np.random.default_rng(0)
    params = {"up": draw.normal(size=(128, 512)) / 16, "down": draw.normal(size=(512, 128)) / 16}
    return jax.tree.map(lambda x: x.astype(np.float32), (params, draw.normal(size=(32, 128))))


def sent(report):
    """The bytes that a device sends, but for single numbers."""
    return sum(c.wire_bytes for c in report.collectives if c.bytes > 4)


def divisions(tree):
    return {name: x.sharding.spec for name, x in tree.items()}


@pytest.mark.parametrize("strategy", MESHES)
@pytest.mark.parametrize("step", [alone, with_the_loss, clipped, of_two_calls, in_an_inner_jit])
def test_gradients_come_back_divided_as_their_parameters_lie(step, strategy):
    params, rows = arguments()
    sharded = jaxshard_magic.shard(step, strategy, mesh=MESHES[strategy])
    planned, made = sharded.plan(params, rows), sharded(params, rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), made, step(params, rows))
    grads = made[1] if isinstance(made, tuple) else made
    report = sharded.report()
    for leaf in report.leaves:
        name = leaf.path.rpartition(".")[2]
        if name in grads:
            assert tuple(grads[name].sharding.spec) == leaf.spec and any(leaf.spec)
    gathered = [c for c in report.collectives if c.kind == "all-gather" and "model" in (c.axes or ())]
    assert not gathered, "nothing is put together to be returned"
    assert sent(planned) == sent(report)


def test_under_dp_each_device_has_all_of_a_gradient():
    params, rows = arguments()
    grads = jaxshard_magic.shard(alone, "dp", mesh="cpu:8 data=8")(params, rows)
    assert not any(axes for spec in divisions(grads).values() for axes in spec)


def test_returned_nnx_gradients_are_divided_and_update_outside_the_step():
    model = nnx.Linear(256, 256, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    rows = np.random.default_rng(0).normal(size=(16, 256)).astype(np.float32)

    @nnx.jit
    def step(model, rows):
        return nnx.value_and_grad(lambda model: jnp.mean(model(rows) ** 2))(model)

    sharded = jaxshard_magic.shard(step, "fsdp", mesh="cpu:8 data=8")
    losses = []
    for _ in range(3):
        value, grads = sharded(model, rows)
        optimizer.update(model, grads)
        losses.append(float(value))
    assert any(grads["kernel"][...].sharding.spec)
    assert losses[2] < losses[1] < losses[0]


def test_a_parameter_that_comes_back_has_its_gradient_beside_it_as_before():
    def step(params, rows):
        grads = jax.grad(loss)(params, rows)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), grads

    params, rows = arguments()
    new, grads = jaxshard_magic.shard(step, "fsdp", mesh="cpu:8 data=8")(params, rows)
    assert divisions(new) == divisions(grads) and any(map(any, divisions(grads).values()))
