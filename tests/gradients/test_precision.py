"""Mixed precision: what runs in which type, and what that does to gradients and to what is kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from support.narrowed import BF16, F32, ROUNDING, Loss, decoder, model, off, pictures, types_of
from support.thinned import thinned
from zoo.transformers import Form

from jaxshard_magic.gradients.float32_recompute import recompute_float32
from jaxshard_magic.gradients.precision import cast_loss
from jaxshard_magic.program.ir import Program

MODELS = (
    "mlp",
    "transformer",
    "scanned and remat",
    "linen with BatchNorm",
    "nnx",
    "a derivative rule of its own",
)


@pytest.mark.parametrize("name", thinned(MODELS, ("nnx", "a derivative rule of its own")))
def test_gradients_are_those_in_float32_to_a_few_roundings(name):
    loss = model(name)
    value, grads = loss.found
    expected, reference = loss.reference
    assert abs(value - expected) <= ROUNDING * abs(expected)
    assert off(grads, reference) < 8 * ROUNDING  # as many as there are products on the longest way through
    assert {g.dtype for g in grads} == {F32}


@pytest.mark.parametrize("name", MODELS)
def test_inputs_and_outputs_keep_their_types(name):
    loss = model(name)
    for cast in (loss.cast.closed, recompute_float32(loss.cast.closed)):
        assert [str(a) for a in cast.in_avals] == [str(a) for a in loss.closed.in_avals]
        assert [a.dtype for a in cast.out_avals] == [a.dtype for a in loss.closed.out_avals]


def by_hand(name):
    """The losses of `MODELS` as one writes them for bfloat16."""
    if name == "transformer":
        f, params, tokens = decoder(Form())
        return jax.grad(lambda p: f(jax.tree.map(lambda x: x.astype(BF16), p), tokens))(params)
    f, params, *data = pictures(BF16)
    return jax.grad(lambda p: f(p, *data)[0])(params)


@pytest.mark.parametrize("name", thinned(["transformer", "linen with BatchNorm"], ["linen with BatchNorm"]))
def test_gradients_are_as_near_to_float32_as_bfloat16_by_hand(name):
    loss = model(name)
    hand = jax.tree.leaves(jax.jit(functools.partial(by_hand, name))())
    triples = zip(loss.found[1], hand, loss.reference[1], strict=True)
    assert all(off([ours], [true]) < max(2 * off([theirs], [true]), ROUNDING) for ours, theirs, true in triples)


def test_running_statistics_are_those_in_float32():
    loss = model("linen with BatchNorm")
    for new, old in zip(loss.run(loss.cast.closed)[1:], loss.run(loss.closed)[1:], strict=True):
        assert new.dtype == F32
        assert np.allclose(new, old, atol=ROUNDING * float(jnp.abs(old).max()))


def test_every_product_runs_in_bfloat16_forward_and_backward():
    loss = model("mlp")
    assert types_of(loss.cast.closed, "dot_general") == [BF16] * 3
    # Three forward, three for the weights, and two that carry the gradient back to the first layer.
    assert types_of(loss.differentiated(loss.cast.closed), "dot_general") == [BF16] * 8
    assert loss.cast.note.startswith("3 of 3 products in bfloat16")


def test_convolutions_run_in_bfloat16_and_statistics_in_float32():
    cast = model("linen with BatchNorm").cast.closed
    assert types_of(cast, "conv_general_dilated") == [BF16] * 2
    assert set(types_of(cast, "reduce_sum")) == {F32}


def test_a_softmax_runs_in_float32_and_its_product_does_not():
    cast = model("transformer").cast.closed
    assert set(types_of(cast, "exp")) == {F32}
    assert set(types_of(cast, "dot_general")) == {BF16}


def test_products_inside_scanned_and_rematerialised_layers_run_in_bfloat16():
    loss = model("scanned and remat")
    assert set(types_of(loss.cast.closed, "dot_general")) == {BF16}
    assert types_of(loss.cast.closed, "scan") == [BF16]  # and so does what one layer hands to the next


def test_about_half_as_much_is_kept_of_scanned_layers():
    loss = Loss(*decoder(Form(gated=True, scanned=True)))
    whole = loss.kept_bytes(loss.closed)
    assert loss.kept_bytes(recompute_float32(loss.cast.closed)) < 0.6 * whole < loss.kept_bytes(loss.cast.closed)


def test_what_is_computed_again_has_no_products():
    loss = Loss(*decoder(Form(gated=True, scanned=True)))
    before, after = loss.cast.closed, recompute_float32(loss.cast.closed)
    counts = [len(types_of(loss.differentiated(c), "dot_general")) for c in (before, after)]
    assert counts[0] == counts[1]


def test_nothing_is_computed_again_outside_of_loops():
    again = recompute_float32(model("transformer").cast.closed)
    assert not [e for e in Program(again).equations if e.primitive.remat]


def test_remat_of_the_users_own_is_left_alone():
    loss = Loss(*decoder(Form(remat=jax.checkpoint_policies.nothing_saveable)))
    bodies = [e for e in Program(recompute_float32(loss.cast.closed)).equations if e.name in ("checkpoint", "remat2")]
    nested = [e for b in bodies for e in b.bodies[0].sub_jaxpr.equations if e.name in ("checkpoint", "remat2")]
    assert bodies and not nested


def test_a_value_that_has_names_is_squared_and_summed_up_as_one_without():
    def loss(w, x):
        h = x @ w
        square = checkpoint_name(h, "a") * checkpoint_name(h, "b")

        def add(total, row):
            return checkpoint_name(checkpoint_name(total, "c") + row @ w, "d"), None

        total, _ = jax.lax.scan(add, jnp.zeros(8), square @ w)
        return (total @ w).sum()

    cast = cast_loss(jax.make_jaxpr(loss)(jnp.ones((8, 8)), jnp.ones((4, 8))), "bf16").closed
    assert types_of(cast, "mul") == [F32]
    assert types_of(cast, "scan") == [F32]
