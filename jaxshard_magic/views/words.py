"""The report in words: the verdict, the key figures, and the sentences that every view shows."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any

from jaxshard_magic.report import Buffer, Check, Collective, Memory, MeshInfo, Report, Timing
from jaxshard_magic.views import memory as mem
from jaxshard_magic.views.format import (
    UNKNOWN,
    byte_text,
    count_text,
    device_text,
    difference_text,
    range_text,
    seconds_text,
    share_text,
)


@dataclass(frozen=True)
class Span:
    """A piece of a sentence; `kind` is text, strong, axis (a mesh axis), code (a name of the user's), memory (the
    devices that hold most) or line (one of the user's)."""

    text: str
    kind: str = "text"


@dataclass(frozen=True)
class Verdict:
    ok: bool
    spans: tuple[Span, ...]

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


@dataclass(frozen=True)
class Figure:
    """One of the key figures: what it is (`short` in a terminal), its value, and what qualifies it.

    `sign` is ok or error where the figure is one or the other.
    """

    label: str
    short: str
    value: str
    note: str
    sign: str | None = None


def strong(text: str) -> Span:
    return Span(text, "strong")


def axes_spans(axes: Sequence[str] | None) -> list[Span]:
    """` over data and model`, empty where no axes are known."""
    if not axes:
        return []
    spans = [Span(" over ")]
    for i, axis in enumerate(axes):
        spans += [Span(" and ")] * (i > 0) + [Span(axis, "axis")]
    return spans


def mesh_text(info: MeshInfo) -> str:
    return " ".join(f"{axis}={size}" for axis, size in info.axes.items())


def devices_text(info: MeshInfo, times: str = "\u00d7") -> str:
    """`8 x TPU v5 lite, attached`, `8 simulated CPU devices`."""
    n = len(info.devices) or prod(info.axes.values())
    processes = f", {info.processes} processes" if info.processes > 1 else ""
    if info.source == "simulated":
        return f"{count_text(n)} simulated {info.platform.upper()} device{'s' * (n != 1)}{processes}"
    state = {"topology": "not attached: compiled, not run"}.get(info.source, info.source)
    return f"{count_text(n)} {times} {info.device_kind}, {state}{processes}"


def options_text(options: dict[str, Any]) -> str:
    """The options that were given, as they are typed: `--rule "wte=P('model')" --precision bf16`."""
    words: list[str] = []
    for name, value in options.items():
        flag = "--" + {"specs": "spec", "rules": "rule"}.get(name, name).replace("_", "-")
        if value is True:
            words.append(flag)
        elif isinstance(value, dict):
            words += [f'{flag} "{key}={item}"' for key, item in value.items()]
        elif isinstance(value, (list, tuple)):
            words += [f'{flag} "{item}"' for item in value]
        elif value is not None and value is not False and value != "":
            text = str(value)
            words.append(f'{flag} "{text}"' if " " in text else f"{flag} {text}")
    return " ".join(words)


def ran(report: Report) -> bool:
    return report.timing is not None and report.timing.calls > 0


def verdict(report: Report) -> Verdict:
    """The answer in one or two sentences: does it run right, does it fit, what holds it up."""
    ok, spans = True, list[Span]()
    for part_ok, part in (_numbers(report), _fit(report), (True, _moved(report))):
        ok = ok and part_ok
        spans += [Span(" ")] * bool(spans and part) + part
    return Verdict(ok, tuple(spans))


def _numbers(report: Report) -> tuple[bool, list[Span]]:
    check = report.check
    if check is None or check.passed:
        return True, []
    spans = [strong("Not the same numbers:"), Span(f" {difference(report)}")]
    if check.failed:
        spans += [Span("; first in "), Span(check.failed[0], "code")]
    return False, [*spans, Span(".")]


def largest_difference(check: Check) -> float | None:
    return check.max_rel_diff if check.max_rel_diff is not None else check.max_abs_diff


def difference(report: Report) -> str:
    """`differs by 2e-6, limit 1e-4`."""
    check = report.check
    if check is None:
        return "not checked"
    known = largest_difference(check)
    if known is None:
        return f"limit {difference_text(check.limit)}"
    differs = "no difference" if known == 0 else f"differs by {difference_text(known)}"
    return f"{differs}, limit {difference_text(check.limit)}"


def _fit(report: Report) -> tuple[bool, list[Span]]:
    if report.memory is None or not report.memory.per_device:
        return True, []
    found, most = mem.groups(report.memory), mem.limit(report.memory)
    top, place = found[0].most, mem.where(found)
    ok = True
    if top.peak is None:
        word, size = "Peak memory not known:", f"the arrays take {byte_text(mem.held(top), 2)}"
    elif most is None:
        word, size = "No memory limit here:", byte_text(top.peak, 2)
    elif top.peak > most:
        ok, word = False, "Does not fit:"
        size = f"{mem.of_limit(top.peak, most)}, {byte_text(top.peak - most)} too much"
    else:
        word = "Fits:" if ran(report) and report.mesh.source != "simulated" else "Would fit:"
        size = mem.of_limit(top.peak, most, 3 if top.peak > 0.9 * most else 2)
    on = [Span(f" {size} on "), Span(place, "memory"), Span(".")] if place else [Span(f" {size}.")]
    return ok, [strong(word), *on]


def _moved(report: Report) -> list[Span]:
    if report.collectives is None:
        return []
    if prod(report.mesh.axes.values()) == 1:
        return [Span("One device: nothing to cut and nothing moves.")]
    if not report.collectives:
        return [Span("Nothing moves between devices.")]
    bound = _bound(report.timing, report.collectives)
    if bound:
        return bound
    return [strong(f"{byte_text(sent(report))} sent"), *_most(report.collectives), Span(".")]


def _bound(timing: Timing | None, collectives: Sequence[Collective]) -> list[Span]:
    if timing is None or timing.predicted_step_s is None or timing.bound is None:
        return []
    spans = [
        strong(f"Bound by {timing.bound}:"),
        Span(f" predicted {seconds_text(timing.predicted_step_s)} a step."),
    ]
    taken: dict[tuple[str, tuple[str, ...] | None], float] = defaultdict(float)
    for c in collectives:
        taken[c.kind, c.axes] += c.seconds or 0.0
    (kind, axes), seconds = max(taken.items(), key=lambda item: item[1])
    if timing.bound != "communication" or not seconds:
        return spans
    share = share_text(seconds / timing.predicted_step_s)
    line = _line([c for c in collectives if (c.kind, c.axes) == (kind, axes)], "seconds")
    return [spans[0], Span(f" {share} of the predicted step is {kind}s"), *axes_spans(axes), *line, Span(".")]


def _most(collectives: Sequence[Collective]) -> list[Span]:
    """`, most by all-gathers over data`: what carries above half of the bytes, if one thing does."""
    total = sum(c.wire_bytes for c in collectives)
    by_kind: dict[tuple[str, tuple[str, ...] | None], int] = defaultdict(int)
    for c in collectives:
        by_kind[c.kind, c.axes] += c.wire_bytes
    (kind, axes), top = max(by_kind.items(), key=lambda item: item[1])
    if 2 * top > total:
        much = "all" if top == total else "most"
        alike = [c for c in collectives if (c.kind, c.axes) == (kind, axes)]
        return [Span(f", {much} by {kind}s"), *axes_spans(axes), *_line(alike, "wire_bytes")]
    by_axes = sent_by_axes(collectives)
    axes, top = max(by_axes.items(), key=lambda item: item[1])
    return [Span(", most"), *axes_spans(axes)] if axes and 2 * top > total else []


def _line(collectives: Sequence[Collective], weight: str) -> list[Span]:
    """`, most from line 12`, and of which file where it is no cell; empty where no line has above half."""
    lines: dict[tuple[str | None, int | None], float] = defaultdict(float)
    for c in collectives:
        lines[c.file, c.line] += getattr(c, weight) or 0
    (file, line), top = max(lines.items(), key=lambda item: item[1])
    if line is None or 2 * top <= sum(lines.values()):
        return []
    of = f" of {file}" if file is not None and not file.startswith("cell ") else ""
    return [Span(", most from "), Span(f"line {line}{of}", "line")]


def sent(report: Report) -> int | None:
    """Bytes that one device sends per step, None where the collectives are not known."""
    return None if report.collectives is None else sum(c.wire_bytes for c in report.collectives)


def sent_by_axes(collectives: Sequence[Collective]) -> dict[tuple[str, ...] | None, int]:
    """Bytes that one device sends per step over each set of axes, most first."""
    total: dict[tuple[str, ...] | None, int] = defaultdict(int)
    for c in collectives:
        total[c.axes] += c.wire_bytes
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def axes_text(axes: Sequence[str] | None) -> str:
    return "other groups" if axes is None else "+".join(axes)


def figures(report: Report) -> tuple[Figure, ...]:
    """Step time, peak memory, bytes sent, compile time, and whether the numbers are the same."""
    return (
        _step_figure(report),
        _peak_figure(report),
        _sent_figure(report),
        _compile_figure(report),
        _same(report),
    )


def _step_figure(report: Report) -> Figure:
    timing = report.timing
    spread = timing.step_s if timing else None
    notes: list[str] = []
    if timing and spread:
        calls = f"{count_text(timing.timed)} of {count_text(timing.calls)}"
        if timing.timed == timing.calls:
            calls = count_text(timing.timed)
        if timing.calls == 1:
            notes.append("one call")
        else:
            notes.append(
                f"{range_text(spread.min, spread.max)} in {calls} calls"
                if timing.timed > 1
                else f"{calls} calls"
            )
    else:
        notes.append("not timed" if ran(report) else "not run")
    if timing and timing.predicted_step_s is not None:
        notes.append(f"predicted {seconds_text(timing.predicted_step_s)}")
    label = "step time, on this CPU" if report.mesh.source == "simulated" else "step time, measured"
    return Figure(label, "step", seconds_text(spread.median if spread else None), ", ".join(notes))


def _peak_figure(report: Report) -> Figure:
    memory = report.memory
    if memory is None or not memory.per_device:
        return Figure("peak memory", "peak", UNKNOWN, "not known")
    found = mem.groups(memory)
    top = found[0]
    source = "measured" if memory.source == "measured" else "computed"
    if top.most.peak is None:
        return Figure("peak memory", "peak", UNKNOWN, f"arrays alone {byte_text(mem.held(top.most))}")
    place = "every device" if len(found) == 1 and len(top.devices) > 1 else device_text(top.devices)
    notes = [note for note in (mem.share_of_limit(memory), place) if note]
    most = mem.limit(memory)
    sign = "error" if most is not None and top.most.peak > most else None
    return Figure(f"peak memory, {source}", "peak", byte_text(top.most.peak), ", ".join(notes), sign)


def _sent_figure(report: Report) -> Figure:
    if report.collectives is None:
        return Figure("sent per device and step", "sent", UNKNOWN, "not known")
    parts = [f"{axes_text(axes)} {byte_text(n)}" for axes, n in sent_by_axes(report.collectives).items()]
    more = f", {len(parts) - 3} more" if len(parts) > 3 else ""
    note = ", ".join(parts[:3]) + more if report.collectives else "nothing moves"
    return Figure("sent per device and step", "sent", byte_text(sent(report)), note)


def _compile_figure(report: Report) -> Figure:
    seconds = report.timing.compile_s if report.timing else None
    note = "once for these shapes" if seconds is not None else "not known"
    return Figure("compile time", "compile", seconds_text(seconds), note)


def _same(report: Report) -> Figure:
    check = report.check
    if check is None:
        return Figure("same numbers", "numbers", UNKNOWN, "not checked")
    value, sign = ("yes", "ok") if check.passed else ("no", "error")
    return Figure("same numbers", "numbers", value, difference(report), sign)


def notes(report: Report) -> list[str]:
    """What a reader must know of where the figures come from."""
    lines = []
    spread = report.timing.step_s if report.timing else None
    known = report.memory is not None or report.collectives is not None
    if report.mesh.source == "simulated" and known:
        time = f" ({seconds_text(spread.median)})" if spread else ""
        lines.append(
            f"Bytes are exact. Step time is of this CPU{time} and says nothing about an accelerator."
            if ran(report)
            else "Bytes are exact. A step time of this CPU would say nothing about an accelerator."
        )
        if report.timing and report.timing.on:
            lines.append(
                f"Predicted times and the memory limit are of {report.timing.on}, at its published rates and with "
                "nothing overlapped; the program is the one compiled for this CPU."
            )
    elif report.mesh.source == "topology":
        lines.append("Every figure is computed from the compiled program or predicted.")
    if not ran(report):
        lines.append(f"Not run: {'compiled only; ' * known}your variables are as they were.")
    return lines


def check_lines(report: Report) -> list[tuple[str, tuple[str, ...]]]:
    """What the check found, with the leaves it names."""
    check = report.check
    if check is None:
        return []
    same = "The same numbers as" if check.passed else "Not the same numbers as"
    lines: list[tuple[str, tuple[str, ...]]] = [(f"{same} {check.reference}: {difference(report)}.", ())]
    if check.failed:
        lines.append((f"{leaves_text(len(check.failed))} not the same:", check.failed))
    if check.noise:
        lines.append((f"{leaves_text(len(check.noise))} with rounding noise only, no error:", check.noise))
    return lines


def leaves_text(n: int) -> str:
    return "1 leaf" if n == 1 else f"{count_text(n)} leaves"


def first_clause(message: str) -> tuple[str, str]:
    """A message's first clause with its colon or full stop, and the rest; a message of one clause, or with a
    long first one, is all rest."""
    ends = [i for mark in (": ", ". ") if 0 < (i := message.find(mark)) <= 100]
    return (message[: min(ends) + 1], message[min(ends) + 2 :]) if ends else ("", message)


def memory_lead(memory: Memory) -> list[Span]:
    """What the memory view opens with: who is fullest, in bold, and what the others hold."""
    head, rest = mem.clauses(memory)
    measured = measured_text(memory)
    said = (
        f" {sentence_case('; '.join([*rest, *([measured] if measured else [])]))}."
        if rest or measured
        else ""
    )
    return [strong(f"{sentence_case(head)}."), Span(said)]


def buffers_lead(memory: Memory) -> str | None:
    """`10 buffers are 95% of the temporaries; 81 more are 152 MiB`; None where the compiler does not tell."""
    if not memory.buffers or memory.others is None:
        return None
    count, rest = memory.others
    told, n = sum(b.bytes for b in memory.buffers), sum(b.count for b in memory.buffers)
    are = f"{count_text(n)} buffer{'s are' if n != 1 else ' is'} {share_text(told / (told + rest))} of the temporaries"
    return are + (
        f"; {count_text(count)} more {'are' if count != 1 else 'is'} {byte_text(rest)}" if count else ""
    )


def buffer_type(buffer: Buffer) -> str:
    """`f32[8,16,128] x2`: the type of one, and how many there are."""
    times = f" \u00d7{count_text(buffer.count)}" if buffer.count > 1 else ""
    return f"{buffer.dtype}[{','.join(map(str, buffer.shape))}]{times}"


def measured_text(memory: Memory) -> str | None:
    """`measured 5.15 GiB on device 0, 1.2% more than computed`, of the device that held most; None where none was."""
    known = [d for d in memory.per_device if d.measured is not None]
    if not known:
        return None
    top = max(known, key=lambda d: d.measured or 0)
    text = f"measured {byte_text(top.measured)} on device {top.device}"
    if not top.peak or top.measured is None:
        return text
    off = top.measured / top.peak - 1
    return f"{text}, {share_text(abs(off))} {'more' if off >= 0 else 'less'} than computed"


def communication_lead(report: Report) -> list[Span]:
    """What the communication view opens with: how much is sent, in bold, and most by what; where a chip's step is
    predicted, the share of it first."""
    collectives, timing = report.collectives, report.timing
    if not collectives:
        return [strong("Nothing moves between devices in this step.")]
    total = byte_text(sum(c.wire_bytes for c in collectives))
    if timing is None or not timing.predicted_step_s or timing.communication_s is None:
        return [strong(f"{total} sent by each device per step"), *_most(collectives), Span(".")]
    share = share_text(timing.communication_s / timing.predicted_step_s)
    spent, step = seconds_text(timing.communication_s), seconds_text(timing.predicted_step_s)
    spans = [strong(f"{share} of the predicted step is communication:")]
    spans.append(Span(f" {spent} of {step}, {total} sent by each device, nothing overlapped."))
    return spans + _links(timing)


def _links(timing: Timing) -> list[Span]:
    """` On TPU v5e links carry 34 GB/s over data, 45 GB/s over model.`"""
    spans = [Span(f" On {timing.on} links carry ")] if timing.links else []
    for i, (axis, rate) in enumerate(timing.links.items()):
        spans += [Span(", ")] * (i > 0) + [Span(f"{rate / 1e9:.3g}\u202fGB/s over "), Span(axis, "axis")]
    return [*spans, Span(".")] if spans else []


def time_parts(report: Report) -> list[tuple[str | None, tuple[str, ...] | None, float]]:
    """The predicted step as (kind of collective, axes, seconds), largest first behind what is no communication, which
    has no kind; empty without a prediction."""
    timing = report.timing
    if timing is None or timing.communication_s is None or timing.predicted_step_s is None:
        return []
    if not isfinite(timing.predicted_step_s):
        return []
    taken: dict[tuple[str, tuple[str, ...] | None], float] = defaultdict(float)
    for c in report.collectives or ():
        taken[c.kind, c.axes] += c.seconds if c.seconds is not None and isfinite(c.seconds) else 0.0
    own = max(0.0, timing.predicted_step_s - timing.communication_s)
    rest = sorted(((kind, axes, s) for (kind, axes), s in taken.items() if s), key=lambda part: -part[2])
    return [(None, None, own), *rest]


def sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]
