"""Which leaves a report lists, with repeated layers folded into one row, and how a leaf is cut."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from jaxshard_magic.report import Leaf, MeshInfo, Report
from jaxshard_magic.report.held import extents, held, lost, on_fullest
from jaxshard_magic.report.parts import cut_of
from jaxshard_magic.views.format import byte_text, count_text, index_text

FOLD_FROM = 3
WANTED_ROWS = 12

_NUMBER, _ALONE = re.compile(r"\d{1,15}"), re.compile(r"(?<![^.\[/])\d{1,15}(?![^.\]/])")
_WORD = re.compile(r"[^.\[\]'\"/]+")


@dataclass(frozen=True)
class Row:
    """Leaves that differ only in a number of their path, written `blocks.0-47.kernel`, with the optimizer's
    leaves that are cut just as they are. Its bytes are those of the device that holds most of them."""

    path: str
    leaves: tuple[Leaf, ...]
    followers: tuple[Leaf, ...] = ()

    @property
    def leaf(self) -> Leaf:
        """The first, which stands for all."""
        return self.leaves[0]

    @property
    def members(self) -> int:
        """How many leaves it stands for."""
        return len(self.leaves)

    @cached_property
    def bytes_per_device(self) -> int:
        """Bytes on the device that holds most of them."""
        return held(self.leaves)

    @cached_property
    def lost(self) -> int:
        """Bytes a device, for not being cut as wanted, where they are most."""
        return lost(self.leaves)

    @cached_property
    def lost_with_followers(self) -> int:
        """The same with the optimizer's leaves that follow."""
        return lost([*self.leaves, *self.followers])


def fold(leaves: Sequence[Leaf]) -> list[Row]:
    """Rows by descending bytes per device: families as one row, with the leaves that follow theirs."""
    follow = followers(leaves)
    following = {id(f) for found in follow.values() for f in found}
    own = [leaf for leaf in leaves if id(leaf) not in following]
    rows = []
    for path, places in families(own):
        members = tuple(own[i] for i in places)
        behind = tuple(f for leaf in members for f in follow.get(id(leaf), ()))
        rows.append(Row(path, members, behind))
    return sorted(rows, key=lambda r: (-r.bytes_per_device, -r.lost))


def families(leaves: Sequence[Leaf]) -> list[tuple[str, list[int]]]:
    """Three and more leaves alike but for the number of their layer and the stage that each is on together, each other
    leaf alone: the path, numbers that vary written `0-47`, and the places in `leaves`. In the order of the first of
    each.

    A number counts layers where it stands alone in the path, as in `blocks.3.attn`, or is the first that varies, as in
    `Block_3.Dense_1`; another is part of a name, so that the two norms of a block are folded as its attention is.
    """
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, leaf in enumerate(leaves):
        pattern = _NUMBER.sub("#", leaf.path)
        sizes = tuple((axis, end - first) for axis, (first, end) in _within(leaf))
        alike[pattern, leaf.role, leaf.shape, leaf.dtype, leaf.spec, sizes, leaf.why, leaf.wanted].append(i)
    families: list[tuple[str, list[int]]] = []
    for group in alike.values():
        for places in _by_name([leaves[i].path for i in group], group):
            path = _common_path([leaves[i].path for i in places])
            families += [(path, places)] if path else [(leaves[i].path, [i]) for i in places]
    return sorted(families, key=lambda family: family[1][0])


def followers(leaves: Sequence[Leaf]) -> dict[int, list[Leaf]]:
    """By id() of a parameter, the optimizer's leaves of its shape and spec, on its part of the mesh, whose path ends as
    its own."""
    # Numbered, so that each leaf's is hashed once, not with every end.
    cuts: dict[tuple[object, ...], int] = {}

    def ends(leaf: Leaf) -> Iterator[tuple[int, tuple[str, ...]]]:
        """What a leaf has in common with its followers, with ever shorter ends of its path."""
        cut = cuts.setdefault((leaf.shape, leaf.spec, _within(leaf), leaf.wanted), len(cuts))
        words = tuple(_WORD.findall(leaf.path))
        return ((cut, words[i:]) for i in range(len(words)))

    params: dict[tuple[int, tuple[str, ...]], Leaf] = {}
    for leaf in leaves:
        if leaf.role == "params":
            for end in ends(leaf):
                params.setdefault(end, leaf)
    following: dict[int, list[Leaf]] = defaultdict(list)
    for leaf in leaves:
        if leaf.role == "optimizer":
            param = next((params[end] for end in ends(leaf) if end in params), None)
            if param is not None:
                following[id(param)].append(leaf)
    return following


def _within(leaf: Leaf) -> tuple[tuple[str, tuple[int, int]], ...]:
    """Its part of the mesh, to be hashed."""
    return tuple(sorted(leaf.within.items())) if leaf.within else ()


def _common_path(paths: Sequence[str]) -> str | None:
    """One path for all of `paths`, which differ in numbers alone; None where it would tell of others too."""
    if len(paths) < FOLD_FROM:
        return None
    columns = [sorted(set(column)) for column in zip(*map(_numbers, paths), strict=True)]
    if prod(map(len, columns)) != len(paths):
        return None
    told = iter(columns)
    return _NUMBER.sub(lambda match: match[0] if len(v := next(told)) == 1 else index_text(v), paths[0])


def _by_name(paths: Sequence[str], places: Sequence[int]) -> Iterable[list[int]]:
    """`places` in groups whose `paths` differ in the numbers of layers alone."""
    alone = {match.start() for match in _ALONE.finditer(paths[0])}
    starts = [match.start() in alone for match in _NUMBER.finditer(paths[0])]
    numbers = [_numbers(path) for path in paths]
    varying = [len(set(column)) > 1 for column in zip(*numbers, strict=True)]
    first = varying.index(True) if True in varying else 0
    named = [i for i, counts in enumerate(starts) if not counts and i != first]
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, own in zip(places, numbers, strict=True):
        groups[tuple(own[i] for i in named)].append(place)
    return groups.values()


def _numbers(path: str) -> list[int]:
    return [int(n) for n in _NUMBER.findall(path)]


@dataclass(frozen=True)
class Listing:
    """The rows of a report's layout table and what stands below it."""

    rows: tuple[Row, ...]
    of: int  # all leaves of the report
    above: str  # what the rows are: "8 of 53, largest first"
    below: tuple[str, ...]  # what became of the leaves without a row


def listing(report: Report, largest: int | None = 8) -> Listing:
    """The `largest` rows (None: every leaf on its own row) and those not cut as wanted, by size."""
    leaves = report.leaves
    if largest is None:
        every = f"all {count_text(len(leaves))}"
        return Listing(tuple(Row(leaf.path, (leaf,)) for leaf in leaves), len(leaves), every, ())
    folded = report.rows
    wanted = sorted((r for r in folded if r.leaf.wanted), key=lambda r: -r.lost_with_followers)[:WANTED_ROWS]
    chosen = {id(r) for r in [*folded[:largest], *wanted]}
    rows = tuple(r for r in folded if id(r) in chosen)
    shown = sum(row.members for row in rows)
    some = "all" if shown == len(leaves) else f"{count_text(shown)} of"
    above = f"{some} {count_text(len(leaves))}, largest first" if len(leaves) > 1 else "only one"
    return Listing(
        rows, len(leaves), above, tuple(_below(folded, [r for r in folded if id(r) not in chosen]))
    )


def _below(folded: Sequence[Row], rest: Sequence[Row]) -> list[str]:
    lines = []
    more = [r for r in rest if r.leaf.wanted]
    if more:
        left = [leaf for r in more for leaf in (*r.leaves, *r.followers)]
        lines.append(
            f"{_leaves(sum(r.members for r in more), 'more')} not cut as wanted, +{byte_text(lost(left))}"
        )
    whole = [leaf for r in rest if not r.leaf.wanted and not any(r.leaf.spec) for leaf in r.leaves]
    on_all = [leaf for leaf in whole if not leaf.within]
    if on_all:
        lines.append(f"{_leaves(len(on_all), 'more')} whole on every device, {together(on_all)}")
    on_some = [leaf for leaf in whole if leaf.within]
    if on_some:
        each = "each " if len(on_some) > 1 else ""
        where = f"{each}whole on its part of {' and '.join(parted(on_some))}"
        lines.append(f"{_leaves(len(on_some), 'more')} {where}, {together(on_some)}")
    follow = [f for r in folded for f in r.followers]
    if follow:
        lines.append(
            f"{_leaves(len(follow), 'optimizer')} cut as the parameters they follow, {together(follow)}"
        )
    return lines


def parted(leaves: Iterable[Leaf]) -> tuple[str, ...]:
    """The mesh axes along which some leaf lies on a part of the devices only: those of a pipeline's stages."""
    return tuple(dict.fromkeys(axis for leaf in leaves for axis in leaf.within))


def together(leaves: Sequence[Leaf]) -> str:
    """`18.4 MiB together`, of leaves on parts of the mesh `18.4 MiB on the fullest device`."""
    return f"{byte_text(held(leaves))} {'on the fullest device' if parted(leaves) else 'together'}"


def _leaves(n: int, what: str) -> str:
    return f"{count_text(n)} {what} {'leaf is' if n == 1 else 'leaves are'}"


def not_cut(row: Row) -> str:
    """`not cut over model, +18.4 MiB`, empty for a leaf that is cut as wanted."""
    if not row.leaf.wanted:
        return ""
    told = f"not cut over {' and '.join(row.leaf.wanted)}"
    if row.lost:
        told += f", +{byte_text(row.lost)}"
    if row.lost_with_followers > row.lost:
        leaves = "leaf" if len(row.followers) == 1 else "leaves"
        total = byte_text(row.lost_with_followers)
        told += f", +{total} with {count_text(len(row.followers))} optimizer {leaves}"
    return told


def role_bytes(leaves: Sequence[Leaf]) -> dict[str, int]:
    """Bytes of each role on the device that holds most, in the order params, optimizer, batch, rng, other."""
    total: dict[str, int] = dict.fromkeys(("params", "optimizer", "batch", "rng", "other"), 0)
    for leaf in on_fullest(leaves):
        total[leaf.role] = total.get(leaf.role, 0) + leaf.bytes_per_device
    return {role: size for role, size in total.items() if size}


def cuts(leaf: Leaf, mesh: MeshInfo) -> tuple[tuple[tuple[str, int], ...], ...]:
    """For each dimension the axes it is cut over with their sizes, major first."""
    sizes, cut = extents(leaf, mesh.axes), cut_of(leaf.spec, len(leaf.shape))
    return tuple(tuple((axis, sizes.get(axis, 1)) for axis in axes) for axes in cut)


def copies(leaf: Leaf, mesh: MeshInfo) -> int:
    """On how many devices each block of the leaf lies."""
    blocks = prod(size for axes in cuts(leaf, mesh) for _, size in axes)
    return max(1, prod(extents(leaf, mesh.axes).values()) // max(1, blocks))
