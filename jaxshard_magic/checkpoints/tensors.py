"""Arrays as they lie in files of weights, safetensors and what `numpy.savez` writes: only what is used is read."""

import json
import lzma
import mmap
import re
import struct
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from os.path import exists, isdir, isfile
from pathlib import Path
from shutil import copyfileobj
from tokenize import TokenError
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from ..errors import ShardError
from ..files import content
from .folder import nearest_to, told_of

SUFFIXES = (".safetensors", ".npz")
INDEX = ".safetensors.index.json"
_HEADER = 100_000_000  # bytes; the format allows no more
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
KINDS = {name: kind for kind, name in _DTYPES.items()}  # safetensors' names of dtypes
_DIMENSIONS = 32  # which numpy's arrays have at most, of every version
_DAMAGED = (  # what Python and numpy say of a zip file that is
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    LookupError,
    MemoryError,
    RecursionError,
    struct.error,
    TokenError,
    SyntaxError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    TypeError,
    OverflowError,
    EOFError,
)
_NPY = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}


@dataclass(frozen=True)
class Tensor:
    """One array of a file.

    `dtype`: as it lies there, None where `kind`, the file's name of it, is
    none that can be read. `start`: its first byte in `file`, or in the file's `member` where that is compressed.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype | None
    kind: str
    file: Path
    start: int
    fortran: bool = False
    member: str = ""

    @property
    def nbytes(self) -> int:
        """Its bytes; 0 of a dtype that can't be read."""
        return prod(self.shape) * (0 if self.dtype is None else self.dtype.itemsize)


def is_weights(path: Path) -> bool:
    """Is this the path of a file of weights, or a folder of them? Raises ShardError for a file of another kind."""
    if path.name.endswith((*SUFFIXES, INDEX)):
        return True
    if isdir(path):
        return _index_of(path) is not None or next(path.glob("*.safetensors"), None) is not None
    if isfile(path):
        raise ShardError(
            f"{path} is a file that is not read: weights are read of .safetensors and .npz, as "
            "safetensors.torch.save_file and numpy.savez write them, and checkpoints are folders"
        )
    return False


def tensors(path: Path) -> dict[str, Tensor]:
    """The arrays of a file of weights by name, of a folder or an index those of all its files. Raises ShardError for
    what is no such file, is cut off or says what can't be."""
    found: dict[str, Tensor] = {}
    files, index = _files(path)
    for file in files:
        if exists(file) and not isfile(file):
            raise ShardError(f"{file} is no file, but a folder, a pipe or a device: name a file of weights")
        if not exists(file):
            near = nearest_to(file, lambda each: each.name.endswith((*SUFFIXES, INDEX)))
            raise ShardError(
                f"there is no {file}.{near} {path.name} names it"
                if file != path
                else f"there is no {file}.{near}"
            )
        try:
            with open(file, "rb") as opened:
                each = _of_npz(file, opened) if file.suffix == ".npz" else _of_safetensors(file, opened)
        except OSError as error:
            raise told_of(file, "read", error) from None
        for tensor in each:
            if tensor.name in found:
                there = found[tensor.name].file.name
                raise ShardError(
                    f"{file}: {tensor.name} is there twice{'' if there == file.name else f', in {there}, too'}"
                )
            found[tensor.name] = tensor
    for name, file in index.items():
        if name not in found or found[name].file.name != file:
            raise ShardError(
                f"{path} says that {name} is in {file}, which has none: load the files once more"
            )
    return found


@contextmanager
def unpacked(packed: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """The arrays as they lie in files, those that are compressed in a folder that is there meanwhile. Raises ShardError
    where they can't be unpacked."""
    if not any(tensor.member for tensor in packed):
        yield tuple(packed)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield tuple(_unpacked(each, Path(folder, str(i))) for i, each in enumerate(packed))


def _unpacked(tensor: Tensor, to: Path) -> Tensor:
    if not tensor.member:
        return tensor
    try:
        with (
            zipfile.ZipFile(tensor.file) as archive,
            archive.open(tensor.member) as packed,
            open(to, "xb") as file,
        ):
            copyfileobj(packed, file, 1 << 20)
    except (*_DAMAGED, OSError) as error:
        raise told_of(tensor.file, "read", error) from None
    return replace(tensor, file=to, member="")


@contextmanager
def as_it_lies(tensor: Tensor) -> Iterator[np.ndarray]:
    """An unpacked array as a part of its file, of which only what is used is read. Raises ShardError where it can't
    be."""
    if tensor.dtype is None:
        raise ShardError(f"{tensor.file}: {tensor.name} is of dtype {tensor.kind}, which can't be read")
    try:
        with open(tensor.file, "rb") as file:
            yield (
                _mapped(tensor, tensor.dtype, file) if tensor.nbytes else np.empty(tensor.shape, tensor.dtype)
            )
    except OSError as error:
        raise told_of(tensor.file, "read", error) from None


def _mapped(tensor: Tensor, dtype: np.dtype, file: Any) -> np.ndarray:
    size = file.seek(0, 2)
    if size < tensor.start + tensor.nbytes:
        raise _cut_off(tensor.file, size, tensor.start + tensor.nbytes)
    pages = tensor.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    length = tensor.start - pages + tensor.nbytes
    data = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=pages)
    flat = np.frombuffer(data, np.uint8)[tensor.start - pages :].view(dtype)
    return flat.reshape(tensor.shape[::-1]).T if tensor.fortran else flat.reshape(tensor.shape)


def _files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """The files that a path stands for, and of an index which of them has each name."""
    if isdir(path):
        index = _index_of(path)
        if index is None:
            return sorted(path.glob("*.safetensors")), {}
        path = index
    if not path.name.endswith(INDEX):
        return [path], {}
    try:
        told = json.loads(content(path, _HEADER))["weight_map"]
        index = {str(name): str(file) for name, file in told.items()}
    except OSError as error:
        raise told_of(path, "read", error) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError):
        raise ShardError(
            f"{path} is no index of safetensors: it has no weight_map of names and files"
        ) from None
    odd = next((file for file in index.values() if Path(file).name != file or file in ("", "..")), None)
    if odd is not None:
        raise ShardError(f"{path} names {odd or 'nothing'}, which is not beside it")
    return [path.with_name(file) for file in dict.fromkeys(index.values())], index


def _index_of(folder: Path) -> Path | None:
    found = sorted(folder.glob(f"*{INDEX}"))
    if len(found) > 1:
        raise ShardError(
            f"{folder} has {len(found)} indexes, {found[0].name} and {found[1].name}: name one of them"
        )
    return next(iter(found), None)


def _of_safetensors(path: Path, file: BinaryIO) -> list[Tensor]:
    size = file.seek(0, 2)
    file.seek(0)
    head = file.read(8)
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
    if len(head) < 8 or length > _HEADER:
        raise ShardError(
            f"{path} is no file of safetensors: its first 8 bytes are not the length of a header"
        )
    if 8 + length > size:
        raise _cut_off(path, size, 8 + length)
    try:
        pairs = json.loads(file.read(length), object_pairs_hook=_once)
        rows = {name: row for name, row in pairs.items() if name != "__metadata__"}
        found = [_row(path, name, row, 8 + length) for name, row in rows.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        why = f" ({error})" if isinstance(error, _Twice) else ""
        raise ShardError(f"{path} has a header that is none of safetensors{why}: it is damaged") from None
    at = 8 + length
    for tensor, end in sorted(found, key=lambda each: (each[0].start, each[1])):
        if tensor.start != at or (tensor.dtype is not None and end - at != tensor.nbytes):
            of = f"{tensor.kind}[{','.join(map(str, tensor.shape))}]"
            raise ShardError(
                f"{path}: {tensor.name} is {of} by the header, and bytes {tensor.start:,} to {end:,}, which don't "
                "agree with that or with their neighbours: the file is damaged"
            )
        at = end
    if at != size:
        raise _cut_off(path, size, at)
    return [tensor for tensor, _ in found]


class _Twice(ValueError):
    """A name that a header has two times."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise _Twice(f"{name} is there twice")
    return found


def _row(path: Path, name: str, row: Mapping[str, Any], begin: int) -> tuple[Tensor, int]:
    start, end = row["data_offsets"]
    shape, kind = tuple(row["shape"]), row["dtype"]
    if not all(type(n) is int and n >= 0 for n in (start, end, *shape)) or end < start:
        raise ValueError
    if len(shape) > _DIMENSIONS or not isinstance(kind, str):
        raise ValueError
    dtype = jnp.dtype(_DTYPES[kind]).newbyteorder("<") if kind in _DTYPES else None
    return Tensor(name, shape, dtype, kind, path, begin + start), begin + end


def _of_npz(path: Path, file: BinaryIO) -> list[Tensor]:
    found = []
    try:
        with zipfile.ZipFile(file) as archive:
            for each in archive.infolist():
                if each.filename.endswith(".npy"):
                    with archive.open(each) as packed:
                        found.append(_member(path, file, each, packed))
    except (*_DAMAGED, OSError) as error:
        raise ShardError(f"{path} is no .npz that numpy wrote, or is cut off: {_first(error)}") from None
    return found


def _member(path: Path, file: BinaryIO, each: zipfile.ZipInfo, packed: Any) -> Tensor:
    version, _ = np.lib.format.read_magic(packed)
    if version not in _NPY:
        raise ValueError(f"{each.filename} is of a kind of array with names")
    shape, fortran, dtype = _NPY[version](packed)
    name = each.filename.removesuffix(".npy")
    kind = str(dtype)
    if dtype == np.dtype("V2"):  # what numpy writes of the one 16-bit float that it has no name for
        dtype = jnp.dtype("bfloat16")
    start, member = packed.tell(), each.filename
    if each.compress_type == zipfile.ZIP_STORED:
        here = file.tell()
        file.seek(each.header_offset + 26)
        start += each.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
        file.seek(here)
        member = ""
    readable = dtype.kind in "biufc" or dtype == jnp.dtype("bfloat16")
    tensor = Tensor(name, tuple(shape), dtype if readable else None, kind, path, start, fortran, member)
    if readable and packed.tell() + tensor.nbytes != each.file_size:
        raise ValueError(f"{name} has {each.file_size - packed.tell():,} bytes and needs {tensor.nbytes:,}")
    return tensor


def _first(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error))[:200] or type(error).__name__


def _cut_off(path: Path, size: int, wanted: int) -> ShardError:
    more = "is cut off" if size < wanted else "has more behind its arrays"
    return ShardError(
        f"{path} {more}: it has {size:,} bytes and its header tells of {wanted:,}; load it once more"
    )
