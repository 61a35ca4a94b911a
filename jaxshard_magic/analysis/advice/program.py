"""Advice on the program: loops of unknown length, calls to Python, memory not donated, a larger batch."""

from collections import Counter
from collections.abc import Iterator

from ...report import Advice
from ...report.device_leaves import stored_bytes
from ...units import byte_text
from .case import Case

WORTH_DONATING = 2**20  # bytes of state; less is not worth advice


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
