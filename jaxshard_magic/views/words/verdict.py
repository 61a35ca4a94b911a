"""The verdict: does the step run right, does it fit, what holds it up."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from jaxshard_magic.report import Collective, Report, Timing
from jaxshard_magic.report.held import held
from jaxshard_magic.views import device_memory
from jaxshard_magic.views.format import byte_text, count_text, of_limit, share_text
from jaxshard_magic.views.words.buffers import largest_spans
from jaxshard_magic.views.words.communication import line_spans, most_spans, predicted_text, sent_text
from jaxshard_magic.views.words.memory import where
from jaxshard_magic.views.words.run import difference, ended_spans, ran
from jaxshard_magic.views.words.spans import Span, axes_spans, strong


@dataclass(frozen=True)
class Verdict:
    ok: bool
    spans: tuple[Span, ...]

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


def verdict(report: Report) -> Verdict:
    """The answer in one or two sentences: did the cell end early, does the step run right, does it fit, what holds it
    up."""
    if not report.of_step:
        return Verdict(True, tuple(_arrays(report)))
    ok, spans = True, list[Span]()
    for part_ok, part in (_ended(report), _numbers(report), _fit(report), (True, _moved(report))):
        ok = ok and part_ok
        spans += [Span(" ")] * bool(spans and part) + part
    return Verdict(ok, tuple(spans))


def _arrays(report: Report) -> list[Span]:
    """Of arrays without a step: their bytes, and what every device keeps whole."""
    leaves, several = report.leaves, len(report.mesh.devices) > 1
    total = byte_text(sum(leaf.bytes for leaf in leaves))
    n = "1 array" if len(leaves) == 1 else f"{count_text(len(leaves))} arrays"
    most = ""
    if several:
        alike = not any(leaf.within for leaf in leaves)
        most = f"; {'each' if alike else 'the fullest'} device holds {byte_text(held(leaves))}"
    whole = [leaf for leaf in leaves if not any(leaf.spec) and not leaf.within] if several else []
    kept = (
        f" Whole on every device: {count_text(len(whole))} of them, {byte_text(held(whole))}."
        if whole
        else ""
    )
    return [strong(f"{n}, {total}{' together' * (len(leaves) > 1)}{most}."), Span(kept)]


def _ended(report: Report) -> tuple[bool, list[Span]]:
    ended = report.ended
    return (True, []) if ended is None else (ended.error is None, ended_spans(ended))


def _numbers(report: Report) -> tuple[bool, list[Span]]:
    check = report.check
    if check is None or check.passed:
        return True, []
    spans = [strong("Not the same numbers:"), Span(f" {difference(report)}")]
    if check.failed:
        spans += [Span("; first in "), Span(check.failed[0], "code")]
    return False, [*spans, Span(".")]


def fits(report: Report) -> bool:
    """False where the peak is above the limit."""
    return _fit(report)[0]


def _fit(report: Report) -> tuple[bool, list[Span]]:
    if report.memory is None or not report.memory.per_device:
        return True, []
    groups, most = device_memory.groups(report.memory), device_memory.limit(report.memory)
    top, place = groups[0].most, where(groups)
    planned = report.memory.source == "planned"
    ok, by_its_plan = True, ", by its plan" * planned
    if top.peak is None:
        word = "Peak memory not known:"
        size = f"the arrays take {byte_text(device_memory.bytes_at_peak(top))}"
    elif most is None:
        word, size = "No memory limit here:", byte_text(top.peak)
    elif top.peak > most:
        ok, word = False, f"{'Would' if planned else 'Does'} not fit{by_its_plan}:"
        size = f"{of_limit(top.peak, most)}, {byte_text(top.peak - most)} too much"
    else:
        fits_now = ran(report) and report.mesh.source != "simulated"
        word = "Fits:" if fits_now else f"Would fit{by_its_plan}:"
        size = of_limit(top.peak, most)
    on = [Span(f" {size} on "), Span(place, "memory"), Span(".")] if place else [Span(f" {size}.")]
    copy = report.checkpoints.copy if report.checkpoints is not None else None
    if ok and copy and top.peak is not None and most is not None and top.peak + copy > most:
        on.append(Span(f" Not while a save is written, which takes {byte_text(copy)} more."))
    return ok, [strong(word), *on, *([] if ok else largest_spans(report))]


def _moved(report: Report) -> list[Span]:
    if report.collectives is None:
        return []
    if prod(report.mesh.axes.values()) == 1:
        return [Span("One device: nothing to cut and nothing moves.")]
    if not report.collectives:
        return [Span("Nothing moves between devices.")]
    bound = _bound(report, report.timing, report.collectives)
    if bound:
        return bound
    return [strong(f"{sent_text(report.collectives)} sent"), *most_spans(report.collectives), Span(".")]


def _bound(report: Report, timing: Timing | None, collectives: Sequence[Collective]) -> list[Span]:
    if timing is None or timing.predicted_step_s is None or timing.bound is None:
        return []
    spans = [
        strong(f"Bound by {timing.bound}:"),
        Span(f" predicted {predicted_text(report)} a step."),
    ]
    taken: dict[tuple[str, tuple[str, ...] | None], float] = defaultdict(float)
    for c in collectives:
        taken[c.kind, c.axes] += c.waited or 0.0
    (kind, axes), seconds = max(taken.items(), key=lambda item: item[1])
    if timing.bound != "communication" or not seconds:
        return spans
    share = share_text(seconds / timing.predicted_step_s)
    line = line_spans([c for c in collectives if (c.kind, c.axes) == (kind, axes)], "waited")
    return [spans[0], Span(f" {share} of the predicted step is {kind}s"), *axes_spans(axes), *line, Span(".")]
