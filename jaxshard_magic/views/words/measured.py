"""Time breakdown of a recorded step in words: shares, number of recorded steps, and notes on the times."""

from jaxshard_magic.report import Measured, Report
from jaxshard_magic.views.format import count_text, percent_text, range_text, seconds_text, share_text
from jaxshard_magic.views.words.spans import Span, strong
from jaxshard_magic.views.words.step_time import is_simulated

# Kinds of time in lanes: compute by phase, movement of data, and waiting.
TIME_KINDS = {
    "F": "forward",
    "B": "backward",
    "R": "recomputed",
    "U": "update",
    "O": "other compute",
    "M": "moving data",
    "X": "waiting",
}
LETTERS = {name: letter for letter, name in TIME_KINDS.items()}
SLOWER = 0.05  # share of the step: a device that computes longer than the median by more is named
SEEN = 0.0005  # share of the step that prints as 0.1%
_CLOCKS = (
    "A step takes as long as on the host where it takes longest. Each host's lanes begin with its own first operation,"
    " as hosts have clocks of their own."
)
_HERE = (
    "The devices are simulated on the cores of this machine, which they share: the times are this machine's. Which line"
    " they are of, and what runs how often, holds."
)


def measured_lead(m: Measured) -> list[Span]:
    """Return the breakdown: `Measured 37.0 ms a step: 30% compute, 50% moving data, 15% waiting, 5% idle.`"""
    mean = m.mean
    parts = {"compute": mean.compute, "moving data": mean.moving, "waiting": mean.waiting, "idle": mean.idle}
    told = ", ".join(
        f"{share_text(seconds / m.seconds)} {name}"
        for name, seconds in parts.items()
        if seconds is not None and m.seconds
    )
    hidden = f"; {seconds_text(mean.overlap)} of what moves is hidden by compute" if mean.overlap else ""
    return [strong(f"Measured {recorded_text(m)} a step"), Span(f": {told}{hidden}.")]


def recorded_text(m: Measured) -> str:
    """Return the mean time of the recorded steps that were read: `37.0 ms`."""
    return seconds_text(m.seconds)


def measured_about(m: Measured) -> str:
    """Return the extent of the recording: `5 recorded steps, 34.6 to 47.1 ms; 156 operations on a device.`

    With fewer recorded steps than requested: `2 of 5 steps were recorded, as a step has so many operations, ...`
    """
    if m.recorded < m.asked:
        were = "was" if m.recorded == 1 else "were"
        of = f"{count_text(m.recorded)} of {count_text(m.asked)} steps"
        steps = f"{of} {were} recorded, as a step has so many operations"
    else:
        steps = f"{count_text(m.recorded)} recorded step{'s' * (m.recorded != 1)}"
    if m.read < m.recorded:
        steps = f"the last {count_text(m.read)} of {steps} were read"
    between = f", {range_text(m.step_s.min, m.step_s.max)}" if m.read > 1 else ""
    return f"{steps}{between}; {count_text(m.operations)} operations on a device."


def measured_notes(report: Report) -> list[str]:
    """Return notes on the times: simulated devices, clocks of hosts, the slowest device, and time without a line of
    code."""
    m = report.measured
    if m is None:
        return []
    notes = [_HERE] if is_simulated(report) else []
    if report.mesh.processes > 1:
        notes.append(_CLOCKS)
    if m.slowest is not None and m.behind is not None and m.behind > SLOWER * m.seconds:
        longest = f"Device {m.slowest} computes longest, {seconds_text(m.behind)} longer than the median one"
        notes.append(f"{longest} of its stage." if report.pipeline else f"{longest}.")
    if m.of_devices > len(m.devices):
        notes.append(f"{count_text(len(m.devices))} of {count_text(m.of_devices)} devices are listed.")
    for row, said in ((m.others, "other lines take {}"), (m.unknown, "no line is known of {}")):
        if row is not None and row.seconds > SEEN * m.seconds:
            notes.append(said.format(percent_text(row.seconds / m.seconds)).capitalize() + " of the step.")
    return notes
