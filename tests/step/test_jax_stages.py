"""A sharded step in the hands of JAX's own tools: traced, lowered, compiled, exported, and asked for its shapes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.refusals import refusal

import jaxshard_magic

KEYS = jax.random.split(jax.random.key(0), 3)
W = {"a": jax.random.normal(KEYS[0], (256, 512)) * 0.05, "b": jax.random.normal(KEYS[1], (512, 256)) * 0.05}
X = jax.random.normal(KEYS[2], (64, 256))
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
STATE = W, OPTIMIZER.init(W)


def train(state, x, rate=0.1):
    params, moments = state
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((jax.nn.relu(x @ p["a"]) @ p["b"] - x) ** 2))(params)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, jax.tree.map(lambda u: rate * u, updates)), moments), {"loss": loss}


def near(a, b):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), a, b)


@pytest.mark.parametrize("strategy", ["dp", "fsdp", "fsdp+tp"])
def test_a_lowered_step_runs_with_the_layout_of_the_sharded_one(strategy):
    sharded = jaxshard_magic.shard(train, strategy, mesh="data=4 model=2")
    lowered = sharded.lower(STATE, X)
    assert "sharding" in lowered.as_text()
    compiled = lowered.compile()
    placed = jax.device_put((STATE, X), compiled.input_shardings[0])
    got = compiled(*placed)
    near(got, sharded(STATE, X))
    specs = jax.tree.map(lambda x: x.sharding.spec, got)
    assert specs == jax.tree.map(lambda x: x.sharding.spec, sharded(STATE, X))
    entry = sharded.entry
    assert entry is not None
    # Bytes of one device: the arguments as the plan lays them.
    shards = [at.shard_shape(x.shape) for x, at in zip(jax.tree.leaves((STATE, X)), entry.shardings, strict=True)]
    assert compiled.memory_analysis().argument_size_in_bytes == sum(4 * int(np.prod(shape)) for shape in shards)
    assert compiled.cost_analysis()["flops"] > 0


def test_shapes_of_the_result_come_with_their_shardings():
    sharded = jaxshard_magic.shard(train, "fsdp", mesh="data=8")
    shapes = sharded.eval_shape(*jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (STATE, X)))
    assert jax.tree.structure(shapes) == jax.tree.structure(jax.eval_shape(train, STATE, X))
    assert shapes[0][0]["a"].sharding.spec == P(None, "data") and shapes[1]["loss"].shape == ()
    assert sharded.calls == 0


def test_an_exported_step_is_called():
    sharded = jaxshard_magic.shard(train, "fsdp", mesh="data=8")
    exported = jax.export.export(sharded)(STATE, X)
    assert exported.nr_devices == 8
    leaves, tree = jax.tree.flatten((STATE, X))
    placed = tree.unflatten(map(jax.device_put, leaves, exported.in_shardings_jax(sharded.mesh)))
    near(jax.jit(exported.call)(*placed), train(STATE, X))


def test_numbers_are_arguments_as_under_jit_and_static_ones_are_not():
    sharded = jaxshard_magic.shard(train, "dp", mesh="data=8")
    compiled = sharded.lower(STATE, X, 0.5).compile()
    placed = jax.device_put((STATE, X), compiled.input_shardings[0][:2])
    near(compiled(*placed, 2.0), train(STATE, X, 2.0))

    @partial(jax.jit, static_argnums=1, static_argnames="twice", donate_argnums=0)
    def scaled(x, power, *, twice):
        return x**power * (2 if twice else 1)

    compiled = jaxshard_magic.shard(scaled, "dp", mesh="data=8").lower(X, 3, twice=True).compile()
    near(compiled(jax.device_put(X, compiled.input_shardings[0][0])), 2 * X**3)
    assert compiled.memory_analysis().alias_size_in_bytes == X.nbytes // 8


def test_traced_inside_of_another_function_it_is_the_step():
    sharded = jaxshard_magic.shard(train, "dp", mesh="data=8")
    assert jax.make_jaxpr(sharded)(STATE, X).out_avals == jax.make_jaxpr(train)(STATE, X).out_avals
    assert jax.eval_shape(sharded, STATE, X) == jax.eval_shape(train, STATE, X)


def test_values_read_besides_the_arguments_are_constants_as_under_jit():
    read = {"rate": 0.5}

    def scaled(x):
        return x * read["rate"]

    sharded = jaxshard_magic.shard(scaled, "dp", mesh="data=8")
    for rate in (0.5, 0.25, 0.125):  # a plain call makes the value an input from the second on
        read["rate"] = rate
        near(sharded(X), X * rate)
        compiled = sharded.lower(X).compile()
        near(compiled(jax.device_put(X, compiled.input_shardings[0][0])), X * rate)


def test_what_is_no_function_of_arrays_is_told_in_a_line():
    def counted(total, x):
        total[...] += jnp.sum(x)

    sharded = jaxshard_magic.shard(counted, "dp", mesh="data=8")
    assert "takes a jax.Ref" in refusal(sharded.lower, jax.new_ref(jnp.zeros(())), X)
    sharded = jaxshard_magic.shard(lambda x, how: x if how == "same" else -x, "dp", mesh="data=8")
    assert "takes a str" in refusal(sharded.lower, X, "same")
    sharded = jaxshard_magic.shard(train, "pp", mesh="pipe=2")
    assert "a program for each stage" in refusal(sharded.trace, STATE, X)


def test_a_step_for_a_slice_that_is_not_attached_is_lowered():
    pytest.importorskip("libtpu")
    sharded = jaxshard_magic.shard(train, "fsdp", mesh="v5e:2x4 data=8")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (STATE, X))
    assert "sharding" in sharded.lower(*shapes).as_text()
