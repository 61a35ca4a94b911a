"""Step time in words: measured on a chip, or predicted for one; and the breakdown of a recorded step.

Footgun: a time of simulated devices is a time of this CPU. It is a note at most, never the figure itself.
"""

from jaxshard_magic.report import Measured, Report, TimeSpread, Timing
from jaxshard_magic.views.format import UNKNOWN, count_text, percent_text, range_text, seconds_text, share_text
from jaxshard_magic.views.words.communication import predicted_range, predicted_text
from jaxshard_magic.views.words.spans import Span, strong

_WAYS = {"step to step": ["from step to step"], "start to end": ["from start to end"]}  # `Timing.how`
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


def is_simulated(report: Report) -> bool:
    """Return whether the devices are simulated, so that measured times are those of this CPU."""
    return report.mesh.source == "simulated"


def chip_step_time(report: Report) -> TimeSpread | None:
    """Return the measured step time of an accelerator in seconds; None without one."""
    # A time of simulated devices is a time of this CPU.
    return None if report.timing is None or is_simulated(report) else report.timing.step_s


def step_time(report: Report) -> tuple[str, str, list[str]]:
    """Return label, value and notes of the step time: as measured on a chip, else as predicted for one."""
    timing, spread = report.timing, chip_step_time(report)
    prediction = "" if timing is None or timing.predicted_step_s is None else predicted_text(report)
    between = predicted_range(report)
    if spread is not None and timing is not None:
        predicted = f"predicted {prediction}" + (f" ({between})" if between else "")
        return (
            "step time, measured",
            seconds_text(spread.median),
            [*_chip_notes(timing, spread), *[predicted] * bool(prediction)],
        )
    on = f"for {timing.on}" if prediction and timing is not None and timing.on else ""
    notes = [" ".join(filter(None, (between, on)))] if on else []
    return (
        ("step time, predicted", prediction, notes + cpu_notes(report))
        if prediction
        else ("step time", UNKNOWN, cpu_notes(report))
    )


def cpu_notes(report: Report) -> list[str]:
    """Return notes on the run of a step without a chip: `1.84 s on this CPU` and `over all 20 calls`, `not timed`, `not
    run`."""
    timing = report.timing
    if timing is None or not timing.calls:
        return ["not run"]
    if timing.step_s is None:
        return ["not timed"]
    return [f"{seconds_text(timing.step_s.median)} on this CPU", *_calls(timing)]


def _chip_notes(timing: Timing, spread: TimeSpread) -> list[str]:
    """Return notes on a measured time: `46.8 to 49.1 ms from step to step`, `over all 1,000 calls but one`."""
    ways = _WAYS.get(timing.how or "", [])
    if timing.timed > 1:
        ways = [" ".join([range_text(spread.min, spread.max), *ways])]
    return [*ways, *_calls(timing)]


def _calls(timing: Timing) -> list[str]:
    """Return notes on the timed calls: `over all 20 calls`, or `over 24 of 1,000 calls` and `350 ms from call to
    call`."""
    timed, calls = timing.timed, timing.calls
    if timing.how == "copies":
        return [f"over {count_text(timed)} call{'s' * (timed > 1)} on copies"]
    if calls == 1:
        return ["one call"]
    left = calls - timed
    over = f"over {count_text(timed)} of {count_text(calls)} calls"
    if not timing.others and left <= 1:
        over = f"over all {count_text(calls)} calls{' but one' * left}"
    others = [f"{count_text(timing.others)} of another program"] if timing.others else []
    apart = [] if timing.apart_s is None else [f"{seconds_text(timing.apart_s)} from call to call"]
    data = [] if timing.data_share is None else [f"{share_text(timing.data_share)} waiting for data"]
    return [over, *others, *apart, *data]


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
