"""Advice on the program and on a recording of it.

The program: loops of unknown length, calls to Python, memory not donated, a larger batch. The recording: a slow device,
and devices waiting for the host.
"""

from collections import Counter
from collections.abc import Iterator

from ...code_locations import location_with_caller
from ...report import Advice
from ...report.device_leaves import stored_bytes
from ...units import byte_text, seconds_text, share_text
from .case import Case

WORTH_DONATING = 2**20  # bytes of state; less is not worth advice

SLOWER, SHARED = 0.10, 0.30  # shares of the step; simulated devices share CPU cores, so one is late by chance
WAITS = 0.05  # share of the step spent waiting for Python; less is not worth advice

SELDOM = "jax.lax.cond(count % 100 == 0, lambda: jax.debug.callback(tell, value), lambda: None)"


def unknown_loops(case: Case) -> Iterator[Advice]:
    """Advise on collectives with a count known only as a lower bound."""
    n = sum(not move.exact for move in case.hlo_collectives)
    if n:
        what = "A collective runs" if n == 1 else f"{n} collectives run"
        message = f"{what} in a loop whose length is only known while it runs: counted for one pass."
        yield Advice("loop-length", "info", message, None)


def host_calls(case: Case) -> Iterator[Advice]:
    """Advise on calls to Python from inside the step: each stops the device until the host has answered."""
    lines = Counter(case.callbacks)
    for line, n in lines.items():
        times = f"{n} times " if n > 1 else ""
        where = f" from {line}" if line else ""
        message = f"The step calls Python {times}in each run{where}: the devices wait for the host meanwhile."
        yield Advice("host-call", "warning", message, None)


def not_donated(case: Case) -> Iterator[Advice]:
    """Advise on state that is twice in memory."""
    twice = stored_bytes(case.undonated_state)
    if twice >= WORTH_DONATING:
        where = "on the fullest device" if case.stage_axes else "on every device"
        message = f"The old state stays while the new one is made: up to {byte_text(twice)} more {where}."
        peak = max((d.peak or 0 for d in (case.memory.per_device if case.memory else ())), default=0)
        yield Advice(
            "not-donated", "info", message, case.usable_fix("--donate"), min(1.0, twice / peak) if peak else None
        )


def batch_grew(case: Case) -> Iterator[Advice]:
    """Advise on the learning rate where the batch is larger than in the step's earlier run.

    Linear for SGD (Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.1), square root for Adam (Malladi et
    al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", 2022).
    """
    now, before = case.examples, case.examples_before
    if now and before and now > before:
        times = now / before
        message = (
            f"The batch grew from {before} to {now} examples: the learning rate usually goes with it, "
            f"{times:.3g} times as large for SGD, {times**0.5:.3g} times for Adam, with a warm-up."
        )
        yield Advice("learning-rate", "info", message, None)


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
