"""Advice from a recording of the step: a slow device, and devices waiting for the host."""

from collections.abc import Iterator

from ...code_locations import location_with_caller
from ...report import Advice
from ...units import seconds_text, share_text
from .case import Case

SLOWER, SHARED = 0.10, 0.30  # shares of the step; simulated devices share CPU cores, so one is late by chance
WAITS = 0.05  # share of the step spent waiting for Python; less is not worth advice

SELDOM = "jax.lax.cond(count % 100 == 0, lambda: jax.debug.callback(tell, value), lambda: None)"


def slow_device(case: Case) -> Iterator[Advice]:
    """Advise on a device with clearly longer compute than the median of those with the same work, which wait for it."""
    m = case.measured
    if m is None or m.slowest is None or m.behind is None:
        return
    share = m.behind / m.seconds
    if share > (SHARED if case.mesh.source == "simulated" else SLOWER):
        alike = "the median one of its own stage" if case.stage_axes else "the median one"
        message = (
            f"Device {m.slowest} computes {seconds_text(m.behind)} longer in a step than {alike}, "
            f"{share_text(share)} of the step: the others wait for it. "
            "Look at what else runs there, at its temperature, and whether it has more of the work."
        )
        yield Advice("slow-device", case.timed_level, message, None, share)


def waits_for_python(case: Case) -> Iterator[Advice]:
    """Advise on devices waiting for calls of Python from inside the step."""
    m = case.measured
    if m is None or m.host <= WAITS * m.seconds:
        return
    rows = [row for row in m.lines if row.file and row.line and row.host]
    top = max(rows, key=lambda row: row.host, default=None)
    where = f", most at {location_with_caller(top.file, top.line or 0, top.called)}" if top is not None else ""
    message = (
        f"A device waits up to {seconds_text(m.host)} of a step's {seconds_text(m.seconds)} for Python on the "
        f"host{where}. Return what it needs and do that outside of the step; what only tells something can do so in "
        "one step of 100, with a count that the step is given:"
    )
    yield Advice("waits-for-python", case.timed_level, message, SELDOM, min(1.0, m.host / m.seconds))
