"""Weights of files that others wrote lie where a plan has them, to the bit; others read what is written; what can't be
is one line."""

import json
import os
import resource
import struct
import sys
import zipfile
from math import prod

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import jaxshard_magic
from jaxshard_magic.checkpoints.objects import opened
from jaxshard_magic.checkpoints.parts import part_of
from jaxshard_magic.checkpoints.rename import rules_of, to_here, to_there
from jaxshard_magic.checkpoints.weights import Source, listing, load
from jaxshard_magic.checkpoints.writing import save
from jaxshard_magic.errors import ShardError

RNG = np.random.default_rng(3)
ABOUT = {"format": "pt"}
BOTH = P("data", "model")
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
    state, notes = opened(like), []
    places = {
        name: NamedSharding(mesh(), P(*spec[: np.ndim(x)]))
        for name, x in zip(state.names, state.leaves, strict=True)
    }
    found = load(path, state, lambda: places, rules_of(rules), tell=notes.append, **more)
    return found, notes


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def refused(of, *args, **kwargs):
    with pytest.raises(ShardError) as error:
        of(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and np.asarray(a).tobytes() == np.asarray(b).tobytes()


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


def test_a_part_is_read_once_for_all_devices_that_hold_it_and_nothing_beside_the_parts(tmp_path, monkeypatch):
    tree = {"w": values(shape=(64, 32))}
    save_file(tree, tmp_path / "w.safetensors")
    read, plain = [], Source.part
    monkeypatch.setattr(Source, "part", lambda *a: read.append(plain(*a)) or read[-1])
    for spec, parts in ((P("data", "model"), 8), (P("data"), 4), (P(None, "model"), 2), (P(), 1)):
        read.clear()
        loaded(tmp_path / "w.safetensors", tree, spec)
        assert [x.nbytes for x in read] == [64 * 32 * 4 // parts] * parts


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_what_numpy_saved_is_read_stored_or_packed_in_any_order_of_bytes_and_dimensions(write, tmp_path):
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
    assert save(tmp_path / "w.safetensors", placed, about=ABOUT) == len(placed)
    with safe_open(tmp_path / "w.safetensors", "numpy") as file:
        assert file.metadata() == ABOUT and set(file.keys()) == set(placed)
        read = {
            name: file.get_tensor(name) for name in placed if "float8" not in name
        }  # numpy has none of these
    assert all(same(read[name], placed[name]) for name in read)
    back, _ = loaded(tmp_path / "w.safetensors", shapes(placed))
    assert all(same(back[name], x) for name, x in placed.items())
    wide = {name: x for name, x in placed.items() if "float8" not in name}
    save(tmp_path / "w.npz", wide, about=ABOUT)
    with np.load(tmp_path / "w.npz") as file:
        assert set(file.keys()) == set(wide)
        assert all(same(file[name].view(x.dtype), x) for name, x in wide.items())
    assert not zipfile.ZipFile(tmp_path / "w.npz").testzip()
    assert sorted(os.listdir(tmp_path)) == ["w.npz", "w.safetensors"]


@pytest.mark.parametrize(
    ("rule", "there", "here"),
    [
        ("a.b=c.d", {"a.b": (2,)}, {"c.d": (2,)}),
        ("model=", {"model.x.w": (2,)}, {"x.w": (2,)}),
        ("=params", {"x.w": (2,)}, {"params.x.w": (2,)}),
        ("h.*.fc=layers_*.up", {"h.3.fc.w": (2,)}, {"layers_3.up.w": (2,)}),
        ("*.weight=*.kernel", {"a.b.weight": (2,), "c.bias": (2,)}, {"a.b.kernel": (2,), "c.bias": (2,)}),
        ("h.*.w=h.w", {f"h.{i}.w": (2,) for i in range(11)}, {"h.w": (11, 2)}),
        ("h.*=h", {f"h.{i}.{n}": (2,) for n in "ab" for i in range(3)}, {"h.a": (3, 2), "h.b": (3, 2)}),
        (
            "h.*.e.*.w=h.*.w",
            {f"h.{i}.e.{j}.w": (2,) for i in range(2) for j in range(3)},
            {"h.0.w": (3, 2), "h.1.w": (3, 2)},
        ),
        ("h.*.e.*.w=w", {f"h.{i}.e.{j}.w": (2,) for i in range(2) for j in range(3)}, {"w": (2, 3, 2)}),
        ("mlp/~/linear/w=up.w", {"mlp/~/linear/w": (2,)}, {"up.w": (2,)}),
        ("w=w:T", {"w": (3, 5)}, {"w": (5, 3)}),
        ("conv=conv:2310", {"conv": (7, 5, 2, 3)}, {"conv": (2, 3, 5, 7)}),
    ],
)
def test_a_table_of_names_is_read_both_ways(rule, there, here, tmp_path):
    tree = {name: values(shape=shape) for name, shape in there.items()}
    save_file(tree, tmp_path / "w.safetensors")
    wanted = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in here.items()}
    found, notes = loaded(tmp_path / "w.safetensors", wanted, P(), [rule])
    assert not notes
    save(tmp_path / "new" / "again.safetensors", found, rules_of([rule]), about=ABOUT)
    again = load_file(tmp_path / "new" / "again.safetensors")
    assert set(again) == set(tree) and all(same(again[name], x) for name, x in tree.items())
    for name in there:
        [named] = [x for x in to_here(rules_of([rule]), there, "w") if x.there == name]
        number = named.numbers
        plain = (
            tree[name].transpose([2, 3, 1, 0])
            if "2310" in rule
            else tree[name].T
            if ":T" in rule
            else tree[name]
        )
        assert same(np.asarray(found[named.here])[number], plain)
    assert {x.there for x in to_there(rules_of([rule]), here, "w")} == set(there)


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


@pytest.fixture(scope="module")
def trained():
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


@pytest.mark.parametrize("path", ["", "model.safetensors.index.json"])
def test_weights_of_several_files_go_where_the_plan_has_the_parameters_alone(trained, path, tmp_path):
    step, state = trained
    params = params_of(5)
    torch_files(tmp_path, params)
    found = step.restore(tmp_path / path, like=state["params"], rename=TORCH)
    assert all(map(same, jax.tree.leaves(found), jax.tree.leaves(params)))
    assert [x.sharding for x in jax.tree.leaves(found)] == [
        x.sharding for x in jax.tree.leaves(state["params"])
    ]
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
    assert (
        same(found["kernel"], np.ascontiguousarray(kernel.T))
        and not found["kernel"].sharding.is_fully_replicated
    )
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
        nnx.update(
            model, jax.tree.map(lambda p, g: p - g, nnx.state(model, nnx.Param), nnx.state(grads, nnx.Param))
        )

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


def header(rows, data=b""):
    text = json.dumps(rows).encode() if isinstance(rows, dict) else rows
    return struct.pack("<Q", len(text)) + text + data


def row(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


TORN = {
    "empty": (b"", "is no file of safetensors"),
    "a page": (b"<html>404 Not Found</html>", "is no file of safetensors"),
    "long header": (struct.pack("<Q", 1 << 40), "is no file of safetensors"),
    "cut in the header": (header({"w": row()})[:20], "is cut off: it has 20 bytes"),
    "cut in the data": (
        header({"w": row()}, b"1234"),
        "is cut off: it has 73 bytes and its header tells of 77",
    ),
    "more behind": (header({"w": row()}, b"123456789"), "has more behind its arrays"),
    "no json": (header(b"{]"), "header that is none of safetensors"),
    "no object": (header(b"[1]"), "header that is none of safetensors"),
    "twice": (header(b'{"w":1,"w":2}'), "w is there twice"),
    "slashes": (
        header({"a.w": row(offsets=(0, 8)), "a/w": row(offsets=(8, 16))}, b"1" * 16),
        "a.w and a/w are both a.w here",
    ),
    "size": (header({"w": row(shape=(3,))}, b"1" * 8), "w is F32[3] by the header"),
    "overlap": (header({"v": row(), "w": row(offsets=(4, 12))}, b"1" * 12), "don't agree"),
    "hole": (header({"w": row(offsets=(4, 12))}, b"1" * 12), "don't agree"),
    "backwards": (header({"w": row(offsets=(8, 0))}, b"1" * 8), "header that is none of safetensors"),
    "negative": (header({"w": row(shape=(-1, -2))}, b"1" * 8), "header that is none of safetensors"),
    "half": (header({"w": row(shape=(2.0,))}, b"1" * 8), "header that is none of safetensors"),
    "fp4": (
        header({"w": row("F4", (16,))}, b"1" * 8),
        "w is of dtype F4 in w.safetensors, which can't be read",
    ),
}


@pytest.mark.parametrize("what", TORN)
def test_a_file_that_is_cut_off_or_says_what_cant_be_is_told_in_one_line(what, tmp_path):
    data, said = TORN[what]
    (tmp_path / "w.safetensors").write_bytes(data)
    assert said in refused(loaded, tmp_path / "w.safetensors", {"w": np.zeros(2, "float32")})


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed, None])
def test_a_file_with_any_bytes_changed_is_read_or_told_in_one_line(write, tmp_path):
    like, path = {"w": np.arange(64, dtype="float32")}, tmp_path / ("w.npz" if write else "w.safetensors")
    if write is None:
        save_file(like, path)
    else:
        write(path, **like)
    good, told = path.read_bytes(), 0
    for _ in range(120):
        bad = bytearray(good)
        for at in RNG.integers(0, len(bad), 3):
            bad[at] = RNG.integers(256)
        path.write_bytes(bad[: None if RNG.random() < 0.8 else RNG.integers(len(bad))])
        try:
            loaded(path, like, P())
        except ShardError as error:
            told += "\n" not in str(error)
    assert told > 20


def test_an_npz_that_is_cut_off_or_has_objects_in_it_is_told_in_one_line(tmp_path):
    path = tmp_path / "w.npz"
    np.savez(path, w=np.zeros(100), x=np.array([{}], dtype=object))
    like = {"w": np.zeros(100, "float32")}
    found, [note] = loaded(path, like, cast=True)
    assert same(found["w"], like["w"]) and note.startswith(
        "w.npz has x object[1], which nothing here is called"
    )
    assert "x is of dtype object in w.npz, which can't be read" in refused(loaded, path, {"x": np.zeros(1)})
    path.write_bytes(path.read_bytes()[:300])
    assert "is no .npz that numpy wrote, or is cut off" in refused(loaded, path, like)


TABLES = {
    "nothing": (
        ["fc.wieght=kernel"],
        "'fc.wieght=kernel' is of no array of w.safetensors. Did you mean 'fc.weight'?",
    ),
    "taken": (["fc=", "fc.bias=b"], "'fc.bias=b': rules before it have all of its arrays"),
    "both": (["fc.weight=fc.bias"], "fc.bias and fc.weight are both fc.bias here"),
    "no equals": (["fc"], "has no ="),
    "stars": (["fc=*"], "more * on your side"),
    "order": (["fc=fc:02"], ":02 is no order of dimensions"),
    "orders": (["h=h:10"], "h.0.w has 1 dimensions, and :10 is of 2"),
    "gap": (["h.*.w=h"], "the last is h.2.w, and there is none of number 1"),
    "grid": (["g.*.*=g"], "the last is g.1.0, and there is none of number 1.1"),
    "far": (["f.*=f"], "the last is f.999999999, and there is none of number 0"),
    "farther": (["f*=f"], "* is '.999999999' in f.999999999"),
    "words": (["fc.*=fc"], "* is 'bias' in fc.bias"),
    "unlike": (["x.*=x"], "x.0 float32[2] and x.1 float32[3] of w.safetensors differ"),
    "swapped": (
        ["fc.weight=kernel"],
        'its last two dimensions swapped, as torch has weights: --rename "fc.weight=kernel:T"',
    ),
    "shaped": (
        ["fc.weight=kernel:10", "y.*=z.*"],
        "the same elements in another shape: keep it as the file has it",
    ),
    "unstacked": (["fc.weight=kernel:T"], '--rename "y.*=y" stacks them'),
}


@pytest.mark.parametrize("what", TABLES)
def test_a_table_that_does_not_fit_is_told_before_anything_is_read(what, tmp_path, monkeypatch):
    rules, said = TABLES[what]
    one = np.zeros(2, "float32")
    tree = {"fc.weight": np.zeros((4, 6), "float32"), "fc.bias": one, "h.0.w": one, "h.2.w": one, "x.0": one}
    tree |= {"g.0.0": one, "g.0.1": one, "g.1.0": one, "f.999999999": one}
    save_file(tree | {"x.1": np.zeros(3, "float32"), "y.0": one, "y.1": one}, tmp_path / "w.safetensors")
    monkeypatch.setattr(Source, "part", lambda *_: pytest.fail("read"))
    like = {"kernel": np.zeros((6, 4), "float32"), "y": np.zeros((2, 2), "float32")}
    if what == "shaped":
        like["kernel"] = like["kernel"].reshape(6, 2, 2)
    assert said in refused(loaded, tmp_path / "w.safetensors", like, rules=rules)


def test_files_that_differ_from_the_state_are_told_by_the_first_leaf(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"a.kernel": np.zeros((4, 6), "float32"), "b": np.zeros(2, "float32")}, path)
    kernel = np.zeros((4, 6), "float32")
    assert (
        "w.safetensors has no a.kernal. Did you mean 'a.kernel'? 1 of 1 are not in it; where it has another name"
        in (refused(loaded, path, {"a": {"kernal": kernel}}))
    )
    assert "a.kernel is float32[4,6] in w.safetensors and float32[4,7] here" in (
        refused(loaded, path, {"a": {"kernel": np.zeros((4, 7), "float32")}})
    )
    half = {"a": {"kernel": kernel.astype("bfloat16")}}
    assert "and bfloat16[4,6] here; cast=True, or --cast" in refused(loaded, path, half)
    found, [note] = loaded(path, half, cast=True)
    assert found["a"]["kernel"].dtype == jnp.bfloat16
    assert note == "w.safetensors has b float32[2], which nothing here is called: left out"
    assert "Did you mean 'w.safetensors'?" in refused(loaded, tmp_path / "v.safetensors", half)
    (tmp_path / "model.pt").write_bytes(b"PK")
    step = jaxshard_magic.shard(lambda w: w, "dp", mesh="cpu:2 data=2")
    assert "weights are read of .safetensors and .npz" in refused(step.restore, tmp_path / "model.pt", half)
    assert "number is for folders" in refused(step.restore, path, half, number=3)
    assert "rename is for files of weights" in refused(step.save, tmp_path / "c", half, rename=["a=b"])


def test_an_index_that_names_what_is_not_there_is_told(tmp_path):
    torch_files(tmp_path, params_of())
    like, index = params_of(), tmp_path / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    told["weight_map"]["lm_head.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(told))
    assert "says that lm_head.weight is in model-00002-of-00002" in refused(
        loaded, tmp_path, like, rules=TORCH
    )
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    assert "Did you mean 'model-00002-of-00002.safetensors'?" in refused(loaded, tmp_path, like, rules=TORCH)
    index.write_text('{"weight_map": {"w": "../w.safetensors"}}')
    assert "names ../w.safetensors, which is not beside it" in refused(loaded, tmp_path, like)
    index.write_text("{}")
    assert "is no index of safetensors" in refused(loaded, index, like)


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process are POSIX")
@pytest.mark.parametrize("name", ["w.safetensors", "w.npz"])
def test_a_disk_that_is_full_leaves_the_file_that_was_there(name, tmp_path):
    small, large = {"w": np.ones(4, "float32")}, {"w": np.ones(1 << 18, "float32")}
    save(tmp_path / name, small, about=ABOUT)
    before = (tmp_path / name).read_bytes()
    assert "is there already: name another file, or write over it with --force" in (
        refused(save, tmp_path / name, large, about=ABOUT)
    )
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        said = refused(save, tmp_path / name, large, force=True, about=ABOUT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"can't write {tmp_path / name}: " in said
    assert os.listdir(tmp_path) == [name] and (tmp_path / name).read_bytes() == before
    save(tmp_path / name, large, force=True, about=ABOUT)
    assert prod(np.shape(loaded(tmp_path / name, large, P())[0]["w"])) == 1 << 18


def test_what_a_file_cant_have_is_told_and_nothing_is_written(tmp_path):
    eight = {"w": values("float8_e5m2")}
    assert "w is float8_e5m2, which .npz has no name for: save it as .safetensors" in (
        refused(save, tmp_path / "w.npz", eight, about=ABOUT)
    )
    assert "w is int4, which safetensors has not" in (
        refused(save, tmp_path / "w.safetensors", {"w": jnp.zeros(4, "int4")}, about=ABOUT)
    )
    assert "a.w and b.w are both c.w in w.npz" in (
        refused(
            save,
            tmp_path / "w.npz",
            {"a.w": values(), "b.w": values()},
            rules_of(["c=a", "c=b"]),
            about=ABOUT,
        )
    )
    step = jaxshard_magic.shard(lambda w: w, "dp", mesh="cpu:2 data=2")
    assert "no arrays but keys" in refused(step.save, tmp_path / "w.npz", {"key": jax.random.key(0)})
    assert not os.listdir(tmp_path)


def test_a_part_of_a_checkpoint_is_restored_by_its_own_names_alone(trained, tmp_path):
    step, state = trained
    step.save(tmp_path / "c", state)
    back = step.restore
    params = back(tmp_path / "c", like={"params": state["params"]})["params"]
    assert all(map(same, jax.tree.leaves(params), jax.tree.leaves(state["params"])))
    ema = back(tmp_path / "c", like=state["ema"], part="ema")
    assert all(map(same, jax.tree.leaves(ema), jax.tree.leaves(state["ema"])))
    assert "as ema, params: say which, part='ema'" in refused(back, tmp_path / "c", state["params"])
    assert " has no emma. Did you mean 'ema'?" in refused(back, tmp_path / "c", state["params"], part="emma")
    smaller = {"params": {"head": state["params"]["head"]}}
    assert " has params.down, which is not in the state" in refused(back, tmp_path / "c", smaller)
    renamed = {"up": 0, **state["params"], "haed": state["params"]["head"]}
    del renamed["head"], renamed["up"]
    assert " has no haed.bias. Did you mean 'head.bias'?" in refused(
        back, tmp_path / "c", renamed, part="ema"
    )
    step.save(tmp_path / "d", {"params": state["params"]})
    said = refused(back, tmp_path / "d", state)
    assert (
        " has params alone, and no ema.down: restore that part, step.restore(DIR, like=state.params)" in said
    )
    assert "Did you mean 'c'?" in refused(back, tmp_path / "cc", state)


def test_moments_are_never_taken_for_parameters_of_which_some_are_wanted():
    have = ["w", "b", "opt.mu.w"]
    assert part_of(have, ["w"], "c/1") == ""
    have = ["params.w", "params.b", "opt.0.mu.w", "opt.0.nu.w"]
    assert part_of(have, ["w"], "c/1") == "params"
    assert part_of(["params.w", "ema.w"], ["w"], "c/1", called="ema") == "ema"


STEP = """%%shard dp
def train(state, batch):
    g = jax.grad(lambda p: jnp.mean((batch - p["w"]) ** 2))(state["params"])
    return {"params": {"w": state["params"]["w"] - g["w"]}, "calls": state["calls"] + 1}
state = train(state, batch)
"""


def test_the_lines_of_a_notebook_save_and_load_parts_and_tell_what_there_is(notebook, tmp_path, capsys):
    notebook.run("import jax, jax.numpy as jnp\nbatch = jnp.ones((8, 4))\n%mesh data=4;")
    notebook.run('state = {"params": {"w": jnp.arange(4.0)}, "calls": jnp.int32(0)}')
    notebook.run(STEP)
    saved = np.asarray(notebook["state"]["params"]["w"])
    file = tmp_path / "w.safetensors"
    notebook.run(f'%shard save {file} state.params --rename "model.0.weight=w"')
    assert f"state.params saved into {file}" in capsys.readouterr().out
    notebook.run(f"%shard save {tmp_path}/c state")
    notebook.run("state = train(state, batch)")
    capsys.readouterr()
    notebook.run(f"%shard load {file}")
    assert capsys.readouterr().out.splitlines() == [
        "w.safetensors: 1 arrays, 16 bytes",
        "model.0.weight float32[4]",
    ]
    error = notebook.fails(f"%shard load {file} state.parms")
    assert "the state has no parms. Did you mean 'params'?" in str(error)
    notebook.run(f'%shard load {file} state.params --rename "model.0.weight=w"')
    assert f"state.params restored from {file}" in capsys.readouterr().out
    assert same(notebook["state"]["params"]["w"], saved) and int(notebook["state"]["calls"]) == 2
    notebook.run('params = {"w": jnp.zeros(4)}')
    notebook.run(f"%shard load {tmp_path}/c params")
    assert "params restored from checkpoint 1 of" in capsys.readouterr().out
    assert same(notebook["params"]["w"], saved)


def test_names_that_differ_in_numbers_alone_are_told_in_a_line(tmp_path):
    layers = {f"h.{i}.w": np.zeros((2, 3), "float32") for i in range(12)}
    save_file(layers | {"norm": np.zeros(3, "float16")}, tmp_path / "w.safetensors")
    assert listing(tmp_path / "w.safetensors") == [
        "w.safetensors: 13 arrays, 294 bytes",
        "h.*.w float32[2,3], 12 of them",
        "norm float16[3]",
    ]
