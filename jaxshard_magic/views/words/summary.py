"""Head of a report in words: the verdict on its numbers, memory and bottleneck, and the key figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from jaxshard_magic.report import Collective, Report, Timing
from jaxshard_magic.report.device_leaves import stored_bytes
from jaxshard_magic.views import device_memory
from jaxshard_magic.views.device_memory import stages
from jaxshard_magic.views.format import UNKNOWN, byte_text, count_text, seconds_text, share_text, usage_text
from jaxshard_magic.views.words.communication import (
    DEVICE_PARTS,
    line_spans,
    most_spans,
    predicted_text,
    sent_by_axes,
    sent_text,
    time_parts,
)
from jaxshard_magic.views.words.memory import fullest_text, largest_spans, share_of_limit
from jaxshard_magic.views.words.run import check_difference, ended_spans, has_run, is_planned
from jaxshard_magic.views.words.spans import Span, axes_spans, axes_text, strong
from jaxshard_magic.views.words.step_time import step_time

NAMED = 0.01  # share of all sent bytes below which axes are not named


@dataclass(frozen=True)
class StepVerdict:
    """Verdict of a report.

    Attributes:
        ok: Whether nothing is wrong.
        spans: One or two sentences.
    """

    ok: bool
    spans: tuple[Span, ...]

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


def verdict(report: Report) -> StepVerdict:
    """Return the verdict: early end of the cell, wrong numbers, memory, and bottleneck."""
    if not report.of_step:
        return StepVerdict(True, tuple(_arrays(report)))
    ok, spans = True, list[Span]()
    for part_ok, part in (_ended(report), _numbers(report), _fit(report), (True, _moved(report))):
        ok = ok and part_ok
        spans += [Span(" ")] * bool(spans and part) + part
    return StepVerdict(ok, tuple(spans))


def _arrays(report: Report) -> list[Span]:
    """Return the verdict of arrays without a step: their bytes, and what is replicated on every device."""
    leaves, several = report.leaves, len(report.mesh.devices) > 1
    total = byte_text(sum(leaf.bytes for leaf in leaves))
    n = "1 array" if len(leaves) == 1 else f"{count_text(len(leaves))} arrays"
    most = ""
    if several:
        alike = not any(leaf.within for leaf in leaves)
        most = f"; {'each' if alike else 'the fullest'} device holds {byte_text(stored_bytes(leaves))}"
    whole = [leaf for leaf in leaves if not any(leaf.spec) and not leaf.within] if several else []
    replicated_text = (
        f" Whole on every device: {count_text(len(whole))} of them, {byte_text(stored_bytes(whole))}." if whole else ""
    )
    return [strong(f"{n}, {total}{' together' * (len(leaves) > 1)}{most}."), Span(replicated_text)]


def _ended(report: Report) -> tuple[bool, list[Span]]:
    ended = report.ended
    return (True, []) if ended is None else (ended.error is None, ended_spans(ended))


def _numbers(report: Report) -> tuple[bool, list[Span]]:
    check = report.check
    if check is None or check.passed:
        return True, []
    spans = [strong("Not the same numbers:"), Span(f" {check_difference(report)}")]
    if check.failed:
        spans += [Span("; first in "), Span(check.failed[0], "code")]
    return False, [*spans, Span(".")]


def fits_memory(report: Report) -> bool:
    """Return whether the peak is within the limit; true if either is unknown."""
    return _fit(report)[0]


def _fit(report: Report) -> tuple[bool, list[Span]]:
    if report.memory is None or not report.memory.per_device:
        return True, []
    groups, most = device_memory.groups(report.memory), device_memory.limit(report.memory)
    top, place = groups[0].fullest, fullest_text(groups)
    planned = report.memory.source == "planned"
    ok, by_its_plan = True, ", by its plan" * planned
    if top.peak is None:
        word = "Peak memory not known:"
        size = f"the arrays take {byte_text(device_memory.bytes_at_peak(top))}"
    elif most is None:
        word, size = "No memory limit here:", byte_text(top.peak)
    elif top.peak > most:
        ok, word = False, f"{'Would' if planned else 'Does'} not fit{by_its_plan}:"
        size = f"{usage_text(top.peak, most)}, {byte_text(top.peak - most)} too much"
    else:
        fits_now = has_run(report) and report.mesh.source != "simulated"
        word = "Fits:" if fits_now else f"Would fit{by_its_plan}:"
        size = usage_text(top.peak, most)
    on = [Span(f" {size} on "), Span(place, "memory"), Span(".")] if place else [Span(f" {size}.")]
    copy = report.checkpoints.copy if report.checkpoints is not None else None
    # While a save is written the step can't reuse the buffers of the saved state.
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
    spans = [strong(f"Bound by {timing.bound}:"), Span(f" predicted {predicted_text(report)} a step.")]
    moving = [part for part in time_parts(report) if part[0] not in DEVICE_PARTS]
    if timing.bound != "communication" or not moving:
        return spans
    kind, axes, seconds = moving[0]
    share = share_text(seconds / timing.predicted_step_s)
    line = line_spans([c for c in collectives if (c.kind, c.axes or ()) == (kind, axes or ())], "waited")
    return [spans[0], Span(f" {share} of the predicted step is {kind}s"), *axes_spans(axes), *line, Span(".")]


@dataclass(frozen=True)
class KeyFigure:
    """Key figure.

    Attributes:
        label: Name.
        short: Name in a terminal.
        value: Value with its unit.
        note: Qualification.
        sign: "ok" or "error" for a figure that is either, else None.
    """

    label: str
    short: str
    value: str
    note: str
    sign: str | None = None


def key_figures_of(report: Report) -> tuple[KeyFigure, ...]:
    """Return the five key figures of a report; empty without a step."""
    if not report.of_step:
        return ()
    return (_step_figure(report), _peak_figure(report), _sent_figure(report), _compile_figure(report), _same(report))


def _step_figure(report: Report) -> KeyFigure:
    label, value, notes = step_time(report)
    return KeyFigure(label, "step", value, ", ".join(notes))


def _peak_figure(report: Report) -> KeyFigure:
    memory = report.memory
    if memory is None or not memory.per_device:
        return KeyFigure("peak memory", "peak", UNKNOWN, "not known")
    groups = device_memory.groups(memory)
    top = groups[0]
    source = {"measured": "measured", "planned": "predicted"}.get(memory.source, "computed")
    if top.fullest.peak is None:
        arrays = byte_text(device_memory.bytes_at_peak(top.fullest))
        return KeyFigure("peak memory", "peak", UNKNOWN, f"arrays alone {arrays}")
    alike = len(groups) == 1 and len(top.devices) > 1
    place = "every device" if alike else stages(report).devices_text(top.devices)
    notes = [note for note in (share_of_limit(memory), place) if note]
    most = device_memory.limit(memory)
    sign = "error" if most is not None and top.fullest.peak > most else None
    return KeyFigure(f"peak memory, {source}", "peak", byte_text(top.fullest.peak), ", ".join(notes), sign)


def _sent_figure(report: Report) -> KeyFigure:
    if report.collectives is None:
        return KeyFigure("sent per device and step", "sent", UNKNOWN, "not known")
    by_axes = sent_by_axes(report.collectives)
    least = NAMED * sum(by_axes.values())
    parts = [f"{axes_text(axes)} {byte_text(n)}" for axes, n in by_axes.items() if n >= least]
    more = f", {len(parts) - 3} more" if len(parts) > 3 else ""
    note = ", ".join(parts[:3]) + more if report.collectives else "nothing moves"
    return KeyFigure("sent per device and step", "sent", sent_text(report.collectives), note)


def _compile_figure(report: Report) -> KeyFigure:
    seconds = report.timing.compile_s if report.timing else None
    unknown = "not compiled" if is_planned(report) else "not known"
    note = "once for these shapes" if seconds is not None else unknown
    return KeyFigure("compile time", "compile", seconds_text(seconds), note)


def _same(report: Report) -> KeyFigure:
    check = report.check
    if check is None:
        return KeyFigure("same numbers", "numbers", UNKNOWN, "not checked")
    value, sign = ("yes", "ok") if check.passed else ("no", "error")
    return KeyFigure("same numbers", "numbers", value, check_difference(report), sign)
