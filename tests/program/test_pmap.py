"""Steps written for one device: found out, and run on the mesh with the numbers of `jax.pmap`."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils, nnx
from jax import lax
from support.cells import LOOP, STEP, close
from support.per_device import (
    CLASSES,
    DEVICES,
    EXAMPLES,
    HIDDEN,
    WIDTH,
    data,
    first,
    halves_on_model,
    linen_state,
    linen_step,
    mean_loss,
    refused,
    replicate,
    same,
    shard,
    split,
    stacked,
    step,
    three,
    updated,
    weights,
    whole,
)

import jaxshard_magic
from jaxshard_magic.program.unwrap import PmapOptions, unwrap_step


@pytest.fixture(scope="module")
def pmapped():
    """Three steps of `jax.pmap` on the same devices."""
    return three(jax.pmap(step, axis_name="batch"), *stacked())


@pytest.mark.parametrize("fun", [jax.pmap(step, axis_name="batch"), step], ids=["decorated", "plain"])
def test_with_a_device_axis_everything_is_as_under_pmap(pmapped, fun):
    sharded = shard(fun)
    same(three(sharded, *stacked()), pmapped)
    leaves = {leaf.path: leaf for leaf in sharded.report().leaves}
    assert leaves["state.params.in"].spec == ("data", None, None)
    assert leaves["state.params.in"].shape == (DEVICES, WIDTH, HIDDEN)
    assert "device axis" in leaves["state.params.in"].why
    assert "device axis" in leaves["batch.x"].why


@pytest.mark.parametrize("fun", [jax.pmap(step, axis_name="batch"), step, jax.jit(step)])
def test_without_a_device_axis_the_batch_is_split_and_state_is_whole(pmapped, fun):
    sharded = shard(fun)
    same(three(sharded, *whole()), first(pmapped))
    leaves = {leaf.path: leaf.why for leaf in sharded.report().leaves}
    assert leaves["state.params.in"] == "pmap: a copy on every device, no device axis"
    assert leaves["batch.x"] == "pmap: no device axis; examples, dim 0 over data"


@pytest.mark.parametrize("mesh", ["batch=8", "data=4 fsdp=2", "data=2 model=2 fsdp=2"])
def test_the_axis_name_stands_for_the_batch_axes_of_the_mesh(mesh):
    devices = 4 if "model" in mesh else 8
    want = three(
        jax.pmap(step, axis_name="batch", devices=jax.devices()[:devices]),
        *stacked(devices),
    )
    same(three(shard(step, mesh), *whole()), first(want))


def test_an_axis_may_be_named_for_it():
    sharded = jaxshard_magic.shard(step, "pmap@model", mesh=jaxshard_magic.mesh("model=8"))
    assert sharded.planned(*whole()).plan.batch_axes == ("model",)


def test_another_mesh_that_the_user_has_set_does_not_get_in():
    with jax.set_mesh(jax.make_mesh((2, 4), ("p", "q"))):
        state, _ = shard(step)(*whole())
    want, _ = jax.pmap(step, axis_name="batch")(*stacked())
    same(jax.tree.map(np.asarray, state), first(jax.tree.map(np.asarray, want)))


def test_collectives_of_every_kind_give_what_pmap_gives():
    def mixed(state, batch):
        i, n = lax.axis_index("batch"), lax.psum(1, "batch")
        grads = jax.grad(mean_loss)(state["params"], batch)
        total = jax.tree.map(lambda g: lax.psum(g, "batch") / n, grads)
        gathered = lax.all_gather(batch["x"], "batch")  # [devices, examples, width]
        scattered = lax.psum_scatter(gathered.mean((1, 2)), "batch")
        moved = lax.ppermute(batch["y"], "batch", [(d, (d + 1) % 8) for d in range(8)])
        turned = lax.all_to_all(gathered[:, 0], "batch", 0, 0)
        largest = lax.pmax(jnp.abs(batch["x"]).max(), "batch")
        return updated(state, total), (i, scattered, moved, turned, largest)

    mapped = jax.pmap(mixed, axis_name="batch")
    args = stacked()
    want = three(mapped, *args)
    same(three(shard(mapped), *args), want)
    same(three(shard(mapped, "data=4 fsdp=2"), *args), want)


@pytest.mark.ci
def test_two_axes_of_the_mesh_go_by_their_names():
    def by_two(state, batch):
        loss, grads = jax.value_and_grad(mean_loss)(state["params"], batch)
        grads = lax.pmean(lax.pmean(grads, "j"), "i")
        own = lax.axis_index("i") * 10 + lax.axis_index(("i", "j"))
        return updated(state, grads), (lax.pmean(loss, ("i", "j")), jnp.full(batch["x"].shape[:1], own))

    mapped = jax.vmap(jax.vmap(by_two, axis_name="j"), axis_name="i")
    state = replicate(replicate(weights(), 2), 4)
    want, losses = three(mapped, state, split(data(), 4, 2))
    sharded = shard(by_two, "i=4 j=2", check=True)
    got, given = three(sharded, *whole())
    same(got, first(first(want)))
    assert sharded.checked is not None
    assert sharded.checked.passed
    assert sharded.report().leaves[-1].spec[0] in (["i", "j"], ("i", "j"))
    np.testing.assert_array_equal(given[0][1], losses[0][1].reshape(-1))


@pytest.mark.ci
def test_a_second_axis_that_divides_no_examples_takes_part():
    def plain(state, batch):
        value, grads = jax.value_and_grad(mean_loss)(state["params"], batch)
        return updated(state, grads), value

    same(three(shard(halves_on_model, "data=4 model=2"), *whole()), three(plain, *whole()), 2e-4)


@pytest.mark.ci
def test_dropout_draws_differ_as_under_pmap():
    def dropping(state, batch, key):
        key = jax.random.fold_in(key, lax.axis_index("batch"))
        kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        grads = jax.grad(mean_loss)(state["params"], batch | {"x": batch["x"] * kept})
        return updated(state, lax.pmean(grads, "batch")), lax.psum(kept.sum(), "batch")

    key = jax.random.key(3)
    mapped = jax.pmap(dropping, axis_name="batch", in_axes=(0, 0, None))
    want = three(mapped, *stacked(), key)
    same(three(shard(mapped), *stacked(), key), want)
    same(three(shard(dropping), *whole(), key), first(want))


@pytest.fixture(scope="module")
def linen_pmapped():
    state = jax_utils.replicate(linen_state(), jax.devices()[:8])
    return three(jax.pmap(linen_step, axis_name="batch"), state, split(data()))


@pytest.mark.ci
def test_a_replicated_train_state_of_flax_is_understood(linen_pmapped):
    sharded = shard(jax.pmap(linen_step, axis_name="batch"), check=True)
    same(
        three(sharded, jax_utils.replicate(linen_state(), jax.devices()[:8]), split(data())),
        linen_pmapped,
        1e-4,
    )
    assert sharded.checked is not None
    assert sharded.checked.passed
    (told,) = (a for a in sharded.report().advice if a.code == "state-differs")
    assert "batch_stats" in told.message
    assert told.fix == "batch_stats = jax.lax.pmean(batch_stats, 'batch')"


@pytest.mark.ci
def test_statistics_without_a_device_axis_have_to_be_reduced(linen_pmapped):
    error = refused(linen_step, linen_state(), data())
    assert "state.batch_stats.BatchNorm_0.mean" in str(error)
    assert error.fix == "batch_stats = jax.lax.pmean(batch_stats, 'batch')"
    state, losses = three(shard(partial(linen_step, sync=True)), linen_state(), data())
    want, their_losses = linen_pmapped
    same((state.params, losses), first((want.params, their_losses)), 1e-4)
    # the mean of running averages is the running average of the means
    same(state.batch_stats, jax.tree.map(lambda x: x.mean(0), want.batch_stats), 1e-4)


def test_an_nnx_step_is_updated_in_place():
    def made():
        model = nnx.Sequential(
            nnx.Linear(WIDTH, HIDDEN, rngs=nnx.Rngs(0)),
            nnx.relu,
            nnx.Linear(HIDDEN, CLASSES, rngs=nnx.Rngs(1)),
        )
        return model, nnx.Optimizer(model, optax.sgd(0.1, 0.9), wrt=nnx.Param)

    def train(model, optimizer, batch, reduce=lambda x: lax.pmean(x, "batch")):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(batch["x"]) - batch["y"]) ** 2))(model)
        optimizer.update(model, reduce(grads))
        return reduce(loss)

    (plain, its), (model, optimizer), sharded = made(), made(), shard(train)
    for _ in range(3):
        want = train(plain, its, data(), reduce=lambda x: x)  # the mean of equal parts' means is the whole mean
        np.testing.assert_allclose(sharded(model, optimizer, data()), want, rtol=1e-5)
    same(nnx.state(model), nnx.state(plain))


def test_a_reduction_once_at_the_end_of_a_loop_is_enough():
    def accumulating(state, batch):
        parts = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)

        def add(grads, part):
            return jax.tree.map(jnp.add, grads, jax.grad(mean_loss)(state["params"], part)), None

        grads, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, state["params"]), parts)
        grads = lax.pmean(jax.tree.map(lambda g: g / 2, grads), "batch")
        return updated(state, grads), jnp.zeros(())

    want = three(jax.pmap(accumulating, axis_name="batch"), *stacked())
    sharded = shard(accumulating)
    same(three(sharded, *whole()), first(want))
    moved = sum(c.bytes * c.count for c in sharded.report().collectives or ())
    assert moved == 4 * (WIDTH * HIDDEN + HIDDEN * CLASSES)  # each gradient once


def own_slice(state, batch):
    """ZeRO by hand: every device has its part of the momentum, and all parameters."""
    grads = jax.grad(mean_loss)(state["params"], batch)["in"]
    part = lax.psum_scatter(grads.T, "batch", tiled=True) / 8
    momentum = 0.9 * state["momentum"] + part
    whole = lax.all_gather(momentum, "batch", tiled=True).T
    return {
        "params": state["params"] | {"in": state["params"]["in"] - 0.1 * whole},
        "momentum": momentum,
    }, whole.sum()


def test_state_of_which_each_device_has_its_own_part_needs_a_device_axis():
    state = {"params": weights()["params"], "momentum": jnp.zeros((HIDDEN // 8, WIDTH))}
    args = replicate(state), split(data())
    mapped = jax.pmap(own_slice, axis_name="batch")
    sharded = shard(mapped)
    same(three(sharded, *args), three(mapped, *args))
    assert [a.code for a in sharded.report().advice if a.code == "state-differs"]
    error = refused(own_slice, state, data())
    assert "another part on every device" in str(error)
    assert "jax.lax.all_gather(momentum, 'batch', tiled=True)" in str(error)


@pytest.mark.ci
def test_the_options_of_pmap_are_honoured():
    def options(state, rate, how, batch):
        grads = lax.pmean(jax.grad(mean_loss)(state["params"], batch), "batch")
        grads = jax.tree.map(lambda g: rate * g, grads) if how == "scaled" else grads
        return updated(state, grads), batch["x"].sum(0)

    mapped = jax.pmap(options, "batch", in_axes=(0, None, None, 1), out_axes=(None, 1), static_broadcasted_argnums=2)
    batch = jax.tree.map(lambda x: x.swapaxes(0, 1), split(data()))
    want = jax.tree.map(np.asarray, mapped(replicate(weights()), 0.5, "scaled", batch))
    sharded = shard(mapped)
    got = sharded(replicate(weights()), 0.5, "scaled", batch)
    same(got, want)
    assert got[0]["params"]["in"].shape == (WIDTH, HIDDEN)
    assert got[1].shape == (WIDTH, DEVICES)


def test_a_users_own_arrays_live_on_and_the_steps_own_are_donated():
    mapped = jax.pmap(step, axis_name="batch", donate_argnums=0)
    state = replicate(weights())
    sharded = shard(mapped)
    second, _ = sharded(state, split(data()))
    third, _ = sharded(second, split(data()))
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    assert all(x.is_deleted() for x in jax.tree.leaves(second))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = jax.tree.map(np.asarray, jax.pmap(step, axis_name="batch")(state, split(data()))[0])
    same(jax.tree.map(np.asarray, sharded(state, split(data()))[0]), want)
    assert not any(x.is_deleted() for x in jax.tree.leaves(third))


def test_static_and_donated_positions_are_counted_in_the_users_own_arguments():
    mapped = jax.pmap(lambda a, b, c, d: d, "i", static_broadcasted_argnums=(1,), donate_argnums=(0, 2))
    found = unwrap_step(mapped)
    assert found.static == {1}
    assert found.donated == {0, 2}
    assert found.pmap == PmapOptions("i", 0, 0)
    assert unwrap_step(jax.pmap(lambda x: x, in_axes=(None,))).pmap == PmapOptions(None, (None,), 0)


def test_the_report_tells_the_collectives_by_the_users_lines():
    sharded = shard(step)
    sharded(*whole())
    report = sharded.report()
    assert report.collectives is not None
    assert report.timing is not None
    moved = 4 * (WIDTH * HIDDEN + HIDDEN * CLASSES) + 4  # the gradients and the loss
    assert sum(c.bytes * c.count for c in report.collectives) == moved
    assert {c.kind for c in report.collectives} == {"all-reduce"}
    lines = {c.line for c in report.collectives}
    start = step.__code__.co_firstlineno
    assert lines == {start + 2, start + 3}
    assert report.strategy == "pmap"
    assert "pmap" in report.to_text()
    assert "pmap" in report.to_html()
    layers = 2 * EXAMPLES * WIDTH * HIDDEN, 2 * EXAMPLES * HIDDEN * CLASSES
    assert report.timing.flops == 3 * sum(layers) - layers[0]  # the first layer's input has no gradient
    assert sharded.ran is not None and sharded.ran.examples == EXAMPLES


@pytest.mark.parametrize("decorator", ["", "@functools.partial(jax.pmap, axis_name='batch')\n"])
def test_a_cell_trains_under_pmap(trained, given, decorator):
    cell = STEP.replace("return", "grads, loss = jax.lax.pmean((grads, loss), 'batch')\n    return")
    report = given.run("%%shard pmap --check" + cell.replace("def ", decorator + "def ") + LOOP)
    assert close(given["state"], trained)
    assert report.check.passed
    assert {c.source.strip() for c in report.collectives} == {"grads, loss = jax.lax.pmean((grads, loss), 'batch')"}
