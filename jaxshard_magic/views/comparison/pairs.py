"""What two trials of a comparison can differ in, as the widget reads it: leaves, memory by role, collectives.

Each part is there for every trial; the browser lays two of them side by side.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxshard_magic.report import Collective, Leaf, Report
from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.report.held import held
from jaxshard_magic.report.parts import finite
from jaxshard_magic.views import device_memory, leaf_rows
from jaxshard_magic.views.format import place_parts, printable, type_parts

Parts = tuple[tuple[str, str | None], ...]


def pairs(comparison: Comparison, index: Mapping[str, int]) -> dict[str, Any]:
    """Per trial how its leaves lie, what its fullest device holds and what it sends; None of one without a report.

    Args:
        index: the mesh axes of all trials.
    """
    reports = [trial.report for trial in comparison.trials]
    return {
        "leaves": _leaves(reports, index),
        "memory": [None if report is None else _memory(report) for report in reports],
        "moved": [None if report is None else _moved(report, index) for report in reports],
    }


@dataclass(frozen=True)
class _Row:
    """Leaves that every trial lays out alike, as `leaf_rows.families` folds them."""

    path: str
    members: tuple[tuple[Leaf | None, ...], ...]  # by leaf, then by trial

    def of(self, trial: int) -> list[Leaf]:
        return [leaf for leaves in self.members if (leaf := leaves[trial]) is not None]


def _leaves(reports: Sequence[Report | None], index: Mapping[str, int]) -> dict[str, Any]:
    """The rows that some two trials lay out differently: columns of paths, of how many leaves each row has and how many
    of the optimizer follow them; for each trial columns of layouts (an index into `layouts`) and of bytes on the
    fullest device, None where it has no such leaf, and of one without a report."""
    every = _by_path(reports)
    behind = _followers(reports)
    count: dict[str, int] = defaultdict(int)
    for param in behind.values():
        count[param] += 1
    known: dict[Parts, int] = {}
    told = []
    for row in _rows({path: leaves for path, leaves in every.items() if path not in behind}):
        columns = [_lies(row.of(trial), known) for trial in range(len(reports))]
        if len({column for column, report in zip(columns, reports, strict=True) if report}) > 1:
            follow = sum(count[leaf.path] for leaf in map(_any, row.members))
            told.append((printable(row.path), len(row.members), follow, columns))
    return {
        "path": [path for path, *_ in told],
        "count": [count for _, count, _, _ in told],
        "follow": [follow for _, _, follow, _ in told],
        "layout": [report and [columns[i][0] for *_, columns in told] for i, report in enumerate(reports)],
        "held": [report and [columns[i][1] for *_, columns in told] for i, report in enumerate(reports)],
        "layouts": [[[printable(text), axis and index[axis]] for text, axis in parts] for parts in known],
    }


def _by_path(reports: Sequence[Report | None]) -> dict[str, tuple[Leaf | None, ...]]:
    by_path = [{leaf.path: leaf for leaf in report.leaves} if report else {} for report in reports]
    paths = dict.fromkeys(path for leaves in by_path for path in leaves)
    return {path: tuple(leaves.get(path) for leaves in by_path) for path in paths}


def _any(leaves: Iterable[Leaf | None]) -> Leaf:
    return next(leaf for leaf in leaves if leaf is not None)


def _followers(reports: Sequence[Report | None]) -> dict[str, str]:
    """Optimizer leaves that lie in every trial as the same parameter does, each with that."""
    followed: dict[str, set[str | None]] = defaultdict(set)
    for report in filter(None, reports):
        follow = leaf_rows.followers(report.leaves)
        of = {leaf.path: p.path for p in report.leaves for leaf in follow.get(id(p), ())}
        for leaf in report.leaves:
            followed[leaf.path].add(of.get(leaf.path))
    return {
        path: param for path, params in followed.items() if len(params) == 1 and (param := next(iter(params)))
    }


def _rows(every: Mapping[str, tuple[Leaf | None, ...]]) -> list[_Row]:
    """Leaves folded where all trials agree: `families` reads from the reason of each how every trial lays it out."""
    members = list(every.values())
    alike = [
        replace(
            _any(leaves), spec=(), within={}, wanted=(), why=repr([leaf and _cut(leaf) for leaf in leaves])
        )
        for leaves in members
    ]
    return [_Row(path, tuple(members[i] for i in places)) for path, places in leaf_rows.families(alike)]


def _cut(leaf: Leaf) -> tuple[object, ...]:
    sizes = sorted((axis, end - first) for axis, (first, end) in leaf.within.items())
    return leaf.dtype, leaf.shape, leaf.spec, sizes, leaf.bytes_per_device


def _lies(leaves: Sequence[Leaf], known: dict[Parts, int]) -> tuple[int | None, int | None]:
    if not leaves:
        return None, None
    place = place_parts(leaves)
    parts = (*type_parts(leaves[0]), *((" ", None),) * bool(place), *place)
    return known.setdefault(parts, len(known)), held(leaves)


def _memory(report: Report) -> dict[str, int | None] | None:
    """By role on the device that is fullest at its peak."""
    most = device_memory.fullest(report.memory)
    return most and {role: getattr(most, role) for role in (*device_memory.ROLES, "peak")}


def _moved(report: Report, index: Mapping[str, int]) -> list[list[Any]] | None:
    """`[kind, axes, bytes sent by one device in a step, seconds, how often, whether that is exact]`, most bytes first;
    axes and seconds are None where they are not known."""
    if report.collectives is None:
        return None
    alike: dict[tuple[str, tuple[str, ...] | None], list[Collective]] = defaultdict(list)
    for c in report.collectives:
        alike[c.kind, c.axes].append(c)
    rows = [
        [
            printable(kind),
            None if axes is None else [index[axis] for axis in axes],
            sum(c.wire_bytes for c in found),
            _sum(c.seconds for c in found),
            sum(c.count for c in found),
            all(c.exact for c in found),
        ]
        for (kind, axes), found in alike.items()
    ]
    return sorted(rows, key=lambda row: -row[2])


def _sum(seconds: Iterable[float | None]) -> float | None:
    known = [finite(each) for each in seconds]
    return None if None in known else sum(filter(None, known), 0.0)
