"""Write weight files a shard at a time; a file is complete or absent."""

import json
import mmap
import os
import struct
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from os.path import exists, isfile
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from ..coordination import run_on_first
from ..device_arrays import iterate_parts
from ..errors import ShardError
from ..files import AtomicFile
from .folder import filesystem_error
from .name_rules import NamePair, NameRule, Order, pair_state_names
from .weight_files import SAFETENSORS_DTYPES, SUFFIXES

Piece = tuple[str, tuple[slice, ...], np.ndarray]  # name of the state's array, index of the shard, values


@dataclass(frozen=True)
class OutputArray:
    """Array of the file to write.

    Attributes:
        named: Name in the file, and name and position in the state.
        shape: Shape in the file.
        dtype: dtype in the file.
        dims: Dimensions of the state's array in the file's order; None to keep them.
    """

    named: NamePair
    shape: tuple[int, ...]
    dtype: np.dtype
    dims: Order | None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def save_weights(
    path: Path,
    arrays: Mapping[str, Any],
    rules: Sequence[NameRule] = (),
    *,
    force: bool = False,
    metadata: Mapping[str, str],
) -> int:
    """Write arrays into a weight file.

    One shard of an array is on this host at a time, in memory maps of files. All hosts must call this together; the
    first one writes.

    Args:
        path: Path that ends in `.safetensors` or `.npz`.
        arrays: Arrays of JAX and numpy by the state's names.
        rules: Renaming rules.
        force: Whether to replace an existing file.
        metadata: Text for the header of a safetensors file.

    Returns:
        Number of arrays in the file.

    Raises:
        ShardError: The file exists and `force` is false, the format lacks a name or dtype, or the disk fails. No file
            is changed then.
    """
    outs = _outs(path, arrays, rules)
    pieces = _pieces(arrays)

    def write() -> str:
        try:
            if exists(path) and not isfile(path):
                raise ShardError(f"{path} is no file, but a folder, a pipe or a device: name another one")
            if exists(path) and not force:
                raise ShardError(
                    f"{path} is there already: name another file, or write over it with --force, force=True"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            with AtomicFile(path) as new:
                if path.suffix == ".npz":
                    _write_npz(new.file, path.parent, outs, pieces)
                else:
                    _write_safetensors(new.file, outs, pieces, metadata)
                new.commit()
        except OSError as error:
            raise filesystem_error(path, "write", error) from None
        finally:
            _gone_through(pieces)  # also after an error: other hosts take part in the transfer of each shard
        return ""

    # Before the wait in `run_on_first`: host 0 needs this host's shards while it writes.
    if jax.process_index():
        _gone_through(pieces)
    run_on_first(write)
    return len(outs)


def _outs(path: Path, arrays: Mapping[str, Any], rules: Sequence[NameRule]) -> list[OutputArray]:
    """Return the arrays of the file to write. Raises ShardError for names and dtypes that the format lacks."""
    if path.suffix not in SUFFIXES:
        raise ShardError(f"{path}: weights are written into one file, .safetensors or .npz, not an index of several")
    found = []
    for named in pair_state_names(rules, {name: np.shape(x) for name, x in arrays.items()}, path.name):
        shape, dtype = (
            np.shape(arrays[named.state_name])[len(named.stack_index) :],
            np.dtype(arrays[named.state_name].dtype),
        )
        order = None if named.rule is None else named.rule.dims(named.state_name, len(shape))
        dims = None if order is None else tuple(np.argsort(order).tolist())
        if path.suffix == ".npz" and dtype.isbuiltin != 1 and dtype != jnp.bfloat16:
            raise ShardError(f"{named.state_name} is {dtype}, which .npz has no name for: save it as .safetensors")
        if path.suffix != ".npz" and dtype.name not in SAFETENSORS_DTYPES:
            raise ShardError(f"{named.state_name} is {dtype}, which safetensors has not: convert it first")
        found.append(OutputArray(named, shape if dims is None else tuple(shape[d] for d in dims), dtype, dims))
    return found


def _pieces(arrays: Mapping[str, Any]) -> Iterator[Piece]:
    """Yield the arrays shard by shard."""
    for name, x in arrays.items():
        for index, values in iterate_parts(x):
            yield name, index, values


def _gone_through(pieces: Iterable[Piece]) -> None:
    """Consume the rest of the shards, so that this host takes part in the transfer of each."""
    for _ in pieces:
        pass


def _write_safetensors(
    file: BinaryIO, outs: Sequence[OutputArray], pieces: Iterator[Piece], about: Mapping[str, str]
) -> None:
    """Write a safetensors file: length of the header, header, values."""
    header: dict[str, Any] = {"__metadata__": dict(about)}
    starts, end = dict[str, int](), 0
    # In this order, and with a header padded to 8 bytes, each array begins at a multiple of its item size.
    for out in sorted(outs, key=lambda out: (-out.dtype.itemsize, out.named.file_name)):
        starts[out.named.file_name] = end
        header[out.named.file_name] = {
            "dtype": SAFETENSORS_DTYPES[out.dtype.name],
            "shape": out.shape,
            "data_offsets": [end, end + out.nbytes],
        }
        end += out.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    begin = file.tell()
    reserve(file, begin + end)
    of = _by_array(outs)
    for name, each in groupby(pieces, key=lambda piece: piece[0]):
        mine = [out for out in of[name] if out.nbytes]
        _fill(file, {out: begin + starts[out.named.file_name] for out in mine}, each)
    os.fsync(file.fileno())


def _write_npz(file: BinaryIO, folder: Path, outs: Sequence[OutputArray], pieces: Iterator[Piece]) -> None:
    """Write an `.npz` file. Each array is assembled in a memory-mapped scratch file, as members of a zip are written in
    order."""
    of = _by_array(outs)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, each in groupby(pieces, key=lambda piece: piece[0]):
            mine, starts, end = of[name], dict[OutputArray, int](), 0
            for out in mine:
                starts[out], end = end, end + out.nbytes
            with tempfile.TemporaryFile(dir=folder) as scratch:
                reserve(scratch, end)
                views = _fill(scratch, {out: at for out, at in starts.items() if out.nbytes}, each)
                for out in mine:
                    # zipfile must know before it writes that a member may be larger than 2 GiB.
                    with archive.open(f"{out.named.file_name}.npy", "w", force_zip64=True) as member:
                        values = views[out] if out.nbytes else np.empty(out.shape, out.dtype)
                        np.lib.format.write_array(member, values, allow_pickle=False)
                views.clear()
    file.flush()
    os.fsync(file.fileno())


def _by_array(outs: Iterable[OutputArray]) -> dict[str, list[OutputArray]]:
    """Return the file's arrays by the state's name."""
    found = defaultdict[str, list[OutputArray]](list)
    for out in outs:
        found[out.named.state_name].append(out)
    return found


def reserve(file: Any, size: int) -> None:
    """Extend a file to `size` bytes of allocated disk space. Raises OSError if there is no room."""
    start = file.seek(0, 2)
    # A write through a memory map can't report a full disk, so the space is taken before.
    if size > start and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), start, size - start)
    elif size > start:
        for at in range(start, size, 1 << 20):
            file.write(b"\0" * min(1 << 20, size - at))
    file.flush()


def _fill(file: Any, starts: Mapping[OutputArray, int], pieces: Iterable[Piece]) -> dict[OutputArray, np.ndarray]:
    """Write the shards of one array of the state into a file.

    Args:
        file: Open file with room for the arrays.
        starts: Offset of each array of the file that is made of this array.
        pieces: All shards of the array.

    Returns:
        The arrays as memory maps of the file.
    """
    if not starts:
        _gone_through(pieces)
        return {}
    # mmap takes only multiples of its granularity as offsets.
    first = min(starts.values()) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    end = max(at + out.nbytes for out, at in starts.items())
    data = mmap.mmap(file.fileno(), end - first, offset=first)
    flat = np.frombuffer(data, np.uint8)
    views = {
        out: flat[at - first : at - first + out.nbytes].view(out.dtype).reshape(out.shape) for out, at in starts.items()
    }
    for _, index, values in pieces:
        for out, view in views.items():
            lead = len(out.named.stack_index)
            inside = [number - (part.start or 0) for number, part in zip(out.named.stack_index, index, strict=False)]
            if any(not 0 <= i < n for i, n in zip(inside, values.shape, strict=False)):
                continue
            turned = view if out.dims is None else view.transpose(np.argsort(out.dims))
            turned[index[lead:]] = values[tuple(inside)]
    return views
