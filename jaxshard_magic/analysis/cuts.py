"""How an array is cut over the devices, as XLA writes it in its shardings."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

Axes = tuple[tuple[str, ...], ...]

_TILES = re.compile(r"\{devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?)?")
_NAMED = re.compile(r"\{mesh\[(.*?)\], \[(.*?)\]")
_SIZE = re.compile(r"'([^']+)'=(\d+)")
_AXIS = re.compile(r"'([^']+)'(:\(\d+\)(\d+))?")  # 'x', or a part of it with its size last: 'x':(1)2


@dataclass(frozen=True)
class Cut:
    """`parts` along each dimension, and the mesh `axes` that each is cut over, None where they are not known."""

    parts: tuple[int, ...]
    axes: Axes | None = None

    def __str__(self) -> str:
        if self.axes is not None:
            return spec_text(self.axes)
        return f"{' x '.join(map(str, self.parts))} parts" if prod(self.parts) > 1 else "one device"


def spec_text(axes: Axes) -> str:
    """The PartitionSpec that cuts an array so.

    >>> spec_text((("data", "model"), ()))
    "P(('data', 'model'), None)"
    """
    return f"P({', '.join(repr(e[0]) if len(e) == 1 else repr(e or None) for e in axes)})"


def read(text: str, rank: int, mesh: Mapping[str, int]) -> Cut | None:
    """The cut of an array of `rank` dimensions by the sharding `text`, on a mesh of these axes; None if not understood.

    Tiles are `devices=[2,1,4]<=[4,2]T(1,0)`: the devices in order as a 4 x 2 array, transposed, and dealt out to
    2 x 1 x 4 parts. What is left over after `rank` dimensions are copies.

    >>> read("{devices=[2,1,4]<=[4,2]T(1,0)}", 3, {"x": 4, "y": 2})
    Cut(parts=(2, 1, 4), axes=(('y',), (), ('x',)))
    >>> read("{mesh['x'=4,'y'=2], [{'x', 'y'}, {}]}", 2, {})
    Cut(parts=(8, 1), axes=(('x', 'y'), ()))
    """
    if named := _NAMED.match(text):
        return _named(named[1], named[2], rank)
    if text.startswith("{replicated"):
        return Cut((1,) * rank, ((),) * rank)
    if text.startswith("{maximal"):
        return Cut((1,) * rank)
    tiles = _TILES.match(text)
    if not tiles:
        return None
    parts = _numbers(tiles[1])
    if len(parts) < rank:
        return None
    order = _dealt(mesh, _numbers(tiles[2]), _numbers(tiles[3])) if tiles[2] else None
    return Cut(parts[:rank], _consumed(order, parts[:rank]) if order is not None else None)


def between(before: Cut, after: Cut) -> Axes | None:
    """A cut on the way from one to the other that moves a single mesh axis, so that each half is an exchange of parts.

    None where a single axis moves already, or the axes are not known. An axis that comes or moves is preferred to one
    that goes, so that the array gets no larger on the way.
    """
    if before.axes is None or after.axes is None:
        return None
    was, will = _places(before.axes), _places(after.axes)
    for axis in sorted({**was, **will}, key=lambda a: a not in will):
        if was.get(axis) != will.get(axis):
            steps = [[a for a in entry if a != axis] for entry in before.axes]
            if axis in will:
                steps[will[axis]].append(axis)
            way = tuple(map(tuple, steps))
            if way not in (before.axes, after.axes):
                return way
    return None


def _places(axes: Axes) -> dict[str, int]:
    return {axis: d for d, entry in enumerate(axes) for axis in entry}


def _named(mesh: str, dims: str, rank: int) -> Cut | None:
    sizes = {name: int(size) for name, size in _SIZE.findall(mesh)}
    entries = [_AXIS.findall(entry) for entry in re.findall(r"\{([^{}]*)\}", dims)]
    if len(entries) != rank or any(name not in sizes for entry in entries for name, *_ in entry):
        return None
    parts = tuple(prod(int(size or sizes[name]) for name, _, size in entry) for entry in entries)
    whole = all(not part for entry in entries for _, part, _ in entry)
    return Cut(parts, tuple(tuple(name for name, *_ in entry) for entry in entries) if whole else None)


def _dealt(
    mesh: Mapping[str, int], sizes: Sequence[int], order: Sequence[int]
) -> list[tuple[str, int]] | None:
    """The mesh axes in the order in which their devices are dealt out."""
    groups = _grouped(((a, n) for a, n in mesh.items() if n > 1), sizes)
    return None if groups is None else [axis for i in order or range(len(groups)) for axis in groups[i]]


def _consumed(order: Sequence[tuple[str, int]], parts: Sequence[int]) -> Axes | None:
    groups = _grouped(order, parts)
    return None if groups is None else tuple(tuple(a for a, _ in group) for group in groups)


def _grouped(axes: Iterable[tuple[str, int]], sizes: Sequence[int]) -> list[list[tuple[str, int]]] | None:
    """The first of `axes` as groups whose sizes multiply to `sizes`; None where they do not."""
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
