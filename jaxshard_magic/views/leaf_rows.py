"""Rows of the layout table: leaves of repeated layers folded into one row, and the sharding of a leaf in numbers."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from jaxshard_magic.report import Leaf, MeshInfo, Report
from jaxshard_magic.report.device_leaves import devices_per_axis, leaves_on_fullest, replicated_bytes, stored_bytes
from jaxshard_magic.report.parts import dim_axes
from jaxshard_magic.views.format import byte_text, count_text, index_text

FOLD_FROM = 3  # leaves from which on a family has one row
ROLES = ("params", "frozen", "optimizer", "batch", "rng", "other")  # in the order of a report
WANTED_ROWS = 12  # rows with missing sharding, at most

# `_ALONE` finds numbers that are a whole component of a path, as in `blocks.3.attn`.
_NUMBER, _ALONE = re.compile(r"\d{1,15}"), re.compile(r"(?<![^.\[/])\d{1,15}(?![^.\]/])")
_WORD = re.compile(r"[^.\[\]'\"/]+")


@dataclass(frozen=True)
class LeafRow:
    """Leaves that differ only in a number of their path, written `blocks.0-47.kernel`.

    Bytes are of the device that stores most of them.

    Attributes:
        path: Path of all leaves, with ranges for the numbers that vary.
        leaves: Parameters or other leaves.
        followers: Optimizer leaves with the sharding of their parameter.
    """

    path: str
    leaves: tuple[Leaf, ...]
    followers: tuple[Leaf, ...] = ()

    @property
    def leaf(self) -> Leaf:
        """First leaf, used for the type and spec of the row."""
        return self.leaves[0]

    @property
    def members(self) -> int:
        """Number of leaves, without followers."""
        return len(self.leaves)

    @cached_property
    def bytes_per_device(self) -> int:
        """Bytes on the device that stores most of the leaves."""
        return stored_bytes(self.leaves)

    @cached_property
    def replicated_bytes(self) -> int:
        """Additional bytes per device due to missing sharding, on the device with most of them."""
        return replicated_bytes(self.leaves)

    @cached_property
    def replicated_with_followers(self) -> int:
        """Additional bytes per device due to missing sharding, including the optimizer's followers."""
        return replicated_bytes([*self.leaves, *self.followers])


def fold(leaves: Sequence[Leaf]) -> list[LeafRow]:
    """Fold leaves into rows with their followers, sorted by descending bytes per device."""
    follow = followers(leaves)
    following = {id(f) for found in follow.values() for f in found}
    own = [leaf for leaf in leaves if id(leaf) not in following]
    rows = []
    for path, indices in layer_families(own):
        members = tuple(own[i] for i in indices)
        row_followers = tuple(f for leaf in members for f in follow.get(id(leaf), ()))
        rows.append(LeafRow(path, members, row_followers))
    return sorted(rows, key=lambda r: (-r.bytes_per_device, -r.replicated_bytes))


def layer_families(leaves: Sequence[Leaf]) -> list[tuple[str, list[int]]]:
    """Group leaves of repeated layers by their paths.

    Three or more leaves form a family if they agree in everything but the number of their layer and their pipeline
    stage. A number counts layers if it is a whole component of the path, as in `blocks.3.attn`, or the first number
    that varies, as in `Block_3.Dense_1`. Other numbers are part of a name, so the two norms of a block are folded like
    its attention.

    Args:
        leaves: Leaves of one report.

    Returns:
        (path, indices into `leaves`) of each family and each single leaf, in order of first occurrence. Varying numbers
        are written `0-47`.
    """
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, leaf in enumerate(leaves):
        pattern = _NUMBER.sub("#", leaf.path)
        # Sizes instead of positions: layers on different pipeline stages belong to one family.
        sizes = tuple((axis, end - first) for axis, (first, end) in _submesh_key(leaf))
        groups[pattern, leaf.role, leaf.shape, leaf.dtype, leaf.spec, sizes, leaf.why, leaf.wanted].append(i)
    families: list[tuple[str, list[int]]] = []
    for group in groups.values():
        for indices in _split_by_names([leaves[i].path for i in group], group):
            path = _common_path([leaves[i].path for i in indices])
            families += [(path, indices)] if path else [(leaves[i].path, [i]) for i in indices]
    return sorted(families, key=lambda family: family[1][0])


def followers(leaves: Sequence[Leaf]) -> dict[int, list[Leaf]]:
    """Return the optimizer leaves of each parameter, by `id()` of the parameter.

    A follower has the parameter's shape, spec and part of the mesh, and its path ends like the parameter's.
    """
    # A number for each sharding: the tuple is then hashed once for a leaf, not once for each end of its path.
    cuts: dict[tuple[object, ...], int] = {}

    def ends(leaf: Leaf) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Yield keys shared with followers, with ever shorter ends of the leaf's path."""
        cut = cuts.setdefault((leaf.shape, leaf.spec, _submesh_key(leaf), leaf.wanted), len(cuts))
        words = tuple(_WORD.findall(leaf.path))
        return ((cut, words[i:]) for i in range(len(words)))

    params: dict[tuple[int, tuple[str, ...]], Leaf] = {}
    for leaf in leaves:
        if leaf.role == "params":
            for end in ends(leaf):
                params.setdefault(end, leaf)
    # By `id()`: leaves have a dict, so they can't be hashed.
    following: dict[int, list[Leaf]] = defaultdict(list)
    for leaf in leaves:
        if leaf.role == "optimizer":
            param = next((params[end] for end in ends(leaf) if end in params), None)
            if param is not None:
                following[id(param)].append(leaf)
    return following


def _submesh_key(leaf: Leaf) -> tuple[tuple[str, tuple[int, int]], ...]:
    """Return the leaf's part of the mesh in hashable form."""
    return tuple(sorted(leaf.within.items())) if leaf.within else ()


def _common_path(paths: Sequence[str]) -> str | None:
    """Return one path for paths that differ in numbers alone, or None."""
    if len(paths) < FOLD_FROM:
        return None
    columns = [sorted(set(column)) for column in zip(*map(_path_numbers, paths), strict=True)]
    # A path with two ranges stands for all combinations. If one is missing, it would name leaves of other families.
    if prod(map(len, columns)) != len(paths):
        return None
    column_iter = iter(columns)
    return _NUMBER.sub(lambda match: match[0] if len(v := next(column_iter)) == 1 else index_text(v), paths[0])


def _split_by_names(paths: Sequence[str], places: Sequence[int]) -> Iterable[list[int]]:
    """Split indices into groups whose paths differ in the numbers of layers alone."""
    layer_starts = {match.start() for match in _ALONE.finditer(paths[0])}
    counts_layers = [match.start() in layer_starts for match in _NUMBER.finditer(paths[0])]
    numbers = [_path_numbers(path) for path in paths]
    varying = [len(set(column)) > 1 for column in zip(*numbers, strict=True)]
    first = varying.index(True) if True in varying else 0
    # A number attached to a name is part of the name, unless it is the first number that varies.
    named = [i for i, counts in enumerate(counts_layers) if not counts and i != first]
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, own in zip(places, numbers, strict=True):
        groups[tuple(own[i] for i in named)].append(place)
    return groups.values()


def _path_numbers(path: str) -> list[int]:
    """Return all numbers in a path."""
    return [int(n) for n in _NUMBER.findall(path)]


@dataclass(frozen=True)
class Listing:
    """Rows of the layout table with their notes.

    Attributes:
        rows: Rows to show.
        leaf_count: Number of leaves in the report.
        heading: Extent of the rows: "8 of 53, largest first".
        notes: Summaries of the leaves without a row.
    """

    rows: tuple[LeafRow, ...]
    leaf_count: int
    heading: str
    notes: tuple[str, ...]


def listing(report: Report, largest: int | None = 8) -> Listing:
    """Choose the rows of the layout table.

    Args:
        report: Report to list.
        largest: Number of the largest rows to list; None gives every leaf a row of its own. Up to 12 rows with missing
            sharding are listed as well.
    """
    leaves = report.leaves
    if largest is None:
        every = f"all {count_text(len(leaves))}"
        return Listing(tuple(LeafRow(leaf.path, (leaf,)) for leaf in leaves), len(leaves), every, ())
    folded = report.rows
    wanted = sorted((r for r in folded if r.leaf.wanted), key=lambda r: -r.replicated_with_followers)[:WANTED_ROWS]
    chosen = {id(r) for r in [*folded[:largest], *wanted]}
    rows = tuple(r for r in folded if id(r) in chosen)
    shown = sum(row.members for row in rows)
    some = "all" if shown == len(leaves) else f"{count_text(shown)} of"
    above = f"{some} {count_text(len(leaves))}, largest first" if len(leaves) > 1 else "only one"
    return Listing(rows, len(leaves), above, tuple(_below(folded, [r for r in folded if id(r) not in chosen])))


def _below(folded: Sequence[LeafRow], rest: Sequence[LeafRow]) -> list[str]:
    """Summarise the leaves without a row: unsharded, replicated, and following a parameter."""
    lines = []
    more = [r for r in rest if r.leaf.wanted]
    if more:
        left = [leaf for r in more for leaf in (*r.leaves, *r.followers)]
        lines.append(
            f"{_leaves(sum(r.members for r in more), 'more')} not cut as wanted, +{byte_text(replicated_bytes(left))}"
        )
    whole = [leaf for r in rest if not r.leaf.wanted and not any(r.leaf.spec) for leaf in r.leaves]
    on_all = [leaf for leaf in whole if not leaf.within]
    if on_all:
        lines.append(f"{_leaves(len(on_all), 'more')} whole on every device, {total_text(on_all)}")
    on_some = [leaf for leaf in whole if leaf.within]
    if on_some:
        each = "each " if len(on_some) > 1 else ""
        where = f"{each}whole on its part of {' and '.join(partial_axes(on_some))}"
        lines.append(f"{_leaves(len(on_some), 'more')} {where}, {total_text(on_some)}")
    follow = [f for r in folded for f in r.followers]
    if follow:
        lines.append(f"{_leaves(len(follow), 'optimizer')} cut as the parameters they follow, {total_text(follow)}")
    return lines


def partial_axes(leaves: Iterable[Leaf]) -> tuple[str, ...]:
    """Return the mesh axes along which some leaf is stored on a part of the devices: the axes of a pipeline's
    stages."""
    return tuple(dict.fromkeys(axis for leaf in leaves for axis in leaf.within))


def total_text(leaves: Sequence[Leaf]) -> str:
    """Return the bytes of several leaves: `18.4 MiB together`, or `18.4 MiB on the fullest device` for parts of the
    mesh."""
    return f"{byte_text(stored_bytes(leaves))} {'on the fullest device' if partial_axes(leaves) else 'together'}"


def _leaves(n: int, what: str) -> str:
    return f"{count_text(n)} {what} {'leaf is' if n == 1 else 'leaves are'}"


def unsharded_text(row: LeafRow) -> str:
    """Return the missing sharding of a row: `not cut over model, +18.4 MiB`. Empty if the row is sharded as
    intended."""
    if not row.leaf.wanted:
        return ""
    text = f"not cut over {' and '.join(row.leaf.wanted)}"
    if row.replicated_bytes:
        text += f", +{byte_text(row.replicated_bytes)}"
    if row.replicated_with_followers > row.replicated_bytes:
        leaves = "leaf" if len(row.followers) == 1 else "leaves"
        total = byte_text(row.replicated_with_followers)
        text += f", +{total} with {count_text(len(row.followers))} optimizer {leaves}"
    return text


def role_bytes(leaves: Sequence[Leaf]) -> dict[str, int]:
    """Return the bytes of each role on the device that stores most, in the order of `ROLES`."""
    total: dict[str, int] = dict.fromkeys(ROLES, 0)
    for leaf in leaves_on_fullest(leaves):
        total[leaf.role] = total.get(leaf.role, 0) + leaf.bytes_per_device
    return {role: size for role, size in total.items() if size}


def sized_dim_axes(leaf: Leaf, mesh: MeshInfo) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Return the mesh axes of each dimension with their sizes, major first.

    Args:
        leaf: Leaf with a spec.
        mesh: Gives the sizes of axes; a leaf on a part of the mesh has smaller ones.
    """
    sizes, cut = devices_per_axis(leaf, mesh.axes), dim_axes(leaf.spec, len(leaf.shape))
    return tuple(tuple((axis, sizes.get(axis, 1)) for axis in axes) for axes in cut)


def replica_count(leaf: Leaf, mesh: MeshInfo) -> int:
    """Return the number of devices that store each block of a leaf.

    Args:
        leaf: Leaf with a spec.
        mesh: Gives the sizes of axes; a leaf on a part of the mesh has smaller ones.
    """
    blocks = prod(size for axes in sized_dim_axes(leaf, mesh) for _, size in axes)
    return max(1, prod(devices_per_axis(leaf, mesh.axes).values()) // max(1, blocks))
