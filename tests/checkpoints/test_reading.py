"""What a checkpoint has is read a piece at a time, each of them once, and is the same to the bit however it is cut."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxshard_magic
from jaxshard_magic.checkpoints import CheckpointInfo, CheckpointStore, SavedLeaf, chunked_reads, store


def over(*axes):
    return NamedSharding(jaxshard_magic.mesh("cpu:8 rows=4 columns=2"), PartitionSpec(*axes))


def tree():
    """Of several kinds, each where a step has it."""
    values = np.random.default_rng(0).normal(size=(96, 64)).astype("f")
    return {
        "rows": jax.device_put(values, over("rows")),
        "both": jax.device_put(values, over("columns", "rows")),
        "half": jax.device_put(values.astype(jnp.bfloat16), over("columns")),
        "cube": jax.device_put(values.reshape(8, 12, 64), over(None, "rows")),
        "prime": jax.device_put(values.reshape(-1)[:1021], over()),
        "number": jax.device_put(np.int32(7), over()),
        "keys": jax.device_put(jax.random.split(jax.random.key(3), 4), over("rows")),
        "numpy": values[0],
    }


def about(arrays):
    return CheckpointInfo(
        1, "fsdp", "rows=4 columns=2", tuple(SavedLeaf(k, x.shape, str(x.dtype)) for k, x in arrays.items())
    )


def targets(arrays, place):
    return {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(x)) for k, x in arrays.items()}


def plain(x):
    return np.asarray(jax.random.key_data(x) if chunked_reads.is_key(x) else x)


PLACES = {
    "rows": lambda x: over("rows") if x.ndim and x.shape[0] % 4 == 0 else over(),
    "columns": lambda x: over(*[None] * (x.ndim - 1), "rows") if x.ndim > 1 else over(),
    "both": lambda x: over("columns", "rows") if x.ndim > 1 else over(),
    "whole": lambda _: over(),
    "one device": lambda _: jax.sharding.SingleDeviceSharding(jax.devices("cpu")[3]),
}


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A folder with `tree()`, its arrays cut into chunks of 1 KiB."""
    monkeypatch.setattr(chunked_reads, "CHUNK", 1 << 10)
    arrays = tree()
    with CheckpointStore(tmp_path) as made:
        made.save(1, arrays, about(arrays))
    return tmp_path


class Counted:
    """An array on disk: which of its parts are read, and how many bytes of them at once."""

    def __init__(self, file, read, under_way):
        self._file, self._read, self._bytes = file, read, under_way

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __getitem__(self, at):
        part, key = self._file[at], (id(self), str(at))
        size = part.size * part.dtype.numpy_dtype.itemsize

        def read():
            self._read[key] += 1
            self._bytes.append(self._bytes[-1] + size)
            future = part.read()

            def result():
                self._bytes.append(self._bytes[-1] - size)
                return future.result()

            return type("Reading", (), {"result": staticmethod(result)})

        return type("Part", (), {"read": staticmethod(read)})


@pytest.mark.parametrize("place", PLACES)
def test_arrays_are_the_same_however_they_are_cut_and_no_chunk_is_read_twice(saved, monkeypatch, place):
    arrays, read, under_way = tree(), Counter(), [0]
    opened = chunked_reads._opened
    monkeypatch.setattr(chunked_reads, "_UNDER_WAY", 3 << 10)
    monkeypatch.setattr(
        chunked_reads, "_opened", lambda *args: [Counted(file, read, under_way) for file in opened(*args)]
    )
    target = targets(arrays, PLACES[place])
    found = CheckpointStore(saved).restore(1, target)
    for name, x in arrays.items():
        assert found[name].dtype == x.dtype and np.array_equal(plain(found[name]), plain(x)), name
        assert found[name].sharding.is_equivalent_to(target[name].sharding, x.ndim)
    assert set(read.values()) == {1} and len(read) > 100
    assert max(under_way) <= 4 << 10, "of the prime one a chunk is 4 KiB"


def test_parts_that_are_read_one_after_the_other_make_the_same_arrays(saved, monkeypatch):
    monkeypatch.setattr(chunked_reads, "_AT_ONCE", 1 << 10)
    arrays = tree()
    found = CheckpointStore(saved).restore(1, targets(arrays, PLACES["both"]))
    assert all(np.array_equal(plain(found[name]), plain(x)) for name, x in arrays.items())


def test_a_step_that_takes_over_what_was_read_leaves_other_devices_theirs(tmp_path):
    """Devices whose memory is the host's share what they all have."""
    w = jnp.ones((256, 256))
    with CheckpointStore(tmp_path) as made:
        made.save(1, {"w": w}, about({"w": w}))
    [found] = CheckpointStore(tmp_path).restore(1, targets({"w": w}, lambda _: over())).values()
    half = jax.jit(lambda x: x * jnp.where(jnp.arange(256) % 2, 2, 1), donate_argnums=0, out_shardings=over())
    found = half(half(found))
    for shard in found.addressable_shards:
        assert np.array_equal(shard.data, np.tile([1, 4], (256, 128)))


def test_what_is_damaged_is_told_in_one_line(saved):
    for file in (saved / "1" / "state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(jaxshard_magic.ShardError, match=r"^checkpoint 1 of .* can't be read back: ") as raised:
        CheckpointStore(saved).restore(1, targets(tree(), PLACES["rows"]))
    assert "\n" not in str(raised.value)


def test_dimensions_whose_divisors_lie_far_apart_are_not_cut_into_rows():
    assert store.chunk_bytes((32000, 4096)) == store.chunk_bytes((4096, 11008)) == store.chunk_bytes(()) == 8 << 20
    assert store.chunk_bytes((50257, 768)) is None  # a prime number: its only chunks would be rows of 3 KiB
