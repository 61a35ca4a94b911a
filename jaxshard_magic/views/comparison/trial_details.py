"""Details of trials for a comparison of two in the widget: layouts of leaves, memory by role, and collectives.

Each detail is given for every trial; the browser sets two of them side by side.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxshard_magic.report import Collective, Leaf, Report
from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.report.device_leaves import stored_bytes
from jaxshard_magic.report.parts import finite_or_none
from jaxshard_magic.views import device_memory, leaf_rows
from jaxshard_magic.views.format import printable, submesh_parts, type_parts

LayoutText = tuple[tuple[str, str | None], ...]


def trial_details(comparison: Comparison, index: Mapping[str, int]) -> dict[str, Any]:
    """Return for each trial its layouts, the memory of its fullest device, and its collectives; None without a report.

    Args:
        comparison: Comparison to show.
        index: Number of each mesh axis, over all trials.
    """
    reports = [trial.report for trial in comparison.trials]
    return {
        "leaves": _leaves(reports, index),
        "memory": [None if report is None else _memory(report) for report in reports],
        "moved": [None if report is None else _moved(report, index) for report in reports],
    }


@dataclass(frozen=True)
class _LeafFamily:
    """Leaves folded into one row, because every trial lays them out alike.

    Attributes:
        path: Path of all leaves, with ranges for the numbers that vary.
        members: Leaves by leaf, then by trial; None for a trial without the leaf.
    """

    path: str
    members: tuple[tuple[Leaf | None, ...], ...]

    def of(self, trial: int) -> list[Leaf]:
        """Return the leaves of one trial."""
        return [leaf for leaves in self.members if (leaf := leaves[trial]) is not None]


def _leaves(reports: Sequence[Report | None], index: Mapping[str, int]) -> dict[str, Any]:
    """Return the rows with different layouts in at least two trials, as columns.

    `path`, `count` and `follow` have an entry for each row: the path, the number of leaves, and the number of optimizer
    leaves that follow them. `layout` and `held` have a column for each trial: an index into `layouts`, and bytes on the
    fullest device. Entries are None for a trial without the leaf, columns for a trial without a report.
    """
    every = _by_path(reports)
    param_of = _followers(reports)
    count: dict[str, int] = defaultdict(int)
    for param in param_of.values():
        count[param] += 1
    layout_numbers: dict[LayoutText, int] = {}
    table = []
    for row in _rows({path: leaves for path, leaves in every.items() if path not in param_of}):
        columns = [_lies(row.of(trial), layout_numbers) for trial in range(len(reports))]
        if len({column for column, report in zip(columns, reports, strict=True) if report}) > 1:
            follow = sum(count[leaf.path] for leaf in map(_any, row.members))
            table.append((printable(row.path), len(row.members), follow, columns))
    return {
        "path": [path for path, *_ in table],
        "count": [count for _, count, _, _ in table],
        "follow": [follow for _, _, follow, _ in table],
        "layout": [report and [columns[i][0] for *_, columns in table] for i, report in enumerate(reports)],
        "held": [report and [columns[i][1] for *_, columns in table] for i, report in enumerate(reports)],
        "layouts": [[[printable(text), axis and index[axis]] for text, axis in parts] for parts in layout_numbers],
    }


def _by_path(reports: Sequence[Report | None]) -> dict[str, tuple[Leaf | None, ...]]:
    """Return the leaves of all trials by path; None for a trial without the leaf."""
    by_path = [{leaf.path: leaf for leaf in report.leaves} if report else {} for report in reports]
    paths = dict.fromkeys(path for leaves in by_path for path in leaves)
    return {path: tuple(leaves.get(path) for leaves in by_path) for path in paths}


def _any(leaves: Iterable[Leaf | None]) -> Leaf:
    """Return the first leaf that is not None."""
    return next(leaf for leaf in leaves if leaf is not None)


def _followers(reports: Sequence[Report | None]) -> dict[str, str]:
    """Return the optimizer leaves laid out like one and the same parameter in every trial, with that parameter's
    path."""
    followed: dict[str, set[str | None]] = defaultdict(set)
    for report in filter(None, reports):
        follow = leaf_rows.followers(report.leaves)
        of = {leaf.path: p.path for p in report.leaves for leaf in follow.get(id(p), ())}
        for leaf in report.leaves:
            followed[leaf.path].add(of.get(leaf.path))
    return {path: param for path, params in followed.items() if len(params) == 1 and (param := next(iter(params)))}


def _rows(every: Mapping[str, tuple[Leaf | None, ...]]) -> list[_LeafFamily]:
    """Fold leaves that have equal layouts in all trials."""
    members = list(every.values())
    alike = [
        replace(
            # `layer_families` compares reasons too: a reason made of all layouts makes it compare all trials.
            _any(leaves),
            spec=(),
            within={},
            wanted=(),
            why=repr([leaf and _cut(leaf) for leaf in leaves]),
        )
        for leaves in members
    ]
    return [_LeafFamily(path, tuple(members[i] for i in places)) for path, places in leaf_rows.layer_families(alike)]


def _cut(leaf: Leaf) -> tuple[object, ...]:
    """Return the layout of a leaf in comparable form: dtype, shape, spec, sizes of its part of the mesh, bytes per
    device."""
    sizes = sorted((axis, end - first) for axis, (first, end) in leaf.within.items())
    return leaf.dtype, leaf.shape, leaf.spec, sizes, leaf.bytes_per_device


def _lies(leaves: Sequence[Leaf], known: dict[LayoutText, int]) -> tuple[int | None, int | None]:
    """Return (index of the layout, bytes on the fullest device) of a row in one trial; a new layout is added to
    `known`."""
    if not leaves:
        return None, None
    place = submesh_parts(leaves)
    parts = (*type_parts(leaves[0]), *((" ", None),) * bool(place), *place)
    return known.setdefault(parts, len(known)), stored_bytes(leaves)


def _memory(report: Report) -> dict[str, int | None] | None:
    """Return the bytes of each role, and the peak, on the device that is fullest at its peak; None if unknown."""
    most = device_memory.fullest(report.memory)
    return most and {role: getattr(most, role) for role in (*device_memory.ROLES, "peak")}


def _moved(report: Report, index: Mapping[str, int]) -> list[list[Any]] | None:
    """Return a row for each kind of collective and axes, most bytes first; None if unknown.

    Rows are `[kind, axes, bytes sent by one device in a step, seconds, count, whether the count is exact]`. Axes and
    seconds are None if unknown.
    """
    if report.collectives is None:
        return None
    groups: dict[tuple[str, tuple[str, ...] | None], list[Collective]] = defaultdict(list)
    for c in report.collectives:
        groups[c.kind, c.axes].append(c)
    rows = [
        [
            printable(kind),
            None if axes is None else [index[axis] for axis in axes],
            sum(c.wire_bytes for c in group),
            _sum(c.seconds for c in group),
            sum(c.count for c in group),
            all(c.exact for c in group),
        ]
        for (kind, axes), group in groups.items()
    ]
    return sorted(rows, key=lambda row: -row[2])


def _sum(seconds: Iterable[float | None]) -> float | None:
    """Return the sum, or None if one summand is unknown or not finite."""
    known = [finite_or_none(each) for each in seconds]
    return None if None in known else sum(filter(None, known), 0.0)
