"""What a step written for one device is refused for: a reduction that is missing, a mesh or a batch that can't be."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from support.per_device import data, first, mean_loss, refused, same, shard, stacked, step, three, updated, whole

import jaxshard_magic
from jaxshard_magic.errors import ShardError


@pytest.mark.parametrize("given", ["device axis", "none"])
def test_a_missing_reduction_is_refused_with_the_leaf_and_the_line(given):
    def forgot(state, batch):
        loss, grads = jax.value_and_grad(mean_loss)(state["params"], batch)
        return updated(state, grads), lax.pmean(loss, "batch")

    error = (
        refused(jax.pmap(forgot, axis_name="batch"), *stacked())
        if given == "device axis"
        else refused(forgot, *whole())
    )
    assert str(error).startswith("state.momentum.in")
    assert "would differ between devices: its gradient is not reduced over 'batch'" in str(error)
    assert error.fix == "grads = jax.lax.pmean(grads, 'batch')"


def test_one_forgotten_parameter_is_named():
    def half(state, batch):
        grads = jax.grad(mean_loss)(state["params"], batch)
        grads = {"in": lax.pmean(grads["in"], "batch"), "out": grads["out"]}
        return updated(state, grads), grads["in"].sum()

    assert str(refused(half, *whole())).startswith("state.momentum.out (and 1 more)")


def test_a_step_with_no_reduction_at_all_is_told_the_meshes_axis():
    def alone(state, batch):
        return updated(state, jax.grad(mean_loss)(state["params"], batch)), jnp.zeros(())

    assert refused(alone, *whole()).fix == "grads = jax.lax.pmean(grads, 'data')"


def test_a_reduction_over_one_of_two_axes_is_not_enough():
    def half(state, batch):
        grads = lax.pmean(jax.grad(mean_loss)(state["params"], batch), "i")
        return updated(state, grads), lax.pmean(lax.axis_index("j"), "j")

    assert refused(half, *whole(), mesh="i=4 j=2").fix == "grads = jax.lax.pmean(grads, 'j')"


def test_a_loss_that_is_not_reduced_is_refused_and_examples_are_joined():
    def telling(state, batch, reduced):
        out = jnp.tanh(batch["x"] @ state["params"]["in"]) @ state["params"]["out"]
        loss, grads = jax.value_and_grad(mean_loss)(state["params"], batch)
        loss = lax.pmean(loss, "batch") if reduced else loss
        return updated(state, lax.pmean(grads, "batch")), {"loss": loss, "best": out.argmax(-1), "out": out}

    error = refused(partial(telling, reduced=False), *whole())
    assert "return.1.loss" in str(error)
    assert error.fix == "loss = jax.lax.pmean(loss, 'batch')"
    _, told = shard(partial(telling, reduced=True))(*whole())
    params = whole()[0]["params"]
    want = jnp.tanh(data()["x"] @ params["in"]) @ params["out"]
    np.testing.assert_allclose(told["out"], want, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(told["best"], want.argmax(-1))


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ("model=8", "use %mesh batch=8, or name the axis for it, pmap@model"),
        ("seq=8", "the mesh has seq=8"),
    ],
)
def test_a_mesh_without_an_axis_for_the_batch_is_refused(mesh, said):
    assert said in str(refused(step, *whole(), mesh=mesh))


def test_two_names_that_the_mesh_does_not_have_are_refused_with_the_mesh_to_write():
    def by_two(state, batch):
        grads = lax.pmean(jax.grad(mean_loss)(state["params"], batch), ("i", "j"))
        return updated(state, grads), jnp.zeros(())

    assert refused(by_two, *whole()).fix == "%mesh i=4 j=2"


def test_a_device_axis_of_another_size_is_refused_with_the_mesh_to_write():
    mapped = jax.pmap(step, axis_name="batch")
    error = refused(mapped, *stacked(4))
    assert "device axis of 4, and the mesh has 8" in str(error)
    assert error.fix == "%mesh batch=4"


def test_a_batch_that_does_not_divide_is_refused():
    short = jax.tree.map(lambda x: x[:30], data())
    assert "batch.x has 30 examples (dim 0), which do not divide by data=8; use a batch of 24 or 32" in str(
        refused(step, whole()[0], short)
    )


def test_a_step_that_knows_the_size_of_its_part_is_told_what_is_the_batch():
    def knows(state, batch):
        grads = jax.grad(mean_loss)(state["params"], batch | {"x": batch["x"] + jnp.ones((4, 1))})
        return updated(state, lax.pmean(grads, "batch")), jnp.zeros(())

    error = refused(knows, *whole())
    assert "--spec \"batch=P('data')\"" in str(error)
    want = three(jax.pmap(knows, axis_name="batch"), *stacked())
    same(three(shard(knows, specs={"batch": P("data")}), *whole()), first(want))
    assert "Did you mean 'batch'?" in str(refused(knows, *whole(), specs={"bach": P("data")}))


@pytest.mark.parametrize("fun", [step, jax.pmap(step, axis_name="batch"), jax.pmap(lambda s, b: (s, b))])
def test_other_strategies_send_such_a_step_to_pmap(fun):
    with pytest.raises(ShardError, match="use %%shard pmap") as error:
        jaxshard_magic.shard(fun, "dp", mesh=jaxshard_magic.mesh("data=8")).prepare(*whole())
    assert "\n" not in str(error.value)


def test_pmap_stands_alone():
    with pytest.raises(ShardError, match="stands alone"):
        jaxshard_magic.shard(step, "pmap+tp", mesh=jaxshard_magic.mesh("data=4 model=2"))


@pytest.mark.parametrize(("decorator", "name"), [(nnx.pmap, "nnx.pmap"), (eqx.filter_pmap, "eqx.filter_pmap")])
def test_decorators_that_cannot_be_read_are_to_be_taken_off(decorator, name):
    with pytest.raises(ShardError, match=f"take {name} off"):
        shard(decorator(lambda model, x: model(x)))


def test_pmap_in_pmap_is_to_be_taken_off():
    with pytest.raises(ShardError, match="take both off"):
        shard(jax.pmap(jax.pmap(step, axis_name="j"), axis_name="i"))
