"""CRC-32 checksums of a checkpoint's files, written beside them once all are there.

Orbax has no checksums of values. A checkpoint without this file, from an earlier version or from a process that was
killed just before, is read unchecked.
"""

import json
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..files import read_limited, write_atomic

NAME = "checksums.json"
_BLOCK = 1 << 20  # bytes of one read
_MOST = 64 << 20  # bytes of the file of checksums, at most
_FEW = 8 << 20  # bytes; fewer are read in a moment, without threads
_THREADS = 4  # zlib computes checksums without the GIL


def write(folder: Path) -> None:
    """Write the sizes and CRC-32 of all files below a folder into the folder.

    Reads all of them, at 1 GB/s a core. Raises OSError.
    """
    names = sorted(_files(folder))
    rows = dict(zip(names, _sums(folder, names), strict=True))
    write_atomic(folder / NAME, json.dumps({"crc32": rows}).encode())


def check(folder: Path, subfolder: str, share: int = 0, shares: int = 1) -> None:
    """Compare files with their recorded sizes and checksums; without a record, do nothing.

    Args:
        folder: Folder of the checkpoint.
        subfolder: Subfolder with the files to compare.
        share: Index of this process among those that divide the files.
        shares: Number of processes that divide the files.

    Raises:
        ValueError: A file differs or is missing, or the record is damaged.
    """
    try:
        text = read_limited(folder / NAME, _MOST)
    except FileNotFoundError:
        return
    try:
        rows = json.loads(text)["crc32"]
        recorded = {str(name): (int(size), int(crc)) for name, (size, crc) in rows.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{NAME} is damaged") from None
    mine = [name for name in sorted(recorded) if name.startswith(f"{subfolder}/")][share::shares]
    # A damaged record must not lead to files outside of the folder.
    missing = next((name for name in mine if not os.path.isfile(folder / name) or ".." in name), None)
    if missing is not None:
        raise ValueError(f"{missing} is missing")
    for name, found in zip(mine, _sums(folder, mine), strict=True):
        if found != recorded[name]:
            raise ValueError(f"{name} is not what was written: {_differs(found, recorded[name])}")


def _differs(found: tuple[int, int], told: tuple[int, int]) -> str:
    """Describe a difference of size or, at equal sizes, of checksum."""
    if found[0] != told[0]:
        return f"it has {found[0]:,} bytes, and had {told[0]:,}"
    return "its checksum differs"


def _files(folder: Path) -> Iterator[str]:
    """Yield the relative paths of regular files below a folder, except links and the checksums themselves."""
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            if name != NAME and path.is_file() and not path.is_symlink():
                yield path.relative_to(folder).as_posix()


def _sums(folder: Path, names: list[str]) -> list[tuple[int, int]]:
    """Return size and CRC-32 of each file. From 8 MiB in total, files are read on several threads."""
    paths = [folder / name for name in names]
    if sum(path.stat().st_size for path in paths) < _FEW:
        return [*map(_sum, paths)]
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(_sum, paths))


def _sum(path: Path) -> tuple[int, int]:
    """Return the size in bytes and the CRC-32 of a file."""
    size = crc = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc
