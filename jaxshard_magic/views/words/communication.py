"""Communication in sentences: how much is sent, most by what and from which line, and the predicted step in parts."""

from collections import defaultdict
from collections.abc import Sequence
from math import isfinite

from jaxshard_magic.report import Collective, Report, Timing
from jaxshard_magic.report.parts import finite
from jaxshard_magic.views.format import byte_text, range_text, rate_text, seconds_text, share_text
from jaxshard_magic.views.words.run import island_word
from jaxshard_magic.views.words.spans import Span, axes_spans, called_spans, line_span, strong

AT_LEAST = "\u2265"
_HOW = {"scheduled": "in the order of the compiled program", "by rule": "as compilers usually overlap"}
OWN = ("compute", "memory")  # what a device does itself, by what it waits for


def communication_lead(report: Report) -> list[Span]:
    """What the communication view opens with: how much is sent, in bold, and most by what; where a chip's step is
    predicted, the share of it first."""
    collectives, timing = report.collectives, report.timing
    if not collectives:
        return [strong("Nothing moves between devices in this step.")]
    total, share = sent_text(collectives), communication_share(report)
    if timing is None or share is None:
        first = [strong(f"{total} sent by each device per step"), *most_spans(collectives), Span(".")]
        return first + _network(report)
    spent, step = least(seconds_text(timing.exposed_s), collectives), predicted_text(report)
    spans = [strong(f"{share} of the predicted step is communication:")]
    carried = least(seconds_text(timing.communication_s), collectives)
    spans.append(Span(f" {spent} of {step}, what nothing hides of {carried} on the links"))
    spans.append(Span(f", {_HOW.get(timing.overlap or '', '')}. {total} sent by each device."))
    return spans + _network(report) + _links(timing)


def network(collectives: Sequence[Collective]) -> int | None:
    """Bytes that one island of the mesh sends to others per step; None where there is but one, or it is not known."""
    known = [c.network_bytes for c in collectives if c.network_bytes is not None]
    return sum(known) if known and len(known) == len(collectives) else None


def _network(report: Report) -> list[Span]:
    """` Each host sends 96.0 MiB to others.`"""
    collectives = report.collectives or ()
    if (leaving := network(collectives)) is None:
        return []
    word = island_word(report.mesh)
    if not leaving:
        return [Span(f" Nothing goes from one {word} to another.")]
    return [Span(f" Each {word} sends {least(byte_text(leaving), collectives)} to others.")]


def communication_share(report: Report) -> str | None:
    """`62%`: the share of the predicted step that is communication; None without a prediction."""
    timing = report.timing
    if timing is None or not timing.predicted_step_s or timing.exposed_s is None:
        return None
    return share_text(timing.exposed_s / timing.predicted_step_s)


def _links(timing: Timing) -> list[Span]:
    """` On TPU v5e links carry 34 GB/s over data, 45 GB/s over model.`"""
    spans = [Span(f" On {timing.on} links carry ")] if timing.links else []
    for i, (axis, rate) in enumerate(timing.links.items()):
        spans += [Span(", ")] * (i > 0) + [Span(f"{rate_text(rate)} over "), Span(axis, "axis")]
    return [*spans, Span(".")] if spans else []


def ways(report: Report) -> list[tuple[str, str]]:
    """How what is sent goes along each axis over which something is, in the mesh's order: `ICI ring, both directions,
    90 GB/s; 2 hops from end to end`."""
    over = {axis for c in report.collectives or () for axis in c.axes or ()}
    told = report.timing.ways if report.timing else {}
    return [(axis, told[axis]) for axis in report.mesh.axes if axis in over and axis in told]


def most_spans(collectives: Sequence[Collective]) -> list[Span]:
    """`, most by all-gathers over data`: what carries above half of the bytes, if one thing does."""
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
    """`, most from cell [3], line 12`; empty where no line has above half."""
    lines: dict[tuple[str | None, int | None], float] = defaultdict(float)
    for c in collectives:
        lines[c.file, c.line] += getattr(c, weight) or 0
    (file, line), top = max(lines.items(), key=lambda item: item[1], default=((None, None), 0.0))
    if line is None or 2 * top <= sum(lines.values()):
        return []
    called = (c.called for c in collectives if (c.file, c.line) == (file, line) and getattr(c, weight))
    return [Span(", most from "), line_span(file, line), *called_spans(called)]


def sent(report: Report) -> int | None:
    """Bytes that one device sends per step, None where the collectives are not known."""
    return None if report.collectives is None else sum(c.wire_bytes for c in report.collectives)


def sent_by_axes(collectives: Sequence[Collective]) -> dict[tuple[str, ...] | None, int]:
    """Bytes that one device sends per step over each set of axes, most first."""
    total: dict[tuple[str, ...] | None, int] = defaultdict(int)
    for c in collectives:
        total[c.axes] += c.wire_bytes
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def least(text: str, collectives: Sequence[Collective]) -> str:
    """`text`, a sum over `collectives`, marked as the least that it may be where the program decides how often one of
    them runs."""
    return text if all(c.exact for c in collectives) else AT_LEAST + text


def sent_text(collectives: Sequence[Collective]) -> str:
    """`993 MiB`, `≥993 MiB`: what one device sends per step."""
    return least(byte_text(sum(c.wire_bytes for c in collectives)), collectives)


def predicted_text(report: Report) -> str:
    """The predicted step, `46.0 ms`."""
    known = report.timing.predicted_step_s if report.timing else None
    return seconds_text(None) if known is None else least(seconds_text(known), report.collectives or ())


def predicted_range(report: Report) -> str:
    """`41.2 to 52.3 ms`: from all overlapped that can be to nothing overlapped; empty where that is not known."""
    low, high = (finite(t) for t in _range(report))
    return "" if low is None or high is None else range_text(low, high)


def _range(report: Report) -> tuple[float | None, float | None]:
    timing = report.timing
    return (None, None) if timing is None else (timing.predicted_low_s, timing.predicted_high_s)


def time_part_text(report: Report, kind: str, axes: tuple[str, ...] | None, seconds: float) -> str:
    """`14.3 ms`: one of the `time_parts`."""
    alike = [c for c in report.collectives or () if (c.kind, c.axes or ()) == (kind, axes or ())]
    return least(seconds_text(seconds), alike)


def time_parts(report: Report) -> list[tuple[str, tuple[str, ...] | None, float]]:
    """The predicted step as (what, axes, seconds): what a device does itself, `OWN`, then each kind of collective,
    largest first; empty without a prediction."""
    timing = report.timing
    if timing is None or timing.exposed_s is None or timing.predicted_step_s is None:
        return []
    if not isfinite(timing.predicted_step_s):
        return []
    own = max(0.0, timing.predicted_step_s - timing.exposed_s)
    taken = [(wait.kind, wait.axes, finite(wait.seconds) or 0.0) for wait in timing.waits]
    rest = sorted((part for part in taken if part[2]), key=lambda part: -part[2])
    waits = finite(timing.waiting_s)
    if waits is None:
        return [("compute", None, own), *rest]
    waits = min(waits, own)
    parts = zip(OWN, (own - waits, waits), strict=True)
    return [*((what, None, s) for what, s in parts if s), *rest]
