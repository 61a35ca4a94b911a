"""The leaves of a report as the widget reads them: where each lies and why, the rows they make, and which of them stay
whole or fail the check."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxshard_magic.report import Leaf, Report
from jaxshard_magic.report.parts import cut_of
from jaxshard_magic.views import leaf_rows
from jaxshard_magic.views.format import dtype_text, printable

ROLES = ("params", "optimizer", "batch", "rng", "other")

_IN_PATH, _GOES_ON = re.compile(r"[\w.\[\]]"), re.compile(r"[\w\[]|\.\w")


def leaves_payload(report: Report, index: Mapping[str, int]) -> dict[str, Any]:
    """What the layout view shows of arrays; `index` numbers the mesh's axes."""
    check = report.check
    return {
        **_leaves(report.leaves, index),
        "short": _short(report, index),
        "failed": _named(check.failed if check else (), report.leaves),
        "noise": _named(check.noise if check else (), report.leaves),
        "rows": _rows(report.leaves),
    }


def _leaves(leaves: Sequence[Leaf], index: Mapping[str, int]) -> dict[str, Any]:
    whys: dict[str, int] = {}
    withins: dict[tuple[tuple[int, int, int], ...], int] = {(): 0}
    places = [tuple((index[a], *span) for a, span in leaf.within.items()) for leaf in leaves]
    columns = {
        "path": [printable(leaf.path) for leaf in leaves],
        "role": [leaf.role if leaf.role in ROLES else "other" for leaf in leaves],
        "dtype": [printable(dtype_text(leaf.dtype)) for leaf in leaves],
        "shape": [leaf.shape for leaf in leaves],
        "spec": [_spec(leaf, index) for leaf in leaves],
        "bytes": [leaf.bytes for leaf in leaves],
        "held": [leaf.bytes_per_device for leaf in leaves],
        "why": [whys.setdefault(leaf.why, len(whys)) for leaf in leaves],
        "within": [withins.setdefault(place, len(withins)) for place in places],
    }
    return {"leaves": columns, "whys": [printable(why) for why in whys], "withins": list(withins)}


def _spec(leaf: Leaf, index: Mapping[str, int]) -> list[list[int]]:
    return [[index[axis] for axis in axes] for axes in cut_of(leaf.spec, len(leaf.shape))]


def _short(report: Report, index: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """The leaves that are not cut as wanted, with what that costs and what would mend it."""
    follow = leaf_rows.followers(report.leaves)
    short = {}
    for i, leaf in enumerate(report.leaves):
        if leaf.wanted:
            behind = follow.get(id(leaf), ())
            short[str(i)] = {
                "wanted": [index[axis] for axis in leaf.wanted],
                "lost": leaf.lost,
                "total": leaf.lost + sum(f.lost for f in behind),
                "followers": len(behind),
                "fix": _fix(leaf.path, report),
            }
    return short


def _fix(path: str, report: Report) -> str | None:
    """The fix of the first advice that names the leaf."""
    for advice in report.advice:
        if advice.fix is not None and _names(advice.message, path):
            return printable(advice.fix)
    return None


def _names(message: str, path: str) -> bool:
    """Whether a message names a leaf of this path, and not one whose path only holds it.

    >>> _names("w.kernel is not cut.", "w.kernel"), _names("w.kernel is not cut.", "kernel")
    (True, False)
    """
    start = message.find(path)
    while start >= 0:
        end = start + len(path)
        if not _IN_PATH.match(message, start - 1, start) and not _GOES_ON.match(message, end):
            return True
        start = message.find(path, start + 1)
    return False


def _named(paths: Sequence[str], leaves: Sequence[Leaf]) -> list[int]:
    """The leaves that a check speaks of. It names outputs, `0.params.w`: a leaf that the step takes as
    `state.params.w` is the same one."""
    if not paths:
        return []
    places: dict[str, int] = {}
    for key in (lambda path: path, _inner):
        for i, leaf in enumerate(leaves):
            places.setdefault(key(leaf.path), i)
    indices = (places.get(path, places.get(_inner(path))) for path in paths)
    return sorted({i for i in indices if i is not None})


def _inner(path: str) -> str:
    return path.partition(".")[2] or path


def _rows(leaves: Sequence[Leaf]) -> list[list[Any]]:
    """One row for each leaf or folded family, role by role, in the order of the step's arguments."""
    rows = []
    for path, places in leaf_rows.families(leaves):
        role = leaves[places[0]].role
        rows.append([role if role in ROLES else "other", printable(path), places])
    return sorted(rows, key=lambda row: ROLES.index(row[0]))
