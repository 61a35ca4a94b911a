"""Files of weights, a state to read them into, and a step whose plan says where it lies."""

import json
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import jaxshard_magic
from jaxshard_magic.checkpoints.name_rules import parse_rules
from jaxshard_magic.checkpoints.state_arrays import flatten_state
from jaxshard_magic.checkpoints.weight_loading import load_weights

RNG = np.random.default_rng(3)
ABOUT = {"format": "pt"}
BOTH = P("data", "model")
TORCH = {  # of the model below
    "model.layers.*.up.weight": "up:T",
    "model.layers.*.down.weight": "down:T",
    "lm_head.weight": "head.kernel:T",
    "lm_head.bias": "head.bias",
}


def values(dtype="float32", shape=(16, 8)):
    return (RNG.normal(size=shape) * 8).astype(jnp.dtype(dtype))


def mesh():
    return Mesh(np.array(jax.devices("cpu")[:8]).reshape(4, 2), ("data", "model"))


def loaded(path, like, spec=BOTH, rules=(), **more):
    """A dict of arrays, all laid out alike."""
    state, notes = flatten_state(like), []
    places = {
        name: NamedSharding(mesh(), P(*spec[: np.ndim(x)])) for name, x in zip(state.names, state.leaves, strict=True)
    }
    found = load_weights(path, state, lambda: places, parse_rules(rules), tell=notes.append, **more)
    return found, notes


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def model(state, batch):
    def loss(params):
        h = batch
        for up, down in zip(params["up"], params["down"], strict=True):
            h = h + jnp.tanh(h @ up) @ down
        return jnp.mean((h @ params["head"]["kernel"] + params["head"]["bias"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    return jax.tree.map(lambda x, g: x - 0.1 * g, state, {"params": grads, "ema": grads}), value


def params_of(seed=0):
    rng = np.random.default_rng(seed)
    made = {"up": (3, 64, 256), "down": (3, 256, 64), "head": {"kernel": (64, 16), "bias": (16,)}}
    return jax.tree.map(
        lambda shape: rng.normal(size=shape).astype("float32") / 8,
        made,
        is_leaf=lambda x: isinstance(x, tuple),
    )


@cache
def trained():
    """A sharded step of `model` and the state after a call of it."""
    step = jaxshard_magic.shard(model, "fsdp", mesh="cpu:8 data=8")
    state, _ = step({"params": params_of(), "ema": params_of(1)}, np.ones((8, 64), "float32"))
    return step, state


def torch_files(folder, params, cut=True):
    """The parameters as torch would have them, in two files with an index."""
    tensors = {"lm_head.weight": params["head"]["kernel"].T, "lm_head.bias": params["head"]["bias"]}
    for i in range(3):
        tensors[f"model.layers.{i}.up.weight"] = params["up"][i].T
        tensors[f"model.layers.{i}.down.weight"] = params["down"][i].T
    files = {name: f"model-0000{1 + ('layers' in name)}-of-00002.safetensors" for name in tensors}
    for file in set(files.values()):
        each = {name: np.ascontiguousarray(x) for name, x in tensors.items() if files[name] == file}
        save_file(each, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
