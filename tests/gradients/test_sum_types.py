"""In which type devices add up gradients: what is rounded when, and what is sent."""

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxshard_magic
from jaxshard_magic.errors import ShardError
from jaxshard_magic.step.alternatives import compile_alternatives

WIDTH, EXAMPLES, DEVICES = 128, 64, 8
WEIGHT = WIDTH * WIDTH


def loss_fn(w, x, y):
    return ((x @ w) * y).sum()


def train_step(w, x, y):
    loss, grad = jax.value_and_grad(loss_fn)(w, x, y)
    return w - grad, loss


def exact_in_bfloat16(shape, seed):
    """Numbers that bfloat16 holds as they are, so that only sums round."""
    drawn = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(drawn, jnp.bfloat16).astype(jnp.float32)


def arguments():
    w = jnp.zeros((WIDTH, WIDTH))
    return w, exact_in_bfloat16((EXAMPLES, WIDTH), 0), exact_in_bfloat16((EXAMPLES, WIDTH), 1)


def gradient(strategy="dp", **options):
    step = jaxshard_magic.shard(train_step, strategy, mesh=f"data={DEVICES}", **options)
    return -np.asarray(step(*arguments())[0], np.float64)


def exact():
    _, x, y = (np.asarray(a, np.float64) for a in arguments())
    return x.T @ y


@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_under_bf16_sums_over_devices_are_rounded_once_at_most(strategy):
    off = np.abs(gradient(strategy, precision="bf16") - exact())
    assert (off <= np.abs(exact()) * 2**-8 + 1e-4).all()


def several(w, x, y):
    """One model for each of several weights."""
    loss, grad = jax.value_and_grad(lambda w: jax.vmap(loss_fn, (0, None, None))(w, x, y).sum())(w)
    return w - grad, loss


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"reduce_dtype": "bf16"}])
def test_several_models_at_once_under_bf16_run_on_simulated_devices(options):
    w, x, y = arguments()
    step = jaxshard_magic.shard(several, "dp", mesh=f"data={DEVICES}", precision="bf16", **options)
    got, _ = step(jnp.stack([w, w]), x, y)
    largest = np.abs(exact()).max()
    np.testing.assert_allclose(-np.asarray(got), np.stack([exact()] * 2), atol=2**-6 * largest)


def test_gradients_computed_in_float32_are_added_up_in_bf16_where_asked():
    found = gradient(reduce_dtype="bf16")
    off = np.abs(found - exact()).max() / np.abs(exact()).max()
    assert 1e-4 < off < 2**-7


def test_the_check_allows_for_the_rounding_of_the_type_that_is_sent():
    step = jaxshard_magic.shard(train_step, "dp", mesh=f"data={DEVICES}", reduce_dtype="bf16", check=True)
    step(*arguments())
    check = step.report().check
    assert check is not None and check.passed


@pytest.mark.ci
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize(
    ("options", "item"),
    [
        ({}, 4),
        ({"reduce_dtype": "bf16"}, 2),
        ({"reduce_dtype": "bf16", "microbatches": 2, "reduce": "once"}, 2),
    ],
)
def test_a_tpu_sends_four_bytes_a_number_or_two_where_asked(options, item, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    step = jaxshard_magic.shard(train_step, "dp", mesh="v5e:2x4 data=8", precision="bf16", **options)
    step.prepare(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments()))
    sums = [c.bytes for c in step.report().collectives or () if c.kind == "all-reduce" and c.bytes > WEIGHT]
    assert sums == [item * WEIGHT]


def test_the_report_shows_the_step_without_it():
    step = jaxshard_magic.shard(train_step, "dp", mesh=f"data={DEVICES}", reduce_dtype="bf16")
    step(*arguments())
    assert [a.change for a in compile_alternatives(step, 600)] == ["", "without --reduce-dtype bf16"]


def test_an_unknown_type_is_refused_with_the_nearest():
    with pytest.raises(ShardError, match=r"--reduce-dtype does not take 'bf61'. Did you mean 'bf16'"):
        jaxshard_magic.shard(train_step, "dp", mesh=f"data={DEVICES}", reduce_dtype="bf61")


@pytest.mark.parametrize("strategy", ["tp", "spmd"])
def test_where_no_gradient_is_added_up_over_devices_the_option_is_refused(strategy):
    step = jaxshard_magic.shard(train_step, strategy, mesh=f"model={DEVICES}", reduce_dtype="bf16")
    with pytest.raises(ShardError, match="divides no batch, so that no gradients are added up"):
        step(*arguments())
