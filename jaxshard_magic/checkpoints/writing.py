"""Files of weights written a part at a time, there as a whole or not at all."""

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

from ..coordination import from_first
from ..errors import ShardError
from ..files import NewFile
from ..placing import parts
from .folder import told_of
from .rename import Named, Order, Rule, to_there
from .tensors import KINDS, SUFFIXES

Piece = tuple[str, tuple[slice, ...], np.ndarray]  # of an array of the state: its name, where, and the values


@dataclass(frozen=True)
class Out:
    """An array as the file will have it: of the state's array `named.here`, at the numbers of `named`, its dimensions
    in the order `dims`."""

    named: Named
    shape: tuple[int, ...]
    dtype: np.dtype
    dims: Order | None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def save(
    path: Path,
    arrays: Mapping[str, Any],
    rules: Sequence[Rule] = (),
    *,
    force: bool = False,
    about: Mapping[str, str],
) -> int:
    """Write arrays of jax and numpy, by the state's names, into a file of weights, and how many it has then.

    One part of an array is on this host at a time, in files that are mapped. On several hosts, which come here
    together, the first one writes. `about`: text for the header of safetensors. Raises ShardError, with no file
    changed, for one that is there without `force`, names and dtypes that it can't have, and what the disk refuses.
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
            with NewFile(path) as new:
                if path.suffix == ".npz":
                    _write_npz(new.file, path.parent, outs, pieces)
                else:
                    _write_safetensors(new.file, outs, pieces, about)
                new.put()
        except OSError as error:
            raise told_of(path, "write", error) from None
        finally:
            _gone_through(pieces)  # other hosts give their parts of all of them
        return ""

    if jax.process_index():
        _gone_through(pieces)
    from_first(write)
    return len(outs)


def _outs(path: Path, arrays: Mapping[str, Any], rules: Sequence[Rule]) -> list[Out]:
    if path.suffix not in SUFFIXES:
        raise ShardError(
            f"{path}: weights are written into one file, .safetensors or .npz, not an index of several"
        )
    found = []
    for named in to_there(rules, {name: np.shape(x) for name, x in arrays.items()}, path.name):
        shape, dtype = np.shape(arrays[named.here])[len(named.numbers) :], np.dtype(arrays[named.here].dtype)
        order = None if named.rule is None else named.rule.dims(named.here, len(shape))
        dims = None if order is None else tuple(np.argsort(order).tolist())
        if path.suffix == ".npz" and dtype.isbuiltin != 1 and dtype != jnp.bfloat16:
            raise ShardError(f"{named.here} is {dtype}, which .npz has no name for: save it as .safetensors")
        if path.suffix != ".npz" and dtype.name not in KINDS:
            raise ShardError(f"{named.here} is {dtype}, which safetensors has not: convert it first")
        found.append(Out(named, shape if dims is None else tuple(shape[d] for d in dims), dtype, dims))
    return found


def _pieces(arrays: Mapping[str, Any]) -> Iterator[Piece]:
    for name, x in arrays.items():
        for index, values in parts(x):
            yield name, index, values


def _gone_through(pieces: Iterable[Piece]) -> None:
    for _ in pieces:
        pass


def _write_safetensors(
    file: BinaryIO, outs: Sequence[Out], pieces: Iterator[Piece], about: Mapping[str, str]
) -> None:
    header: dict[str, Any] = {"__metadata__": dict(about)}
    starts, end = dict[str, int](), 0
    for out in sorted(outs, key=lambda out: (-out.dtype.itemsize, out.named.there)):
        starts[out.named.there] = end
        header[out.named.there] = {
            "dtype": KINDS[out.dtype.name],
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
        _fill(file, {out: begin + starts[out.named.there] for out in mine}, each)
    os.fsync(file.fileno())


def _write_npz(file: BinaryIO, folder: Path, outs: Sequence[Out], pieces: Iterator[Piece]) -> None:
    of = _by_array(outs)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, each in groupby(pieces, key=lambda piece: piece[0]):
            mine, starts, end = of[name], dict[Out, int](), 0
            for out in mine:
                starts[out], end = end, end + out.nbytes
            with tempfile.TemporaryFile(dir=folder) as scratch:
                reserve(scratch, end)
                views = _fill(scratch, {out: at for out, at in starts.items() if out.nbytes}, each)
                for out in mine:
                    with archive.open(f"{out.named.there}.npy", "w", force_zip64=True) as member:
                        values = views[out] if out.nbytes else np.empty(out.shape, out.dtype)
                        np.lib.format.write_array(member, values, allow_pickle=False)
                views.clear()
    file.flush()
    os.fsync(file.fileno())


def _by_array(outs: Iterable[Out]) -> dict[str, list[Out]]:
    """What the file has of each array of the state."""
    found = defaultdict[str, list[Out]](list)
    for out in outs:
        found[out.named.here].append(out)
    return found


def reserve(file: Any, size: int) -> None:
    """Make a file so long, on disk: what is then written through a map of it finds its room. Raises OSError where there
    is none."""
    start = file.seek(0, 2)
    if size > start and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), start, size - start)
    elif size > start:
        for at in range(start, size, 1 << 20):
            file.write(b"\0" * min(1 << 20, size - at))
    file.flush()


def _fill(file: Any, starts: Mapping[Out, int], pieces: Iterable[Piece]) -> dict[Out, np.ndarray]:
    """Write the pieces of an array of the state into the arrays that a file has of it, from their first bytes on; these
    arrays, as they lie in the file."""
    if not starts:
        _gone_through(pieces)
        return {}
    first = min(starts.values()) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    end = max(at + out.nbytes for out, at in starts.items())
    data = mmap.mmap(file.fileno(), end - first, offset=first)
    flat = np.frombuffer(data, np.uint8)
    views = {
        out: flat[at - first : at - first + out.nbytes].view(out.dtype).reshape(out.shape)
        for out, at in starts.items()
    }
    for _, index, values in pieces:
        for out, view in views.items():
            lead = len(out.named.numbers)
            inside = [
                number - (part.start or 0) for number, part in zip(out.named.numbers, index, strict=False)
            ]
            if any(not 0 <= i < n for i, n in zip(inside, values.shape, strict=False)):
                continue
            turned = view if out.dims is None else view.transpose(np.argsort(out.dims))
            turned[index[lead:]] = values[tuple(inside)]
    return views
