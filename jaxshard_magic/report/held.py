"""What one device holds of leaves that lie on different parts of the mesh."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product

from .parts import Leaf, MeshInfo


def extents(leaf: Leaf, axes: Mapping[str, int]) -> dict[str, int]:
    """The mesh axes with the devices along each that the leaf lies on.

    >>> leaf = Leaf("w", "params", (4,), "float32", (None,), 16, 16, "", within={"pipe": (1, 3)})
    >>> extents(leaf, {"pipe": 4, "data": 2})
    {'pipe': 2, 'data': 2}
    """
    return {**axes, **{axis: end - first for axis, (first, end) in leaf.within.items()}}


def on_device(leaves: Iterable[Leaf], mesh: MeshInfo, device: int) -> list[Leaf]:
    """The leaves that the device of this id holds, or holds a part of; all of them where the mesh has no such."""
    if device not in mesh.devices:
        return list(leaves)
    at = mesh.place(mesh.devices.index(device))
    return [leaf for leaf in leaves if _lies(leaf, at)]


def on_fullest(leaves: Sequence[Leaf], of: Callable[[Leaf], int] | None = None) -> list[Leaf]:
    """The leaves that lie on the device that holds most of them, as `of` counts each; its bytes by default.

    Of all devices only those at the start of some leaf have to be looked at: along an axis what lies there grows
    nowhere else.
    """
    starts: dict[str, set[int]] = {}
    for leaf in leaves:
        for axis, (first, _) in leaf.within.items():
            starts.setdefault(axis, {0}).add(first)
    if not starts:
        return list(leaves)
    places = [dict(zip(starts, at, strict=True)) for at in product(*map(sorted, starts.values()))]
    count = of or _stored
    found = ([leaf for leaf in leaves if _lies(leaf, at)] for at in places)
    return max(found, key=lambda held: sum(map(count, held)))


def held(leaves: Sequence[Leaf]) -> int:
    """Bytes of the leaves on the device that holds most of them."""
    return sum(map(_stored, on_fullest(leaves)))


def lost(leaves: Sequence[Leaf]) -> int:
    """Bytes that the leaves lost on the device where they lost most."""
    return sum(leaf.lost for leaf in on_fullest(leaves, lambda leaf: leaf.lost))


def _lies(leaf: Leaf, at: Mapping[str, int]) -> bool:
    return all(first <= at.get(axis, 0) < end for axis, (first, end) in leaf.within.items())


def _stored(leaf: Leaf) -> int:
    return leaf.bytes_per_device
