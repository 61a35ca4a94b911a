"""Products of which one mesh axis would divide two dimensions: what moves for them is planned, and moves so."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxshard_magic

WIDTH, LAYERS = 64, 4
ROWS = (32, 16, WIDTH)
MESHES = {
    "dp": "cpu:4 data=4",
    "tp": "cpu:4 model=4",
    "dp+tp": "cpu:4 data=2 model=2",
    "fsdp+tp": "cpu:4 fsdp=2 model=2",
}


def residual(weights, x):
    """Features are rows of each weight, and its columns."""
    for w in weights:
        x = x + jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


def highway(weights, x):
    for a, b in zip(weights[::2], weights[1::2], strict=True):
        gate = jax.nn.sigmoid(x @ a)
        x = gate * jnp.tanh(x @ b) + (1 - gate) * x
    return jnp.mean(x**2)


def scanned(weights, x):
    x, _ = jax.lax.scan(lambda x, w: (x + jax.nn.gelu(x @ w), None), x, jnp.stack(weights))
    return jnp.mean(x**2)


def recurrent(weights, x):
    def cell(h, step):
        return jnp.tanh(step @ weights[0] + h @ weights[1]), None

    h, _ = jax.lax.scan(cell, jnp.zeros_like(x[:, 0]), jnp.swapaxes(x, 0, 1))
    return jnp.mean((h @ weights[2]) ** 2)


def gram(weights, x):
    x = x + x @ weights[0]
    return jnp.mean(jnp.einsum("bsf,bsg->bfg", x, x) ** 2)


def bilinear(weights, x):
    x = x + x @ weights[0]
    return jnp.mean(jnp.einsum("bsf,fg,bsg->bs", x, weights[1], x) ** 2)


def contrastive(weights, x):
    """Rows of one matrix meet those of another."""
    one, other = (jnp.tanh(x[:, 0] @ a) @ b for a, b in (weights[:2], weights[2:]))
    scores = one @ other.T
    return jnp.mean((scores * (1 - jnp.eye(len(x)))) ** 2) - jnp.mean(jnp.sum(one * other, -1))


def arguments():
    draw = np.random.default_rng(0)
    weights = [draw.normal(0, 0.1, (WIDTH, WIDTH)).astype(np.float32) for _ in range(LAYERS)]
    return weights, draw.normal(size=ROWS).astype(np.float32)


def of(loss, strategy):
    @jax.jit
    def step(weights, x):
        value, gradients = jax.value_and_grad(lambda w: loss(w, x))(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    return step, jaxshard_magic.shard(step, strategy, mesh=MESHES[strategy], check=False)


def moved(report):
    """How often each collective is made of more than one number a row."""
    found = Counter()
    for c in report.collectives:
        if c.bytes > 4 * ROWS[0]:
            found[c.kind, c.axes, c.bytes] += c.count
    return found


ALWAYS = [(residual, "tp"), (contrastive, "dp"), (gram, "dp+tp")]
ALL = [residual, highway, scanned, recurrent, gram, bilinear, contrastive]
OTHERS = [(loss, strategy) for loss in ALL for strategy in MESHES if (loss, strategy) not in ALWAYS]
MOVED_OTHERWISE = {
    # The gather of a weight that no trip of a loop changes is made once on CPU devices, and planned for each trip.
    (recurrent, "fsdp+tp"),
    # XLA for CPU devices adds up a half of one gradient by rows, and permutes it, where a sum is planned.
    (contrastive, "dp+tp"),
    (contrastive, "fsdp+tp"),
}


@pytest.mark.parametrize(
    ("loss", "strategy"),
    [*ALWAYS, *(pytest.param(*case, marks=pytest.mark.ci) for case in OTHERS if case not in MOVED_OTHERWISE)],
)
def test_what_an_axis_divides_twice_moves_as_planned_and_gives_the_plain_numbers(loss, strategy):
    given = arguments()
    step, sharded = of(loss, strategy)
    planned = moved(sharded.plan(*given))
    for got, want in zip(jax.tree.leaves(sharded(*given)), jax.tree.leaves(step(*given)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())
    assert planned == moved(sharded.report())


def test_a_square_residual_stream_is_reduced_and_gathered_once_a_layer():
    """The product with the rows that a device has of a weight is a part of a sum, whose features it then keeps; the
    gradient of that is needed with all of its features, for the weight and for what the layer before gave."""
    _, sharded = of(residual, "tp")
    whole = int(np.prod(ROWS)) * 4
    assert moved(sharded.plan(*arguments())) == {
        ("all-reduce", ("model",), whole): LAYERS,
        ("all-gather", ("model",), whole): LAYERS,
    }


def test_a_leaf_whose_features_are_divided_says_so():
    for strategy, why in (("tp", ""), ("dp+tp", "examples: dim 0 over data; ")):
        _, sharded = of(residual, strategy)
        x = sharded.plan(*arguments()).leaves[-1]
        assert x.spec[2] == "model" and x.why == f"{why}tp: features, dim 2 over model"


def test_rows_that_meet_rows_are_gathered_on_one_side():
    _, sharded = of(contrastive, "dp")
    embeddings = ROWS[0] * WIDTH * 4
    planned = moved(sharded.plan(*arguments()))
    assert planned["all-gather", ("data",), embeddings] == 1
