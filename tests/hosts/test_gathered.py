"""State of any make brought to one device, and read as plain containers for a kernel that has none of its classes."""

import threading
from collections import namedtuple
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from jaxshard_magic.hosts.plain_values import PlainValues
from jaxshard_magic.program.arrays import to_plain_tree
from jaxshard_magic.step.copies import gather_state

Pair = namedtuple("Pair", "first second")


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.a, self.drop = nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
        self.many = nnx.List([nnx.Linear(8, 8, rngs=rngs)])


class Holder:
    """As a notebook defines one."""

    __module__ = "__main__"

    def __init__(self, **held: Any):
        vars(self).update(held)


@pytest.fixture(scope="module")
def spread() -> dict[str, Any]:
    """Values of many makes, every array whole on all devices."""
    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param)
    dense = nn.Dense(8)
    params = dense.init(jax.random.key(0), jnp.ones((1, 8)))
    everywhere = jax.sharding.NamedSharding(jax.make_mesh((8,), ("data",)), jax.sharding.PartitionSpec())

    def moved(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.device_put(x, everywhere) if isinstance(x, jax.Array) else x, tree)

    for each in (net, optimizer):
        nnx.update(each, moved(nnx.state(each)))
    return {
        "net": net,
        "optimizer": optimizer,
        "state": nnx.state(net),
        "parameters": nnx.state(net, nnx.Param),
        "split": nnx.split(net),
        "variable": net.a.kernel,
        "pure": nnx.to_pure_dict(nnx.state(net)),
        "linen": moved(TrainState.create(apply_fn=dense.apply, params=params, tx=optax.adam(0.1))),
        "equinox": moved(eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))),
        "keys": moved(jax.random.split(jax.random.key(0), 3)),
        "list": moved([jnp.ones(3), None, 3, 1.5, "text", np.ones(3), np.float32(2), {}]),
        "pair": Pair(moved(jnp.ones(2)), net),
        "nothing": None,
        "number": 3,
    }


NAMES = ["net", "optimizer", "state", "parameters", "split", "variable", "pure", "linen", "equinox", "keys"]
NAMES += ["list", "pair", "nothing", "number"]


@pytest.mark.parametrize("name", NAMES)
def test_any_tree_is_gathered_on_one_device_and_keeps_its_kind_and_values(spread: dict[str, Any], name: str):
    before = [np.asarray(_bits(x)) for x in _arrays(spread[name])]
    whole = gather_state([spread[name]], jax.devices()[0])
    assert type(whole) is type(spread[name])
    after = _arrays(whole)
    assert all(x.devices() == {jax.devices()[0]} for x in after)
    assert len(after) == len(before) and all(map(np.array_equal, before, map(_bits, after)))


def test_an_nnx_state_is_gathered_beside_its_module_and_a_module_in_place(spread: dict[str, Any]):
    net = Net(nnx.Rngs(0))
    state = nnx.state(net)
    other = gather_state([state], jax.devices()[1])
    assert {d for x in jax.tree.leaves(other) for d in x.devices()} == {jax.devices()[1]}
    assert jax.devices()[1] not in {d for x in jax.tree.leaves(nnx.state(net)) for d in x.devices()}
    assert gather_state([net], jax.devices()[1]) is net and net.a.kernel[...].devices() == {jax.devices()[1]}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_host_holds_is_read_into_plain_containers(spread: dict[str, Any], name: str):
    found = PlainValues().convert(spread[name], name)
    plain: Any = (dict, list, tuple, np.ndarray, np.generic, int, float, str, type(None))
    assert all(isinstance(x, plain) for x in jax.tree.leaves(found, is_leaf=lambda x: x is None))
    own = sorted(np.asarray(_bits(x)).tobytes() for x in _arrays(spread[name]))
    assert own == sorted(
        x.tobytes() for x in jax.tree.leaves(found) if isinstance(x, np.ndarray) and x.tobytes() in own
    )


def test_what_is_no_array_is_left_and_named_and_a_circle_ends():
    holder = Holder(w=jnp.ones(2), lock=threading.Lock(), parts=[Holder(n=1, text="a")])
    holder.own = holder
    rescued = PlainValues()
    found = rescued.convert(holder, "trainer")
    assert found["w"].tolist() == [1, 1] and found["parts"] == [{"n": 1, "text": "a"}]
    assert rescued.omitted_paths == ["trainer.lock", "trainer.own"] and not rescued.has_keys


def test_named_tuples_of_packages_stay_and_those_of_a_notebook_are_dicts():
    adam = optax.adam(0.1).init({"w": jnp.ones(2)})
    found = PlainValues().convert(adam, "adam")
    assert type(found[0]) is type(adam[0]) and found[0].mu["w"].tolist() == [0, 0]
    own = type("Own", (Pair,), {"__module__": "__main__"})
    assert PlainValues().convert(own(jnp.ones(1), 2), "own") == {"first": np.ones(1), "second": 2}


def test_of_typed_keys_the_numbers_are_read_and_that_is_told():
    rescued, key = PlainValues(), jax.random.key(7)
    found = rescued.convert({"key": key}, "state")
    assert rescued.has_keys and jax.random.wrap_key_data(found["key"]) == key


def _arrays(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(to_plain_tree(tree)) if isinstance(x, jax.Array)]


def _bits(x: Any) -> Any:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
