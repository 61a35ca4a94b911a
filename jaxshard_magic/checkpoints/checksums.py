"""Checksums of a checkpoint's files, written beside them once all are there: Orbax's own have none of their values.

A checkpoint without them, of an earlier version or of a process that was killed at that moment, is read unchecked.
"""

import json
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..files import content, put_whole

NAME = "checksums.json"
_BLOCK = 1 << 20  # bytes that are read at once
_MOST = 64 << 20  # bytes of the checksums themselves
_FEW = 8 << 20  # bytes that are read in no time
_THREADS = 4  # zlib lets others run meanwhile


def write(folder: Path) -> None:
    """Write the sizes and CRC-32 of all files of a folder into it, which reads them, 1 GB/s a core. Raises OSError."""
    names = sorted(_files(folder))
    rows = dict(zip(names, _sums(folder, names), strict=True))
    put_whole(folder / NAME, json.dumps({"crc32": rows}).encode())


def check(folder: Path, under: str, share: int = 0, shares: int = 1) -> None:
    """Compare the files of a folder, those in `under`, with what was written of them: of `shares` alike ones a share.
    Raises ValueError for one that differs, or is not there."""
    try:
        text = content(folder / NAME, _MOST)
    except FileNotFoundError:
        return
    try:
        rows = json.loads(text)["crc32"]
        told = {str(name): (int(size), int(crc)) for name, (size, crc) in rows.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{NAME} is damaged") from None
    mine = [name for name in sorted(told) if name.startswith(f"{under}/")][share::shares]
    missing = next((name for name in mine if not os.path.isfile(folder / name) or ".." in name), None)
    if missing is not None:
        raise ValueError(f"{missing} is missing")
    for name, found in zip(mine, _sums(folder, mine), strict=True):
        if found != told[name]:
            raise ValueError(f"{name} is not what was written: {_differs(found, told[name])}")


def _differs(found: tuple[int, int], told: tuple[int, int]) -> str:
    if found[0] != told[0]:
        return f"it has {found[0]:,} bytes, and had {told[0]:,}"
    return "its checksum differs"


def _files(folder: Path) -> Iterator[str]:
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            if name != NAME and path.is_file() and not path.is_symlink():
                yield path.relative_to(folder).as_posix()


def _sums(folder: Path, names: list[str]) -> list[tuple[int, int]]:
    paths = [folder / name for name in names]
    if sum(path.stat().st_size for path in paths) < _FEW:
        return [*map(_sum, paths)]
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(_sum, paths))


def _sum(path: Path) -> tuple[int, int]:
    """Bytes, and their CRC-32."""
    size = crc = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc
