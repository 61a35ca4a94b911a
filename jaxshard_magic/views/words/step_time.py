"""Step time in words: measured on a chip, or predicted for one.

Footgun: a time of simulated devices is a time of this CPU. It is a note at most, never the figure itself.
"""

from jaxshard_magic.report import Report, TimeSpread, Timing
from jaxshard_magic.views.format import UNKNOWN, count_text, range_text, seconds_text, share_text
from jaxshard_magic.views.words.communication import predicted_range, predicted_text

_WAYS = {"step to step": ["from step to step"], "start to end": ["from start to end"]}  # `Timing.how`


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
            [*_measured(timing, spread), *[predicted] * bool(prediction)],
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


def _measured(timing: Timing, spread: TimeSpread) -> list[str]:
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
