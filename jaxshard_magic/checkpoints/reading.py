"""Arrays read from disk a piece at a time, so that little more memory is taken than they have.

Orbax's own way reads all parts of an array at once, each of which is then in memory four times: as it was written,
decoded, put together, and where it was asked for.
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

from ..files import content
from ..placing import Span, from_placed, parts_here, put_part
from .objects import impl_of, is_key

CHUNK = 8 << 20  # bytes of what is written as one, where an array can be cut so
_COARSE = 16  # the most by which an array's cuts may differ in size from one to the next
_AT_ONCE = 64 << 20  # bytes
_UNDER_WAY = 16 << 20  # bytes that are decoded at once, of chunks that are as large on disk
_METADATA = 256 << 20  # bytes of what tells of the arrays
_ALIGNED = 64  # bytes: an array that begins so is taken over by a CPU device without a copy


def chunk_of(shape: Sequence[int]) -> int | None:
    """The bytes at most of what is written of an array as one; None for all that a device has, where the divisors of
    a dimension lie far apart, as of a prime number, so that chunks would be rows.

    >>> chunk_of((4096, 768)), chunk_of((50257, 768))
    (8388608, None)
    """
    return CHUNK if all(_widest(n) <= _COARSE for n in shape) else None


def read(folder: Path, target: Any) -> list[jax.Array]:
    """The arrays of a state on disk, in the order of the target's leaves: a tree of `jax.ShapeDtypeStruct` with
    shardings. Beside them a twentieth of all is in memory, or 48 MiB where that is more; on devices with a memory of
    their own also a part of an array, until it is there. Raises ValueError for arrays that are not there, of another
    shape, or damaged."""
    named, _ = tree_flatten_with_path(target)
    wanted = [_stored(x) for _, x in named]
    files = _opened(folder, [keystr(path, simple=True, separator=".") for path, _ in named])
    for (path, _), x, file in zip(named, wanted, files, strict=True):
        if tuple(file.shape) != tuple(x.shape):
            raise ValueError(f"{keystr(path)} is {list(file.shape)} on disk, not {list(x.shape)}")
    parts = [
        _Part(files[i], x, span, devices, i)
        for i, x in enumerate(wanted)
        for span, devices in parts_here(x.shape, x.sharding).items()
    ]
    sizes = [part.size for part in parts]
    under_way = max(_UNDER_WAY, sum(sizes) // 64)  # in memory three times
    found: list[list[jax.Array]] = [[] for _ in wanted]
    for group in parts_of(sizes):
        together = parts[group.start : group.stop]
        values = deque(_values(together, under_way))
        for part in together:
            found[part.array] += put_part(values.popleft(), part.devices, part.wanted.sharding)
        jax.block_until_ready([found[part.array] for part in together])
        _give_back()
    arrays = (from_placed(x.shape, x.dtype, x.sharding, have) for x, have in zip(wanted, found, strict=True))
    return [
        jax.random.wrap_key_data(x, impl=impl_of(str(to.dtype))) if is_key(to) else x
        for (_, to), x in zip(named, arrays, strict=True)
    ]


def _stored(x: Any) -> jax.ShapeDtypeStruct:
    """An array as it is on disk: typed keys are their numbers."""
    if not is_key(x):
        return x
    bits = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return jax.ShapeDtypeStruct(bits.shape, bits.dtype, sharding=x.sharding)


def parts_of(sizes: Sequence[int]) -> list[range]:
    """Neighbours that are read at once, of parts of so many bytes: a sixteenth of all together, or 64 MiB where that
    is more.

    >>> mib = 1 << 20
    >>> parts_of([40 * mib, 20 * mib, 30 * mib, 100 * mib])
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
    """What some devices of this host have of an array: `span` of the `wanted` one, which lies in `file` and is number
    `array` of those that are read."""

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
        """Bytes."""
        return math.prod(self.shape) * self.wanted.dtype.itemsize

    @cached_property
    def chunk(self) -> tuple[int, ...]:
        """The shape of what was written as one. Zarr tells none of a number."""
        return tuple(self.file.chunk_layout.read_chunk.shape or ())

    def chunks(self) -> Iterator[Span]:
        """Those that it lies in."""
        rows = zip(self.span, self.chunk, strict=True)
        for at in product(*(range(start // n, -(-stop // n)) for (start, stop), n in rows)):
            yield tuple((k * n, (k + 1) * n) for k, n in zip(at, self.chunk, strict=True))


def _values(parts: Sequence[_Part], under_way: int) -> list[np.ndarray]:
    """The parts in memory; each chunk is read once for all of them, about `under_way` bytes of chunks at a time."""
    whole = [_aligned(part.shape, part.wanted.dtype) for part in parts]
    pieces: dict[tuple[int, Span], list[int]] = {}
    for k, part in enumerate(parts):
        for chunk in part.chunks():
            pieces.setdefault((part.array, chunk), []).append(k)
    waiting: deque[tuple[Any, Span, list[int], int]] = deque()
    held = 0
    for (_, chunk), those in pieces.items():
        inside = [_common(parts[k].span, chunk) for k in those]
        span = tuple((min(a for a, _ in d), max(b for _, b in d)) for d in zip(*inside, strict=True))
        file = parts[those[0]].file
        size = math.prod(parts[those[0]].chunk) * file.dtype.numpy_dtype.itemsize
        while waiting and held + size > under_way:
            held -= _arrived(parts, whole, *waiting.popleft())
        waiting.append((file[_slices(span)].read(), span, those, size))
        held += size
    while waiting:
        _arrived(parts, whole, *waiting.popleft())
    return whole


def _arrived(
    parts: Sequence[_Part], whole: Sequence[np.ndarray], reading: Any, span: Span, those: list[int], size: int
) -> int:
    """What was read of a chunk goes to the parts that have some of it. Gives `size`, the bytes of the chunk."""
    values = reading.result()
    for k in those:
        both = _common(parts[k].span, span)
        whole[k][_slices(both, parts[k].span)] = values[_slices(both, span)]
    return size


def _common(a: Span, b: Span) -> Span:
    return tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))


def _slices(span: Span, of: Span | None = None) -> tuple[slice, ...]:
    """A span as an index, into what begins where `of` does."""
    zero = [start for start, _ in of] if of is not None else [0] * len(span)
    return tuple(slice(a - z, b - z) for (a, b), z in zip(span, zero, strict=True))


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Memory for an array, not filled."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return memory[start : start + size].view(dtype).reshape(shape)


def _opened(folder: Path, names: Sequence[str]) -> list[Any]:
    """The arrays of these names, as Orbax writes them: zarr in one key-value store of all."""
    import tensorstore as ts

    # TensorStore would wait for the writer of a pipe.
    if odd := next((path for path in _paths(folder) if not path.is_file()), None):
        raise ValueError(f"{odd.relative_to(folder)} is no file")
    told: Mapping[str, Any] = json.loads(content(folder / "_METADATA", _METADATA))
    # What lies where in the store is kept once it was read; chunks are not.
    context = ts.Context({"cache_pool#places": {"total_bytes_limit": 32 << 20}})
    store = {"driver": "ocdbt", "base": folder.as_uri() + "/", "cache_pool": "cache_pool#places"}
    driver = "zarr3" if told["use_zarr3"] else "zarr"
    opening = [
        ts.open({"driver": driver, "kvstore": {**store, "path": name}}, open=True, read=True, context=context)
        for name in names
    ]
    return [each.result() for each in opening]


def _paths(folder: Path) -> Iterator[Path]:
    """All that is in a folder and in those inside of it, but for these."""
    for place, _, names in os.walk(folder):
        yield from (Path(place, name) for name in names)


def _widest(n: int) -> int:
    """The most by which two neighbouring divisors of a number differ, as a factor."""
    low = [k for k in range(1, math.isqrt(max(n, 1)) + 1) if n % k == 0]
    divisors = sorted({*low, *(n // k for k in low)})
    return max((math.ceil(b / a) for a, b in pairwise(divisors)), default=1)


def _give_back() -> None:
    """What was freed of buffers goes to the system: glibc would keep a quarter of all that is read."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
