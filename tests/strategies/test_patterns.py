"""The patterns in which people write parallel train steps by hand: each sharded, with the plain step's numbers."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import jax_utils, nnx
from jax import lax
from jax.experimental import mesh_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from support.patterns import (
    CLASSES,
    DEVICES,
    EXAMPLES,
    HIDDEN,
    WIDTH,
    alike,
    labelled,
    layout,
    linen_step,
    loss_and_accuracy,
    momentum,
    nnx_made,
    per_device,
    plain_linen,
    thrice,
    train_state,
)
from zoo.parts import Draw, cross_entropy, descend, mlp, mlp_params

import jaxshard_magic


@pytest.mark.ci
def test_pmap_with_a_replicated_train_state():
    mapped = jax.pmap(partial(linen_step, reduce=lambda x: lax.pmean(x, "batch")), axis_name="batch")
    sharded = jaxshard_magic.shard(mapped, "pmap", mesh="data=8")
    got = thrice(sharded, jax_utils.replicate(train_state(), jax.devices()[:8]), per_device(labelled()))
    alike(jax_utils.unreplicate(got), plain_linen())
    where = layout(sharded)
    assert where["state.params.Dense_0.kernel"] == where["batch.x"] == P("data")  # a device axis


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def nnx_step(model, optimizer, batch, reduce=lambda x: x):
    loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(batch["x"]), batch["y"]))(model)
    optimizer.update(model, reduce(grads))
    return reduce(loss)


def test_pmap_with_an_nnx_state_broadcast_to_all_devices():
    graph, state = nnx.split(nnx_made(Mlp))

    @partial(jax.pmap, axis_name="devices")
    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        loss = nnx_step(model, optimizer, batch, lambda x: lax.pmean(x, "devices"))
        return nnx.state((model, optimizer)), loss

    copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (DEVICES, *x.shape)), state)
    sharded = jaxshard_magic.shard(step, "pmap", mesh="data=8")
    got, _ = thrice(sharded, copies, per_device(labelled()))
    model, optimizer = nnx_made(Mlp)
    for _ in range(3):
        nnx.jit(nnx_step)(model, optimizer, labelled())
    alike(jax.tree.map(lambda x: x[0], got), nnx.state((model, optimizer)))
    assert layout(sharded)["state.0.up.kernel"] == P("data")


def test_pmap_that_accumulates_over_a_list_of_microbatches():
    def accumulating(state, batches):
        total = jax.tree.map(jnp.zeros_like, state.params)
        for batch in batches:
            grads = jax.grad(lambda p, b=batch: loss_and_accuracy(state, p, b)[0])(state.params)
            total = jax.tree.map(jnp.add, total, grads)
        grads = lax.pmean(jax.tree.map(lambda g: g / len(batches), total), "devices")
        return state.apply_gradients(grads=grads), jnp.zeros(())

    batches = [labelled(seed) for seed in range(3)]
    whole = jax.tree.map(lambda *parts: jnp.concatenate(parts), *batches)
    sharded = jaxshard_magic.shard(jax.pmap(accumulating, axis_name="devices"), "pmap", mesh="data=8")
    state = jax_utils.replicate(train_state(), jax.devices()[:8])
    got, _ = thrice(sharded, state, [per_device(batch) for batch in batches])
    want, _ = thrice(jax.jit(linen_step), train_state(), whole)
    alike(jax_utils.unreplicate(got), want)


def test_a_train_state_is_fully_sharded_with_its_moments():
    sharded = jaxshard_magic.shard(jax.jit(linen_step), "fsdp", mesh="data=8")
    alike(thrice(sharded, train_state(), labelled()), plain_linen())
    where = layout(sharded)
    assert where["state.params.Dense_0.kernel"] == P(None, "data")
    assert where["state.opt_state.0.trace.Dense_0.kernel"] == P(None, "data")
    assert where["batch.x"] == P("data", None)


@pytest.mark.parametrize("owned", [False, True], ids=["beside the model", "that owns the model"])
def test_an_nnx_optimizer(owned):
    def made():
        model = Mlp(nnx.Rngs(0))
        return nnx.ModelAndOptimizer(model, momentum) if owned else nnx.Optimizer(model, momentum, wrt=nnx.Param), model

    @nnx.jit
    def step(optimizer, model, batch):
        model = optimizer.model if owned else model
        loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(batch["x"]), batch["y"]))(model)
        optimizer.update(grads) if owned else optimizer.update(model, grads)
        return loss

    sharded = jaxshard_magic.shard(step, "fsdp+tp", mesh="data=4 model=2")
    ours, plain = made(), made()
    for _ in range(3):
        alike(sharded(*ours, labelled()), step(*plain, labelled()))
    alike(ours[1], plain[1])
    alike(ours[0], plain[0])
    kernels = {path: spec for path, spec in layout(sharded).items() if path.endswith("up.kernel")}
    assert kernels and set(kernels.values()) == {P("data", "model")}


def test_examples_and_columns_placed_by_hand():
    """Specs for `jax.jit` in the place of a strategy."""
    sharded = jaxshard_magic.shard(
        linen_step,
        "spmd",
        mesh="data=2 model=4",
        specs={"batch": P("data")},
        rules={"Dense_0.kernel": P(None, "model"), "Dense_0.bias": P("model")},
    )
    alike(thrice(sharded, train_state(), labelled()), plain_linen())
    where = layout(sharded)
    assert where["batch.x"] == P("data", None)
    assert where["state.params.Dense_0.kernel"] == where["state.opt_state.0.trace.Dense_0.kernel"] == P(None, "model")
    assert not any(where["state.params.Dense_1.kernel"])


PARTS = 2


def sliced(state, batch):
    """One optimizer step for several slices of the batch, one after the other."""
    size = batch["x"].shape[0] // PARTS
    grads, losses = jax.tree.map(jnp.zeros_like, state.params), 0.0
    for i in range(PARTS):
        part = jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size], batch)
        value, more = jax.value_and_grad(lambda p, b=part: loss_and_accuracy(state, p, b)[0])(state.params)
        grads = jax.tree.map(lambda a, g: a + g / PARTS, grads, more)
        losses += value
    return state.apply_gradients(grads=grads), losses / PARTS


def scanned(state, batch):
    """The same as a scan."""

    def add(total, part):
        found = jax.value_and_grad(lambda p: loss_and_accuracy(state, p, part)[0])(state.params)
        return jax.tree.map(jnp.add, total, found), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params)
    parts = jax.tree.map(lambda x: x.reshape(PARTS, -1, *x.shape[1:]), batch)
    (value, grads), _ = lax.scan(add, zeros, parts)
    return state.apply_gradients(grads=jax.tree.map(lambda g: g / PARTS, grads)), value / PARTS


@pytest.mark.ci
@pytest.mark.parametrize(("step", "reduce"), [(sliced, "each"), (scanned, "once")])
def test_accumulation_written_into_the_step(step, reduce):
    sharded = jaxshard_magic.shard(step, "fsdp", mesh="data=8", reduce=reduce)
    state, told = plain_linen()
    alike(thrice(sharded, train_state(), labelled()), (state, told["loss"]))
    assert layout(sharded)["state.params.Dense_0.kernel"] == P(None, "data")


@pytest.mark.ci
def test_the_option_in_the_place_of_accumulation_by_hand():
    sharded = jaxshard_magic.shard(linen_step, "fsdp", mesh="data=8", microbatches=PARTS, reduce="once")
    state, told = thrice(jax.jit(scanned), train_state(), labelled())
    got, ours = thrice(sharded, train_state(), labelled())
    alike((got, ours["loss"]), (state, told))


def masked_batch():
    """The last rows are padding, of as many examples as no two devices share alike."""
    return labelled() | {"mask": jnp.arange(EXAMPLES) < EXAMPLES - 7}


def masked_loss(params, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(mlp(params, batch["x"]), batch["y"])
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


def masked_step(params, batch):
    def loss(p):
        total, real = masked_loss(p, batch)
        return total / real

    value, grads = jax.value_and_grad(loss)(params)
    return descend(params, grads), value


@pytest.mark.parametrize("options", [{}, {"microbatches": 4, "reduce": "once"}], ids=["whole", "microbatches"])
def test_a_masked_batch(options):
    params = mlp_params(Draw(0), WIDTH, HIDDEN, CLASSES)
    sharded = jaxshard_magic.shard(masked_step, "fsdp", mesh="data=8", **options)
    alike(thrice(sharded, params, masked_batch()), thrice(jax.jit(masked_step), params, masked_batch()))
    where = layout(sharded)
    assert where["batch.mask"] == P("data") and where["params.layer0.w"] == P(None, "data")


def test_a_masked_batch_under_pmap():
    """A device that has only padding divides by nothing: what is summed over the devices is both sums."""

    def step(params, batch):
        (total, real), grads = jax.value_and_grad(masked_loss, has_aux=True)(params, batch)
        total, real, grads = lax.psum((total, real, grads), "devices")
        return descend(params, jax.tree.map(lambda g: g / real, grads)), total / real

    params = mlp_params(Draw(0), WIDTH, HIDDEN, CLASSES)
    sharded = jaxshard_magic.shard(jax.pmap(step, axis_name="devices"), "pmap", mesh="data=8")
    got = thrice(sharded, jax_utils.replicate(params, jax.devices()[:8]), per_device(masked_batch()))
    alike(jax_utils.unreplicate(got), thrice(jax.jit(masked_step), params, masked_batch()))


def test_casts_to_bfloat16_written_into_the_step():
    def step(params, batch):
        def loss(p):
            half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (p, batch["x"]))
            return cross_entropy(mlp(*half).astype(jnp.float32), batch["y"])

        value, grads = jax.value_and_grad(loss)(params)
        return descend(params, grads), value

    params = mlp_params(Draw(0), WIDTH, HIDDEN, CLASSES)
    sharded = jaxshard_magic.shard(step, "dp", mesh="data=8")
    # Gradients are sums of as many bfloat16 numbers as there are devices: a rounding or two each.
    alike(thrice(sharded, params, labelled()), thrice(jax.jit(step), params, labelled()), rtol=2.0**-7)
    assert not any(layout(sharded)["params.layer0.w"])


@pytest.mark.parametrize(
    ("sizes", "axes", "strategy", "first", "last", "examples"),
    [
        ((2, 4), ("data", "model"), "tp", P(None, "model"), P("model", None), P("data", None)),
        ((4, 2), ("fsdp", "tp"), "fsdp+tp", P("fsdp", "tp"), P("tp", None), P("fsdp", None)),
        ((1, 8), ("fsdp", "tp"), "fsdp+tp", P("fsdp", "tp"), P("tp", None), P("fsdp", None)),
        ((4, 2), ("fsdp", "data"), "fsdp", P(None, "fsdp"), P(None, None), P(("fsdp", "data"), None)),
        (
            (2, 2, 2),
            ("data", "fsdp", "tensor"),
            "fsdp+tp",
            P("fsdp", "tensor"),
            P("tensor", None),
            P(("data", "fsdp"), None),
        ),
    ],
)
def test_hybrid_meshes(sizes, axes, strategy, first, last, examples):
    mesh = Mesh(mesh_utils.create_device_mesh(sizes), axes)
    sharded = jaxshard_magic.shard(linen_step, strategy, mesh=mesh)
    alike(thrice(sharded, train_state(), labelled()), plain_linen())
    where = layout(sharded)
    assert where["state.params.Dense_0.kernel"] == first
    assert where["state.params.Dense_1.kernel"] == last  # too small to be fully sharded
    assert where["batch.x"] == examples
