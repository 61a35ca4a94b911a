"""The step time in words: what was measured on a chip or predicted for one, how, and over which calls.

The time of simulated devices is never a figure of its own: it is told behind what stands for it.
"""

from jaxshard_magic.report import Report, Spread, Timing
from jaxshard_magic.views.format import UNKNOWN, count_text, range_text, seconds_text, share_text
from jaxshard_magic.views.words.communication import predicted_range, predicted_text

_WAYS = {"step to step": ["from step to step"], "start to end": ["from start to end"]}  # `Timing.how`


def simulated(report: Report) -> bool:
    """Whether the devices were simulated: what a step takes there is a time of this CPU."""
    return report.mesh.source == "simulated"


def on_chip(report: Report) -> Spread | None:
    """Seconds of a step as an accelerator ran it; None where none did."""
    return None if report.timing is None or simulated(report) else report.timing.step_s


def step_time(report: Report) -> tuple[str, str, list[str]]:
    """What the figure is called, the figure, and what qualifies it: as a chip ran it, else as predicted for one."""
    timing, spread = report.timing, on_chip(report)
    told = "" if timing is None or timing.predicted_step_s is None else predicted_text(report)
    between = predicted_range(report)
    if spread is not None and timing is not None:
        predicted = f"predicted {told}" + (f" ({between})" if between else "")
        return (
            "step time, measured",
            seconds_text(spread.median),
            [*_measured(timing, spread), *[predicted] * bool(told)],
        )
    on = f"for {timing.on}" if told and timing is not None and timing.on else ""
    notes = [" ".join(filter(None, (between, on)))] if on else []
    return (
        ("step time, predicted", told, notes + here(report)) if told else ("step time", UNKNOWN, here(report))
    )


def here(report: Report) -> list[str]:
    """What there is to say where no chip ran the step: the time of this CPU, `1.84 s on this CPU` and `over all 20
    calls`."""
    timing = report.timing
    if timing is None or not timing.calls:
        return ["not run"]
    if timing.step_s is None:
        return ["not timed"]
    return [f"{seconds_text(timing.step_s.median)} on this CPU", *_calls(timing)]


def _measured(timing: Timing, spread: Spread) -> list[str]:
    """`46.8 to 49.1 ms from step to step`, `over all 1,000 calls but one`."""
    ways = _WAYS.get(timing.how or "", [])
    if timing.timed > 1:
        ways = [" ".join([range_text(spread.min, spread.max), *ways])]
    return [*ways, *_calls(timing)]


def _calls(timing: Timing) -> list[str]:
    """`over all 20 calls`, `over 24 of 1,000 calls` and `350 ms from call to call`."""
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
