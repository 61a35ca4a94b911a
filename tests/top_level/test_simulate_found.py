"""Arrays that the namespace of a live kernel leads to, as its devices become more: in whatever holds them."""

import functools
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.simulated import alone, on_new_devices, spread, use

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Frozen:
    weight: Any


@dataclass(slots=True)
class Slotted:
    weight: Any


class Trainer:
    def __init__(self, state: Any):
        self.state = state

    def step(self) -> Any:
        return self.state["w"]


@pytest.mark.ci
@alone
def test_arrays_are_found_wherever_the_namespace_leads():
    mesh = use("data=4").mesh
    x = spread(np.arange(8.0), mesh, "data")
    values, old = [x], x

    def captured():
        return values[0], x

    params = {"w": x, "name": "dense"}
    pair = Pair(x, (1, (x,)))
    loop: list[Any] = [x]
    loop.append(loop)
    user: dict[str, Any] = {
        "params": params,
        "again": params,
        "pair": pair,
        "twin": pair,
        "frozen": Frozen(Slotted([x])),
        "space": SimpleNamespace(x=x),
        "captured": captured,
        "jitted": jax.jit(lambda y: y + values[0]),
        "bound": functools.partial(lambda a, b: (a, b), x, b=x),
        "leaf": jax.tree_util.Partial(lambda a: a, x),
        "method": Trainer(params).step,
        "loop": loop,
    }
    use("data=8", user)
    new = params["w"]
    assert new is not old
    assert on_new_devices(new)
    assert user["params"] is user["again"] is params
    assert user["pair"] is user["twin"] is not pair
    assert type(user["pair"]) is Pair
    assert user["pair"].left is user["pair"].right[1][0] is new
    assert user["frozen"].weight.weight[0] is new
    assert user["space"].x is new
    assert captured() == (new, new)
    assert user["bound"]() == (new, new)
    assert user["leaf"]() is new
    assert user["method"]() is new
    assert loop[0] is new and loop[1] is loop
    np.testing.assert_array_equal(user["jitted"](new), 2 * np.arange(8.0))


@pytest.mark.ci
@alone
def test_an_nnx_model_and_its_optimizer_train_on():
    import optax
    from flax import nnx

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda m: ((m(batch) - 1) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    mesh = use("data=4").mesh
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(0)))
    user = {"model": model, "optimizer": nnx.Optimizer(model, optax.sgd(0.1, 0.9), wrt=nnx.Param)}
    nnx.update(model, jax.tree.map(lambda x: spread(x, mesh), nnx.state(model)))
    batch = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    user |= {"batch": spread(batch, mesh, "data"), "state": nnx.state(model)}
    twin = nnx.clone((model, user["optimizer"]))
    kernel = model.layers[0].kernel
    first, second = [float(step(*twin, user["batch"])) for _ in range(2)]
    assert float(step(model, user["optimizer"], user["batch"])) == first

    built = use("data=8", user)
    assert user["model"] is model
    assert model.layers[0].kernel is kernel
    assert user["batch"].sharding == NamedSharding(built.mesh, P("data"))
    assert on_new_devices(*jax.tree.leaves((nnx.state(model), nnx.state(user["optimizer"]), user["state"])))
    np.testing.assert_allclose(step(model, user["optimizer"], user["batch"]), second, rtol=1e-6)


@pytest.mark.ci
@alone
def test_equinox_modules_and_train_states_come_along():
    import equinox as eqx
    import flax.linen as nn
    import optax
    from flax.core import freeze
    from flax.training.train_state import TrainState

    mesh = use("data=4").mesh
    everywhere = functools.partial(spread, mesh=mesh)
    model = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    dense = nn.Dense(4)
    params = jax.tree.map(everywhere, dense.init(jax.random.key(0), jnp.ones((1, 4))))
    user: dict[str, Any] = {
        "model": jax.tree.map(lambda x: everywhere(x) if eqx.is_array(x) else x, model),
        "state": TrainState.create(apply_fn=dense.apply, params=params, tx=optax.sgd(0.1, momentum=0.9)),
        "frozen": freeze(params),
    }
    arrays, treedef = jax.tree.flatten(eqx.filter(user, eqx.is_array))
    before = [np.asarray(x) for x in arrays]
    built = use("data=8", user)
    after, now = jax.tree.flatten(eqx.filter(user, eqx.is_array))
    assert now == treedef
    assert on_new_devices(*after)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    assert user["frozen"]["params"]["kernel"] is user["state"].params["params"]["kernel"]
    x = spread(np.ones((8, 4), np.float32), built.mesh, "data")
    assert eqx.filter_jit(lambda model, x: jax.vmap(model)(x))(user["model"], x).shape == (8, 4)
    user["state"].apply_gradients(grads=user["state"].params)


@pytest.mark.ci
@alone
def test_a_namespace_nested_deeper_than_python_can_follow_does_no_harm():
    mesh = use("data=4").mesh
    nest: list[Any] = [spread(np.arange(8.0), mesh, "data")]
    for _ in range(5000):
        nest = [nest]
    built = use("data=8", {"nest": nest})
    assert built.notes[1].startswith("1 sharded array outside the namespace")
