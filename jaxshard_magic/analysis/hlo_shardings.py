"""Parse the sharding of an array as printed by XLA."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

Axes = tuple[tuple[str, ...], ...]

_TILES = re.compile(r"\{devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?)?")
_NAMED = re.compile(r"\{mesh\[(.*?)\], \[(.*?)\]")
_SIZE = re.compile(r"'([^']+)'=(\d+)")
_AXIS = re.compile(r"'([^']+)'(:\(\d+\)(\d+))?")  # an axis 'x', or a part of it: 'x':(1)2 has size 2


@dataclass(frozen=True)
class HloSharding:
    """Sharding of an array.

    Attributes:
        parts: Number of shards along each dimension.
        axes: Mesh axes of each dimension; None if unknown.
    """

    parts: tuple[int, ...]
    axes: Axes | None = None

    def __str__(self) -> str:
        if self.axes is not None:
            return spec_text(self.axes)
        return f"{' x '.join(map(str, self.parts))} parts" if prod(self.parts) > 1 else "one device"


def spec_text(axes: Axes) -> str:
    """Return the source text of a PartitionSpec.

    >>> spec_text((("data", "model"), ()))
    "P(('data', 'model'), None)"
    """
    return f"P({', '.join(repr(e[0]) if len(e) == 1 else repr(e or None) for e in axes)})"


def parse_sharding(text: str, rank: int, mesh: Mapping[str, int]) -> HloSharding | None:
    """Parse a sharding of HLO.

    Tiles have the form `devices=[2,1,4]<=[4,2]T(1,0)`: the devices in order as a 4 x 2 array, transposed, and
    distributed over 2 x 1 x 4 shards. Dimensions of the tiles beyond `rank` hold replicas.

    Args:
        text: Sharding in HLO syntax.
        rank: Number of dimensions of the array.
        mesh: Axis sizes by name.

    Returns:
        None for an unknown form.

    >>> parse_sharding("{devices=[2,1,4]<=[4,2]T(1,0)}", 3, {"x": 4, "y": 2})
    HloSharding(parts=(2, 1, 4), axes=(('y',), (), ('x',)))
    >>> parse_sharding("{mesh['x'=4,'y'=2], [{'x', 'y'}, {}]}", 2, {})
    HloSharding(parts=(8, 1), axes=(('x', 'y'), ()))
    """
    if named := _NAMED.match(text):
        return _parse_named_sharding(named[1], named[2], rank)
    if text.startswith("{replicated"):
        return HloSharding((1,) * rank, ((),) * rank)
    if text.startswith("{maximal"):
        return HloSharding((1,) * rank)
    tiles = _TILES.match(text)
    if not tiles:
        return None
    parts = _numbers(tiles[1])
    if len(parts) < rank:
        return None
    order = _axes_in_device_order(mesh, _numbers(tiles[2]), _numbers(tiles[3])) if tiles[2] else None
    return HloSharding(parts[:rank], _consumed(order, parts[:rank]) if order is not None else None)


def intermediate_axes(before: HloSharding, after: HloSharding) -> Axes | None:
    """Return an intermediate sharding differing from `before` in a single mesh axis, so that both steps exchange
    shards.

    Returns:
        None if a single axis changes already, or if the axes are unknown.
    """
    if before.axes is None or after.axes is None:
        return None
    was, will = _dim_of_axis(before.axes), _dim_of_axis(after.axes)
    # Axes used by the target come first, so that the array gets no larger on the way.
    for axis in sorted({**was, **will}, key=lambda a: a not in will):
        if was.get(axis) != will.get(axis):
            steps = [[a for a in entry if a != axis] for entry in before.axes]
            if axis in will:
                steps[will[axis]].append(axis)
            way = tuple(map(tuple, steps))
            if way not in (before.axes, after.axes):
                return way
    return None


def _dim_of_axis(axes: Axes) -> dict[str, int]:
    return {axis: d for d, entry in enumerate(axes) for axis in entry}


def _parse_named_sharding(mesh: str, dims: str, rank: int) -> HloSharding | None:
    sizes = {name: int(size) for name, size in _SIZE.findall(mesh)}
    entries = [_AXIS.findall(entry) for entry in re.findall(r"\{([^{}]*)\}", dims)]
    if len(entries) != rank or any(name not in sizes for entry in entries for name, *_ in entry):
        return None
    parts = tuple(prod(int(size or sizes[name]) for name, _, size in entry) for entry in entries)
    # A PartitionSpec can't name a part of an axis.
    whole = all(not part for entry in entries for _, part, _ in entry)
    return HloSharding(parts, tuple(tuple(name for name, *_ in entry) for entry in entries) if whole else None)


def _axes_in_device_order(
    mesh: Mapping[str, int], sizes: Sequence[int], order: Sequence[int]
) -> list[tuple[str, int]] | None:
    """Return the mesh axes with their sizes, major to minor in the device order of the tiles; None if no axes match."""
    # Axes of size 1 leave no trace in tiles.
    groups = _grouped(((a, n) for a, n in mesh.items() if n > 1), sizes)
    return None if groups is None else [axis for i in order or range(len(groups)) for axis in groups[i]]


def _consumed(order: Sequence[tuple[str, int]], parts: Sequence[int]) -> Axes | None:
    groups = _grouped(order, parts)
    return None if groups is None else tuple(tuple(a for a, _ in group) for group in groups)


def _grouped(axes: Iterable[tuple[str, int]], sizes: Sequence[int]) -> list[list[tuple[str, int]]] | None:
    """Return the first of `axes` as groups with size products equal to `sizes`; None if impossible."""
    left = iter(axes)
    groups: list[list[tuple[str, int]]] = []
    for size in sizes:
        group: list[tuple[str, int]] = []
        while (parts := prod(n for _, n in group)) < size:
            if (axis := next(left, None)) is None:
                return None
            group.append(axis)
        if parts != size:
            return None
        groups.append(group)
    return groups


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()
