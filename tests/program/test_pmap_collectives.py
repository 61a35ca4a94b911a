"""Collectives inside the gradient of a step written for one device: microbatches, remat and precision with them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.per_device import data, first, linen_state, linen_step, same, shard, stacked, three, updated, whole

from jaxshard_magic.program.batching.batch_labels import CONSTANT, ExampleSum, PerExample, UnknownLabel
from jaxshard_magic.program.batching.followed_program import follow_batch
from jaxshard_magic.program.ir import Program


def followed(fun, dim=0):
    """How what `fun` makes of examples follows them: a batch of 12 in microbatches of 4, on two devices."""

    def traced(n):
        return Program(jax.make_jaxpr(fun, axis_env=[("i", 2)])(jnp.ones((n, 6))))

    return follow_batch(traced(4), traced(12), {0: dim}).output_labels


def test_a_sum_over_devices_follows_the_batch_as_its_terms_do():
    def f(x):
        moved = lax.ppermute(x, "i", [(0, 1), (1, 0)])
        return lax.psum(x, "i"), lax.psum(x.sum(), "i"), lax.pmean(x.mean(), "i"), moved

    rows, total, mean, moved = followed(f)
    assert (rows, total, moved) == (PerExample(0), ExampleSum(), PerExample(0))
    assert mean.scale == pytest.approx(1 / 3)


def test_an_extreme_over_devices_does_so_for_each_example():
    rows, largest, fixed = followed(
        lambda x: (lax.pmax(x, "i"), lax.pmax(x.sum(), "i"), lax.axis_index("i") + lax.pmin(1, "i"))
    )
    assert (rows, fixed) == (PerExample(0), CONSTANT)
    assert isinstance(largest, UnknownLabel)


def test_what_is_gathered_or_scattered_beside_the_examples_keeps_them():
    def f(x):
        stacked = lax.all_gather(x, "i"), lax.all_gather(x, "i", axis=2)
        tiled = lax.all_gather(x, "i", axis=1, tiled=True), lax.all_gather(x, "i", tiled=True)
        parts = (
            lax.psum_scatter(x, "i", scatter_dimension=1, tiled=True),
            lax.psum_scatter(x, "i", tiled=True),
        )
        turned = lax.all_to_all(x, "i", 1, 1, tiled=True), lax.all_to_all(x, "i", 0, 1, tiled=True)
        return *stacked, *tiled, *parts, *turned

    kept = followed(f)
    assert kept[:2] == (PerExample(1), PerExample(0))
    assert [kept[i] for i in (2, 4, 6)] == [PerExample(0)] * 3
    assert all(isinstance(kept[i], UnknownLabel) for i in (3, 5, 7))


def summed(state, batch):
    """A sum over all examples of all devices, made inside the gradient."""

    def loss(params):
        out = jnp.tanh(batch["x"] @ params["in"]) @ params["out"]
        return lax.psum(jnp.sum((out - batch["y"]) ** 2), "batch") / 100

    loss, grads = jax.value_and_grad(loss)(state["params"])
    return updated(state, lax.pmean(grads, "batch")), loss


@pytest.mark.ci
def test_a_sum_over_devices_inside_the_gradient_is_exact():
    sharded = shard(summed, microbatches=4)
    same(three(sharded, *whole()), first(three(jax.pmap(summed, axis_name="batch"), *stacked())))
    assert not sharded.entry.plan.findings


def looped(params, x, axis):
    def layer(x, w):
        y = jnp.tanh(x @ w)
        mean = lax.pmean(y.mean(0), axis) if axis else y.mean(0)
        return y - mean, None

    return lax.scan(layer, x, params)[0]


def loop_step(params, batch):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(looped(p, batch, "batch") ** 2))(params)
    grads, loss = lax.pmean((grads, loss), "batch")
    return params - 0.1 * grads, loss


@pytest.mark.parametrize("remat", ["full", "2"])
def test_layers_that_reduce_over_devices_are_computed_again(remat):
    params = 0.3 * jax.random.normal(jax.random.key(0), (4, 6, 6))
    own, other = shard(loop_step), shard(loop_step, remat=remat)
    want, got = own(params, data()["x"]), other(params, data()["x"])
    same(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, want))

    def flops(sharded):
        return sum(share.flops for share in sharded.entry.plan.shares)

    assert flops(other) > flops(own)


@pytest.mark.ci
def test_check_knows_the_rounding_of_a_narrow_type_in_such_a_step():
    """The gradient of a bias before a norm is zero but for rounding."""
    sharded = shard(partial(linen_step, sync=True), precision="bf16", check=True)
    sharded(linen_state(), data())
    assert sharded.checked.passed
    assert any("bias" in name for name in sharded.checked.noise)
