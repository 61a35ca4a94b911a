"""Key figures: step time, peak memory, bytes sent, compile time, and equality of numbers."""

from dataclasses import dataclass

from jaxshard_magic.report import Report
from jaxshard_magic.views import device_memory
from jaxshard_magic.views.device_stages import stages
from jaxshard_magic.views.format import UNKNOWN, byte_text, seconds_text
from jaxshard_magic.views.words.communication import sent_by_axes, sent_text
from jaxshard_magic.views.words.memory import share_of_limit
from jaxshard_magic.views.words.run import check_difference, is_planned
from jaxshard_magic.views.words.spans import axes_text
from jaxshard_magic.views.words.step_time import step_time

NAMED = 0.01  # share of all sent bytes below which axes are not named


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
