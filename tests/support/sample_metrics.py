"""Runs of a training with known numbers."""

import math

from jaxshard_magic.live import CallWork, LiveRun, MetricsRow
from jaxshard_magic.report import Metrics

LOOP = {
    "step_s": 0.012,
    "examples_per_s": 5333.0,
    "flops_per_s": 1.2e14,
    "memory": 12.4 * 2**30,
    "busy": 0.97,
}


def run(steps: int = 400, *, astray: int | None = None, own: dict[str, float] | None = None) -> LiveRun:
    """A loss that falls as 10 / step, not a number from the step `astray` on, beside an accuracy and what is measured
    of the loop, every 25 steps; `own` are more numbers of the step."""
    made = LiveRun(total=lambda: 2 * steps)
    made.work = CallWork(examples=64, examples_rule="64 a step, of batch.x[64,16]")
    for step in range(1, steps + 1):
        loss = math.nan if astray is not None and step >= astray else 10 / step
        made.add_row(MetricsRow(step, step * 0.012, {"loss": loss, "acc": step / steps} | (own or {})))
        made.steps = step
        if step % 25 == 0:
            made.add_loop_metrics(step, step * 0.012, LOOP)
    return made


def metrics(steps: int = 400, **how) -> Metrics:
    found = run(steps, **how).metrics()
    assert found is not None
    return found
