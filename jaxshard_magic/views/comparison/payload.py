"""Data of a comparison for its widget: each trial as numbers and texts, and details for a comparison of two."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxshard_magic.report import Collective, Leaf, Report
from jaxshard_magic.report.comparison import Comparison, Trial
from jaxshard_magic.report.device_leaves import stored_bytes
from jaxshard_magic.report.parts import finite_or_none
from jaxshard_magic.views import device_memory, leaf_rows
from jaxshard_magic.views.comparison import data
from jaxshard_magic.views.format import (
    UNKNOWN,
    byte_text,
    limit_text,
    printable,
    seconds_text,
    submesh_parts,
    type_parts,
)
from jaxshard_magic.views.payload_encoding import axis_numbers, compressed, span_pairs
from jaxshard_magic.views.training.payload import curves_payload
from jaxshard_magic.views.words import comparison as words
from jaxshard_magic.views.words import percent_text

VERSION = 1
LayoutText = tuple[tuple[str, str | None], ...]


def packed_comparison(comparison: Comparison) -> bytes:
    """Return the payload as compact JSON in UTF-8, compressed with zlib."""
    return compressed(payload(comparison))


def payload(comparison: Comparison) -> dict[str, Any]:
    """Return the data of the comparison's widget, ready for JSON. Names are plain text, never markup."""
    reports = filter(None, (trial.report for trial in comparison.trials))
    index, sent = axis_numbers(data.merged_mesh(comparison).axes, reports), data.sent_columns(comparison)
    limit = data.limit_of(comparison)
    names, front = words.trial_names(comparison), {id(trial) for trial in comparison.front}
    return {
        "v": VERSION,
        "lead": span_pairs(words.comparison_lead(comparison)),
        "about": printable(words.comparison_about(comparison)),
        "notes": [printable(note) for note in words.comparison_notes(comparison)],
        "axes": [printable(axis) for axis in index],
        "source": words.source_text(comparison),
        "limit": limit,
        "limit_text": None if limit is None else limit_text(limit),
        "sent": {
            "unit": sent.unit,
            "names": [printable(name) for name in sent.names],
            "axes": [_over(name, index) for name in sent.names],
        },
        "trials": [
            _trial(comparison, trial, names[trial.key], sent)
            | {"mesh": [[index[axis], size] for axis, size in trial.mesh.items()], "front": id(trial) in front}
            for trial in comparison.trials
        ],
        "left": [printable(line) for line in comparison.left],
        "pairs": trial_details(comparison, index),
        "curves": curves_payload(data.trial_metrics(comparison)),
    }


def default_trial(comparison: Comparison) -> int | None:
    """Return the position of the trial shown at first: the fastest, else the smallest; None if neither is known."""
    best = comparison.fastest or comparison.smallest
    return next((i for i, trial in enumerate(comparison.trials) if trial is best), None)


def _over(name: str, index: Mapping[str, int]) -> list[int] | None:
    """Return the indices of the axes of a column of bytes sent; None for unknown axes, and for merged columns."""
    axes = name.split("+")
    return [index[axis] for axis in axes] if all(axis in index for axis in axes) else None


def _trial(comparison: Comparison, trial: Trial, name: words.TrialName, sent: data.SentColumns) -> dict[str, Any]:
    """Return the data of one trial."""
    seconds, failed = finite_or_none(comparison.seconds(trial)), data.has_failed(trial)
    sizes, check = sent.bytes_of(trial), None if trial.report is None else trial.report.check
    return {
        "name": printable(name.strategy),
        "more": printable(name.options),
        "label": printable(name.text),
        "line": printable(trial.line),
        "failed": failed,
        "why": [printable(part) for part in words.failure_parts(trial)] if failed else None,
        "fix": None if trial.fix is None else printable(trial.fix),
        "fits": _answer(words.fits_answer(trial)),
        "over": trial.fits is False,
        "peak": trial.peak,
        "peak_text": byte_text(trial.peak),
        "seconds": seconds,
        "seconds_text": words.step_text(comparison, trial),
        "apart": words.is_predicted(comparison, trial),
        "tail": finite_or_none(words.comparable_prediction(comparison, trial)),
        "sent": sizes,
        "sent_text": [UNKNOWN if size is None else sent.text(size) for size in sizes],
        "bubble": finite_or_none(trial.bubble),
        "bubble_text": percent_text(trial.bubble),
        "same": _answer(words.same_answer(trial)),
        "differs": None if check is None else finite_or_none(words.largest_difference(check)),
        "point": not failed and seconds is not None and trial.peak is not None,
        "facts": [[term, printable(told)] for term, told in _facts(comparison, trial)],
    }


def _answer(answer: words.SignedAnswer) -> list[str | None]:
    return [answer.sign, answer.word, answer.more]


def _facts(comparison: Comparison, trial: Trial) -> list[tuple[str, str]]:
    """Return (term, text) pairs for the chosen trial beside the picture."""
    told = [("report", number)] if (number := words.report_text(trial)) else []
    if trial.measured is not None:
        beside = words.prediction_text(comparison, trial)
        how = f", predicted {beside}" if beside else ""
        told.append(("this CPU took" if trial.simulated else "measured", f"{seconds_text(trial.measured)}{how}"))
    if trial.predicted is not None and words.comparable_prediction(comparison, trial) is None:
        on = trial.report.timing.on if trial.report and trial.report.timing else None
        told.append(("predicted", f"{seconds_text(trial.predicted)}{f' for {on}' if on else ''}"))
    if trial.peak is not None:
        share = words.limit_share(trial)
        told.append(("peak", f"{byte_text(trial.peak)}{f', {share} of the limit' if share else ''}"))
    return [*told, ("front", words.front_text(comparison, trial))]


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
