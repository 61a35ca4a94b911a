"""Arithmetic of sharded shapes: axes per dimension, bytes per device, number of replicas."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from jax.sharding import PartitionSpec

from ..report.parts import DimAxes as DimAxes
from ..report.parts import dim_axes as dim_axes

MeshAxes = Mapping[str, int]  # sizes of the mesh axes, in mesh order


def spec_of(cut: DimAxes) -> PartitionSpec:
    """Return the PartitionSpec of an array, without trailing None.

    >>> spec_of((("data",), ()))
    P('data',)
    """
    entries = [axes[0] if len(axes) == 1 else axes or None for axes in cut]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def fit_to_mesh(wish: DimAxes, shape: Sequence[int], mesh: MeshAxes) -> DimAxes:
    """Return the part of a requested sharding that the mesh allows.

    Each axis is used once, and the axes of a dimension together divide its size.

    >>> fit_to_mesh((("data", "model"), ("data",)), (12, 8), {"data": 4, "model": 2})
    (('data',), ())

    Args:
        wish: Requested axes of each dimension.
        shape: Shape of the array.
        mesh: Mesh axes with their sizes.
    """
    used: set[str] = set()
    found = []
    for axes, size in zip(wish, shape, strict=True):
        kept: list[str] = []
        for axis in axes:
            if axis in mesh and axis not in used and size % num_shards([*kept, axis], mesh) == 0:
                kept.append(axis)
                used.add(axis)
        found.append(tuple(kept))
    return tuple(found)


def num_shards(axes: Iterable[str], mesh: MeshAxes) -> int:
    """Return the number of shards along these axes."""
    return prod(mesh[axis] for axis in axes)


def next_multiple(size: int, pieces: int) -> int:
    """Return the smallest multiple of `pieces` that is at least `size`.

    >>> next_multiple(50257, 4)
    50260
    """
    return -(-size // pieces) * pieces


def shard_bytes(shape: Sequence[int], bits: int, cut: DimAxes, mesh: MeshAxes) -> int:
    """Return the bytes of one device's shard.

    Args:
        shape: Shape of the whole array.
        bits: Bits of an element.
        cut: Mesh axes of each dimension.
        mesh: Mesh axes with their sizes.
    """
    # Rounded up: an element may have fewer than 8 bits.
    return -(-prod(n // num_shards(axes, mesh) for n, axes in zip(shape, cut, strict=True)) * bits // 8)


def num_replicas(cut: DimAxes, mesh: MeshAxes) -> int:
    """Return the number of devices that have each shard."""
    return prod(mesh.values()) // prod(num_shards(axes, mesh) for axes in cut)
