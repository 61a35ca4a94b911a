"""Arrays in weight files, `.safetensors` and the `.npz` of `numpy.savez`: headers, and values mapped into memory on
use."""

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
from ..files import read_limited
from .folder import filesystem_error, suggest_name

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
SAFETENSORS_DTYPES = {name: kind for kind, name in _DTYPES.items()}  # by name of the dtype
_DIMENSIONS = 32  # at most, in arrays of every version of NumPy
_DAMAGED = (  # exceptions of Python and NumPy for a damaged zip file
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
class FileArray:
    """One array of a file.

    Attributes:
        name: Name in the file.
        shape: Shape in the file.
        dtype: dtype in the file; None if it can't be read.
        dtype_name: The file's name of the dtype.
        file: Path of the file.
        start: Offset of the first byte in `file`, or in its uncompressed `member`.
        fortran: Whether the first dimension is the fastest in memory.
        member: Name of the member of a zip file, if compressed; else "".
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype | None
    dtype_name: str
    file: Path
    start: int
    fortran: bool = False
    member: str = ""

    @property
    def nbytes(self) -> int:
        """Size in bytes; 0 for a dtype that can't be read."""
        return prod(self.shape) * (0 if self.dtype is None else self.dtype.itemsize)


def is_weights(path: Path) -> bool:
    """Return whether a path is a weight file or a folder of them, by its name or its contents.

    Raises ShardError for an existing file of another kind.
    """
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


def read_headers(path: Path) -> dict[str, FileArray]:
    """Read the headers of a weight file, or of all files of a folder or an index.

    Args:
        path: File, folder or index of safetensors.

    Returns:
        Arrays by name.

    Raises:
        ShardError: A file is missing, cut off, damaged or of another kind, or a name occurs twice.
    """
    found: dict[str, FileArray] = {}
    files, index = _files(path)
    for file in files:
        if exists(file) and not isfile(file):
            raise ShardError(f"{file} is no file, but a folder, a pipe or a device: name a file of weights")
        if not exists(file):
            near = suggest_name(file, lambda each: each.name.endswith((*SUFFIXES, INDEX)))
            raise ShardError(
                f"there is no {file}.{near} {path.name} names it" if file != path else f"there is no {file}.{near}"
            )
        try:
            with open(file, "rb") as opened:
                each = _of_npz(file, opened) if file.suffix == ".npz" else _of_safetensors(file, opened)
        except OSError as error:
            raise filesystem_error(file, "read", error) from None
        for tensor in each:
            if tensor.name in found:
                there = found[tensor.name].file.name
                raise ShardError(
                    f"{file}: {tensor.name} is there twice{'' if there == file.name else f', in {there}, too'}"
                )
            found[tensor.name] = tensor
    for name, file in index.items():
        if name not in found or found[name].file.name != file:
            raise ShardError(f"{path} says that {name} is in {file}, which has none: load the files once more")
    return found


@contextmanager
def unpacked(packed: Sequence[FileArray]) -> Iterator[tuple[FileArray, ...]]:
    """Provide arrays uncompressed: compressed ones are extracted into a temporary folder, removed at exit.

    Raises ShardError if they can't be extracted.
    """
    if not any(tensor.member for tensor in packed):
        yield tuple(packed)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield tuple(_unpacked(each, Path(folder, str(i))) for i, each in enumerate(packed))


def _unpacked(tensor: FileArray, to: Path) -> FileArray:
    if not tensor.member:
        return tensor
    try:
        with zipfile.ZipFile(tensor.file) as archive, archive.open(tensor.member) as packed, open(to, "xb") as file:
            copyfileobj(packed, file, 1 << 20)
    except (*_DAMAGED, OSError) as error:
        raise filesystem_error(tensor.file, "read", error) from None
    return replace(tensor, file=to, member="")


@contextmanager
def memory_mapped(tensor: FileArray) -> Iterator[np.ndarray]:
    """Provide an uncompressed array as a memory map of its file: pages are read on use. Raises ShardError."""
    if tensor.dtype is None:
        raise ShardError(f"{tensor.file}: {tensor.name} is of dtype {tensor.dtype_name}, which can't be read")
    try:
        with open(tensor.file, "rb") as file:
            yield (_mapped(tensor, tensor.dtype, file) if tensor.nbytes else np.empty(tensor.shape, tensor.dtype))
    except OSError as error:
        raise filesystem_error(tensor.file, "read", error) from None


def _mapped(tensor: FileArray, dtype: np.dtype, file: Any) -> np.ndarray:
    """Return an array over a memory map of its bytes. Raises ShardError if the file is too short."""
    size = file.seek(0, 2)
    if size < tensor.start + tensor.nbytes:
        raise _cut_off(tensor.file, size, tensor.start + tensor.nbytes)
    # mmap takes only multiples of its granularity as offsets.
    pages = tensor.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    length = tensor.start - pages + tensor.nbytes
    data = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=pages)
    flat = np.frombuffer(data, np.uint8)[tensor.start - pages :].view(dtype)
    return flat.reshape(tensor.shape[::-1]).T if tensor.fortran else flat.reshape(tensor.shape)


def _files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files of a path, and for an index the file name of each array. Raises ShardError."""
    if isdir(path):
        index = _index_of(path)
        if index is None:
            return sorted(path.glob("*.safetensors")), {}
        path = index
    if not path.name.endswith(INDEX):
        return [path], {}
    try:
        told = json.loads(read_limited(path, _HEADER))["weight_map"]
        index = {str(name): str(file) for name, file in told.items()}
    except OSError as error:
        raise filesystem_error(path, "read", error) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError):
        raise ShardError(f"{path} is no index of safetensors: it has no weight_map of names and files") from None
    # A name with folders in it could lead anywhere on the disk.
    odd = next((file for file in index.values() if Path(file).name != file or file in ("", "..")), None)
    if odd is not None:
        raise ShardError(f"{path} names {odd or 'nothing'}, which is not beside it")
    return [path.with_name(file) for file in dict.fromkeys(index.values())], index


def _index_of(folder: Path) -> Path | None:
    """Return the index of safetensors in a folder; None without one. Raises ShardError for several."""
    found = sorted(folder.glob(f"*{INDEX}"))
    if len(found) > 1:
        raise ShardError(f"{folder} has {len(found)} indexes, {found[0].name} and {found[1].name}: name one of them")
    return next(iter(found), None)


def _of_safetensors(path: Path, file: BinaryIO) -> list[FileArray]:
    """Read the header of a safetensors file. Raises ShardError unless its arrays fill the file without gap or
    overlap."""
    size = file.seek(0, 2)
    file.seek(0)
    head = file.read(8)
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
    if len(head) < 8 or length > _HEADER:
        raise ShardError(f"{path} is no file of safetensors: its first 8 bytes are not the length of a header")
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
            of = f"{tensor.dtype_name}[{','.join(map(str, tensor.shape))}]"
            raise ShardError(
                f"{path}: {tensor.name} is {of} by the header, and bytes {tensor.start:,} to {end:,}, which don't "
                "agree with that or with their neighbours: the file is damaged"
            )
        at = end
    if at != size:
        raise _cut_off(path, size, at)
    return [tensor for tensor, _ in found]


class _Twice(ValueError):
    """Duplicate name in a header."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return pairs of a JSON object as a dict. Raises `_Twice` for equal names."""
    found = dict(pairs)
    # Of equal names, Python's json silently keeps the last.
    if len(found) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise _Twice(f"{name} is there twice")
    return found


def _row(path: Path, name: str, row: Mapping[str, Any], begin: int) -> tuple[FileArray, int]:
    """Return the array of a header's row, and the offset of its end in the file. Raises ValueError, TypeError or
    KeyError."""
    start, end = row["data_offsets"]
    shape, kind = tuple(row["shape"]), row["dtype"]
    if not all(type(n) is int and n >= 0 for n in (start, end, *shape)) or end < start:
        raise ValueError
    if len(shape) > _DIMENSIONS or not isinstance(kind, str):
        raise ValueError
    dtype = jnp.dtype(_DTYPES[kind]).newbyteorder("<") if kind in _DTYPES else None
    return FileArray(name, shape, dtype, kind, path, begin + start), begin + end


def _of_npz(path: Path, file: BinaryIO) -> list[FileArray]:
    """Read the headers of the arrays in an `.npz` file. Raises ShardError."""
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


def _member(path: Path, file: BinaryIO, each: zipfile.ZipInfo, packed: Any) -> FileArray:
    """Read the header of one array of an `.npz` file. Raises ValueError for structured dtypes and wrong sizes."""
    version, _ = np.lib.format.read_magic(packed)
    if version not in _NPY:
        raise ValueError(f"{each.filename} is of a kind of array with names")
    shape, fortran, dtype = _NPY[version](packed)
    name = each.filename.removesuffix(".npy")
    kind = str(dtype)
    # NumPy has no name for bfloat16, and writes it as raw values of two bytes.
    if dtype == np.dtype("V2"):
        dtype = jnp.dtype("bfloat16")
    start, member = packed.tell(), each.filename
    if each.compress_type == zipfile.ZIP_STORED:
        here = file.tell()
        # A zip member's values follow its local header of 30 bytes, which ends in the lengths of the name and the extra
        # field between the two.
        file.seek(each.header_offset + 26)
        start += each.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
        file.seek(here)
        member = ""
    readable = dtype.kind in "biufc" or dtype == jnp.dtype("bfloat16")
    tensor = FileArray(name, tuple(shape), dtype if readable else None, kind, path, start, fortran, member)
    if readable and packed.tell() + tensor.nbytes != each.file_size:
        raise ValueError(f"{name} has {each.file_size - packed.tell():,} bytes and needs {tensor.nbytes:,}")
    return tensor


def _first(error: Exception) -> str:
    """Return an error's text on one line, at most 200 characters."""
    return re.sub(r"\s+", " ", str(error))[:200] or type(error).__name__


def _cut_off(path: Path, size: int, wanted: int) -> ShardError:
    """Return the error for a file shorter or longer than its header says."""
    more = "is cut off" if size < wanted else "has more behind its arrays"
    return ShardError(f"{path} {more}: it has {size:,} bytes and its header tells of {wanted:,}; load it once more")
