"""Mixed precision: values that a shorter type would lose, and what is left as its author wrote it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.narrowed import BF16, F32, ROUNDING, Loss, classifier, classify, gentle, model, off, types_of
from zoo.parts import Draw, cross_entropy, mlp

from jaxshard_magic.errors import ShardError
from jaxshard_magic.gradients.float32_recompute import recompute_float32
from jaxshard_magic.gradients.precision import cast_loss
from jaxshard_magic.program.ir import Program


def ones_product(w, x):
    return x @ w  # (n, 4) @ (4,): ones, each exact in bfloat16


def test_a_sum_of_ten_thousand_terms_is_exact():
    w, x = jnp.full(4, 0.25), jnp.ones((10_000, 4))
    loss = Loss(lambda w, x: ones_product(w, x).sum(), w, x)
    assert float(loss.run(loss.cast.closed)[0]) == 10_000


def test_a_sum_carried_through_a_loop_is_exact_also_where_a_product_follows():
    def total(w, x):
        summed, _ = lax.scan(lambda total, row: (total + ones_product(w, row[None]), None), jnp.zeros(1), x)
        return (summed[:, None] @ jnp.full((1, 1), 0.5)).sum()

    loss = Loss(total, jnp.full(4, 0.25), jnp.ones((10_000, 4)))
    assert loss.cast.changed == 2
    assert float(loss.run(loss.cast.closed)[0]) == pytest.approx(5_000, rel=ROUNDING)


def test_a_row_that_is_looked_up_often_sums_its_gradient_in_float32():
    def f(table, tokens):
        return (table[tokens] @ jnp.ones((4, 1))).sum()

    loss = Loss(f, jnp.ones((8, 4)), jnp.zeros(4096, jnp.int32))
    grads = loss.found[1][0]
    assert np.array_equal(grads[0], np.full(4, 4096.0))
    assert not grads[1:].any()


def test_weights_used_at_every_step_of_a_loop_sum_their_gradient_in_float32():
    def f(w, x):
        return lax.scan(lambda _, row: (None, row @ w), None, x)[1].sum()

    loss = Loss(f, jnp.ones((4, 1)), jnp.ones((4096, 1, 4)))
    assert np.array_equal(loss.found[1][0], np.full((4, 1), 4096.0))


def test_dropout_keeps_the_same_units():
    def f(w, x, key):
        h = x @ w
        kept = jax.random.bernoulli(key, 0.5, h.shape)
        h = jnp.where(kept, h / 0.5, 0.0)
        return (h @ w).mean(), h == 0

    loss = Loss(f, jnp.eye(16), Draw(0).normal(32, 16), jax.random.key(1))
    assert np.array_equal(loss.run(loss.cast.closed)[1], loss.run(loss.closed)[1])


def test_a_derivative_rule_of_the_users_own_is_kept():
    loss = Loss(lambda w, x: gentle(x @ w), jnp.full((1, 1), 8.0), jnp.ones((4, 1)))
    assert float(loss.found[1][0][0, 0]) == 1.0  # clipped: 16 without the rule


def test_what_a_scanned_relu_keeps_is_a_mask():
    def f(w, x):
        return lax.scan(lambda h, _: (jax.nn.relu(h @ w), None), x, None, length=3)[0].sum()

    loss = Loss(f, jnp.ones((32, 32)), jnp.ones((64, 32)))
    # Of each trip the mask, a byte an element, and the input of the product.
    assert loss.kept_bytes(recompute_float32(loss.cast.closed)) == 3 * (64 * 32 + 2 * 64 * 32)


@pytest.mark.parametrize("how", ["bf16", "fp16"])
@pytest.mark.parametrize("filled", [jnp.full, lambda *given: np.full(*given, np.float32)], ids=["jnp", "numpy"])
def test_a_mask_that_is_added_stays_finite_in_examples_that_it_covers(how, filled):
    def f(w, x):
        bias = jnp.where(jnp.arange(8) < 0, jnp.zeros((8, 8)), filled((8, 8), jnp.finfo(jnp.float32).min))

        def mixed(x, _):
            return jax.nn.softmax((x @ w) @ x.T / 2 + bias, axis=-1) @ x, None

        return lax.scan(mixed, x, length=2)[0].sum()

    loss = Loss(f, jnp.eye(4), Draw(0).normal(8, 4), how=how)
    with jax.disable_jit():
        assert float(loss.run(loss.cast.closed)[0]) == pytest.approx(float(loss.run(loss.closed)[0]), rel=16 * ROUNDING)
    assert jnp.isfinite(loss.found[1][0]).all()


@pytest.mark.parametrize("how", ["bf16", "fp16"])
@pytest.mark.parametrize("least", [-1e9, float(jnp.finfo(jnp.float32).min)])
@pytest.mark.parametrize("trips", [0, 1])
def test_a_mask_that_the_narrow_type_cannot_hold_stays_finite(how, least, trips):
    """Also where it is written outside of the loop that reads it."""

    def mixed(x, w, least):
        scores = (x @ w) @ x.T
        return jax.nn.softmax(jnp.where(jnp.zeros_like(scores, bool), scores, least), axis=-1) @ x

    def f(w, x):
        if not trips:
            return mixed(x, w, least).sum()
        outside = jnp.full((8, 8), least)
        return lax.scan(lambda x, _: (mixed(x, w, outside), None), x, length=trips)[0].sum()

    loss = Loss(f, jnp.eye(4), Draw(0).normal(8, 4), how=how)
    value, grads = loss.found
    with jax.disable_jit():  # one operation at a time: XLA for the CPU takes casts away
        assert jnp.isfinite(loss.run(loss.cast.closed)[0])
    assert jnp.isfinite(value)
    assert jnp.isfinite(grads[0]).all()


def test_a_small_addend_is_not_lost_in_float16():
    loss = Loss(lambda w, x: jnp.log((x @ w) + 1e-9).sum(), jnp.zeros((4, 1)), jnp.ones((1, 4)), how="fp16")
    assert float(loss.run(loss.cast.closed)[0]) == pytest.approx(np.log(1e-9), rel=1e-5)


def branching(w, x):
    h = lax.cond(x.sum() > 0, lambda h: jax.nn.relu(h @ w), lambda h: jnp.exp(h), x)
    return lax.switch(1, [jnp.sin, lambda h: h @ w], h).sum()


def nested(w, x):
    def outer(h, row):
        return lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ w) + row, h), h.sum()

    h, sums = lax.scan(outer, x, x[:2])
    return h.sum() + sums.mean()


def until(w, x):
    last, _ = lax.while_loop(lambda c: c[1] < 3, lambda c: (jnp.tanh(c[0] @ w), c[1] + 1), (x, 0))
    return lax.stop_gradient(last).sum() + (x @ w).sum()


def empty(w, x):
    h, ys = lax.scan(lambda h, _: (h @ w, h), x, None, length=0)
    return h.sum() + ys.sum()


def vmapped(w, x):
    return jax.vmap(lambda row: jnp.sort(row @ w)[::2].prod())(x).mean()


@pytest.mark.parametrize("f", [branching, nested, until, empty, vmapped])
@pytest.mark.parametrize("how", ["bf16", "fp16"])
def test_loops_branches_and_sorts_give_the_same_numbers(f, how):
    d = Draw(0)
    loss = Loss(f, d.weight(4, 4), d.normal(4, 4), how=how)
    cast = recompute_float32(loss.cast.closed)
    assert np.allclose(loss.run(cast)[0], loss.run(loss.closed)[0], rtol=16 * ROUNDING, atol=16 * ROUNDING)
    assert off(loss.grads(cast)[1], loss.reference[1]) < 16 * ROUNDING


def test_positions_and_times_are_not_rounded_before_a_product_reads_them():
    def f(w, t):
        return (jnp.sin(t[:, None] * jnp.arange(1.0, 5.0)) @ w).sum()

    t = jnp.array([1001.0, 999.0])  # neighbours in bfloat16 are 4 apart
    loss = Loss(f, jnp.eye(4), t)
    expected = np.sin(np.outer([1001.0, 999.0], [1, 2, 3, 4])).sum()
    assert float(loss.run(loss.cast.closed)[0]) == pytest.approx(expected, abs=8 * ROUNDING)


def test_regression_targets_meet_the_prediction_in_float32():
    loss = Loss(lambda w, x, y: jnp.abs(x @ w - y).sum(), jnp.eye(1), jnp.ones((1, 1)), jnp.full((1, 1), 1.001))
    assert float(loss.run(loss.cast.closed)[0]) == pytest.approx(0.001, rel=1e-3)


def test_inner_products_and_products_with_an_algorithm_stay_as_they_are():
    def f(w, x):
        h = lax.dot(x, w, precision=lax.DotAlgorithmPreset.F32_F32_F32)
        return jnp.vdot(h, h) + jnp.einsum("ij,ij->i", h, h).sum()

    loss = Loss(f, jnp.eye(4), jnp.ones((4, 4)))
    assert loss.cast.changed == 0
    assert loss.cast.closed is loss.closed


def test_the_precision_that_a_product_asks_for_is_kept():
    loss = Loss(lambda w, x: jnp.dot(x, w, precision="highest").sum(), jnp.eye(4), jnp.ones((4, 4)))
    (product,) = [e for e in Program(loss.cast.closed).equations if e.name == "dot_general"]
    assert product.params["precision"] == (lax.Precision.HIGHEST, lax.Precision.HIGHEST)


def test_float64_is_cast_as_well():
    with jax.enable_x64(True):
        w, x = jnp.eye(4, dtype=jnp.float64), jnp.ones((4, 4), jnp.float64)
        loss = Loss(lambda w, x: (x @ w).sum(), w, x)
        assert types_of(loss.cast.closed, "dot_general") == [BF16]
        assert loss.cast.closed.out_avals[0].dtype == jnp.float64


def narrow_classifier():
    params, x, labels = classifier()
    return jax.tree.map(lambda p: p.astype(BF16), params), x.astype(BF16), labels


def test_a_loss_in_bfloat16_stays_as_it_is():
    loss = Loss(classify, *narrow_classifier())
    assert loss.cast.closed is loss.closed
    assert loss.cast.note == "3 products in bfloat16 as written; nothing changed"


def test_what_the_user_cast_up_stays_up():
    def f(params, x, labels):
        return cross_entropy(mlp(params, x).astype(F32), labels)

    loss = Loss(f, *narrow_classifier())
    assert loss.cast.closed is loss.closed


def test_f32_runs_a_loss_written_in_bfloat16_in_float32():
    params, x, labels = narrow_classifier()
    loss = Loss(classify, params, x, labels, how="f32")
    value, grads = loss.found
    wide = jax.tree.map(lambda p: p.astype(F32), (params, x))
    expected, reference = jax.jit(jax.value_and_grad(classify))(*wide, labels)
    assert types_of(loss.cast.closed, "dot_general") == [F32] * 3
    assert loss.cast.note == "3 of 3 products in float32"
    assert value.dtype == BF16
    assert float(value) == pytest.approx(float(expected), rel=ROUNDING)
    assert off(grads, [g.astype(BF16) for g in jax.tree.leaves(reference)]) < 2 * ROUNDING


def test_f32_adds_up_what_is_scattered_in_float32():
    def f(w, x):
        return jax.ops.segment_sum(x @ w, jnp.zeros(1024, jnp.int32), 2)[0, 0]

    w, x = jnp.ones((4, 1), BF16), jnp.full((1024, 4), 0.25, BF16)
    loss = Loss(f, w, x, how="f32")
    assert float(loss.run(loss.cast.closed)[0]) == 1024  # in bfloat16 256 + 1 is 256


def test_f32_says_which_derivative_rules_stay_narrow():
    loss = Loss(lambda w, x: jax.nn.relu(x @ w).sum(), jnp.eye(4, dtype=BF16), jnp.ones((4, 4), BF16), how="f32")
    assert loss.cast.note == "1 of 1 product in float32; 1 function with a derivative rule as written"


def test_a_loss_without_products_is_left_alone():
    loss = Loss(lambda w, x: (w * x).sum(), jnp.ones(4), jnp.ones(4))
    assert loss.cast.closed is loss.closed
    assert loss.cast.note == "nothing to run in bfloat16"


def test_an_unknown_precision_names_the_nearest():
    with pytest.raises(ShardError, match=r"--precision does not take 'bfloat16'\. Did you mean 'bf16'\?"):
        cast_loss(model("mlp").closed, "bfloat16")


def test_equations_keep_the_users_lines():
    loss = model("mlp")
    (frame, *_) = [
        f
        for e in Program(recompute_float32(loss.cast.closed)).equations
        if e.name == "dot_general"
        for f in e.jaxpr_eqn.source_info.traceback.frames
        if f.function_name == "mlp"
    ]
    assert frame.file_name.endswith("parts.py")
