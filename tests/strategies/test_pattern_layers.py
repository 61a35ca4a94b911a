"""Layers written to be divided or computed again, as people write them: sharded, with the plain step's numbers."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.patterns import (
    CLASSES,
    EXAMPLES,
    HEADS,
    HIDDEN,
    WIDTH,
    alike,
    labelled,
    layout,
    linen_step,
    momentum,
    nnx_made,
    sequences,
    thrice,
)
from zoo.parts import Draw, descend

import jaxshard_magic

pytestmark = pytest.mark.full


class Column(nnx.Module):
    """A weight whose columns, its outputs, are divided: the layer needs no sum."""

    def __init__(self, ins, outs, rngs, mesh=None):
        self.weight = nnx.Param(
            placed(nnx.initializers.lecun_normal()(rngs.params(), (ins, outs)), mesh, None, "model")
        )
        self.bias = nnx.Param(placed(jnp.zeros(outs), mesh, "model"))

    def __call__(self, x):
        return x @ self.weight[...] + self.bias[...]


class Row(nnx.Module):
    """A weight whose rows, its inputs, are divided: the products of the devices are summed, and the bias comes once."""

    def __init__(self, ins, outs, rngs, mesh=None):
        self.weight = nnx.Param(
            placed(nnx.initializers.lecun_normal()(rngs.params(), (ins, outs)), mesh, "model", None)
        )
        self.bias = nnx.Param(placed(jnp.zeros(outs), mesh))

    def __call__(self, x):
        return x @ self.weight[...] + self.bias[...]


def placed(x, mesh, *axes):
    return x if mesh is None else jax.device_put(x, NamedSharding(mesh, P(*axes)))


class Layer(nnx.Module):
    """Attention and an MLP, each a column parallel layer and a row parallel one."""

    def __init__(self, rngs, mesh=None):
        column, row = partial(Column, rngs=rngs, mesh=mesh), partial(Row, rngs=rngs, mesh=mesh)
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv, self.out = column(WIDTH, 3 * WIDTH), row(WIDTH, WIDTH)
        self.up, self.down = column(WIDTH, HIDDEN), row(HIDDEN, WIDTH)

    def attention(self, x):
        q, k, v = (part.reshape(*x.shape[:2], HEADS, -1) for part in jnp.split(self.qkv(self.norm1(x)), 3, axis=-1))
        scores = nnx.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5)
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape))

    def mlp(self, x):
        return self.down(nnx.gelu(self.up(self.norm2(x))))

    def __call__(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


def regression_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(batch["x"]) - batch["y"]) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def trains_alike(sharded, ours, plain, step=regression_step):
    for _ in range(3):
        alike(sharded(*ours, sequences()), nnx.jit(step)(*plain, sequences()))
    alike(ours[0], plain[0])
    alike(ours[1], plain[1])
    return layout(sharded)


PARALLEL = {
    "qkv.weight": P(None, "model"),
    "qkv.bias": P("model"),
    "out.weight": P("model", None),
    "out.bias": P(None),
    "up.weight": P(None, "model"),
    "up.bias": P("model"),
    "down.weight": P("model", None),
    "down.bias": P(None),
}


@pytest.mark.parametrize("by_hand", [False, True], ids=["anywhere", "placed by hand"])
def test_column_and_row_parallel_layers(by_hand):
    mesh = jaxshard_magic.mesh("data=4 model=2")
    sharded = jaxshard_magic.shard(regression_step, "tp", mesh=mesh)
    where = trains_alike(sharded, nnx_made(partial(Layer, mesh=mesh if by_hand else None)), nnx_made(Layer))
    assert {name: where[f"model.{name}"] for name in PARALLEL} == PARALLEL
    assert where["optimizer.opt_state.0.trace.down.weight"] == P("model", None)
    assert where["batch.x"] == P("data", None, None)
    assert not any(where["model.norm1.scale"])


def test_column_and_row_parallel_layers_with_a_sum_of_their_own():
    """Written for one device: of both weights it takes its part, and `psum` joins the products."""

    def step(params, batch):
        devices, own = lax.psum(1, "model"), lax.axis_index("model")

        def loss(p):
            part = partial(lax.dynamic_slice_in_dim, start_index=own * HIDDEN // devices, slice_size=HIDDEN // devices)
            hidden = jax.nn.gelu(batch["x"] @ part(p["up"], axis=1))
            return jnp.mean((lax.psum(hidden @ part(p["down"], axis=0), "model") - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        # The transpose of psum is psum: each gradient comes as often as there are devices.
        grads = jax.tree.map(lambda g: lax.psum(g, "model") / devices, grads)
        return descend(params, lax.pmean(grads, "data")), lax.pmean(value, "data")

    def plain(params, batch):
        def loss(p):
            return jnp.mean((jax.nn.gelu(batch["x"] @ p["up"]) @ p["down"] - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return descend(params, grads), value

    d = Draw(0)
    params = {"up": d.weight(WIDTH, HIDDEN), "down": d.weight(HIDDEN, WIDTH)}
    batch = {"x": d.normal(EXAMPLES, WIDTH), "y": d.normal(EXAMPLES, WIDTH)}
    sharded = jaxshard_magic.shard(step, "pmap", mesh="data=4 model=2")
    alike(thrice(sharded, params, batch), thrice(jax.jit(plain), params, batch))
    where = layout(sharded)
    assert where["batch.x"] == P("data") and not any(where["params.up"])


@pytest.mark.parametrize(
    ("strategy", "mesh", "weight", "activations"),
    [
        ("sp", "data=2 sequence=4", P(None, None), P("data", "sequence", None)),
        ("sp+tp", "data=2 model=2 sequence=2", P(None, "model"), P("data", "sequence", None)),
        ("sp+tp", "data=4 model=2", P(None, "model"), P("data", "model", None)),
    ],
)
def test_sequence_parallel_layers(strategy, mesh, weight, activations):
    sharded = jaxshard_magic.shard(regression_step, strategy, mesh=mesh)
    where = trains_alike(sharded, nnx_made(Layer), nnx_made(Layer))
    assert where["model.up.weight"] == weight and where["batch.x"] == activations


class BoundMethods(Layer):
    def __call__(self, x):
        x = x + jax.checkpoint(self.attention)(x)
        return x + jax.checkpoint(self.mlp)(x)


class AttentionOnly(Layer):
    def __call__(self, x):
        x = x + nnx.remat(Layer.attention)(self, x)
        return x + self.mlp(x)


@pytest.mark.parametrize("model", [BoundMethods, AttentionOnly])
def test_checkpointed_parts_of_an_nnx_layer(model):
    sharded = jaxshard_magic.shard(regression_step, "fsdp+tp", mesh="data=4 model=2")
    where = trains_alike(sharded, nnx_made(model), nnx_made(Layer))
    assert where["model.up.weight"] == P("data", "model")
    assert recomputes(sharded)


def recomputes(sharded):
    """Is a product done a second time for the backward pass?"""
    return any(share.recomputed for share in sharded.entry.plan.shares)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = nn.gelu(nn.Dense(HIDDEN)(x))
        return x + nn.Dense(WIDTH)(hidden)


class Blocks(nn.Module):
    block: type[nn.Module]

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = self.block(name=f"block{i}")(x)
        return nn.Dense(CLASSES)(x)


def test_checkpointed_linen_blocks():
    def made(block):
        model = Blocks(block)
        params = model.init(jax.random.key(0), jnp.ones((1, WIDTH)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=momentum)

    sharded = jaxshard_magic.shard(linen_step, "fsdp", mesh="data=8", microbatches=2)
    got = thrice(sharded, made(nn.remat(Block)), labelled())
    alike(got, thrice(jax.jit(linen_step), made(Block), labelled()))
    assert layout(sharded)["state.params.block0.Dense_0.kernel"] == P(None, "data")
    assert recomputes(sharded)


def test_checkpointed_functions_with_a_policy():
    def block(x, p):
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

    def step_with(block):
        def step(params, batch):
            def loss(params):
                x = batch["x"]
                for p in params:
                    x = block(x, p)
                return jnp.mean((x - batch["y"]) ** 2)

            value, grads = jax.value_and_grad(loss)(params)
            return descend(params, grads), value

        return step

    d = Draw(0)
    params = [{"up": d.weight(WIDTH, HIDDEN), "down": d.weight(HIDDEN, WIDTH)} for _ in range(2)]
    again = jax.checkpoint(block, policy=jax.checkpoint_policies.nothing_saveable)
    sharded = jaxshard_magic.shard(step_with(again), "tp", mesh="data=2 model=4")
    alike(thrice(sharded, params, sequences()), thrice(jax.jit(step_with(block)), params, sequences()))
    where = layout(sharded)
    assert where["params.0.up"] == P(None, "model") and where["params.1.down"] == P("model", None)
    assert recomputes(sharded)


def test_stages_that_microbatches_go_through():
    """A forward pass by stages, one microbatch after the other, as pipelines are written down."""

    def step(stages, batch):
        def loss(stages):
            found = []
            for x in jnp.split(batch["x"], 4):
                for w in stages:
                    x = x + jnp.tanh(x @ w["in"]) @ w["out"]
                found.append(x)
            return jnp.mean((jnp.concatenate(found) - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(stages)
        return descend(stages, grads), value

    d = Draw(0)
    stages = [{"in": d.weight(WIDTH, HIDDEN), "out": d.weight(HIDDEN, WIDTH)} for _ in range(2)]
    sharded = jaxshard_magic.shard(step, "fsdp+tp", mesh="data=4 model=2")
    alike(thrice(sharded, stages, sequences()), thrice(jax.jit(step), stages, sequences()))
    assert layout(sharded)["stages.0.in"] == P("data", "model")
