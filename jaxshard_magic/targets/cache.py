"""What compilers said of programs, kept in the user's cache folder for the next look: a file of JSON each."""

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

from ..files import close_to_others, content, inflated, own_folder, put_own
from ..packages import CUDA, TPU, versions
from .built import Built, MemoryStats

SIZE = 500_000_000  # bytes; what was used least recently goes first
FORM = 1  # of what is kept
_INFLATED = 4 * SIZE  # bytes of one of them as JSON
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError)


def folder() -> Path:
    """Where all of it lies. The variable XDG_CACHE_HOME moves it, as other programs' caches."""
    return Path(platformdirs.user_cache_dir("jaxshard_magic", appauthor=False))


def key_of(program: bytes, topology: Mapping[str, Any], order: Sequence[int], tupled: bool) -> str:
    """The same for the same program, target, and versions of the compilers."""
    compilers = sorted(versions(("jaxlib", *TPU, *CUDA)).items())
    parts = (FORM, sorted(topology.items()), list(order), tupled, compilers)
    return hashlib.sha256(repr(parts).encode() + program).hexdigest()


def get(key: str) -> Built | None:
    """What was kept under a key; None where there is nothing, or nothing readable."""
    try:
        path = _compiled() / key
        built = _built(json.loads(inflated(content(path, SIZE), _INFLATED)))
        os.utime(path)
    except (*_UNREADABLE, OSError):
        return None
    return built


def put(key: str, built: Built) -> None:
    """Keep it. A cache that can't be written keeps nothing."""
    row = asdict(built) | {"proto": b85encode(built.proto).decode()}
    packed = zlib.compress(json.dumps(row).encode(), 1)
    with suppress(OSError):
        put_own(_compiled() / key, packed)
        _drop_oldest()


def _compiled() -> Path:
    return own_folder(own_folder(folder()) / "compiled")


def _built(row: Mapping[str, Any]) -> Built:
    stats = None if row["stats"] is None else MemoryStats(**row["stats"])
    decoded = {"proto": b85decode(row["proto"]), "stats": stats, "log": tuple(row["log"])}
    return Built(**{**row, **decoded})


def _drop_oldest() -> None:
    """Until there are at most SIZE bytes; what stays is closed to others. Other processes may do so meanwhile."""
    files = [(path, path.stat()) for path in _compiled().rglob("*") if path.is_file()]
    held = sum(found.st_size for _, found in files)
    for path, found in sorted(files, key=lambda each: each[1].st_mtime_ns):
        if held > SIZE:
            path.unlink(missing_ok=True)
            held -= found.st_size
        else:
            close_to_others(path)
