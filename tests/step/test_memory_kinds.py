"""Arrays on the host: a strategy leaves each in the memory that the step gives it, and no device is said to hold it."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from support.differing import furthest

import jaxshard_magic
from jaxshard_magic.codegen.latest_call import last_call

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
SGD = optax.sgd(0.1, momentum=0.9)
PARAMS = {"a": jnp.eye(256) + 0.1, "b": jnp.eye(256) * 0.5}
X = jax.random.normal(jax.random.key(0), (16, 256))


def step_of(host=HOST, device=DEVICE):
    """A step with the momentum on the host between calls."""

    def train_step(params, state, x):
        state = jax.device_put(state, device)
        loss, grads = jax.value_and_grad(lambda p: ((jnp.tanh(x @ p["a"]) @ p["b"] - x) ** 2).mean())(params)
        updates, state = SGD.update(grads, state, params)
        return optax.apply_updates(params, updates), jax.device_put(state, host), loss

    return train_step


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def named(mesh, kind):
    return NamedSharding(mesh, P(), memory_kind=kind)


def trained(step, calls=3):
    params, state = PARAMS, jax.device_put(SGD.init(PARAMS), HOST)
    for _ in range(calls):
        params, state, loss = step(params, state, X)
        assert kinds(state) == {"pinned_host"} and kinds((params, loss)) == {"device"}
    return params, state, loss


@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        ("dp", "data=8"),
        ("fsdp", "data=8"),
        ("pp", "pipe=2"),
        pytest.param("tp", "model=4", marks=pytest.mark.full),
        pytest.param("pp+fsdp", "pipe=2 data=2", marks=pytest.mark.full),
    ],
)
def test_momenta_on_the_host_come_back_on_the_host(strategy, mesh):
    step = jaxshard_magic.shard(jax.jit(step_of()), strategy, mesh=mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of donated memory that no result can use
        got = trained(step)
    assert furthest(got, trained(jax.jit(step_of()))) < 1e-5
    report = step.report()
    assert all(not d.optimizer and d.peak for d in report.memory.per_device)
    momenta = [leaf for leaf in report.leaves if leaf.role == "optimizer"]
    assert momenta and all("in pinned_host memory" in leaf.why for leaf in momenta)
    assert not [a for a in report.advice if a.code == "placements"]
    live = report.memory.live
    assert live is None or 0 < max(live.bytes) <= report.memory.per_device[0].peak


def test_a_device_holds_less_where_momenta_are_on_the_host():
    def peak(on):
        step = jaxshard_magic.shard(jax.jit(lambda p, s, x: (p, s, x @ p["a"])), "dp", mesh="data=8")
        step(PARAMS, jax.device_put(SGD.init(PARAMS), on), X)
        return step.report().memory.per_device[0].peak

    assert peak(DEVICE) - peak(HOST) >= 2 * 4 * 256 * 256


@pytest.mark.parametrize("space", [True, False])
def test_pipelines_have_momenta_on_the_host_of_their_own_stage(space):
    one = jax.devices()[0]
    places = (
        (HOST, DEVICE) if space else [SingleDeviceSharding(one, memory_kind=kind) for kind in ("pinned_host", "device")]
    )
    step = jaxshard_magic.shard(jax.jit(step_of(*places)), "pp", mesh="pipe=2")
    _, state, _ = trained(step, 1)
    devices = [tuple(state[0].trace[name].devices()) for name in "ab"]
    assert devices[0] != devices[1]


def test_shardings_of_other_devices_with_a_memory_kind_move_between_memories():
    other = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,))
    step = jaxshard_magic.shard(step_of(named(other, "pinned_host"), named(other, "device")), "fsdp", mesh="data=8")
    _, state, _ = trained(step, 2)
    assert state[0].trace["a"].sharding.spec == P("data", None)
    assert not [a for a in step.report().advice if a.code == "placements"]


def test_results_that_a_jit_puts_on_the_host_are_there():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    outs = ({"sum": named(mesh, "pinned_host"), "mean": None}, None)
    jitted = jax.jit(lambda x: ({"sum": x.sum(0), "mean": x.mean(0)}, x), out_shardings=outs)
    tree, same = jaxshard_magic.shard(jitted, "dp", mesh="data=8")(X)
    assert (kinds(tree["sum"]), kinds(tree["mean"]), kinds(same)) == ({"pinned_host"}, {"device"}, {"device"})
    np.testing.assert_allclose(tree["sum"], X.sum(0), atol=1e-5)


def test_arrays_in_another_memory_are_another_kind_of_call():
    step = jaxshard_magic.shard(jax.jit(lambda s, x: (s, x.sum())), "dp", mesh="data=8")
    for space, kind in ((HOST, "pinned_host"), (DEVICE, "device"), (HOST, "pinned_host")):
        kept, _ = step(jax.device_put(PARAMS, space), X)
        assert kinds(kept) == {kind}


def test_what_a_loss_closes_over_on_the_host_is_read_from_there():
    table = jax.device_put(PARAMS["a"], HOST)

    @jax.jit
    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: (x @ jax.device_put(table, DEVICE) @ w).mean())(w)
        return w - grad, loss

    got = jaxshard_magic.shard(step, "fsdp", mesh="data=8")(PARAMS["b"], X)
    assert furthest(got, step(PARAMS["b"], X)) < 1e-4


def test_activations_that_a_policy_offloads_go_to_the_host():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(w, x):
        h = jax.ad_checkpoint.checkpoint_name(jnp.tanh(x @ w), "h")
        return (jnp.tanh(h @ w) ** 2).mean()

    @jax.jit
    def step(w, x):
        value, grad = jax.value_and_grad(jax.checkpoint(loss, policy=policy))(w, x)
        return w - grad, value

    sharded = jaxshard_magic.shard(step, "fsdp", mesh="data=8")
    assert furthest(sharded(PARAMS["a"], X), step(PARAMS["a"], X)) < 1e-5
    assert not [a for a in sharded.report().advice if a.code == "placements"]
    entry, call = last_call(sharded)
    assert "f32<host>[16,256]" in str(jax.make_jaxpr(entry.plan.run)(*call.leaves))
