"""A loss with its attentions fused: the numbers of the loss as it is written, and no array of scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from support.attentions import FORMS, WRITTEN, by_hand, causal, einsum, window

from jaxshard_magic.gradients.fused_attention import fuse_attention, save_attention_results
from jaxshard_magic.program.attention.fused_attention import attention_gradient_p, attention_p
from jaxshard_magic.program.ir import Program
from jaxshard_magic.program.trace import hoist_constants

T, H = 16, 8
MASKS = {
    "full": lambda lengths, ids: None,
    "causal": lambda lengths, ids: causal(T),
    "window": lambda lengths, ids: window(T),
    "padding": lambda lengths, ids: causal(T) & (jnp.arange(T) >= lengths[:, None, None, None]),
    "segments": lambda lengths, ids: causal(T) & (ids[:, None, :, None] == ids[:, None, None]),
}


def loss_of(attend, wrap=lambda f: f):
    def loss(w, x, lengths, ids):
        @wrap
        def layer(x):
            q, k, v = (jnp.einsum("bthd,hde->bthe", x, m) for m in w)
            return attend(q, k, v, lengths, ids)

        return jnp.mean(layer(x) ** 2)

    return loss


def arguments(batch=2, heads=4, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 2)
    w = 0.3 * jax.random.normal(keys[0], (3, heads, H, H), dtype)
    x = jax.random.normal(keys[1], (batch, T, heads, H), dtype)
    return w, x, jnp.array([0, 5][:batch]), jnp.array([[0] * 7 + [1] * 9, [2] * T][:batch])


def fusion(loss, args):
    closed = jax.make_jaxpr(loss)(*args)
    found = fuse_attention(hoist_constants(closed), dict(enumerate(closed.consts)))
    run = jaxpr_as_fun(found.closed)
    return found, lambda *given: run(*closed.consts, *given)[0]


def close(loss, args, tolerance):
    found, run = fusion(loss, args)
    assert len(found.attentions) == 1
    wanted = jax.jit(jax.value_and_grad(loss, (0, 1)))(*args)
    given = jax.jit(jax.value_and_grad(run, (0, 1)))(*args)
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()
    return found


CASES = [
    pytest.param(
        name,
        mask,
        marks=() if i % len(MASKS) == j and (3 <= i < len(MASKS) or name == "repeated") else pytest.mark.full,
    )
    for i, name in enumerate(FORMS)
    for j, mask in enumerate(MASKS)
    if mask != "padding" or name not in ("by_hand", "repeated")  # -inf where nothing is seen: nan
]


@pytest.mark.parametrize(("name", "mask"), CASES)
def test_a_fused_loss_has_the_values_and_gradients_of_the_one_written(name, mask):
    def attend(q, k, v, lengths, ids):
        return FORMS[name](q, k, v, MASKS[mask](lengths, ids))

    close(loss_of(attend), arguments(), 1e-5)


@pytest.mark.parametrize(
    "attend",
    [
        pytest.param(
            f,
            marks=() if f.__name__ in ("two_masks", "exponentials_masked", "by_distance") else pytest.mark.full,
        )
        for f in WRITTEN
    ],
)
def test_what_is_made_of_scores_by_other_words_has_its_values_and_gradients(attend):
    """Of the first positions of an example some queries see nothing."""

    def padded(q, k, v, lengths, ids):
        return attend(q, k, v, jnp.arange(T) >= lengths[:, None])

    close(loss_of(padded), arguments(), 1e-5)


@pytest.mark.ci
def test_one_example_and_one_head():
    close(loss_of(lambda q, k, v, *_: by_hand(q, k, v, causal(T))), arguments(1, 1), 1e-5)


def test_in_bfloat16_the_numbers_are_those_of_bfloat16():
    close(loss_of(lambda q, k, v, *_: einsum(q, k, v, causal(T))), arguments(dtype=jnp.bfloat16), 3e-2)


def test_no_array_of_scores_is_left():
    loss = loss_of(lambda q, k, v, lengths, ids: einsum(q, k, v, MASKS["padding"](lengths, ids)))
    found, _ = fusion(loss, arguments())
    program = Program(found.closed)
    assert not [s for s in program.shapes if s[-2:] == (T, T)]


def test_remat_keeps_what_attention_gives():
    loss = loss_of(lambda q, k, v, *_: by_hand(q, k, v, causal(T)), jax.checkpoint)
    found, _ = fusion(loss, arguments())
    assert [_runs(closed) for closed in (found.closed, save_attention_results(found.closed))] == [
        [2, 1],
        [1, 1],
    ]


def _runs(closed):
    """How often a gradient runs attention, and the gradient of one."""
    arrays = [jnp.zeros(a.shape, a.dtype) for a in closed.in_avals]
    at = next(i for i, a in enumerate(arrays) if a.ndim == 4)

    def value(w):
        return jaxpr_as_fun(closed)(*arrays[:at], w, *arrays[at + 1 :])[0]

    equations = Program(jax.make_jaxpr(jax.grad(value))(arrays[at])).equations
    return [sum(e.jaxpr_eqn.primitive is p for e in equations) for p in (attention_p, attention_gradient_p)]
