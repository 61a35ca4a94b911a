"""Leaves of a report as data for the widget: layout, reasons, table rows, missing sharding and failed checks."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxshard_magic.report import Leaf, Report
from jaxshard_magic.report.parts import dim_axes
from jaxshard_magic.views import leaf_rows
from jaxshard_magic.views.format import dtype_text, printable

_IN_PATH, _GOES_ON = re.compile(r"[\w.\[\]]"), re.compile(r"[\w\[]|\.\w")


def leaves_payload(report: Report, index: Mapping[str, int]) -> dict[str, Any]:
    """Return the layout view's data about arrays.

    Args:
        report: Report to show.
        index: Number of each mesh axis.
    """
    check = report.check
    return {
        **_leaves(report.leaves, index),
        "short": _unsharded_leaves(report, index),
        "failed": _mentioned_leaves(check.failed if check else (), report.leaves),
        "noise": _mentioned_leaves(check.noise if check else (), report.leaves),
        "rows": _rows(report.leaves),
    }


def _leaves(leaves: Sequence[Leaf], index: Mapping[str, int]) -> dict[str, Any]:
    """Return leaves as columns; reasons and parts of the mesh are stored once and referred to by number."""
    whys: dict[str, int] = {}
    withins: dict[tuple[tuple[int, int, int], ...], int] = {(): 0}
    submeshes = [tuple((index[a], *span) for a, span in leaf.within.items()) for leaf in leaves]
    columns = {
        "path": [printable(leaf.path) for leaf in leaves],
        "role": [leaf.role if leaf.role in leaf_rows.ROLES else "other" for leaf in leaves],
        "dtype": [printable(dtype_text(leaf.dtype)) for leaf in leaves],
        "shape": [leaf.shape for leaf in leaves],
        "spec": [_spec(leaf, index) for leaf in leaves],
        "bytes": [leaf.bytes for leaf in leaves],
        "held": [leaf.bytes_per_device for leaf in leaves],
        "why": [whys.setdefault(leaf.why, len(whys)) for leaf in leaves],
        "within": [withins.setdefault(place, len(withins)) for place in submeshes],
    }
    return {"leaves": columns, "whys": [printable(why) for why in whys], "withins": list(withins)}


def _spec(leaf: Leaf, index: Mapping[str, int]) -> list[list[int]]:
    return [[index[axis] for axis in axes] for axes in dim_axes(leaf.spec, len(leaf.shape))]


def _unsharded_leaves(report: Report, index: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return the leaves with missing sharding, by index: the cost in bytes, and the fix."""
    follow = leaf_rows.followers(report.leaves)
    short = {}
    for i, leaf in enumerate(report.leaves):
        if leaf.wanted:
            leaf_followers = follow.get(id(leaf), ())
            short[str(i)] = {
                "wanted": [index[axis] for axis in leaf.wanted],
                "lost": leaf.lost,
                "total": leaf.lost + sum(f.lost for f in leaf_followers),
                "followers": len(leaf_followers),
                "fix": _fix(leaf.path, report),
            }
    return short


def _fix(path: str, report: Report) -> str | None:
    """Return the fix of the first advice that mentions the leaf, or None."""
    for advice in report.advice:
        if advice.fix is not None and _mentions(advice.message, path):
            return printable(advice.fix)
    return None


def _mentions(message: str, path: str) -> bool:
    """Return whether a message mentions the leaf of this path, not a leaf with a longer path.

    >>> _mentions("w.kernel is not cut.", "w.kernel"), _mentions("w.kernel is not cut.", "kernel")
    (True, False)
    """
    start = message.find(path)
    while start >= 0:
        end = start + len(path)
        if not _IN_PATH.match(message, start - 1, start) and not _GOES_ON.match(message, end):
            return True
        start = message.find(path, start + 1)
    return False


def _mentioned_leaves(paths: Sequence[str], leaves: Sequence[Leaf]) -> list[int]:
    """Return the indices of leaves mentioned by a check."""
    if not paths:
        return []
    index_by_path: dict[str, int] = {}
    # A check names outputs, `0.params.w`; the step takes the same leaf as `state.params.w`. The first key of a path is
    # therefore optional, but full paths go first.
    for key in (lambda path: path, _without_first_key):
        for i, leaf in enumerate(leaves):
            index_by_path.setdefault(key(leaf.path), i)
    indices = (index_by_path.get(path, index_by_path.get(_without_first_key(path))) for path in paths)
    return sorted({i for i in indices if i is not None})


def _without_first_key(path: str) -> str:
    """Return a path without its first key."""
    return path.partition(".")[2] or path


def _rows(leaves: Sequence[Leaf]) -> list[list[Any]]:
    """Return a row for each leaf or family of layers, sorted by role, then in the order of the step's arguments."""
    rows = []
    for path, places in leaf_rows.layer_families(leaves):
        role = leaves[places[0]].role
        rows.append([role if role in leaf_rows.ROLES else "other", printable(path), places])
    return sorted(rows, key=lambda row: leaf_rows.ROLES.index(row[0]))
