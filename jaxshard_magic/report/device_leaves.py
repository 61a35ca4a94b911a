"""Leaves and bytes on a device, for leaves on different parts of the mesh."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product

from .parts import Leaf, MeshInfo


def devices_per_axis(leaf: Leaf, axes: Mapping[str, int]) -> dict[str, int]:
    """Return the number of devices along each mesh axis that hold the leaf.

    Args:
        leaf: The leaf.
        axes: Mesh axes with sizes.

    >>> leaf = Leaf("w", "params", (4,), "float32", (None,), 16, 16, "", within={"pipe": (1, 3)})
    >>> devices_per_axis(leaf, {"pipe": 4, "data": 2})
    {'pipe': 2, 'data': 2}
    """
    return {**axes, **{axis: end - first for axis, (first, end) in leaf.within.items()}}


def leaves_on_device(leaves: Iterable[Leaf], mesh: MeshInfo, device: int) -> list[Leaf]:
    """Return the leaves with data on a device.

    Args:
        leaves: Leaves to choose from.
        mesh: The mesh.
        device: Id of the device. All leaves are returned for an id outside of the mesh.
    """
    if device not in mesh.devices:
        return list(leaves)
    at = mesh.place(mesh.devices.index(device))
    return [leaf for leaf in leaves if _is_on(leaf, at)]


def leaves_on_fullest(leaves: Sequence[Leaf], size: Callable[[Leaf], int] | None = None) -> list[Leaf]:
    """Return the leaves on the device with the largest total.

    Args:
        leaves: Leaves to choose from.
        size: Size of a leaf; its bytes per device by default.
    """
    # Only devices at the start of some leaf are candidates: along an axis the total increases nowhere else.
    starts: dict[str, set[int]] = {}
    for leaf in leaves:
        for axis, (first, _) in leaf.within.items():
            starts.setdefault(axis, {0}).add(first)
    if not starts:
        return list(leaves)
    places = [dict(zip(starts, at, strict=True)) for at in product(*map(sorted, starts.values()))]
    count = size or _stored
    by_device = ([leaf for leaf in leaves if _is_on(leaf, at)] for at in places)
    return max(by_device, key=lambda held: sum(map(count, held)))


def stored_bytes(leaves: Sequence[Leaf]) -> int:
    """Return the bytes of the leaves on the fullest device."""
    return sum(map(_stored, leaves_on_fullest(leaves)))


def replicated_bytes(leaves: Sequence[Leaf]) -> int:
    """Return the bytes lost to replication (`Leaf.lost`) on the device with the largest loss."""
    return sum(leaf.lost for leaf in leaves_on_fullest(leaves, lambda leaf: leaf.lost))


def _is_on(leaf: Leaf, at: Mapping[str, int]) -> bool:
    """Return whether the device at these mesh coordinates holds the leaf; axes not given are at 0."""
    return all(first <= at.get(axis, 0) < end for axis, (first, end) in leaf.within.items())


def _stored(leaf: Leaf) -> int:
    return leaf.bytes_per_device
