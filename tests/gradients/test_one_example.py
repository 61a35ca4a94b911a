"""Microbatches of one example: JAX makes other operations of dimensions of 1, and the numbers stay the plain step's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.followed import normal
from support.refusals import refusal

import jaxshard_magic
from jaxshard_magic.program.batching.batch_labels import ExampleSum, UnknownLabel
from jaxshard_magic.program.batching.followed_program import describe_equation, follow_batch, follow_single_example
from jaxshard_magic.program.ir import Program

T, D, V = 3, 8, 5
TABLE, HEAD = normal(1, V, D), normal(2, D, V)


def tokens(n):
    return jax.random.randint(jax.random.key(n), (n, T), 0, V)


def features(n):
    return normal(n, n, D)


def language_model(p, x):
    """`take_along_axis` leaves out the first dimension of one sequence: the same operations, of other shapes."""
    scores = jnp.tanh(p["table"][x]) @ p["head"]
    return optax.softmax_cross_entropy_with_integer_labels(scores[:, :-1], x[:, 1:]).mean()


def classifier(p, x):
    """Of one row JAX makes other operations than of several, too."""
    scores = jnp.tanh(x) @ p["head"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, jnp.zeros(len(x), int)).mean()


def attention(p, x):
    """`@` squeezes dimensions of 1 of what it multiplies."""
    h = p["table"][x]
    return jnp.square(jax.nn.softmax(h @ h.transpose(0, 2, 1)) @ h @ p["head"]).mean()


def masked(p, x):
    return jnp.where(x > 0, jnp.square(p["table"][x] @ p["head"]).sum(-1), 0).sum() / (x > 0).sum() + language_model(
        p, x
    )


def dropped_out(p, x):
    kept = jax.random.bernoulli(jax.random.key(7), 0.8, (len(x), D))
    return classifier(p, jnp.where(kept, x, 0))


def contrastive(p, x):
    h = x @ p["head"]
    return optax.softmax_cross_entropy_with_integer_labels(h @ h.T, jnp.arange(len(x))).mean()


def programs(loss, make, *sizes):
    params = {"table": TABLE, "head": HEAD}
    return tuple(Program(jax.make_jaxpr(loss)(params, make(n))) for n in sizes)


def followed_one(loss, make):
    small, large = programs(loss, make, 1, 8)
    return follow_single_example(small, large, {2: 0}, {0, 1}, lambda: programs(loss, make, 2, 16))


@pytest.mark.parametrize(
    ("loss", "make"),
    [(language_model, tokens), (classifier, features), (attention, tokens), (masked, tokens)],
)
def test_a_mean_is_proven_at_two_examples_where_one_shows_less(loss, make):
    (label,) = followed_one(loss, make).output_labels
    assert label == follow_batch(*programs(loss, make, 2, 16), {2: 0}, {0, 1}).output_labels[0]
    assert isinstance(label, ExampleSum)


def test_what_decides_by_one_example_in_python_is_not_taken_for_a_mean():
    def loss(p, x):
        return classifier(p, x) if len(x) > 1 else 2 * classifier(p, x)

    def renamed(p, x):
        return classifier(p, x) * (1.0 if len(x) > 1 else 3.0)

    assert "the program of one example is another one" in refusal(lambda: followed_one(loss, features))
    assert "the program of one example is another one" in refusal(lambda: followed_one(renamed, features))


def test_a_loss_that_pairs_examples_is_blamed_at_its_own_line():
    says = refusal(lambda: followed_one(contrastive, features))
    assert says.startswith("the loss is no sum over examples (dot_general at test_one_example.py")


def test_a_metric_that_is_no_sum_stays_unknown():
    def loss(p, x):
        value = language_model(p, x)
        return value, jnp.exp(value)

    mean, perplexity = (found := followed_one(loss, tokens)).output_labels
    assert isinstance(mean, ExampleSum) and isinstance(perplexity, UnknownLabel)
    assert describe_equation(found.small, found.unknown_causes[0]).startswith("exp at")


def step_of(loss):
    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def ran(loss, x, strategy="dp", mesh="data=1", **options):
    step, params = step_of(loss), {"table": TABLE, "head": HEAD}
    sharded = jaxshard_magic.shard(step, strategy, mesh=mesh, **options)
    got, want = sharded(params, x), step(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), got, want)
    return sharded


@pytest.mark.parametrize(
    ("loss", "x"),
    [
        (language_model, tokens(8)),
        (classifier, features(8)),
        pytest.param(masked, tokens(6), marks=pytest.mark.full),
    ],
)
def test_parts_of_one_example_have_the_numbers_of_the_whole_batch(loss, x):
    sharded = ran(loss, x, microbatches=len(x))
    assert not [f for f in sharded.entry.plan.findings if f.code == "microbatches"]


def test_parts_of_one_example_not_known_to_add_up_are_refused_with_the_reason():
    says = refusal(lambda: ran(dropped_out, features(8), microbatches=8))
    assert says.startswith("--microbatches 8: the program of one example is another one than that of several (")
    assert "no sum" not in says


@pytest.mark.parametrize(
    ("loss", "x", "parts"),
    [
        (language_model, tokens(8), 8),
        (dropped_out, features(8), 4),
        pytest.param(classifier, features(7), 7, marks=pytest.mark.full),
        pytest.param(language_model, tokens(6), 6, marks=pytest.mark.full),
        pytest.param(classifier, features(2), 2, marks=pytest.mark.full),
    ],
)
def test_a_pipeline_takes_as_many_parts_as_divide_a_small_batch(loss, x, parts):
    piped = ran(loss, x, "pp", "pipe=2")
    report = piped.report()
    assert report.pipeline.microbatches == parts
    assert not [a for a in report.advice if a.code == "whole-batch"]


@pytest.mark.parametrize(
    ("loss", "x", "why"),
    [
        (language_model, tokens(1), "the batch has one example."),
        pytest.param(dropped_out, features(7), "the program of one example is another one", marks=pytest.mark.full),
    ],
)
def test_a_batch_that_stays_whole_is_not_blamed_on_the_loss(loss, x, why):
    (said,) = [a for a in ran(loss, x, "pp", "pipe=2").report().advice if a.code == "whole-batch"]
    assert why in said.message and "no sum" not in said.message
    assert said.fix is None
