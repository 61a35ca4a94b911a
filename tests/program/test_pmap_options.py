"""Microbatches, remat and precision inside a step written for one device: the numbers of `jax.pmap`."""

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
    linen_loss,
    linen_state,
    linen_step,
    mean_loss,
    refused,
    same,
    shard,
    stacked,
    step,
    three,
    updated,
    whole,
)

from jaxshard_magic.step.alternatives import compile_alternatives

GRADIENTS = 4 * (WIDTH * HIDDEN + HIDDEN * CLASSES)  # bytes


def pmapped(fun, *args, **options):
    """Three steps of `jax.pmap` on the same devices."""
    return three(jax.pmap(fun, axis_name="batch", **options), *args)


def moved(sharded):
    return sum(c.bytes * c.count for c in sharded.report().collectives)


@pytest.fixture(scope="module")
def plain():
    return pmapped(step, *stacked())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"microbatches": 4}, marks=pytest.mark.full),
        pytest.param({"remat": "2"}, marks=pytest.mark.full),
        {"microbatches": 2, "remat": "full"},
    ],
    ids=str,
)
def test_numbers_are_those_of_pmap_with_and_without_a_device_axis(plain, options):
    mapped = jax.pmap(step, axis_name="batch")
    same(three(shard(mapped, **options), *stacked()), plain)
    sharded = shard(step, check=True, **options)
    same(three(sharded, *whole()), first(plain))
    assert sharded.checked.passed
    assert moved(sharded) == GRADIENTS + 4  # the gradients once, and the loss


def narrow_loss(params, batch, dtype):
    """`mean_loss` with its products in `dtype`, as written by hand."""
    x, y, a, b = (z.astype(dtype) for z in (batch["x"], batch["y"], params["in"], params["out"]))
    return jnp.mean((jnp.tanh(x @ a) @ b - y).astype(jnp.float32) ** 2)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"precision": "bf16", "microbatches": 2}, marks=pytest.mark.full),
        pytest.param({"precision": "bf16", "remat": "full"}, marks=pytest.mark.full),
        {"precision": "fp16", "microbatches": 2, "remat": "full"},
    ],
    ids=str,
)
def test_products_run_in_the_narrow_type_and_gradients_are_reduced_in_float32(options):
    dtype = {"bf16": jnp.bfloat16, "fp16": jnp.float16}[options["precision"]]

    def by_hand(state, batch):
        loss, grads = jax.value_and_grad(mean_loss_in)(state["params"], batch)
        return updated(state, lax.pmean(grads, "batch")), lax.pmean(loss, "batch")

    mean_loss_in = partial(narrow_loss, dtype=dtype)
    want = pmapped(by_hand, *stacked())
    rounding = 4 * float(jnp.finfo(dtype).eps)
    mapped = jax.pmap(step, axis_name="batch")
    close_to(three(shard(mapped, **options), *stacked()), want, rounding)
    sharded = shard(step, **options)
    close_to(three(sharded, *whole()), first(want), rounding)
    flags = 4 * (options["precision"] == "fp16")  # are the gradients finite on all devices?
    assert moved(sharded) == GRADIENTS + 4 + flags


def close_to(got, want, off):
    """Within `off` of each array's largest number."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=off * np.abs(b).max())


def test_a_step_that_overflows_on_one_device_is_left_out_on_all():
    sharded = shard(step, precision="fp16", microbatches=2)
    state, batch = whole()
    large = batch | {"x": batch["x"].at[0].set(1e6)}  # an example of the first device
    skipped, _ = sharded(state, large)
    same(skipped, state)
    assert int(skipped["count"]) == 0
    taken, _ = sharded(skipped, batch)
    assert int(taken["count"]) == 1
    scale, good = sharded.entry.consts[:2]
    assert (float(scale), int(good)) == (2.0**14, 1)
    held = [np.asarray(s.data) for s in taken["params"]["in"].addressable_shards]
    assert len(held) == DEVICES
    assert all((x == held[0]).all() for x in held)


@pytest.mark.ci
def test_dropout_draws_each_device_s_own_numbers():
    def dropping(state, batch, key):
        key = jax.random.fold_in(key, lax.axis_index("batch"))

        def loss(params):
            hidden = jnp.tanh(batch["x"] @ params["in"])
            kept = jax.random.bernoulli(key, 0.5, hidden.shape)
            return jnp.mean((jnp.where(kept, 2 * hidden, 0) @ params["out"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss)(state["params"])
        return updated(state, lax.pmean(grads, "batch")), lax.pmean(loss, "batch")

    key = jax.random.key(3)
    want = pmapped(dropping, *stacked(), key, in_axes=(0, 0, None))
    same(three(shard(dropping, microbatches=4), *whole(), key), first(want))
    own = jax.random.split(key, DEVICES)
    mapped = jax.pmap(dropping, axis_name="batch")
    same(three(shard(mapped, microbatches=2, remat="full"), *stacked(), own), three(mapped, *stacked(), own))


def test_a_mean_over_the_real_examples_of_all_devices_stays_one():
    def masked(state, batch):
        real = (batch["x"][:, 0] > 0).astype(jnp.float32)
        every = lax.psum(real.sum(), "batch")

        def loss(params):
            errors = (jnp.tanh(batch["x"] @ params["in"]) @ params["out"] - batch["y"]) ** 2
            return (errors.mean(-1) * real).sum() / every

        loss, grads = jax.value_and_grad(loss)(state["params"])
        return updated(state, lax.psum(grads, "batch")), lax.psum(loss, "batch")

    sharded = shard(masked, microbatches=2)
    same(three(sharded, *whole()), first(pmapped(masked, *stacked())))
    assert not sharded.entry.plan.findings


def test_what_the_loss_tells_of_each_example_is_joined():
    def telling(state, batch):
        def loss(params):
            out = jnp.tanh(batch["x"] @ params["in"]) @ params["out"]
            return jnp.mean((out - batch["y"]) ** 2), (out, jnp.abs(out).max())

        (_, (out, most)), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        return updated(state, lax.pmean(grads, "batch")), out, lax.pmax(most, "batch")

    _, out, most = shard(telling, microbatches=4)(*whole())
    _, want, largest = jax.pmap(telling, axis_name="batch")(*stacked())
    np.testing.assert_allclose(out, want.reshape(EXAMPLES, CLASSES), rtol=1e-5)
    np.testing.assert_allclose(most, largest[0], rtol=1e-6)


def linen_by_hand(state, batch, sync=False):
    """Two microbatches, one after the other, each with the statistics that the one before left."""
    half = batch["x"].shape[0] // 2
    statistics, sums = state.batch_stats, []
    for i in range(2):
        part = jax.tree.map(lambda x, i=i: x[i * half : (i + 1) * half], batch)
        gradient = jax.value_and_grad(linen_loss, has_aux=True)
        (value, statistics), grads = gradient(state.params, statistics, state, part)
        sums.append((value, grads))
    value, grads = lax.pmean(jax.tree.map(lambda a, b: (a + b) / 2, *sums), "batch")
    if sync:
        statistics = lax.pmean(statistics, "batch")
    return state.apply_gradients(grads=grads, batch_stats=statistics), {"loss": value}


@pytest.mark.parametrize(
    ("axis", "sync"),
    [
        (None, False),
        pytest.param(None, True, marks=pytest.mark.full),
        pytest.param("batch", False, marks=pytest.mark.full),
    ],
    ids=["own", "pmean", "inside"],
)
def test_statistics_go_from_one_microbatch_to_the_next_on_every_device(axis, sync):
    state = linen_state(axis, optax.sgd(0.1, 0.9))
    args = jax_utils.replicate(state), stacked()[1]
    want = pmapped(partial(linen_by_hand, sync=sync), *args)
    mapped = jax.pmap(partial(linen_step, sync=sync), axis_name="batch")
    sharded = shard(mapped, microbatches=2)
    same(three(sharded, *args), want, 1e-4)
    (said,) = [f for f in sharded.entry.plan.findings if f.code == "microbatches"]
    assert "from one to the next" in said.message


@pytest.mark.ci
def test_check_compares_such_a_step_with_microbatches_taken_by_hand():
    sharded = shard(partial(linen_step, sync=True), microbatches=2, check=True)
    sharded(linen_state(), data())
    assert sharded.checked.passed
    assert sharded.checked.reference == "a loop over microbatches written by hand, on one device"


@pytest.mark.ci
@pytest.mark.parametrize("options", [{"microbatches": 2}, {"remat": "full"}], ids=str)
def test_a_loss_that_is_reduced_inside_the_gradient_has_pmap_s_numbers(options):
    def inside(state, batch):
        loss, grads = jax.value_and_grad(lambda p: lax.pmean(mean_loss(p, batch), "batch"))(state["params"])
        return updated(state, lax.pmean(grads, "batch")), loss

    same(three(shard(inside, **options), *whole()), first(pmapped(inside, *stacked())))


@pytest.mark.ci
@pytest.mark.parametrize("options", [{"microbatches": 4}, {"remat": "2"}], ids=str)
def test_a_second_axis_inside_the_loss_takes_part(options):
    mesh = "data=4 model=2"
    same(three(shard(halves_on_model, mesh, **options), *whole()), three(shard(halves_on_model, mesh), *whole()))


@pytest.mark.ci
def test_an_nnx_step_is_updated_in_place():
    def made():
        model = nnx.Sequential(nnx.Linear(WIDTH, HIDDEN, rngs=nnx.Rngs(0)), nnx.relu)
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def train(model, optimizer, batch, reduce=lambda x: lax.pmean(x, "batch")):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(batch["x"]) ** 2))(model)
        optimizer.update(model, reduce(grads))
        return reduce(loss)

    (plain, its), (model, optimizer) = made(), made()
    sharded = shard(train, microbatches=2, remat="full")
    for _ in range(3):
        want = train(plain, its, data(), reduce=lambda x: x)  # the mean of equal parts' means is the whole mean
        np.testing.assert_allclose(sharded(model, optimizer, data()), want, rtol=1e-5)
    same(nnx.state(model), nnx.state(plain), 1e-4)


@pytest.mark.ci
def test_temporaries_fall_with_the_microbatches():
    width, layers, examples = 64, 8, 4096

    def deep(params, batch):
        def loss(params):
            x = batch
            for w in params:
                x = x + jax.nn.gelu(x @ w)
            return jnp.square(x).mean()

        loss, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, lax.pmean(grads, "batch")), lax.pmean(loss, "batch")

    def temporaries(n):
        sharded = shard(deep, "data=2", microbatches=n)
        sharded.prepare([jnp.ones((width, width))] * layers, jnp.ones((examples, width)))
        return sharded.report().memory.per_device[0].temporaries

    assert temporaries(1) > 3.2 * temporaries(4)


@pytest.mark.ci
def test_the_report_compares_with_no_options_and_offers_no_other_reduction():
    sharded = shard(step, microbatches=2, remat="full")
    sharded.prepare(*whole())
    found = {a.change: a for a in compile_alternatives(sharded, 600)}
    assert found.keys() == {"", "without --microbatches 2", "without --remat full"}
    assert found["without --remat full"].flops < found[""].flops


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"microbatches": 2, "reduce": "once"},
            "--reduce once: under pmap gradients are reduced where step has",
        ),
        ({"pad": True}, "--pad: under pmap step is run on each device's part"),
        (
            {"microbatches": 3},
            "--microbatches 3: 4 examples of each device do not divide into 3 microbatches",
        ),
    ],
)
def test_what_has_no_place_in_a_device_s_step_is_refused(options, said):
    for args, fun in ((whole(), step), (stacked(), jax.pmap(step, axis_name="batch"))):
        assert str(refused(fun, *args, **options)).startswith(said)


def test_a_missing_reduction_is_refused_with_options_as_without():
    def forgot(state, batch):
        loss, grads = jax.value_and_grad(mean_loss)(state["params"], batch)
        return updated(state, grads), lax.pmean(loss, "batch")

    error = refused(forgot, *whole(), microbatches=2, remat="full")
    assert error.fix == "grads = jax.lax.pmean(grads, 'batch')"


def test_a_cell_trains_under_pmap_with_options(trained, given):
    cell = STEP.replace("return", "grads, loss = jax.lax.pmean((grads, loss), 'batch')\n    return")
    report = given.run("%%shard pmap --mesh data=4 --microbatches 2 --remat full --check" + cell + LOOP)
    assert close(given["state"], trained)
    assert report.check.passed
