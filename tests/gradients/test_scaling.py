"""Dynamic loss scaling: what float16 would lose is kept, and steps that overflow are left out."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxpr_as_fun

from jaxshard_magic.gradients import loss_scaling
from jaxshard_magic.gradients.precision import cast_loss


def in_float16(f, w, *data):
    """A loss in float16 as a function of its weights."""
    fun = jaxpr_as_fun(cast_loss(jax.make_jaxpr(f)(w, *data), "fp16").closed)
    return lambda w: fun(w, *data)[0]


def overflowing(w, x):
    return jnp.square(x @ w).mean()


@pytest.mark.parametrize(("size", "finite"), [(1.0, True), (1e4, False)])
def test_a_float16_step_is_left_out_when_its_gradients_overflow(size, finite):
    w = jnp.full((4, 4), size)
    scale = loss_scaling.initial()
    value, back = jax.vjp(in_float16(overflowing, w, jnp.full((4, 4), 0.5)), w)
    grads = back(scale.value.astype(value.dtype))
    assert bool(loss_scaling.all_finite(grads)) == finite
    after = loss_scaling.next_scale(scale, loss_scaling.all_finite(grads))
    assert float(after.value) == (2.0**15 if finite else 2.0**14)
    weights = loss_scaling.kept_where(loss_scaling.all_finite(grads), w - 1, w)
    assert float(weights[0, 0]) == (size - 1 if finite else size)


def test_a_gradient_too_small_for_float16_survives_by_its_scale():
    # 2 * 2**-13 * 2**-13 = 2**-25, half of the least that float16 holds.
    w, x, y = (jnp.full((1, 1), v) for v in (1.0, 2.0**-13, 0.0))
    scale = loss_scaling.initial()
    value, back = jax.vjp(in_float16(lambda w, x, y: jnp.square(x @ w - y).sum(), w, x, y), w)
    assert float(back(jnp.ones_like(value))[0][0, 0]) == 0
    (grad,) = loss_scaling.unscaled(back(scale.value.astype(value.dtype)), scale)
    assert float(grad[0, 0]) == 2.0**-25


def test_the_scale_doubles_after_two_thousand_good_steps():
    step = jax.jit(loss_scaling.next_scale)
    scale = loss_scaling.LossScale(loss_scaling.initial().value, jnp.asarray(1998, jnp.int32))
    scale = step(scale, True)
    assert (float(scale.value), int(scale.good)) == (2.0**15, 1999)
    scale = step(scale, True)
    assert (float(scale.value), int(scale.good)) == (2.0**16, 0)


def test_a_bad_step_halves_the_scale_and_starts_the_count_anew():
    scale = loss_scaling.next_scale(loss_scaling.LossScale(jnp.float32(8), jnp.int32(1999)), jnp.asarray(False))
    assert (float(scale.value), int(scale.good)) == (4.0, 0)


def test_the_scale_stays_between_one_and_what_float32_holds():
    low = loss_scaling.next_scale(loss_scaling.LossScale(jnp.float32(1), jnp.int32(0)), False)
    high = loss_scaling.next_scale(loss_scaling.LossScale(jnp.float32(2.0**127), jnp.int32(1999)), True)
    assert (float(low.value), float(high.value)) == (1.0, 2.0**127)


def test_gradients_are_divided_in_float32_and_keep_their_types():
    scale = loss_scaling.LossScale(jnp.float32(2.0**17), jnp.int32(0))  # more than float16 holds
    grads = {"w": jnp.full(2, 2.0**15, jnp.float16), "b": jnp.full(2, 3.0 * 2**17), "n": jnp.arange(2)}
    found = loss_scaling.unscaled(grads, scale)
    assert {name: g.dtype for name, g in found.items()} == {
        "w": jnp.float16,
        "b": jnp.float32,
        "n": grads["n"].dtype,
    }
    assert (float(found["w"][0]), float(found["b"][0]), int(found["n"][1])) == (0.25, 3.0, 1)


def test_one_bad_number_anywhere_makes_a_step_bad():
    fine = {"w": jnp.ones(3), "n": jnp.arange(3), "none": None}
    assert bool(loss_scaling.all_finite(fine))
    assert bool(loss_scaling.all_finite({}))
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        assert not loss_scaling.all_finite({**fine, "b": jnp.array([1.0, bad])})
