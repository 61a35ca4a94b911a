"""--pad: rows added to an uneven batch, with the numbers of the real rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.thinned import thinned

import jaxshard_magic
from jaxshard_magic.errors import ShardError

EXAMPLES, CLASSES = 13, 5


def data(examples=EXAMPLES):
    rng = np.random.default_rng(0)
    return {
        "x": jnp.asarray(rng.integers(0, 10, (examples, 3))),
        "y": jnp.asarray(rng.integers(0, CLASSES, examples)),
        "w": jnp.asarray(rng.random(examples) < 0.6, jnp.float32),
    }


def params():
    rng = np.random.default_rng(1)
    return {
        "table": jnp.asarray(rng.normal(size=(10, 8)), jnp.float32),
        "head": jnp.asarray(rng.normal(size=(8, CLASSES)), jnp.float32),
    }


def losses(p, batch):
    h = p["table"][batch["x"]].mean(1)
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3)  # over the batch
    h = h * jax.random.bernoulli(jax.random.key(3), 0.8, h.shape)
    logits = jax.nn.gelu(h) @ p["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]), logits


def mean(p, batch):
    each, logits = losses(p, batch)
    right = logits.argmax(-1) == batch["y"]
    return each.mean(), {
        "each": each,
        "worst": each.max(),
        "best": each.min(),
        "right": right.mean(),
        "n": right.sum(),
    }


def masked(p, batch):
    each, _ = losses(p, batch)
    return (each * batch["w"]).sum() / batch["w"].sum(), {}


def total(p, batch):
    return losses(p, batch)[0].sum(), {}


def step_of(loss):
    def step(p, batch):
        (value, told), grads = jax.value_and_grad(loss, has_aux=True)(p, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), {"loss": value, **told}

    return step


def drawn(p, batch):
    """Keys for each example, draws that depend on all, their number, and rows that must not be zeros."""
    h = p["table"][batch["x"]].mean(1) * (batch["x"].sum(1, keepdims=True) > 0)
    n = h.shape[0]
    keys = jax.random.split(jax.random.key(1), n)
    h = h / jnp.linalg.norm(h, axis=-1, keepdims=True) + jax.vmap(lambda key: jax.random.normal(key, (8,)))(keys)
    each = jnp.square(h @ p["head"]).sum(-1) * jax.random.gamma(jax.random.key(2), 2.0, (n,))
    return each.mean(), {"n": jnp.asarray(n), "each": each}


def convolved(kernel, padding="VALID"):
    """A loss whose convolution has the examples as its places."""

    def loss(p, batch):
        h = p["table"][batch["x"]].mean(1)
        logits = jax.lax.conv_general_dilated(
            h[None], kernel(p["head"]), (1,), padding, dimension_numbers=("NHC", "HIO", "NHC")
        )
        return jnp.square(logits).mean(), {}

    return loss


beside = convolved(lambda head: head[None])
neighbours = convolved(lambda head: jnp.stack([head, 2 * head]))
with_edges = convolved(lambda head: jnp.stack([head, 2 * head, head]), "SAME")


def by_neighbour(p, batch):
    """Rows that are added to those that each names, as messages of a graph are; rows added name real ones."""
    h = jnp.tanh(p["table"][batch["x"]].mean(1))
    to = batch["x"].sum(1) % 7
    sums = jax.ops.segment_sum(h, to, num_segments=h.shape[0])
    return jnp.sin(sums - jnp.zeros_like(h).at[to].subtract(h)).mean(), {}


def set_by_row(p, batch):
    """Numbers that are set, multiplied and bounded at places of rows, and of rows that others name."""
    h = p["table"][batch["x"]].mean(1)
    places = jnp.arange(h.shape[0]), batch["y"]
    to = batch["x"].sum(1) % 7
    h = h.at[places].set(1.0).at[places].multiply(2.0) + jnp.zeros_like(h).at[to].max(h)
    return jnp.tanh(jnp.zeros((20, 8)).at[to + 7].min(h)).mean() + jnp.tanh(h).mean(), {}


def set_where_promised(p, batch):
    h = p["table"][batch["x"]].mean(1)
    to = batch["x"].sum(1) % 7
    return jnp.tanh(jnp.zeros_like(h).at[to].max(h, mode="promise_in_bounds")).mean(), {}


def pooled(p, batch):
    h = p["table"][batch["x"]].mean(1)
    return jnp.square(jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (3, 1), (1, 1), "VALID")).mean(), {}


@pytest.mark.parametrize(
    ("loss", "examples"),
    thinned(
        [
            (mean, 13),
            (masked, 13),
            (total, 13),
            (mean, 2),
            (drawn, 13),
            (beside, 13),
            (by_neighbour, 13),
            (set_by_row, 13),
        ],
        [(masked, 13)],
    ),
)
def test_all_numbers_are_those_of_the_real_rows(loss, examples):
    step, batch = step_of(loss), data(examples)
    sharded = jaxshard_magic.shard(step, "dp", mesh="data=4", pad=True, check=True)
    got, want = sharded(params(), batch), step(params(), batch)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert sharded.checked.passed
    (said,) = [f for f in sharded.entry.plan.findings if f.code == "padded"]
    assert said.message.startswith(f"{-examples % 4} rows added to the {examples} examples")


def test_a_batch_that_a_spec_divides_gets_its_rows_too():
    step, batch, specs = step_of(masked), data(), {f"batch.{name}": "P('data')" for name in "xyw"}
    sharded = jaxshard_magic.shard(step, "dp", mesh="data=4", pad=True, specs=specs)
    got, want = sharded(params(), batch), step(params(), batch)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_padding_the_batch_does_not_allow_an_uneven_spec_of_a_weight():
    sharded = jaxshard_magic.shard(step_of(masked), "dp", mesh="data=4", pad=True, specs={"p.head": "P(None, 'data')"})
    with pytest.raises(ShardError, match=r"p\.head: dimension 1 of \(8, 5\) has size 5"):
        sharded(params(), data())


def test_a_batch_that_divides_is_left_as_it_is():
    sharded = jaxshard_magic.shard(step_of(mean), "dp", mesh="data=4", pad=True)
    sharded(params(), data(12))
    assert not sharded.entry.padding


@pytest.mark.ci
def test_the_last_batch_of_an_epoch_goes_on_with_the_same_state():
    step = step_of(mean)
    sharded = jaxshard_magic.shard(step, "fsdp", mesh="data=4", pad=True)
    got, want = params(), params()
    for examples in (16, 16, 13, 16, 13):
        got, _ = sharded(got, data(examples))
        want, _ = step(want, data(examples))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.ci
def test_statistics_of_an_nnx_batch_norm_are_those_of_the_real_rows():
    def step(model, optimizer, x):
        def loss(model):
            return jnp.square(model(x)).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    def made():
        model = nnx.Sequential(nnx.Linear(4, 6, rngs=nnx.Rngs(0)), nnx.BatchNorm(6, rngs=nnx.Rngs(0)))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    x = jnp.asarray(np.random.default_rng(2).normal(size=(EXAMPLES, 4)), jnp.float32)
    ours, plain = made(), made()
    jaxshard_magic.shard(step, "dp", mesh="data=4", pad=True)(*ours, x)
    step(*plain, x)
    for a, b in zip(jax.tree.leaves(nnx.state(ours[0])), jax.tree.leaves(nnx.state(plain[0])), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def contrasted(p, batch):
    h = p["table"][batch["x"]].mean(1)
    return jax.nn.logsumexp(h @ h.T, -1).mean(), {}


def sorted_(p, batch):
    return jnp.sort(losses(p, batch)[0])[:4].mean(), {}


def turned(p, batch):
    each, _ = losses(p, batch)
    return (each * each[::-1]).mean(), {}


def regrouped(p, batch):
    logits = p["table"][batch["x"]].mean(1) @ p["head"]
    return jnp.square(logits.reshape(CLASSES, -1).mean(0)).mean(), {}


@pytest.mark.parametrize(
    "loss", [contrasted, sorted_, turned, regrouped, pooled, neighbours, with_edges, set_where_promised]
)
def test_a_step_that_mixes_rows_is_refused_with_its_line(loss):
    with pytest.raises(ShardError, match=r"--pad: [\w-]+ at \S+, line \d+ works on several examples at once") as error:
        jaxshard_magic.shard(step_of(loss), "dp", mesh="data=4", pad=True)(params(), data())
    assert "\n" not in str(error.value)


def test_without_the_option_an_uneven_batch_is_refused_by_a_line_that_names_it():
    with pytest.raises(ShardError, match=r"13 examples .* --pad, which adds rows"):
        jaxshard_magic.shard(step_of(mean), "dp", mesh="data=4")(params(), data())


def test_truths_and_bits_over_the_batch_are_those_of_the_real_rows():
    def step(w, batch):
        grads = jax.grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(w)
        bits = jax.lax.reduce(batch["bits"] + 0, np.int32(-1), jax.lax.bitwise_and, (0,))
        seen = batch["x"].sum(-1) > 100
        return w - 0.1 * grads, (seen.argmax(), (~seen).argmin(), bits)

    batch = {"x": jnp.ones((3, 4)), "bits": jnp.array([7, 6, 14], jnp.int32)}
    plain = step(jnp.ones(4), batch)
    _, told = jaxshard_magic.shard(step, "dp", mesh="cpu:4 data=4", pad=True)(jnp.ones(4), batch)
    assert tuple(map(int, told)) == tuple(map(int, plain[1])) == (0, 0, 6)
