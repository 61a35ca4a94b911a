"""Communication in words: bytes sent, their main cause and line of code, and the parts of the predicted step."""

from collections import defaultdict
from collections.abc import Sequence
from math import isfinite

from jaxshard_magic.report import Collective, Report, Timing
from jaxshard_magic.report.parts import finite_or_none
from jaxshard_magic.views.format import byte_text, range_text, rate_text, seconds_text, share_text
from jaxshard_magic.views.words.run import island_word
from jaxshard_magic.views.words.spans import Span, axes_spans, called_spans, line_span, strong

AT_LEAST = "\u2265"
_HOW = {"scheduled": "in the order of the compiled program", "by rule": "as compilers usually overlap"}
DEVICE_PARTS = ("compute", "memory")  # the device's own time: computing, and waiting for its memory


def communication_lead(report: Report) -> list[Span]:
    """Return the first sentences of the communication view: bytes sent, in bold, and their main cause.

    With a predicted step for a chip, the share of communication goes first.
    """
    collectives, timing = report.collectives, report.timing
    if not collectives:
        return [strong("Nothing moves between devices in this step.")]
    total, share = sent_text(collectives), communication_share(report)
    if timing is None or share is None:
        first = [strong(f"{total} sent by each device per step"), *most_spans(collectives), Span(".")]
        return first + _network(report)
    spent, step = mark_lower_bound(seconds_text(timing.exposed_s), collectives), predicted_text(report)
    spans = [strong(f"{share} of the predicted step is communication:")]
    carried = mark_lower_bound(seconds_text(timing.communication_s), collectives)
    spans.append(Span(f" {spent} of {step}, what nothing hides of {carried} on the links"))
    spans.append(Span(f", {_HOW.get(timing.overlap or '', '')}. {total} sent by each device."))
    return spans + _network(report) + _links(timing)


def inter_island_bytes(collectives: Sequence[Collective]) -> int | None:
    """Return the bytes sent per step by one island of the mesh to others; None for a single island, or if unknown."""
    known = [c.network_bytes for c in collectives if c.network_bytes is not None]
    return sum(known) if known and len(known) == len(collectives) else None


def _network(report: Report) -> list[Span]:
    """Return the bytes between islands: ` Each host sends 96.0 MiB to others.`"""
    collectives = report.collectives or ()
    if (leaving := inter_island_bytes(collectives)) is None:
        return []
    word = island_word(report.mesh)
    if not leaving:
        return [Span(f" Nothing goes from one {word} to another.")]
    return [Span(f" Each {word} sends {mark_lower_bound(byte_text(leaving), collectives)} to others.")]


def communication_share(report: Report) -> str | None:
    """Return the share of communication in the predicted step: `62%`; None without a prediction."""
    timing = report.timing
    if timing is None or not timing.predicted_step_s or timing.exposed_s is None:
        return None
    return share_text(timing.exposed_s / timing.predicted_step_s)


def _links(timing: Timing) -> list[Span]:
    """Return the speed of links by axis: ` On TPU v5e links carry 34 GB/s over data, 45 GB/s over model.`"""
    spans = [Span(f" On {timing.on} links carry ")] if timing.links else []
    for i, (axis, rate) in enumerate(timing.links.items()):
        spans += [Span(", ")] * (i > 0) + [Span(f"{rate_text(rate)} over "), Span(axis, "axis")]
    return [*spans, Span(".")] if spans else []


def link_texts(report: Report) -> list[tuple[str, str]]:
    """Return (axis, links) of each axis with communication, in mesh order: `ICI ring, both directions, 90 GB/s; 2 hops
    from end to end`."""
    over = {axis for c in report.collectives or () for axis in c.axes or ()}
    told = report.timing.ways if report.timing else {}
    return [(axis, told[axis]) for axis in report.mesh.axes if axis in over and axis in told]


def most_spans(collectives: Sequence[Collective]) -> list[Span]:
    """Return the kind of collective, or else the axes, behind more than half of the bytes: `, most by all-gathers over
    data`.

    Empty if there is none.
    """
    total = sum(c.wire_bytes for c in collectives)
    by_kind: dict[tuple[str, tuple[str, ...] | None], int] = defaultdict(int)
    for c in collectives:
        by_kind[c.kind, c.axes] += c.wire_bytes
    (kind, axes), top = max(by_kind.items(), key=lambda item: item[1])
    if 2 * top > total:
        much = "all" if top == total else "most"
        alike = [c for c in collectives if (c.kind, c.axes) == (kind, axes)]
        return [Span(f", {much} by {kind}s"), *axes_spans(axes), *line_spans(alike, "wire_bytes")]
    by_axes = sent_by_axes(collectives)
    axes, top = max(by_axes.items(), key=lambda item: item[1])
    return [Span(", most"), *axes_spans(axes)] if axes and 2 * top > total else []


def line_spans(collectives: Sequence[Collective], weight: str) -> list[Span]:
    """Return the line behind more than half of a quantity: `, most from cell [3], line 12`; empty if there is none.

    Args:
        collectives: Collectives.
        weight: Attribute of `Collective` to sum up, such as "wire_bytes".
    """
    lines: dict[tuple[str | None, int | None], float] = defaultdict(float)
    for c in collectives:
        lines[c.file, c.line] += getattr(c, weight) or 0
    (file, line), top = max(lines.items(), key=lambda item: item[1], default=((None, None), 0.0))
    if line is None or 2 * top <= sum(lines.values()):
        return []
    called = (c.called for c in collectives if (c.file, c.line) == (file, line) and getattr(c, weight))
    return [Span(", most from "), line_span(file, line), *called_spans(called)]


def sent_bytes(report: Report) -> int | None:
    """Return the bytes sent by one device per step; None if collectives are unknown."""
    return None if report.collectives is None else sum(c.wire_bytes for c in report.collectives)


def sent_by_axes(collectives: Sequence[Collective]) -> dict[tuple[str, ...] | None, int]:
    """Return the bytes sent by one device per step over each set of axes, most first."""
    total: dict[tuple[str, ...] | None, int] = defaultdict(int)
    for c in collectives:
        total[c.axes] += c.wire_bytes
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def mark_lower_bound(text: str, collectives: Sequence[Collective]) -> str:
    """Mark a sum as a lower bound if the program decides at run time how often a collective runs.

    Args:
        text: Sum over the collectives.
        collectives: Summands.
    """
    return text if all(c.exact for c in collectives) else AT_LEAST + text


def sent_text(collectives: Sequence[Collective]) -> str:
    """Return the bytes sent by one device per step: `993 MiB`, `≥993 MiB`."""
    return mark_lower_bound(byte_text(sum(c.wire_bytes for c in collectives)), collectives)


def predicted_text(report: Report) -> str:
    """Return the predicted step time: `46.0 ms`; a dash without a prediction."""
    known = report.timing.predicted_step_s if report.timing else None
    return seconds_text(None) if known is None else mark_lower_bound(seconds_text(known), report.collectives or ())


def predicted_range(report: Report) -> str:
    """Return the bounds of the predicted step, from full overlap to no overlap: `41.2 to 52.3 ms`; empty if unknown."""
    low, high = (finite_or_none(t) for t in _range(report))
    return "" if low is None or high is None else range_text(low, high)


def _range(report: Report) -> tuple[float | None, float | None]:
    timing = report.timing
    return (None, None) if timing is None else (timing.predicted_low_s, timing.predicted_high_s)


def time_part_text(report: Report, kind: str, axes: tuple[str, ...] | None, seconds: float) -> str:
    """Return the time of one entry of `time_parts`: `14.3 ms`.

    Args:
        report: Gives the collectives.
        kind: Kind of the entry.
        axes: Mesh axes of the entry.
        seconds: Seconds of the entry.
    """
    alike = [c for c in report.collectives or () if (c.kind, c.axes or ()) == (kind, axes or ())]
    return mark_lower_bound(seconds_text(seconds), alike)


def time_parts(report: Report) -> list[tuple[str, tuple[str, ...] | None, float]]:
    """Return the parts of the predicted step as (kind, axes, seconds); empty without a prediction.

    Compute and memory of the device go first, then each kind of collective, the longest first.
    """
    timing = report.timing
    if timing is None or timing.exposed_s is None or timing.predicted_step_s is None:
        return []
    if not isfinite(timing.predicted_step_s):
        return []
    own = max(0.0, timing.predicted_step_s - timing.exposed_s)
    taken = [(wait.kind, wait.axes, finite_or_none(wait.seconds) or 0.0) for wait in timing.waits]
    rest = sorted((part for part in taken if part[2]), key=lambda part: -part[2])
    waits = finite_or_none(timing.waiting_s)
    if waits is None:
        return [("compute", None, own), *rest]
    waits = min(waits, own)
    parts = zip(DEVICE_PARTS, (own - waits, waits), strict=True)
    return [*((what, None, s) for what, s in parts if s), *rest]
