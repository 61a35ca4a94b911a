"""Weights of files that others wrote lie where a plan has them, to the bit, and others read what is written."""

import os
import zipfile

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from support.weight_files import (
    ABOUT,
    TORCH,
    loaded,
    mesh,
    model,
    params_of,
    same,
    shapes,
    torch_files,
    trained,
    values,
)

import jaxshard_magic
from jaxshard_magic.checkpoints.weight_loading import ArraySource
from jaxshard_magic.checkpoints.weight_saving import save_weights

DTYPES = (
    "float32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int32",
    "uint8",
    "bool",
    "complex64",
)


@pytest.mark.parametrize("spec", [P("data", "model"), P(None, "data"), P("model"), P(("data", "model"))])
def test_each_device_has_its_part_of_every_dtype_of_a_file_of_safetensors(spec, tmp_path):
    tree = {dtype: values(dtype) for dtype in DTYPES} | {
        "one": np.float32(3),
        "none": np.zeros((0, 8), "int32"),
    }
    save_file({k: np.asarray(x) for k, x in tree.items()}, tmp_path / "w.safetensors")
    found, _ = loaded(tmp_path / "w.safetensors", shapes(tree), spec)
    assert all(same(found[name], x) for name, x in tree.items())
    for name in DTYPES:
        assert found[name].sharding.spec == spec
        assert all(same(s.data, tree[name][s.index]) for s in found[name].addressable_shards)


def test_each_part_is_read_once_for_all_its_devices_and_nothing_else(tmp_path, monkeypatch):
    tree = {"w": values(shape=(64, 32))}
    save_file(tree, tmp_path / "w.safetensors")
    read, plain = [], ArraySource.part
    monkeypatch.setattr(ArraySource, "part", lambda *a: read.append(plain(*a)) or read[-1])
    for spec, parts in ((P("data", "model"), 8), (P("data"), 4), (P(None, "model"), 2), (P(), 1)):
        read.clear()
        loaded(tmp_path / "w.safetensors", tree, spec)
        assert [x.nbytes for x in read] == [64 * 32 * 4 // parts] * parts


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_npz_files_are_read_packed_or_not_in_any_order_of_bytes_and_dims(write, tmp_path):
    plain, turned = values(shape=(32, 16)), values(shape=(8, 6, 4))
    write(
        tmp_path / "w.npz",
        **{
            "a/kernel": plain,
            "b": np.asfortranarray(turned),
            "c": plain.astype(">f4"),
            "d": plain.astype("bfloat16"),
        },
        epoch=3,
    )
    like = {
        "a": {"kernel": plain},
        "b": turned,
        "c": plain,
        "d": plain.astype("bfloat16"),
        "epoch": jnp.int32(0),
    }
    found, _ = loaded(tmp_path / "w.npz", like, P("model", None), cast=True)
    assert same(found["a"]["kernel"], plain) and same(found["b"], turned) and same(found["c"], plain)
    assert same(found["d"], plain.astype("bfloat16")) and int(found["epoch"]) == 3


@pytest.mark.parametrize("spec", [P("data", "model"), P(None, "data"), P(), P("model")])
def test_the_libraries_themselves_read_what_is_written_from_any_layout(spec, tmp_path):
    tree = {dtype: values(dtype) for dtype in DTYPES}
    placed = {name: jax.device_put(x, NamedSharding(mesh(), spec)) for name, x in tree.items()}
    placed |= {"host": values(), "one": jnp.float32(2), "none": jnp.zeros((0, 8))}
    assert save_weights(tmp_path / "w.safetensors", placed, metadata=ABOUT) == len(placed)
    with safe_open(tmp_path / "w.safetensors", "numpy") as file:
        assert file.metadata() == ABOUT and set(file.keys()) == set(placed)
        read = {name: file.get_tensor(name) for name in placed if "float8" not in name}  # numpy has none of these
    assert all(same(read[name], placed[name]) for name in read)
    back, _ = loaded(tmp_path / "w.safetensors", shapes(placed))
    assert all(same(back[name], x) for name, x in placed.items())
    wide = {name: x for name, x in placed.items() if "float8" not in name}
    save_weights(tmp_path / "w.npz", wide, metadata=ABOUT)
    with np.load(tmp_path / "w.npz") as file:
        assert set(file.keys()) == set(wide)
        assert all(same(file[name].view(x.dtype), x) for name, x in wide.items())
    assert not zipfile.ZipFile(tmp_path / "w.npz").testzip()
    assert sorted(os.listdir(tmp_path)) == ["w.npz", "w.safetensors"]


@pytest.mark.parametrize("path", ["", "model.safetensors.index.json"])
def test_weights_of_several_files_go_where_the_plan_has_the_parameters_alone(path, tmp_path):
    step, state = trained()
    params = params_of(5)
    torch_files(tmp_path, params)
    found = step.restore(tmp_path / path, like=state["params"], rename=TORCH)
    assert all(map(same, jax.tree.leaves(found), jax.tree.leaves(params)))
    assert [x.sharding for x in jax.tree.leaves(found)] == [x.sharding for x in jax.tree.leaves(state["params"])]
    assert not found["up"].sharding.is_fully_replicated
    after, _ = step({**state, "params": found}, np.ones((8, 64), "float32"))
    plain, _ = jax.jit(model)({**state, "params": params}, np.ones((8, 64), "float32"))
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_a_state_of_linen_takes_its_parameters_from_a_file(tmp_path):
    dense = nn.Dense(256)
    batch = np.ones((8, 128), "float32")
    made = dense.init(jax.random.key(0), batch)["params"]
    state = TrainState.create(apply_fn=dense.apply, params=made, tx=optax.adam(0.1))

    def step(state, x):
        grads = jax.grad(lambda p: jnp.mean(state.apply_fn({"params": p}, x) ** 2))(state.params)
        return state.apply_gradients(grads=grads)

    sharded = jaxshard_magic.shard(step, "fsdp", mesh="cpu:8 data=8")
    sharded.prepare(state, batch)
    kernel = values(shape=(256, 128))
    save_file({"fc.weight": kernel, "fc.bias": values(shape=(256,))}, tmp_path / "w.safetensors")
    rename = {"fc.weight": "kernel:T", "fc": ""}
    found = sharded.restore(tmp_path / "w.safetensors", like=state.params, rename=rename)
    assert same(found["kernel"], np.ascontiguousarray(kernel.T)) and not found["kernel"].sharding.is_fully_replicated
    sharded.save(tmp_path / "c", state.replace(params=found))
    again = sharded.restore(tmp_path / "c", like=state.params)
    assert same(again["kernel"], found["kernel"]) and again["kernel"].sharding == found["kernel"].sharding


def test_generators_of_nnx_objects_are_left_out_and_stay_as_they_are(tmp_path):
    def made(seed):
        rngs = nnx.Rngs(seed)
        return nnx.Sequential(nnx.Linear(32, 64, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))

    @nnx.jit
    def step(model, x):
        grads = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model, nnx.Param), nnx.state(grads, nnx.Param)))

    sharded = jaxshard_magic.shard(step, "dp", mesh="cpu:2 data=2")
    first, other = made(0), made(1)
    sharded(first, np.ones((4, 32), "float32"))
    with pytest.warns(UserWarning, match=r"left out of w.safetensors: a generator of random numbers"):
        sharded.save(tmp_path / "w.safetensors", first)
    assert set(load_file(tmp_path / "w.safetensors")) == {"layers.0.kernel", "layers.0.bias"}
    key, count = other.layers[1].rngs.key[...], other.layers[1].rngs.count[...]
    assert sharded.restore(tmp_path / "w.safetensors", like=other) is other
    assert same(other.layers[0].kernel[...], first.layers[0].kernel[...])
    assert same(jax.random.key_data(other.layers[1].rngs.key[...]), jax.random.key_data(key))
    assert int(other.layers[1].rngs.count[...]) == int(count)
