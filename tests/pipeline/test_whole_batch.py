"""A pipeline whose batch can't be taken apart takes it whole, with the plain step's numbers, and says why."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import pipelined_images as images
from support import pipelined_steps as steps
from support.thinned import thinned

import jaxshard_magic
from jaxshard_magic.errors import ShardError


def contrastive(params, x, _):
    """Every example is compared with every other one."""
    h = steps.run_blocks(params["layers"], x)
    return optax.softmax_cross_entropy_with_integer_labels(h @ h.T, jnp.arange(x.shape[0])).mean()


def likeness(params, x, y):
    scores = steps.run_blocks(params["layers"], x)
    return ((scores - y) ** 2).mean(), (scores @ scores.T).max()


def with_its_size(params, x, y):
    """Its author's batch was 16."""
    scores = steps.run_blocks(params["layers"], x.reshape(16, steps.WIDTH))
    return ((scores - y) ** 2).sum() / 16


def numbers():
    return steps.normal(1, 16, steps.WIDTH), steps.normal(2, 16, steps.WIDTH)


def of(loss, has_aux=False):
    def step(params, x, y):
        value, grads = jax.value_and_grad(loss, has_aux=has_aux)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return lambda: (step, ({"layers": steps.language_model()["layers"]}, *numbers()))


def drawn_inside():
    def step(params, key):
        key, data = jax.random.split(key)
        x = jax.random.normal(data, (16, steps.WIDTH))

        def loss(params):
            return ((steps.run_blocks(params, x) - jnp.roll(x, 1)) ** 2).mean(), key

        (value, key_again), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), key_again, value

    return step, (steps.language_model()["layers"], jax.random.key(7))


def closed_over():
    step, (params, x, y) = of(lambda p, x, y: ((steps.run_blocks(p["layers"], x) - y) ** 2).mean())()
    return lambda params: step(params, x, y), (params,)


def one_graph():
    """34 nodes that are no examples: what is one's depends on its neighbours."""
    edges = jax.random.randint(jax.random.key(1), (2, 78), 0, 34)
    nodes = steps.normal(2, 34, steps.WIDTH)

    def step(params, nodes, edges):
        def loss(params):
            h = nodes
            for w in params:
                gathered = jax.ops.segment_sum(h[edges[0]], edges[1], h.shape[0])
                h = h + jnp.tanh(gathered @ w["a"]) @ w["b"]
            return (h[0] - h[-1]) @ (h[0] - h[-1])

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step, (steps.language_model()["layers"], nodes, edges)


WHOLE = {
    "batch norm": (images.batch_norm, "the loss couples the examples of a batch"),
    "contrastive": (of(contrastive), "the loss is no sum over examples"),
    "a metric": (of(likeness, has_aux=True), "1 output beside the loss is no sum over examples"),
    "its own size": (of(with_its_size), "the step can't be traced for 2 examples in the place of 16"),
    "drawn inside": (drawn_inside, "no batch was found among the step's arguments"),
    "closed over": (closed_over, ""),
    "one graph": (one_graph, "the rows of nodes are made of each other"),
}


def of_pipeline(made, mesh="pipe=2", strategy="pp", **options):
    step, args = made
    piped = jaxshard_magic.shard(step, strategy, mesh=mesh, check=True, **options)
    piped(*args)
    return piped


@pytest.mark.parametrize("name", thinned(WHOLE, ("its own size", "one graph")))
def test_a_batch_that_cannot_be_taken_apart_is_one_microbatch(name):
    make, why = WHOLE[name]
    piped = of_pipeline(make())
    assert piped.checked.passed and piped.checked.reference.startswith("the plain step")
    report = piped.report()
    (said,) = [a for a in report.advice if a.message.startswith("The whole batch is one microbatch")]
    assert why in said.message and "\n" not in said.message
    assert report.pipeline.microbatches == 1
    assert report.pipeline.bubble.ideal == 0.5  # of two stages, one works


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
@pytest.mark.parametrize("name", ["contrastive", "drawn inside", "batch norm"])
def test_it_is_divided_over_the_devices_of_a_stage(name, schedule):
    made = WHOLE[name][0]()
    assert of_pipeline(made, "pipe=2 data=2", "pp+fsdp", schedule=schedule).checked.passed


@pytest.mark.ci
def test_with_microbatches_asked_for_the_numbers_are_those_of_a_loop_by_hand():
    piped = of_pipeline(of(contrastive)(), microbatches=4)
    assert piped.checked.passed and "microbatches" in piped.checked.reference


def test_a_schedule_without_a_form_for_one_microbatch_says_why_there_is_one():
    with pytest.raises(ShardError) as refused:
        of_pipeline(of(contrastive)(), schedule="interleaved", chunks=2)
    assert str(refused.value).startswith("--schedule interleaved: the batch is taken whole (the loss is no sum")
    assert refused.value.fix == "--schedule 1f1b --chunks 1"


@pytest.mark.ci
def test_a_batch_that_two_stages_read_may_be_of_numpy_or_jax_and_lie_anywhere():
    """Every language model: the first stage embeds its tokens, the last one is to predict them."""

    def loss(params, tokens, _):
        scores = steps.logits(params, tokens[:, :-1])
        return steps.per_example(scores, tokens[:, 1:]).mean()

    step, (params, state, tokens, _) = steps.trained(steps.language_model(), loss)
    tokens = np.asarray(tokens)
    last = jax.device_put(tokens, jax.devices()[1])
    piped = jaxshard_magic.shard(step, "pp", mesh="pipe=2")
    want = got = (params, state)
    for batch in (tokens, tokens, jnp.asarray(tokens), jnp.asarray(tokens), last, last, tokens):
        *want, value = jax.jit(step)(*want, tokens, tokens)
        *got, told = piped(*got, batch, batch)
        np.testing.assert_allclose(told, value, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
