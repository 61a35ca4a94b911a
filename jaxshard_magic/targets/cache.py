"""What compilers said of programs, kept in the user's cache folder for the next look."""

import hashlib
import shutil
import sqlite3
import zlib
from base64 import b85decode, b85encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import diskcache
import platformdirs

from ..packages import CUDA, TPU, installed
from .built import Built, MemoryStats

SIZE = 500_000_000  # bytes; what was used least recently goes first
FORM = 1  # of what is kept
_SETTINGS = {"disk": diskcache.JSONDisk, "eviction_policy": "least-recently-used"}
_UNREADABLE = (ValueError, TypeError, KeyError, zlib.error)


def folder() -> Path:
    """Where all of it lies. The variable XDG_CACHE_HOME moves it, as other programs' caches."""
    return Path(platformdirs.user_cache_dir("jaxshard_magic", appauthor=False))


def key_of(program: bytes, topology: Mapping[str, Any], order: Sequence[int], tupled: bool) -> str:
    """The same for the same program, target, and versions of the compilers."""
    versions = [(name, installed()[name]) for name in ("jaxlib", *TPU, *CUDA)]
    parts = (FORM, sorted(topology.items()), list(order), tupled, versions)
    return hashlib.sha256(repr(parts).encode() + program).hexdigest()


def get(key: str) -> Built | None:
    """What was kept under a key; None where there is nothing, or nothing readable."""
    row = _with_cache(lambda cache: cache.get(key))
    try:
        return None if row is None else _built(row)
    except _UNREADABLE:
        return None


def put(key: str, built: Built) -> None:
    """Keep it. A cache that can't be written keeps nothing."""
    row = asdict(built) | {"proto": b85encode(built.proto).decode()}
    _with_cache(lambda cache: cache.set(key, row))


def _built(row: Mapping[str, Any]) -> Built:
    stats = None if row["stats"] is None else MemoryStats(**row["stats"])
    decoded = {"proto": b85decode(row["proto"]), "stats": stats, "log": tuple(row["log"])}
    return Built(**{**row, **decoded})


def _with_cache(job: Any) -> Any:
    """What `job` gets of the open cache. A damaged one is thrown away; without one that can be opened, None."""
    for again in (True, False):
        try:
            with diskcache.Cache(str(folder() / "compiled"), **_SETTINGS, size_limit=SIZE) as cache:
                return job(cache)
        except _UNREADABLE:
            return None  # of this one row
        except sqlite3.OperationalError:
            return None  # no room, no right to write, or another process holds it
        except sqlite3.DatabaseError:
            if again:
                shutil.rmtree(folder() / "compiled", ignore_errors=True)
        except (OSError, diskcache.Timeout):
            return None
    return None
