"""Weights that no gradient reaches: told from data by what they do, and divided as parameters are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.differing import furthest

import jaxshard_magic

D, H, B, RANK = 256, 512, 64, 8
KEYS = jax.random.split(jax.random.key(0), 6)
BASE = {
    "up": {"w": 0.05 * jax.random.normal(KEYS[0], (D, H)), "bias": jnp.zeros(H)},
    "down": {"w": 0.05 * jax.random.normal(KEYS[1], (H, D)), "bias": jnp.zeros(D)},
}
X = jax.random.normal(KEYS[2], (B, D))
ADAPTERS = {
    name: {
        "a": 0.01 * jax.random.normal(KEYS[3], (layer["w"].shape[0], RANK)),
        "b": jnp.zeros((RANK, layer["w"].shape[1])),
    }
    for name, layer in BASE.items()
}
ADAM = optax.adam(1e-3)


def roles(sharded):
    return {leaf.path: leaf.role for leaf in sharded.report().leaves}


def specs(sharded):
    return {leaf.path: leaf.spec for leaf in sharded.report().leaves}


def adapted(adapters, weight):
    """A network of which the adapters alone are trained; `weight(name, h)` multiplies with the base."""

    def layer(name, h):
        return weight(name, h) + h @ adapters[name]["a"] @ adapters[name]["b"]

    return lambda x: layer("down", jax.nn.relu(layer("up", x)))


def train(predict, adapters, moments, x):
    loss, grads = jax.value_and_grad(lambda a: jnp.mean((predict(a)(x) - x) ** 2))(adapters)
    updates, moments = ADAM.update(grads, moments, adapters)
    return optax.apply_updates(adapters, updates), moments, loss


def lora(adapters, moments, base, x):
    return train(lambda a: adapted(a, lambda n, h: h @ base[n]["w"] + base[n]["bias"]), adapters, moments, x)


def quantized(adapters, moments, base, x):
    """The base as integers, with a scale for each column."""

    def weight(n, h):
        return h @ (base[n]["q"].astype(h.dtype) * base[n]["scale"])

    return train(lambda a: adapted(a, weight), adapters, moments, x)


QUANTIZED = {
    name: {"q": jnp.round(layer["w"] * 100).astype(jnp.int8), "scale": jnp.full(layer["w"].shape[1], 0.01)}
    for name, layer in BASE.items()
}


def three_calls(step, base):
    adapters, moments = ADAPTERS, ADAM.init(ADAPTERS)
    for _ in range(3):
        adapters, moments, loss = step(adapters, moments, base, X)
    return jax.tree.map(np.asarray, (adapters, loss))


@pytest.mark.parametrize("strategy", ["dp", "fsdp", "tp", "fsdp+tp"])
@pytest.mark.parametrize(("step", "base", "w"), [(lora, BASE, "w"), (quantized, QUANTIZED, "q")])
def test_the_base_of_adapters_is_divided_as_parameters_are(step, base, w, strategy):
    mesh = {"fsdp+tp": "data=4 model=2", "tp": "model=8"}.get(strategy, "data=8")
    sharded = jaxshard_magic.shard(step, strategy, mesh=mesh, check=True)
    assert furthest(three_calls(sharded, base), three_calls(jax.jit(step), base)) < 1e-4
    assert sharded.report().check.passed
    assert {r for path, r in roles(sharded).items() if path.startswith("base.")} == {"frozen"}
    assert roles(sharded)["x"] == "batch"
    parts = {axis for name in base for axis in specs(sharded)[f"base.{name}.{w}"] if axis}
    assert parts == {axis for axis in ("data", "model") if axis in mesh and strategy != "dp"}


def test_under_fsdp_each_device_has_an_eighth_and_the_base_is_gathered_once():
    sharded = jaxshard_magic.shard(lora, "fsdp", mesh="data=8")
    three_calls(sharded, BASE)
    weights = {leaf.path: leaf for leaf in sharded.report().leaves if leaf.path.endswith(".w")}
    assert [leaf.bytes_per_device * 8 for leaf in weights.values()] == [D * H * 4] * 2
    gathered = [c for c in sharded.report().collectives if c.kind == "all-gather"]
    # Once for both passes: the forward pass keeps what its backward pass multiplies with. No sum of a gradient.
    assert sum(c.count * c.bytes for c in gathered) == 2 * D * H * 4
    summed = sum(c.count * c.bytes for c in sharded.report().collectives if c.kind == "all-reduce")
    assert summed == sum(x.nbytes for x in jax.tree.leaves(ADAPTERS)) + 4


def test_a_base_that_comes_back_is_frozen_and_an_average_is_not():
    def step(state, x):
        adapters, moments, loss = lora(state["adapters"], state["moments"], state["base"], x)
        average = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, state["average"], adapters)
        return {"adapters": adapters, "moments": moments, "base": state["base"], "average": average}, loss

    state = {"adapters": ADAPTERS, "moments": ADAM.init(ADAPTERS), "base": BASE, "average": ADAPTERS}
    sharded = jaxshard_magic.shard(step, "fsdp", mesh="data=8")
    state, _ = sharded(state, X)
    sharded(state, X)
    assert roles(sharded)["state.base.up.w"] == roles(sharded)["state.base.up.bias"] == "frozen"
    assert roles(sharded)["state.average.up.a"] == "other"
    assert specs(sharded)["state.base.up.w"] == (None, "data")


def test_a_base_that_adapters_are_added_to_before_the_product_is_frozen():
    def merged(adapters, moments, base, x):
        def weight(a, n):
            return base[n]["w"] + a[n]["a"] @ a[n]["b"]

        return train(lambda a: lambda x: jax.nn.relu(x @ weight(a, "up")) @ weight(a, "down"), adapters, moments, x)

    sharded = jaxshard_magic.shard(merged, "fsdp", mesh="data=8")
    assert furthest(three_calls(sharded, BASE), three_calls(jax.jit(merged), BASE)) < 1e-4
    assert roles(sharded)["base.up.w"] == "frozen"


@pytest.mark.parametrize("wider", [1, 2])
def test_a_teacher_of_any_width_is_divided(wider):
    teacher = {"up": jnp.tile(BASE["up"]["w"], (1, wider)), "down": jnp.tile(BASE["down"]["w"], (wider, 1))}
    student = {name: layer["w"] for name, layer in BASE.items()}

    def distill(student, teacher, x):
        def predict(p):
            return jax.nn.relu(x @ p["up"]) @ p["down"]

        loss, grads = jax.value_and_grad(lambda p: jnp.mean((predict(p) - predict(teacher)) ** 2))(student)
        return jax.tree.map(lambda p, g: p - 0.1 * g, student, grads), loss

    sharded = jaxshard_magic.shard(distill, "fsdp", mesh="data=8")
    assert furthest(sharded(student, teacher, X), jax.tree.map(np.asarray, distill(student, teacher, X))) < 1e-5
    assert roles(sharded)["teacher.up"] == "frozen" and specs(sharded)["teacher.up"] == (None, "data")


def test_parts_of_an_nnx_model_that_the_optimizer_leaves_alone():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(512, D, rngs=rngs)
            self.up = nnx.Linear(D, H, rngs=rngs)
            self.down = nnx.LoRALinear(H, D, lora_rank=RANK, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.relu(self.up(self.embed(x))))

    @nnx.jit
    def train_step(model, optimizer, tokens):
        at = nnx.DiffState(0, nnx.LoRAParam)
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(tokens) ** 2), argnums=at)(model)
        optimizer.update(model, grads)
        return loss

    tokens = jax.random.randint(KEYS[4], (B,), 0, 512)
    made = []
    for run in (train_step, jaxshard_magic.shard(train_step, "fsdp", mesh="data=8")):
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam)
        losses = [run(model, optimizer, tokens) for _ in range(3)]
        made.append((losses, nnx.to_pure_dict(nnx.state(model))))
    assert furthest(made[1], made[0]) < 1e-5
    sharded = run
    assert {roles(sharded)[f"model.{p}"] for p in ("embed.embedding", "up.kernel", "up.bias", "down.kernel")} == {
        "frozen"
    }
    assert roles(sharded)["model.down.lora.lora_a"] == "params"
    assert "data" in specs(sharded)["model.up.kernel"] and "data" in specs(sharded)["model.embed.embedding"]


def test_data_without_examples_in_it_stays_data():
    """A matrix between examples, a table of neighbours, a mask and labels act as no weight."""
    keys = jax.random.split(KEYS[5], 3)
    adjacency = jax.random.uniform(keys[0], (B, B))
    w = 0.1 * jax.random.normal(keys[1], (D, D))

    def step(w, graph, mask, labels):
        def loss(w):
            h = jnp.tanh(graph["adjacency"] @ (graph["features"] @ w)) * mask
            return -jnp.mean(jnp.einsum("bd,bd->b", jax.nn.log_softmax(h), labels))

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * grad, value

    args = w, {"adjacency": adjacency, "features": X}, jnp.ones(D), jax.nn.softmax(X)
    sharded = jaxshard_magic.shard(step, "fsdp", mesh="data=8")
    assert furthest(sharded(*args), jax.tree.map(np.asarray, step(*args))) < 1e-5
    found = roles(sharded)
    assert "frozen" not in found.values()


def test_a_part_of_an_argument_with_data_in_it_takes_no_neighbours_along():
    def step(adapters, moments, both, x):
        return lora(adapters, moments, both["base"], x * both["extra"]["mask"] + both["extra"]["rows"])

    both = {"base": BASE, "extra": {"mask": jnp.ones(D), "rows": X}}
    sharded = jaxshard_magic.shard(step, "fsdp", mesh="data=8")
    sharded(ADAPTERS, ADAM.init(ADAPTERS), both, X)
    found = roles(sharded)
    assert found["both.base.up.bias"] == "frozen" and found["both.extra.mask"] != "frozen"


@pytest.mark.parametrize("trains", [True, False])
def test_a_data_set_in_memory_is_no_embedding(trains):
    data_set = jax.random.normal(KEYS[5], (1024, D))
    w = {name: layer["w"] for name, layer in BASE.items()}

    def loss(w, at):
        x = data_set[at]
        return jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"] - x) ** 2)

    def step(w, at):
        value, grads = jax.value_and_grad(loss)(w, at)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value

    sharded = jaxshard_magic.shard(step if trains else loss, "fsdp", mesh="data=8", check=True)
    sharded(w, jnp.arange(B))
    assert sharded.report().check.passed
    assert roles(sharded)["closure.0"] != "frozen" and roles(sharded)["w.up"] == ("params" if trains else "frozen")


@pytest.mark.parametrize("options", [{"microbatches": 4}, {"remat": "full"}])
def test_options_for_the_gradient_leave_the_base_whole_to_each_part(options):
    sharded = jaxshard_magic.shard(lora, "fsdp", mesh="data=8", check=True, **options)
    assert furthest(three_calls(sharded, BASE), three_calls(jax.jit(lora), BASE)) < 1e-5
    assert sharded.report().check.passed and roles(sharded)["base.up.w"] == "frozen"


def test_a_pipeline_has_the_base_of_each_stage_where_it_is_read():
    sharded = jaxshard_magic.shard(lora, "pp", mesh="pipe=2", microbatches=4, check=True)
    assert furthest(three_calls(sharded, BASE), three_calls(jax.jit(lora), BASE)) < 1e-5
    assert sharded.report().check.passed and roles(sharded)["base.up.w"] == "frozen"
