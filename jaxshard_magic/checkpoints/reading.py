"""Arrays read from disk a part at a time, so that little more memory is taken than they have."""

import ctypes
import math
import sys
from collections.abc import Collection, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jax

_AT_ONCE = 64 << 20  # bytes


def read(orbax: Any, folder: Path, target: Any, others: Collection[str] = ()) -> list[Any]:
    """The arrays of a state on disk, in the order of the target's leaves: a tree of `jax.ShapeDtypeStruct` with
    shardings; of a dict without the names of `others`, which are there as well."""
    wanted, structure = jax.tree.flatten(target)
    found: list[Any] = []
    for part in parts_of([math.prod(x.shape) * x.dtype.itemsize for x in wanted]):
        item = structure.unflatten([x if i in part else orbax.PLACEHOLDER for i, x in enumerate(wanted)])
        if others:
            item |= dict.fromkeys(others, orbax.PLACEHOLDER)
        args = orbax.args.PyTreeRestore(item, orbax.checkpoint_utils.construct_restore_args(item))
        # Orbax's Checkpointer would have hosts wait for each other at each part, for ever where one can't read it.
        with closing(orbax.PyTreeCheckpointHandler()) as handler:
            found_here = handler.restore(folder, args=args)
        if others:
            found_here = {name: x for name, x in found_here.items() if name not in others}
        arrays = jax.tree.leaves(found_here)[part.start : part.stop]
        found += jax.block_until_ready(arrays)
        del arrays, found_here
        _give_back()
    return found


def parts_of(sizes: Sequence[int]) -> list[range]:
    """Neighbours that are read at once, of arrays of so many bytes: a sixteenth of all together, or 64 MiB where that
    is more, as what is read has buffers beside the arrays.

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


def _give_back() -> None:
    """What was freed of buffers goes to the system: glibc would keep a quarter of all that is read."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
