"""--pad with --microbatches: batches that divide into neither devices nor microbatches, with the plain numbers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from support.refusals import refusal
from support.thinned import FULL, thinned

import jaxshard_magic
from jaxshard_magic.errors import ShardError
from jaxshard_magic.gradients.rows import row_positions

WIDTH, EXAMPLES, MICROBATCHES = 8, 13, 3


def params():
    rng = np.random.default_rng(1)
    return {
        "layers": jnp.asarray(rng.normal(size=(2, WIDTH, WIDTH)) * WIDTH**-0.5, jnp.float32),
        "table": jnp.asarray(rng.normal(size=(5, WIDTH)), jnp.float32),
    }


def data(examples=EXAMPLES):
    rng = np.random.default_rng(0)
    return {
        "x": jnp.asarray(rng.normal(size=(examples, WIDTH)), jnp.float32),
        "y": jnp.asarray(rng.integers(0, 5, examples)),
        "w": jnp.asarray([1, 0, 1, 1, 0] * 20, jnp.float32)[:examples],
    }


def errors(p, batch, key=None):
    def layer(h, w):
        return jax.nn.silu(h @ w), None

    h = batch["x"] / jnp.linalg.norm(batch["x"], axis=-1, keepdims=True)  # 0 / 0 in a row of zeros
    if key is not None:
        h = h * jax.random.bernoulli(key, 0.8, h.shape)
    h, _ = jax.lax.scan(jax.checkpoint(layer), h, p["layers"])
    return optax.softmax_cross_entropy_with_integer_labels(h @ p["table"].T, batch["y"])


def mean(p, batch):
    return errors(p, batch).mean(), {}


def total_with_decay(p, batch):
    return errors(p, batch).sum() + 0.1 * optax.global_norm(p) ** 2, {}


def masked(p, batch):
    return (errors(p, batch) * batch["w"]).sum() / batch["w"].sum(), {}


def averaged(p, batch):
    return jnp.average(errors(p, batch), weights=batch["w"]), {}


def dropped(p, batch):
    return errors(p, batch, jax.random.key(7)).mean(), {}


def dropped_by_rows(p, batch):
    keys = jax.random.split(jax.random.key(7), batch["y"].size)
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (WIDTH,)))(keys)
    return errors(p, batch | {"x": batch["x"] * kept + 0.1}).mean(), {}


def by_positions(p, batch):
    """Four rows for each example, as tokens have."""
    h = batch["x"] @ p["layers"][0]
    x = h[:, None] + jnp.arange(4.0)[:, None]
    e = jax.nn.relu(x.reshape(-1, WIDTH) @ p["layers"][1]).sum(-1)
    e = e * jax.random.bernoulli(jax.random.key(2), 0.5, e.shape)
    return e.mean(), {"each": e.reshape(-1, 4)}


def reporting(p, batch):
    e = errors(p, batch)
    return e.mean(), {
        "each": e,
        "worst": e.max(),
        "best": e.min(),
        "right": (e < 1.5).mean(),
        "n": (e < 1.5).sum(),
        "examples": jnp.asarray(e.shape[0]),
        "perplexity": jnp.exp(e.mean()),
        "norm": optax.global_norm(p),
    }


def step_of(loss):
    def step(p, batch):
        (value, told), grads = jax.value_and_grad(loss, has_aux=True)(p, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), {"loss": value, "grads": grads, **told}

    return step


def same(got, want, rtol=2e-5, atol=1e-6):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def sharded_and_plain(loss, examples=EXAMPLES, microbatches=MICROBATCHES, mesh="data=2", **options):
    step = step_of(loss)
    options = {"pad": True, **options}
    sharded = jaxshard_magic.shard(step, options.pop("strategy", "dp"), mesh=mesh, microbatches=microbatches, **options)
    return sharded(params(), data(examples)), jax.jit(step)(params(), data(examples)), sharded


@pytest.mark.parametrize(
    "loss",
    thinned(
        [mean, total_with_decay, masked, averaged, dropped, dropped_by_rows, by_positions, reporting],
        [masked, reporting],
    ),
)
def test_all_numbers_are_those_of_the_real_rows(loss):
    got, want, sharded = sharded_and_plain(loss, check=loss is reporting)
    same(got, want)
    assert loss is not reporting or (sharded.checked.passed and "plain step" in sharded.checked.reference)
    (said,) = [f for f in sharded.entry.plan.findings if f.code in ("padded", "microbatches")]
    assert said.message.startswith("5 rows added to the 13 examples, which do not divide into 3 microbatches over 2 ")


@pytest.mark.parametrize(
    ("examples", "microbatches", "mesh", "rows"),
    [
        pytest.param(12, 8, "data=2", 4, marks=FULL),  # divides over the devices alone
        pytest.param(15, 3, "data=2", 3, marks=FULL),  # into the microbatches alone
        (5, 4, "data=2", 3),  # a microbatch of added rows alone
        pytest.param(2, 4, "data=2", 6, marks=FULL),  # as many examples as a microbatch has rows
        pytest.param(7, 2, "data=1", 1, marks=FULL),
    ],
)
def test_every_number_of_examples_is_brought_to_microbatches_times_devices(examples, microbatches, mesh, rows):
    got, want, sharded = sharded_and_plain(reporting, examples, microbatches, mesh)
    same(got, want)
    assert {more for _, more in sharded.entry.padding.values()} == {rows}


def test_tokens_that_stand_in_one_row_are_no_more_examples():
    """All that is multiplied is the tokens of all examples, six of each: 72 would divide."""

    def loss(p, batch):
        tokens = (batch["x"][:, None] * jnp.arange(1.0, 7.0)[:, None]).reshape(-1, WIDTH)
        return jnp.mean(jnp.tanh(tokens @ p["layers"][0]) ** 2), {}

    message = "12 examples do not divide into 2 microbatches on 4 shards"
    assert message in refusal(sharded_and_plain, loss, 12, 2, "data=4", pad=False)
    got, want, sharded = sharded_and_plain(loss, 12, 2, "data=4")
    same(got, want)
    assert sharded.entry.plan.examples == 16


@pytest.mark.ci
def test_a_batch_that_divides_is_left_as_it_is():
    got, want, sharded = sharded_and_plain(mean, 12)
    same(got, want)
    assert not sharded.entry.padding and not [f for f in sharded.entry.plan.findings if f.code == "padded"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"strategy": "fsdp", "reduce": "once", "remat": "full"}, marks=FULL),
        {"strategy": "fsdp", "reduce": "once-gathered", "remat": "2"},
    ],
)
def test_other_options_go_with_it(options):
    got, want, _ = sharded_and_plain(dropped, **options)
    same(got, want)


@pytest.mark.parametrize("precision", thinned(["bf16", "fp16"], ["fp16"]))
def test_shorter_products_are_those_of_the_whole_batch(precision):
    got, want, _ = sharded_and_plain(masked, precision=precision)
    same(got, want, rtol=0.05, atol=0.01)


@pytest.mark.ci
def test_noise_drawn_outside_the_loss_is_that_of_the_real_rows():
    def step(p, batch, key):
        keys = jax.random.split(key, len(batch["x"]))
        noise = jax.random.normal(key, batch["x"].shape)
        noise += jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(keys)
        centred = batch | {"x": batch["x"] - batch["x"].mean(0) + noise}
        value, grads = jax.value_and_grad(lambda p: mean(p, centred)[0])(p)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value, centred["x"]

    sharded = jaxshard_magic.shard(step, "dp", mesh="data=2", microbatches=MICROBATCHES, pad=True)
    args = params(), data(), jax.random.key(4)
    same(sharded(*args), step(*args))


@pytest.mark.ci
def test_both_gradient_calls_of_a_step_see_the_real_rows():
    def step(maker, critic, x):
        a, g = jax.value_and_grad(lambda c: (jnp.tanh(x @ c) - jnp.tanh(x @ maker @ c)).mean())(critic)
        critic = critic - 0.1 * g
        b, h = jax.value_and_grad(lambda m: -jnp.tanh(x @ m @ critic).mean())(maker)
        return maker - 0.1 * h, critic, a, b

    maker, critic = params()["layers"]
    sharded = jaxshard_magic.shard(step, "dp", mesh="data=2", microbatches=MICROBATCHES, pad=True)
    same(sharded(maker, critic, data()["x"]), step(maker, critic, data()["x"]))


@pytest.mark.ci
def test_an_epochs_last_batch_goes_on_with_the_same_nnx_model_and_dropout():
    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(lambda m: jnp.square(m(x)).mean())(model)
        optimizer.update(model, grads)
        return value

    def made():
        rngs = nnx.Rngs(0)
        layers = nnx.Linear(WIDTH, 6, rngs=rngs), nnx.LayerNorm(6, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)
        model = nnx.Sequential(*layers)
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    ours, plain = made(), made()
    sharded = jaxshard_magic.shard(step, "fsdp", mesh="data=2", microbatches=2, pad=True)
    for examples in (16, 13, 16, 13):
        x = data(examples)["x"]
        same(sharded(*ours, x), nnx.jit(step)(*plain, x))
    same(nnx.state(ours[0], nnx.Param), nnx.state(plain[0], nnx.Param), rtol=1e-4, atol=1e-5)


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dropout(0.3, deterministic=False)(linen.gelu(linen.Dense(6)(x)))
        return linen.Dense(1)(x)[:, 0]


@pytest.mark.full
def test_a_linen_model_with_dropout_and_an_equinox_model_are_taken_alike():
    net, x = Net(), data()["x"]
    weights = net.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    mlp = eqx.nn.MLP(WIDTH, "scalar", 6, 1, key=jax.random.key(0))

    def linen_step(weights, x, key):
        return jax.value_and_grad(lambda w: jnp.square(net.apply(w, x, rngs={"dropout": key})).mean())(weights)

    def equinox_step(mlp, x, key):
        return eqx.filter_value_and_grad(lambda m: jnp.square(jax.vmap(m)(x)).mean())(mlp)

    for step, model in ((linen_step, weights), (equinox_step, mlp)):
        sharded = jaxshard_magic.shard(step, "dp", mesh="data=2", microbatches=MICROBATCHES, pad=True)
        key = jax.random.key(5)
        got, want = sharded(model, x, key), step(model, x, key)
        same(*(eqx.filter(tree, eqx.is_array) for tree in (got, want)))


def test_the_rows_of_a_dimension_are_told_by_the_examples():
    rows = jnp.array([2, 3, 6, 7])
    assert row_positions(rows, 4).tolist() == [2, 3, 6, 7]
    assert row_positions(rows, 8).tolist() == [4, 5, 6, 7, 12, 13, 14, 15]
    assert row_positions(rows, 2).tolist() == [1, 3]  # rows 2 and 3 are pair 1


def normed(p, batch):
    h = batch["x"] @ p["layers"][0]
    return jnp.square((h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3) @ p["layers"][1]).mean(), {}


def middle(p, batch):
    e = errors(p, batch)
    return e.mean(), {"spread": jnp.square((e[:, None] * p["table"][0] - e.mean()) @ p["layers"][0]).sum()}


def contrasted(p, batch):
    h = batch["x"] @ p["layers"][0]
    return jax.nn.logsumexp(h @ h.T, -1).mean(), {}


@jax.custom_jvp
def own_mean(x):
    return x.mean()


own_mean.defjvp(lambda x, t: (x[0].mean(), 2 * t[0].mean()))


def with_its_own_derivative(p, batch):
    return own_mean(errors(p, batch)), {}


def gamma(p, batch):
    return (errors(p, batch) * jax.random.gamma(jax.random.key(1), 2.0, batch["y"].shape)).mean(), {}


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            normed,
            r"--pad: the loss is no sum over examples \(\w+ at \S+, line \d+\), so that no rows can be added",
        ),
        (middle, r"--pad: an output beside the loss is no sum over examples"),
        (contrasted, r"--pad: dot_general at \S+, line \d+ works on several examples at once"),
        (with_its_own_derivative, r"--pad: reduce_sum at \S+, line \d+ works on several examples at once"),
        (gamma, r"--pad: random_gamma at \S+, line \d+ works on several examples at once"),
    ],
)
def test_a_loss_that_couples_examples_is_refused_in_a_line(loss, message):
    with pytest.raises(ShardError, match=message) as error:
        sharded_and_plain(loss)
    assert "\n" not in str(error.value)


def test_without_the_option_it_is_named():
    with pytest.raises(ShardError, match=r"13 examples do not divide into 3 microbatches on 2 shards; .*--pad"):
        sharded_and_plain(mean, pad=False)
