"""How a loss follows its batch: labels by hand, microbatches put together against the whole, what stays unknown."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from support.followed import KEY, MEAN, ROW, THIRD, B, M, W, X, Y, case, check, squares

from jaxshard_magic.errors import ShardError
from jaxshard_magic.program.batching.batch_labels import (
    Concatenated,
    Constant,
    ExampleSum,
    Identical,
    PerExample,
    SizeDependent,
    Summed,
    UnknownLabel,
    output_combination,
)
from jaxshard_magic.program.batching.followed_program import describe_equation, follow_batch
from jaxshard_magic.program.ir import Program

MASK = (jnp.arange(B) % 5 > 0).astype(jnp.float32)


def crossentropy(logits, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)[:, 0]


def test_the_mean_over_examples_is_a_sum_times_one_over_the_microbatches():
    check(case(lambda w, x: squares(w, x).mean(), W, X), MEAN)


def test_the_mean_of_per_example_losses_that_were_divided_before():
    check(
        case(lambda w, x: ((squares(w, x) / x.shape[0]).sum(), x / x.shape[0]), W, X),
        MEAN,
        PerExample(0, THIRD),
    )


def test_a_sum_loss_is_a_sum():
    made = case(lambda w, x: (squares(w, x).sum(), x @ w, w * 2, jnp.float32(len(x))), W, X)
    check(made, ExampleSum(), ROW, Constant(), SizeDependent(Fraction(M)))
    assert not made.followed.operand_scales


def test_weight_decay_counts_in_part_for_a_sum_and_whole_for_a_mean():
    def loss(w, x, total):
        return getattr(squares(w, x), total)() + 0.1 * (w**2).sum()

    summed, mean = case(lambda w, x: loss(w, x, "sum"), W, X), case(lambda w, x: loss(w, x, "mean"), W, X)
    check(summed, ExampleSum())
    check(mean, MEAN)
    assert list(summed.followed.operand_scales.values()) == [THIRD]
    assert not mean.followed.operand_scales


def test_terms_of_different_scale_are_added():
    def loss(w, x):
        return squares(w, x).mean() + 0.3 * jnp.sin(x @ w).sum() - 2 * x.shape[0] + jnp.log(x.shape[0] * 1.0)

    check(case(loss, W, X), MEAN)


def test_a_running_total_is_a_sum():
    def loss(p, x):
        each = squares(p["w"], x)
        return each.mean(), p["total"] + each.sum(), 0.9 * p["mean"] + 0.1 * x.mean(0)

    made = case(loss, {"mean": jnp.ones(5), "total": jnp.float32(3), "w": W}, X)
    check(made, MEAN, ExampleSum(), MEAN)


def test_a_whole_number_that_cannot_be_divided_among_microbatches_is_unknown():
    made = case(lambda n, y: (n + (y > 1).sum(), (y > 1).sum()), jnp.int32(5), Y, trained=False)
    check(made, UnknownLabel(made.followed.unknown_causes[0]), ExampleSum())
    assert describe_equation(made.followed.small, made.followed.unknown_causes[0]).startswith(
        "add at test_follow.py, line "
    )


def test_a_constant_beside_examples_that_were_divided_by_the_batch_size():
    check(case(lambda w, x: jnp.exp(squares(w, x) / x.shape[0] + 0.5), W, X), ROW)


def test_per_example_outputs_and_accuracy():
    def loss(w, x, y):
        logits = x @ w
        each = crossentropy(logits, y)
        right = logits.argmax(-1) == y
        return each.mean(), each, right.mean(), right.sum(), logits.max(-1)

    check(case(loss, W, X, Y), MEAN, ROW, MEAN, ExampleSum(), ROW)


def masked(w, x, mask):
    each = squares(w, x).sum(-1)
    return (each * mask).sum() / jnp.maximum(mask.sum(), 1), each


def test_a_masked_mean_divides_by_the_count_of_the_whole_batch():
    made = case(masked, W, X, MASK)
    check(made, ExampleSum(), ROW)
    assert made.followed.full_batch_values
    without = case(masked, W, X, MASK, trained=False)
    assert isinstance(without.labels[0], UnknownLabel)
    assert not without.followed.full_batch_values


def test_a_masked_mean_inside_a_jitted_or_rematerialised_loss():
    check(case(jax.jit(masked), W, X, MASK), ExampleSum(), ROW)
    check(case(jax.checkpoint(masked), W, X, MASK), ExampleSum(), ROW)


def test_a_masked_mean_by_where():
    check(case(lambda w, x, mask: jnp.mean(squares(w, x).sum(-1), where=mask > 0), W, X, MASK), ExampleSum())


BIAS, SPOTS = jnp.arange(20.0).reshape(5, 4), jnp.arange(3)[:, None] - jnp.arange(3)[None]


@pytest.mark.parametrize(
    "lookup",
    [
        lambda table: jnp.take(table, SPOTS + 2, axis=0),
        lambda table: jnp.take(table.T, SPOTS + 2, axis=1, fill_value=0.0).transpose(1, 2, 0),
        lambda table: jnp.take(table, SPOTS, axis=0, mode="wrap"),
        lambda table: jnp.take(table, SPOTS + 9, axis=0, mode="clip"),
        lambda table: table.at[SPOTS].get(mode="promise_in_bounds"),
        lambda table: jnp.take_along_axis(table, jnp.abs(SPOTS)[:, :1], axis=0)[:, None, :],
        lambda table: jax.vmap(lambda spots: jnp.take(table, spots, axis=0))(SPOTS),
    ],
)
def test_rows_looked_up_by_places_are_the_same_for_any_batch(lookup):
    """A bias by relative position, in the modes of `jnp.take`; "fill", its default, fills with NaN."""
    check(case(lambda table, x: ((x @ W)[:, None, None] + lookup(table)).mean(), BIAS, X), MEAN)


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_looked_up_by_the_data_are_of_each_example(axis):
    def loss(table, y):
        rows = jnp.take(table if axis == 0 else table.T, y, axis=axis)
        return jnp.sin(rows).mean(), rows

    check(case(loss, BIAS, Y), MEAN, PerExample(axis))


def test_what_depends_on_parameters_is_no_norm():
    made = case(lambda w, x: squares(w, x).sum() / jnp.abs(x @ w).sum(), W, X)
    check(made, UnknownLabel(made.followed.unknown_causes[0]))
    assert describe_equation(made.followed.small, made.followed.unknown_causes[0]).startswith(
        "div at test_follow.py, line "
    )


def test_batchnorm_is_unknown_and_says_where():
    def loss(w, x):
        h = x @ w
        mean, var = h.mean(0), h.var(0)
        h = (h - mean) / jnp.sqrt(var + 1e-5)
        return (h**4).mean(), 0.9 * 1.0 + 0.1 * mean

    made = case(loss, W, X)
    assert isinstance(made.labels[0], UnknownLabel)
    assert made.labels[1] == MEAN
    says = [describe_equation(made.followed.small, c) for c in made.followed.unknown_causes]
    assert says
    assert all(s.startswith("sub at test_follow.py, line ") for s in says)


def test_a_contrastive_loss_is_unknown_from_its_matrix_on():
    def loss(w, x):
        h = x @ w
        return jax.nn.logsumexp(h @ h.T, axis=-1).mean()

    made = case(loss, W, X)
    assert [describe_equation(made.followed.small, c).partition(" at ")[0] for c in made.followed.unknown_causes] == [
        "dot_general"
    ]


def test_nothing_is_scaled_on_the_way_to_what_is_averaged_anyhow():
    made = case(lambda w, x: jnp.sqrt(squares(w, x).sum() + 1e-3), W, X)
    assert isinstance(made.labels[0], UnknownLabel)
    assert not made.followed.operand_scales


def test_both_examples_crossed_with_each_other_are_unknown():
    made = case(lambda w, x: (x @ w)[:, None, :] - (x @ w)[None, :, :], W, X)
    assert isinstance(made.labels[0], UnknownLabel)


def test_a_gradient_that_is_not_yet_taken_is_unknown_without_being_a_cause():
    later = Primitive("jaxshard_gradient")
    later.multiple_results = True
    later.def_abstract_eval(lambda *avals: list(avals))

    def step(w, x):
        _, g = later.bind(x, w)
        return w - g, (x / 255).mean()

    made = case(step, W, X)
    assert made.labels == (UnknownLabel(), MEAN)
    assert made.followed.unknown_causes == ()


def test_batches_that_are_no_multiple():
    def traced(n):
        return Program(jax.make_jaxpr(lambda w, x: (squares(w, x).mean(), x @ w, n))(W, X[:n]))

    found = follow_batch(traced(7), traced(8), {1: 0})
    assert found.output_labels == (ExampleSum(Fraction(7, 8)), ROW, SizeDependent(Fraction(8, 7)))


def test_an_input_of_another_size_that_is_not_named_is_unknown():
    def traced(n):
        return Program(jax.make_jaxpr(lambda x, z: (x.sum(), z.sum()))(X[:n], X[:n]))

    assert follow_batch(traced(4), traced(8), {0: 0}).output_labels == (ExampleSum(), UnknownLabel())


def test_inputs_may_have_other_labels_than_a_batch():
    def traced(n):
        return Program(jax.make_jaxpr(lambda x, n: x.sum() / n)(X[:n], 1.0))

    assert follow_batch(traced(4), traced(12), {0: 0, 1: SizeDependent(Fraction(3))}).output_labels == (MEAN,)


def test_a_function_that_is_another_one_for_another_size_is_refused():
    def traced(n):
        return Program(jax.make_jaxpr(lambda x: sum(jnp.tanh(r).sum() for r in x))(X[:n]))

    with pytest.raises(ShardError, match="another one for another batch size"):
        follow_batch(traced(4), traced(8), {0: 0})


def test_batches_that_do_not_grow_alike_are_refused():
    def traced(n, m):
        return Program(jax.make_jaxpr(lambda x, y: x.sum() + y.sum())(X[:n], X[:m]))

    with pytest.raises(ShardError, match="input 0: 2, input 1: 3"):
        follow_batch(traced(4, 2), traced(8, 6), {0: 0, 1: 0})
    with pytest.raises(ShardError, match="another factor than 1"):
        follow_batch(traced(4, 2), traced(4, 2), {0: 0, 1: 0})


def test_what_is_unknown_is_joined_by_its_shape_else_averaged_and_called_a_guess():
    row, number, key = jnp.ones((2, 4)), jnp.ones(()), KEY
    assert output_combination(UnknownLabel(), Fraction(M), row, jnp.ones((2, 12))) == Concatenated(1, exact=False)
    assert output_combination(UnknownLabel(), Fraction(M), number, number) == Summed(THIRD, exact=False)
    assert output_combination(UnknownLabel(), Fraction(M), key, key) == Identical(exact=False)


def test_what_a_branch_loses_is_told_before_the_branch():
    made = case(lambda w, x: jax.lax.cond(w.sum() > 0, lambda h: jnp.cumsum(h, 0), lambda h: h, x @ w), W, X)
    assert describe_equation(made.followed.small, made.followed.unknown_causes[0]).startswith("cumsum at")
