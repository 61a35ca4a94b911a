"""Files of weights that are damaged, differ from the state or can't be written are told in one line."""

import json
import os
import resource
import struct
import sys
import time
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file
from support.refusals import refusal
from support.weight_files import (
    ABOUT,
    RNG,
    TORCH,
    loaded,
    params_of,
    same,
    torch_files,
    values,
)

import jaxshard_magic
from jaxshard_magic.checkpoints.name_rules import parse_rules
from jaxshard_magic.checkpoints.weight_loading import list_arrays
from jaxshard_magic.checkpoints.weight_saving import save_weights
from jaxshard_magic.errors import ShardError


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
    assert said in refusal(loaded, tmp_path / "w.safetensors", {"w": np.zeros(2, "float32")})


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
    assert same(found["w"], like["w"]) and note.startswith("w.npz has x object[1], which nothing here is called")
    assert "x is of dtype object in w.npz, which can't be read" in refusal(loaded, path, {"x": np.zeros(1)})
    path.write_bytes(path.read_bytes()[:300])
    assert "is no .npz that numpy wrote, or is cut off" in refusal(loaded, path, like)


def test_files_that_differ_from_the_state_are_told_by_the_first_leaf(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"a.kernel": np.zeros((4, 6), "float32"), "b": np.zeros(2, "float32")}, path)
    kernel = np.zeros((4, 6), "float32")
    assert (
        "w.safetensors has no a.kernal. Did you mean 'a.kernel'? 1 of 1 are not in it; where it has another name"
        in (refusal(loaded, path, {"a": {"kernal": kernel}}))
    )
    assert "a.kernel is float32[4,6] in w.safetensors and float32[4,7] here" in (
        refusal(loaded, path, {"a": {"kernel": np.zeros((4, 7), "float32")}})
    )
    half = {"a": {"kernel": kernel.astype("bfloat16")}}
    assert "and bfloat16[4,6] here; cast=True, or --cast" in refusal(loaded, path, half)
    found, [note] = loaded(path, half, cast=True)
    assert found["a"]["kernel"].dtype == jnp.bfloat16
    assert note == "w.safetensors has b float32[2], which nothing here is called: left out"
    assert "Did you mean 'w.safetensors'?" in refusal(loaded, tmp_path / "v.safetensors", half)
    (tmp_path / "model.pt").write_bytes(b"PK")
    step = jaxshard_magic.shard(lambda w: w, "dp", mesh="cpu:2 data=2")
    assert "weights are read of .safetensors and .npz" in refusal(step.restore, tmp_path / "model.pt", half)
    assert "number is for folders" in refusal(step.restore, path, half, number=3)
    assert "rename is for files of weights" in refusal(step.save, tmp_path / "c", half, rename=["a=b"])


def test_many_names_take_no_longer_each_than_few(tmp_path):
    """A header's rows, its listing, and what is compared of a file whose names all differ from the state's."""

    def seconds(n: int) -> float:
        path, rows = (
            tmp_path / f"{n}.safetensors",
            {f"w{i}.x": row(offsets=(8 * i, 8 * i + 8)) for i in range(n)},
        )
        path.write_bytes(header(rows, bytes(8 * n)))
        like = {f"v{i}": np.zeros(2, "float32") for i in range(n)}
        start = time.process_time()
        assert len(list_arrays(path)) > 1
        assert "has no v0." in refusal(loaded, path, like)
        assert "w0.x is there twice" in refusal(list_arrays, twice(path, n))
        return time.process_time() - start

    def twice(path, n):
        rows = ", ".join(f'"w{i % (n - 1)}.x": 1' for i in range(n)).encode()
        path.write_bytes(header(b"{%s}" % rows))
        return path

    seconds(100)
    few, many = seconds(500), seconds(8000)
    assert many < 100 * few, f"{few:.2f} s and {many:.2f} s: 16 times as many"


def test_an_index_that_names_what_is_not_there_is_told(tmp_path):
    torch_files(tmp_path, params_of())
    like, index = params_of(), tmp_path / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    told["weight_map"]["lm_head.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(told))
    assert "says that lm_head.weight is in model-00002-of-00002" in refusal(loaded, tmp_path, like, rules=TORCH)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    assert "Did you mean 'model-00002-of-00002.safetensors'?" in refusal(loaded, tmp_path, like, rules=TORCH)
    index.write_text('{"weight_map": {"w": "../w.safetensors"}}')
    assert "names ../w.safetensors, which is not beside it" in refusal(loaded, tmp_path, like)
    index.write_text("{}")
    assert "is no index of safetensors" in refusal(loaded, index, like)


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process are POSIX")
@pytest.mark.parametrize("name", ["w.safetensors", "w.npz"])
def test_a_disk_that_is_full_leaves_the_file_that_was_there(name, tmp_path):
    small, large = {"w": np.ones(4, "float32")}, {"w": np.ones(1 << 18, "float32")}
    save_weights(tmp_path / name, small, metadata=ABOUT)
    before = (tmp_path / name).read_bytes()
    assert "is there already: name another file, or write over it with --force" in (
        refusal(save_weights, tmp_path / name, large, metadata=ABOUT)
    )
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        said = refusal(save_weights, tmp_path / name, large, force=True, metadata=ABOUT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"can't write {tmp_path / name}: " in said
    assert os.listdir(tmp_path) == [name] and (tmp_path / name).read_bytes() == before
    save_weights(tmp_path / name, large, force=True, metadata=ABOUT)
    assert prod(np.shape(loaded(tmp_path / name, large, P())[0]["w"])) == 1 << 18


def test_what_a_file_cant_have_is_told_and_nothing_is_written(tmp_path):
    eight = {"w": values("float8_e5m2")}
    assert "w is float8_e5m2, which .npz has no name for: save it as .safetensors" in (
        refusal(save_weights, tmp_path / "w.npz", eight, metadata=ABOUT)
    )
    assert "w is int4, which safetensors has not" in (
        refusal(save_weights, tmp_path / "w.safetensors", {"w": jnp.zeros(4, "int4")}, metadata=ABOUT)
    )
    assert "a.w and b.w are both c.w in w.npz" in (
        refusal(
            save_weights,
            tmp_path / "w.npz",
            {"a.w": values(), "b.w": values()},
            parse_rules(["c=a", "c=b"]),
            metadata=ABOUT,
        )
    )
    step = jaxshard_magic.shard(lambda w: w, "dp", mesh="cpu:2 data=2")
    assert "no arrays but keys" in refusal(step.save, tmp_path / "w.npz", {"key": jax.random.key(0)})
    assert not os.listdir(tmp_path)
