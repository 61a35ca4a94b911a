"""The key figures: step time, peak memory, bytes sent, compile time, and whether the numbers are the same."""

from dataclasses import dataclass

from jaxshard_magic.report import Report
from jaxshard_magic.views import device_memory
from jaxshard_magic.views.device_stages import stages
from jaxshard_magic.views.format import UNKNOWN, byte_text, seconds_text
from jaxshard_magic.views.words.communication import sent_by_axes, sent_text
from jaxshard_magic.views.words.memory import share_of_limit
from jaxshard_magic.views.words.run import difference, is_planned
from jaxshard_magic.views.words.spans import axes_text
from jaxshard_magic.views.words.step_time import step_time

NAMED = 0.01  # of what is sent: axes that carry less are told in the communication view alone


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


def figures(report: Report) -> tuple[Figure, ...]:
    """Step time, peak memory, bytes sent, compile time, and whether the numbers are the same; none without a step."""
    if not report.of_step:
        return ()
    return (
        _step_figure(report),
        _peak_figure(report),
        _sent_figure(report),
        _compile_figure(report),
        _same(report),
    )


def _step_figure(report: Report) -> Figure:
    label, value, notes = step_time(report)
    return Figure(label, "step", value, ", ".join(notes))


def _peak_figure(report: Report) -> Figure:
    memory = report.memory
    if memory is None or not memory.per_device:
        return Figure("peak memory", "peak", UNKNOWN, "not known")
    groups = device_memory.groups(memory)
    top = groups[0]
    source = {"measured": "measured", "planned": "predicted"}.get(memory.source, "computed")
    if top.most.peak is None:
        arrays = byte_text(device_memory.bytes_at_peak(top.most))
        return Figure("peak memory", "peak", UNKNOWN, f"arrays alone {arrays}")
    alike = len(groups) == 1 and len(top.devices) > 1
    place = "every device" if alike else stages(report).named(top.devices)
    notes = [note for note in (share_of_limit(memory), place) if note]
    most = device_memory.limit(memory)
    sign = "error" if most is not None and top.most.peak > most else None
    return Figure(f"peak memory, {source}", "peak", byte_text(top.most.peak), ", ".join(notes), sign)


def _sent_figure(report: Report) -> Figure:
    if report.collectives is None:
        return Figure("sent per device and step", "sent", UNKNOWN, "not known")
    by_axes = sent_by_axes(report.collectives)
    least = NAMED * sum(by_axes.values())
    parts = [f"{axes_text(axes)} {byte_text(n)}" for axes, n in by_axes.items() if n >= least]
    more = f", {len(parts) - 3} more" if len(parts) > 3 else ""
    note = ", ".join(parts[:3]) + more if report.collectives else "nothing moves"
    return Figure("sent per device and step", "sent", sent_text(report.collectives), note)


def _compile_figure(report: Report) -> Figure:
    seconds = report.timing.compile_s if report.timing else None
    unknown = "not compiled" if is_planned(report) else "not known"
    note = "once for these shapes" if seconds is not None else unknown
    return Figure("compile time", "compile", seconds_text(seconds), note)


def _same(report: Report) -> Figure:
    check = report.check
    if check is None:
        return Figure("same numbers", "numbers", UNKNOWN, "not checked")
    value, sign = ("yes", "ok") if check.passed else ("no", "error")
    return Figure("same numbers", "numbers", value, difference(report), sign)
