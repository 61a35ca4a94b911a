"""Throughput of a loop per second, from repeated looks at the number of finished calls."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

MIN_INTERVAL_S = 0.5  # seconds, at least: when a call finished is known only up to the time between two looks


@dataclass(frozen=True)
class CallWork:
    """Work of one call of a program; None for an unknown amount.

    Attributes:
        examples: Examples in the batch.
        examples_rule: Text that names the array behind `examples`.
        tokens: Tokens in the batch.
        tokens_rule: Text that names the array behind `tokens`.
        flops: FLOPs of the matrix products on all devices.
        ideal_s: Seconds for these products, recomputed ones excluded, at the devices' peak.
    """

    examples: int | None = None
    examples_rule: str | None = None
    tokens: int | None = None
    tokens_rule: str | None = None
    flops: float | None = None
    ideal_s: float | None = None

    @cached_property
    def amounts(self) -> tuple[float | None, ...]:
        """Additive amounts, in the order of `WorkDone.amounts`."""
        return self.examples, self.tokens, self.flops, self.ideal_s


NO_WORK = (0.0,) * len(CallWork().amounts)


class WorkDone(NamedTuple):
    """Total work of all calls up to one.

    Attributes:
        calls: Number of calls.
        amounts: Sums of `CallWork.amounts`; None after a call with an unknown amount.
    """

    calls: int = 0
    amounts: tuple[float | None, ...] = NO_WORK

    def plus(self, calls: int, each: CallWork) -> "WorkDone":
        """Return the total after `calls` more calls of equal work."""
        more = (None if amount is None else calls * amount for amount in each.amounts)
        return WorkDone(self.calls + calls, tuple(map(_sum, self.amounts, more)))


@dataclass(frozen=True)
class CallSequence:
    """Consecutive calls of one program.

    Attributes:
        done_before: Work of all earlier calls.
        work: Work of each call.
        value_names: Names of the numbers returned by each call.
    """

    done_before: WorkDone = field(default_factory=WorkDone)
    work: CallWork = field(default_factory=CallWork)
    value_names: tuple[str, ...] = ()

    def done_after(self, number: int) -> WorkDone:
        """Return the work of all calls up to call `number`, which belongs to this sequence."""
        return self.done_before.plus(number - self.done_before.calls, self.work)


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


class RateMeter:
    """Rates over the intervals between looks at a loop."""

    def __init__(self) -> None:
        self._at: tuple[float, WorkDone] | None = None

    def skip_interval(self) -> None:
        """Exclude the current interval from rates, for example during a compile."""
        self._at = None

    def update(self, now: float, done: WorkDone) -> dict[str, float]:
        """Return rates since the previous look by name; empty at the first look, for too short an interval, or
        without a finished call.

        Args:
            now: Seconds on any clock.
            done: Work finished by now.
        """
        if self._at is None:
            self._at = now, done
            return {}
        then, before = self._at
        calls = done.calls - before.calls
        if now - then < MIN_INTERVAL_S or calls <= 0:
            return {}
        self._at = now, done
        seconds = now - then
        return {"step_s": seconds / calls} | dict(_rates(seconds, before, done))


def _rates(seconds: float, before: WorkDone, after: WorkDone) -> Iterator[tuple[str, float]]:
    names = ("examples_per_s", "tokens_per_s", "flops_per_s", "mfu")
    for name, a, b in zip(names, before.amounts, after.amounts, strict=True):
        if a is not None and b is not None and b > a:
            yield name, (b - a) / seconds
