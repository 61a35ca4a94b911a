"""The arithmetic of a cut array: which axes divide a dimension, what one device then holds, how often it is there."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from jax.sharding import PartitionSpec

from ..report.parts import Cut as Cut
from ..report.parts import cut_of as cut_of

Axes = Mapping[str, int]  # a mesh: its axes in order, with their sizes


def spec_of(cut: Cut) -> PartitionSpec:
    """As it is written: without the Nones at its end.

    >>> spec_of((("data",), ()))
    P('data',)
    """
    entries = [axes[0] if len(axes) == 1 else axes or None for axes in cut]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def fitting(wish: Cut, shape: Sequence[int], mesh: Axes) -> Cut:
    """Of what was wished for what the mesh can do: axes that it has, each once, that divide their dimension together.

    >>> fitting((("data", "model"), ("data",)), (12, 8), {"data": 4, "model": 2})
    (('data',), ())
    """
    used: set[str] = set()
    found = []
    for axes, size in zip(wish, shape, strict=True):
        kept: list[str] = []
        for axis in axes:
            if axis in mesh and axis not in used and size % parts([*kept, axis], mesh) == 0:
                kept.append(axis)
                used.add(axis)
        found.append(tuple(kept))
    return tuple(found)


def parts(axes: Iterable[str], mesh: Axes) -> int:
    """Into how many pieces these axes cut."""
    return prod(mesh[axis] for axis in axes)


def next_size(size: int, pieces: int) -> int:
    """The next size, from `size` on, that so many pieces divide.

    >>> next_size(50257, 4)
    50260
    """
    return -(-size // pieces) * pieces


def held(shape: Sequence[int], bits: int, cut: Cut, mesh: Axes) -> int:
    """Bytes of one device's part, of elements of so many bits."""
    return -(-prod(n // parts(axes, mesh) for n, axes in zip(shape, cut, strict=True)) * bits // 8)


def copies(cut: Cut, mesh: Axes) -> int:
    """On how many devices each slice lies."""
    return prod(mesh.values()) // prod(parts(axes, mesh) for axes in cut)
