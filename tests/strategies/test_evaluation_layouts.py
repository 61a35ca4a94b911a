"""Evaluation and decoding: without a gradient, weights are still told from data and divided as in training."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.differing import furthest

import jaxshard_magic

WIDTH = 256  # of every layer, and the number of examples: sizes tell nothing apart
KEYS = jax.random.split(jax.random.key(0), 12)
MESHES = {"dp": "data=8", "fsdp": "data=8", "tp": "model=8", "fsdp+tp": "data=4 model=2"}


def normal(key, *shape):
    return jax.random.normal(key, shape) / np.sqrt(shape[0])


def network():
    return {f"layer{k}": {"w": normal(KEYS[k], WIDTH, WIDTH), "b": jnp.zeros(WIDTH)} for k in range(3)}


def predict(params, x):
    for layer in params.values():
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x


def evaluate(params, batch):
    return {"loss": jnp.mean((predict(params, batch["x"]) - batch["y"]) ** 2)}


BATCH = {name: normal(k, WIDTH, WIDTH) for name, k in zip("xy", KEYS[3:5], strict=True)}


def leaves(sharded):
    return {leaf.path: leaf for leaf in sharded.report().leaves}


def axes_of(leaf):
    return {axis for entry in leaf.spec if entry for axis in (entry if isinstance(entry, tuple) else (entry,))}


def wanted_axes(strategy):
    return {"dp": set(), "fsdp": {"data"}, "tp": {"model"}, "fsdp+tp": {"data", "model"}}[strategy]


@pytest.mark.parametrize("strategy", MESHES)
@pytest.mark.parametrize("order", ["model first", "batch first", "closed over"])
def test_an_evaluation_divides_weights_as_weights_and_the_batch_as_a_batch(order, strategy):
    params = network()
    step, args, model = {
        "model first": (evaluate, (params, BATCH), "params"),
        "batch first": (lambda batch, params: evaluate(params, batch), (BATCH, params), "params"),
        "closed over": (lambda batch: evaluate(params, batch), (BATCH,), "closure"),
    }[order]
    sharded = jaxshard_magic.shard(step, strategy, mesh=MESHES[strategy], check=True)
    for _ in range(3):
        got = sharded(*args)
    assert furthest(got, jax.tree.map(np.asarray, evaluate(params, BATCH))) < 1e-5
    assert sharded.report().check.passed
    found = leaves(sharded)
    weights = [leaf for path, leaf in found.items() if path.startswith(model) and len(leaf.shape) == 2]
    assert len(weights) == 3 and {leaf.role for leaf in weights} == {"frozen"}
    assert all(axes_of(leaf) == wanted_axes(strategy) for leaf in weights)
    rows = "data" if "data" in MESHES[strategy] else None
    assert found["batch.x"].spec[0] == found["batch.y"].spec[0] == rows


def test_a_model_in_the_same_argument_as_its_data():
    def step(inputs):
        return predict(inputs["params"], inputs["x"])

    sharded = jaxshard_magic.shard(step, "fsdp", mesh="data=8")
    sharded({"params": network(), "x": BATCH["x"]})
    found = leaves(sharded)
    assert found["inputs.params.layer1.w"].role == "frozen" and found["inputs.x"].role == "batch"


def test_two_models_are_both_weights():
    def step(policy, reference, x):
        return predict(policy, x) - predict(reference, x)

    sharded = jaxshard_magic.shard(step, "fsdp+tp", mesh="data=4 model=2")
    got = sharded(network(), network(), BATCH["x"])
    np.testing.assert_allclose(got, np.zeros((WIDTH, WIDTH)), atol=1e-5)
    found = leaves(sharded)
    assert all(axes_of(found[f"{name}.layer1.w"]) == {"data", "model"} for name in ("policy", "reference"))


def test_a_trained_model_is_evaluated_where_it_lies():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
            self.norm = nnx.BatchNorm(2 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.relu(self.norm(self.up(x))))

    @nnx.jit
    def train_step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    @nnx.jit
    def eval_step(model, x):
        return jnp.mean((model(x) - x) ** 2)

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    trained = jaxshard_magic.shard(train_step, "fsdp+tp", mesh="data=4 model=2")
    trained(model, optimizer, BATCH["x"])
    model.eval()
    laid_out = {path: leaf.spec for path, leaf in leaves(trained).items() if path.startswith("model.")}
    arrays = [model.up.kernel[...], model.down.kernel[...]]
    evaluated = jaxshard_magic.shard(eval_step, "fsdp+tp", mesh="data=4 model=2", check=True)
    evaluated(model, BATCH["x"])
    assert evaluated.report().check.passed
    kernels = ("model.up.kernel", "model.down.kernel")
    assert [leaves(evaluated)[path].spec for path in kernels] == [laid_out[path] for path in kernels]
    assert [model.up.kernel[...].sharding, model.down.kernel[...].sharding] == [x.sharding for x in arrays]


HEADS, DEPTH, ROWS, LENGTH, VOCABULARY = 8, 2, 16, 64, 512


def decoder():
    shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "o": (WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    stack = {n: jnp.stack([normal(k, *s)] * DEPTH) for (n, s), k in zip(shapes.items(), KEYS[:6], strict=True)}
    return {"embed": normal(KEYS[6], VOCABULARY, WIDTH), "layers": stack, "head": normal(KEYS[7], WIDTH, VOCABULARY)}


def decode(params, cache, tokens, position):
    """One token more for each row, with keys and values of those before it in a cache."""

    def layer(h, given):
        w, keys, values = given
        q, k, v = ((h @ w[n]).reshape(ROWS, HEADS, -1) for n in "qkv")
        keys = jax.lax.dynamic_update_slice(keys, k[:, None], (0, position, 0, 0))
        values = jax.lax.dynamic_update_slice(values, v[:, None], (0, position, 0, 0))
        scores = jnp.einsum("bhd,bthd->bht", q, keys) / np.sqrt(WIDTH // HEADS)
        scores = jnp.where(jnp.arange(LENGTH) <= position, scores, -1e30)
        read = jnp.einsum("bht,bthd->bhd", jax.nn.softmax(scores), values).reshape(ROWS, WIDTH)
        h = h + read @ w["o"]
        return h + jax.nn.gelu(h @ w["up"]) @ w["down"], (keys, values)

    h, cache = jax.lax.scan(layer, params["embed"][tokens], (params["layers"], *cache))
    return cache, (h @ params["head"]).argmax(-1)


@pytest.mark.parametrize("strategy", ["dp", "tp", "dp+tp", "fsdp+tp"])
def test_a_decoding_step_divides_its_cache_by_rows_and_heads_and_moves_no_weight_under_tp(strategy):
    mesh = {"dp": "data=8", "tp": "model=8"}.get(strategy, "data=2 model=4")
    sharded = jaxshard_magic.shard(decode, strategy, mesh=mesh, check=True)
    empty = jnp.zeros((DEPTH, ROWS, LENGTH, HEADS, WIDTH // HEADS))
    params, tokens = decoder(), jnp.arange(ROWS)
    cache, plain_cache, plain_tokens = (empty, empty), (empty, empty), tokens
    for position in range(3):
        cache, tokens = sharded(params, cache, tokens, position)
        plain_cache, plain_tokens = jax.jit(decode)(params, plain_cache, plain_tokens, position)
    np.testing.assert_array_equal(tokens, plain_tokens)
    assert furthest(cache, plain_cache) < 1e-4 and sharded.report().check.passed
    found = leaves(sharded)
    rows, heads = ("data" if "data" in mesh else None), ("model" if "model" in mesh else None)
    assert found["cache.0"].spec == found["cache.1"].spec == (None, rows, None, heads, None)
    assert found["params.layers.q"].role == "frozen" and ("model" in axes_of(found["params.layers.q"])) == bool(heads)
    largest = max((c.bytes for c in sharded.report().collectives), default=0)
    if strategy == "tp":
        # Two sums of activations a layer, one of the looked-up rows, and what the largest logit needs.
        assert largest == ROWS * WIDTH * 4
    if strategy in ("dp", "dp+tp"):
        assert "all-gather" not in {c.kind for c in sharded.report().collectives if c.bytes >= WIDTH * WIDTH}
