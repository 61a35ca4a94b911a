"""Results of compilers in the user's cache folder, one compressed file of JSON each."""

import hashlib
import json
import os
import zlib
from base64 import b85decode, b85encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import platformdirs

from ..files import inflated, make_private, private_folder, read_limited, write_private
from ..packages import CUDA, TPU, versions
from .worker import CompileResult, MemoryStats

SIZE = 500_000_000  # bytes of all files; the least recently used are removed first
FORM = 1  # version of the file format, part of each key
_INFLATED = 4 * SIZE  # most bytes of one result as JSON
# What a damaged file, or one of another program, may raise.
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError)


def folder() -> Path:
    """Return the cache folder of this package. XDG_CACHE_HOME moves it, like other programs' caches."""
    return Path(platformdirs.user_cache_dir("jaxshard_magic", appauthor=False))


def key_of(program: bytes, topology: Mapping[str, Any], order: Sequence[int], tupled: bool) -> str:
    """Return a key that is equal for equal programs, targets, orders of devices and versions of the compilers."""
    compilers = sorted(versions(("jaxlib", *TPU, *CUDA)).items())
    parts = (FORM, sorted(topology.items()), list(order), tupled, compilers)
    return hashlib.sha256(repr(parts).encode() + program).hexdigest()


def get(key: str) -> CompileResult | None:
    """Return the result under a key; None if there is none or it can't be read."""
    try:
        path = _compiled() / key
        built = _built(json.loads(inflated(read_limited(path, SIZE), _INFLATED)))
        # Marks the file as used: `_drop_oldest` starts with those unused for longest.
        os.utime(path)
    except (*_UNREADABLE, OSError):
        return None
    return built


def put(key: str, built: CompileResult) -> None:
    """Store a result under a key. A cache that can't be written stores nothing, without an error."""
    row = asdict(built) | {"proto": b85encode(built.proto).decode()}
    packed = zlib.compress(json.dumps(row).encode(), 1)
    with suppress(OSError):
        write_private(_compiled() / key, packed)
        _drop_oldest()


def _compiled() -> Path:
    return private_folder(private_folder(folder()) / "compiled")


def _built(row: Mapping[str, Any]) -> CompileResult:
    stats = None if row["stats"] is None else MemoryStats(**row["stats"])
    decoded = {"proto": b85decode(row["proto"]), "stats": stats, "log": tuple(row["log"])}
    return CompileResult(**{**row, **decoded})


def _drop_oldest() -> None:
    """Remove least recently used files until 500 MB are left, and make the others private to the user."""
    files = [(path, path.stat()) for path in _compiled().rglob("*") if path.is_file()]
    held = sum(found.st_size for _, found in files)
    for path, found in sorted(files, key=lambda each: each[1].st_mtime_ns):
        if held > SIZE:
            # Another process may have removed the file meanwhile.
            path.unlink(missing_ok=True)
            held -= found.st_size
        else:
            make_private(path)
