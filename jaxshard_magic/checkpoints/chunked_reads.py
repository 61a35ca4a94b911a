"""Read a checkpoint's arrays piece by piece, with little more memory than the arrays themselves.

Orbax reads all shards of an array at once, with each in memory four times: as written, decoded, assembled, and at its
destination.
"""

import ctypes
import json
import math
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from ..device_arrays import Span, from_local_shards, local_shards, put_shard
from ..files import read_limited
from .state_arrays import is_key, prng_impl_of

CHUNK = 8 << 20  # bytes of a chunk on disk, where an array's dimensions divide well
_COARSE = 16  # largest ratio of neighbouring divisors of a dimension that divides well
_AT_ONCE = 64 << 20  # bytes of a group of shards
_UNDER_WAY = 16 << 20  # bytes of chunks that are read at the same time, if they are as large on disk
_METADATA = 256 << 20  # bytes of Orbax's description of the arrays, at most
_ALIGNED = 64  # bytes; a CPU device takes over an array aligned like this without a copy


def chunk_bytes(shape: Sequence[int]) -> int | None:
    """Return the most bytes of one chunk when an array is written; None to write each device's shard as one chunk.

    Chunks divide dimensions evenly. If the divisors of a dimension lie far apart, as of a prime number, chunks would
    shrink to rows, and None is returned.

    >>> chunk_bytes((4096, 768)), chunk_bytes((50257, 768))
    (8388608, None)
    """
    return CHUNK if all(_widest(n) <= _COARSE for n in shape) else None


def read_arrays(folder: Path, target: Any) -> list[jax.Array]:
    """Read the arrays of a state from disk onto devices.

    Takes a twentieth of all bytes as extra memory, or 48 MiB if that is more. For devices with memory of their own, the
    shards of one group (`group_parts`) are on the host as well until they are copied.

    Args:
        folder: Folder of the arrays, as Orbax writes it.
        target: Tree of `jax.ShapeDtypeStruct` with shardings.

    Returns:
        The arrays in the order of the target's leaves.

    Raises:
        ValueError: An array is missing, of another shape, or damaged.
    """
    named, _ = tree_flatten_with_path(target)
    wanted = [_stored(x) for _, x in named]
    files = _opened(folder, [keystr(path, simple=True, separator=".") for path, _ in named])
    for (path, _), x, file in zip(named, wanted, files, strict=True):
        if tuple(file.shape) != tuple(x.shape):
            raise ValueError(f"{keystr(path)} is {list(file.shape)} on disk, not {list(x.shape)}")
    parts = [
        _Part(files[i], x, span, devices, i)
        for i, x in enumerate(wanted)
        for span, devices in local_shards(x.shape, x.sharding).items()
    ]
    sizes = [part.size for part in parts]
    under_way = max(_UNDER_WAY, sum(sizes) // 64)  # as written, decoded and assembled: three times in memory
    found: list[list[jax.Array]] = [[] for _ in wanted]
    for group in group_parts(sizes):
        together = parts[group.start : group.stop]
        values = deque(_read_parts(together, under_way))
        for part in together:
            found[part.array] += put_shard(values.popleft(), part.devices, part.wanted.sharding)
        # The host's memory for this group is free only once the devices have their copies.
        jax.block_until_ready([found[part.array] for part in together])
        _trim_heap()
    arrays = (from_local_shards(x.shape, x.dtype, x.sharding, have) for x, have in zip(wanted, found, strict=True))
    return [
        jax.random.wrap_key_data(x, impl=prng_impl_of(str(to.dtype))) if is_key(to) else x
        for (_, to), x in zip(named, arrays, strict=True)
    ]


def _stored(x: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype on disk: those of the key data for typed keys."""
    if not is_key(x):
        return x
    bits = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return jax.ShapeDtypeStruct(bits.shape, bits.dtype, sharding=x.sharding)


def group_parts(sizes: Sequence[int]) -> list[range]:
    """Divide parts into groups of neighbours to read at once.

    Args:
        sizes: Bytes of each part.

    Returns:
        Ranges of indices. A group has at most a sixteenth of all bytes, or 64 MiB if that is more; a larger part is a
        group by itself.

    >>> mib = 1 << 20
    >>> group_parts([40 * mib, 20 * mib, 30 * mib, 100 * mib])
    [range(0, 2), range(2, 3), range(3, 4)]
    """
    most, parts, start, size = max(sum(sizes) / 16, _AT_ONCE), [], 0, 0
    for i, each in enumerate(sizes):
        if i > start and size + each > most:
            parts.append(range(start, i))
            start, size = i, 0
        size += each
    return [*parts, range(start, len(sizes))] if sizes else []


@dataclass(frozen=True)
class _Part:
    """Shard of an array for some devices of this host.

    Attributes:
        file: TensorStore of the array on disk.
        wanted: Shape, dtype and sharding of the array.
        span: Start and stop of the shard in each dimension.
        devices: Devices that get the shard.
        array: Index of the array among those to read.
    """

    file: Any
    wanted: jax.ShapeDtypeStruct
    span: Span
    devices: Sequence[Any]
    array: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.span)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.wanted.dtype.itemsize

    @cached_property
    def chunk(self) -> tuple[int, ...]:
        """Shape of a chunk on disk; () for a scalar, where Zarr gives none."""
        return tuple(self.file.chunk_layout.read_chunk.shape or ())

    def chunks(self) -> Iterator[Span]:
        """Yield the spans of the chunks that overlap the shard."""
        rows = zip(self.span, self.chunk, strict=True)
        for at in product(*(range(start // n, -(-stop // n)) for (start, stop), n in rows)):
            yield tuple((k * n, (k + 1) * n) for k, n in zip(at, self.chunk, strict=True))


def _read_parts(parts: Sequence[_Part], in_flight: int) -> list[np.ndarray]:
    """Read parts into memory, each chunk once for all of them, with about `in_flight` bytes of chunks at a time."""
    whole = [_aligned(part.shape, part.wanted.dtype) for part in parts]
    pieces: dict[tuple[int, Span], list[int]] = {}
    for k, part in enumerate(parts):
        for chunk in part.chunks():
            pieces.setdefault((part.array, chunk), []).append(k)
    waiting: deque[tuple[Any, Span, list[int], int]] = deque()
    bytes_in_flight = 0
    for (_, chunk), part_indices in pieces.items():
        inside = [_common(parts[k].span, chunk) for k in part_indices]
        span = tuple((min(a for a, _ in d), max(b for _, b in d)) for d in zip(*inside, strict=True))
        file = parts[part_indices[0]].file
        size = math.prod(parts[part_indices[0]].chunk) * file.dtype.numpy_dtype.itemsize
        while waiting and bytes_in_flight + size > in_flight:
            bytes_in_flight -= _copy_chunk(parts, whole, *waiting.popleft())
        waiting.append((file[_slices(span)].read(), span, part_indices, size))
        bytes_in_flight += size
    while waiting:
        _copy_chunk(parts, whole, *waiting.popleft())
    return whole


def _copy_chunk(
    parts: Sequence[_Part], whole: Sequence[np.ndarray], reading: Any, span: Span, those: list[int], size: int
) -> int:
    """Copy a chunk that was read into the parts that overlap it, and return `size`, the chunk's bytes."""
    values = reading.result()
    for k in those:
        both = _common(parts[k].span, span)
        whole[k][_slices(both, parts[k].span)] = values[_slices(both, span)]
    return size


def _common(a: Span, b: Span) -> Span:
    """Return the intersection of two spans."""
    return tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))


def _slices(span: Span, of: Span | None = None) -> tuple[slice, ...]:
    """Return a span as an index into an array that begins where `of` does, or at 0."""
    zero = [start for start, _ in of] if of is not None else [0] * len(span)
    return tuple(slice(a - z, b - z) for (a, b), z in zip(span, zero, strict=True))


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return uninitialized memory for an array, aligned to 64 bytes."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return memory[start : start + size].view(dtype).reshape(shape)


def _opened(folder: Path, names: Sequence[str]) -> list[Any]:
    """Open arrays by name in Orbax's format: Zarr in one OCDBT key-value store. Raises ValueError."""
    import tensorstore as ts

    # TensorStore would open a pipe and wait for its writer.
    if odd := next((path for path in _paths(folder) if not path.is_file()), None):
        raise ValueError(f"{odd.relative_to(folder)} is no file")
    told: Mapping[str, Any] = json.loads(read_limited(folder / "_METADATA", _METADATA))
    # Only the store's index is cached: each chunk is read once.
    context = ts.Context({"cache_pool#places": {"total_bytes_limit": 32 << 20}})
    store = {"driver": "ocdbt", "base": folder.as_uri() + "/", "cache_pool": "cache_pool#places"}
    driver = "zarr3" if told["use_zarr3"] else "zarr"
    opening = [
        ts.open({"driver": driver, "kvstore": {**store, "path": name}}, open=True, read=True, context=context)
        for name in names
    ]
    return [each.result() for each in opening]


def _paths(folder: Path) -> Iterator[Path]:
    """Yield the paths of everything below a folder except folders."""
    for place, _, names in os.walk(folder):
        yield from (Path(place, name) for name in names)


def _widest(n: int) -> int:
    """Return the largest ratio of two neighbouring divisors of `n`, rounded up."""
    low = [k for k in range(1, math.isqrt(max(n, 1)) + 1) if n % k == 0]
    divisors = sorted({*low, *(n // k for k in low)})
    return max((math.ceil(b / a) for a, b in pairwise(divisors)), default=1)


def _trim_heap() -> None:
    """Return freed memory to the system."""
    # glibc keeps freed memory for itself, a quarter of all bytes that are read.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
