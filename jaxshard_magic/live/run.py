"""Metrics of one run of a loop: each number returned or measured is a series of bounded size.

A series has a bounded number of buckets, with exact minimum, mean, maximum and last value, however long the run is.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite

from ..report.metrics import Curve, CurveTail, Metrics
from ..temporary import AcquiredLock
from .calls import CallWork

_MAX_BUCKETS = 128  # even, as buckets merge in pairs
MAX_NAMES = 24  # returned names with a series; further names are only counted
DIGITS = 6  # significant digits of a value in a report

# Units of the measurements of the loop, by name.
LOOP_METRICS = {
    "step_s": "s",
    "examples_per_s": "examples/s",
    "tokens_per_s": "tokens/s",
    "flops_per_s": "FLOP/s",
    "mfu": "share",
    "memory": "bytes",
    "busy": "share",
}


@dataclass(slots=True)
class Bucket:
    """The values of consecutive steps.

    Attributes:
        step: The last of the steps.
        time: Seconds into the run at which `step` was seen.
        low: Smallest finite value.
        high: Largest finite value.
        total: Sum of the finite values.
        finite_count: Number of finite values.
        last: The newest value, finite or not.
    """

    step: int
    time: float
    low: float
    high: float
    total: float
    finite_count: int
    last: float

    @property
    def mean(self) -> float | None:
        """Mean of the finite values; None without any."""
        return self.total / self.finite_count if self.finite_count else None

    def add(self, step: int, time: float, value: float) -> None:
        """Add the value of a later step."""
        self.step, self.time, self.last = step, time, value
        if isfinite(value):
            self.finite_count, self.total = self.finite_count + 1, self.total + value
            if value < self.low:
                self.low = value
            if value > self.high:
                self.high = value

    def merge(self, later: "Bucket") -> None:
        """Merge with the next bucket."""
        self.step, self.time, self.last = later.step, later.time, later.last
        self.finite_count, self.total = self.finite_count + later.finite_count, self.total + later.total
        self.low, self.high = min(self.low, later.low), max(self.high, later.high)


class Series:
    """Values by increasing step, in at most `max_buckets` buckets of `width` values each.

    If all buckets are full, they merge in pairs, and each then holds twice as many values. So the cost of a value does
    not depend on the length of the run. NaN and infinite values are in no minimum, mean or maximum.

    >>> loss = Series(max_buckets=2)
    >>> for step, value in enumerate([4.0, 2.0, 3.0, 1.0, 0.5], 1):
    ...     loss.add(step, time=step / 10, value=value)
    >>> [(b.step, b.low, b.mean, b.high, b.last) for b in loss], loss.width
    ([(4, 1.0, 2.5, 4.0, 1.0), (5, 0.5, 0.5, 0.5, 0.5)], 4)

    Args:
        max_buckets: Maximum number of buckets, even.

    Attributes:
        width: Values per bucket.
        count: Number of values.
        first_value: The first value.
        first_nonfinite: First step with a value that is not finite; None without one.
        last_finite: Last step with a finite value before `first_nonfinite`; None without one.

    Raises:
        ValueError: `max_buckets` is odd or below 2.
    """

    def __init__(self, max_buckets: int = _MAX_BUCKETS):
        if max_buckets < 2 or max_buckets % 2:
            raise ValueError(f"buckets merge in pairs: an even number of them, not {max_buckets}")
        self._most, self._buckets, self._room_left = max_buckets, list[Bucket](), 0
        self.width = 1
        self.count = 0
        self.first_value: float | None = None
        self.first_nonfinite: int | None = None
        self.last_finite: int | None = None

    def add(self, step: int, time: float, value: float) -> None:
        """Add the value of a later step, `time` seconds into the run."""
        self.count += 1
        if self.first_value is None:
            self.first_value = value
        if self.first_nonfinite is None:
            if isfinite(value):
                self.last_finite = step
            else:
                self.first_nonfinite = step
        if not self._room_left:
            if len(self._buckets) == self._most:
                self._merge_pairs()
            self._buckets.append(Bucket(step, time, inf, -inf, 0.0, 0, value))
            self._room_left = self.width
        self._buckets[-1].add(step, time, value)
        self._room_left -= 1

    def _merge_pairs(self) -> None:
        pairs = list(zip(self._buckets[::2], self._buckets[1::2], strict=True))
        for first, second in pairs:
            first.merge(second)
        self._buckets = [first for first, _ in pairs]
        self.width *= 2

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def __len__(self) -> int:
        return len(self._buckets)

    def __getitem__(self, index: int) -> Bucket:
        return self._buckets[index]


@dataclass(frozen=True)
class MetricsRow:
    """Numbers returned by one call of the step.

    Attributes:
        step: Number of the call, from 1.
        time: Seconds into the run at which the call was seen to have finished.
        values: Numbers by name.
    """

    step: int
    time: float
    values: Mapping[str, float]


class LiveRun:
    """The metrics of a run.

    Args:
        max_buckets: Maximum number of buckets per series, even.
        total: Returns the planned number of steps; None if unknown.

    Attributes:
        returned: Series returned by the step, by name.
        measured: Series measured of the loop, by the names of `LOOP_METRICS`.
        work: Work of one call.
        loss_name: Name of the loss among the returned numbers; None without a loss.
        steps: Number of finished steps.
        seconds: Seconds into the run at the last update.
        skipped: Number of steps that were not read.
    """

    def __init__(self, max_buckets: int = _MAX_BUCKETS, total: Callable[[], int | None] = lambda: None):
        self._most = max_buckets
        self.total = total
        self.returned: dict[str, Series] = {}
        self.measured: dict[str, Series] = {}
        self.work = CallWork()
        self.loss_name: str | None = None
        self.steps = 0
        self.seconds = 0.0
        self.skipped = 0
        self._left_out: set[str] = set()
        self._lock = threading.RLock()

    def add_row(self, row: MetricsRow) -> None:
        """Add the numbers of a step. Steps must arrive in order."""
        self.seconds = row.time
        with AcquiredLock(self._lock):
            for name, value in row.values.items():
                series = self.returned.get(name)
                if series is None:
                    if len(self.returned) >= MAX_NAMES:
                        self._left_out.add(name)
                        continue
                    series = self.returned[name] = Series(self._most)
                series.add(row.step, row.time, value)

    def add_loop_metrics(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Add measurements of the loop up to a step, by the names of `LOOP_METRICS`.

        Args:
            step: The step.
            time: Seconds into the run.
            values: Measurements by name.
        """
        self.seconds = time
        with AcquiredLock(self._lock):
            for name, value in values.items():
                if name not in self.measured:
                    self.measured[name] = Series(self._most)
                self.measured[name].add(step, time, value)

    def metrics(self, tails: Sequence[CurveTail] | None = None) -> Metrics | None:
        """Return all metrics for a report; None without any.

        Args:
            tails: Complete curves, if already at hand.
        """
        curves = [tail.curve for tail in (self.tails({}) if tails is None else tails)]
        if not curves:
            return None
        more = {"of": self.total(), "skipped": self.skipped, "left_out": len(self._left_out), "loss": self.loss_name}
        return Metrics(self.steps, _rounded(self.seconds), tuple(curves), **more)

    def tails(self, buckets_read: Mapping[str, tuple[int, int]]) -> list[CurveTail]:
        """Return the new part of each curve.

        Args:
            buckets_read: For each curve, the number of buckets a reader has and their width; empty for a new reader.
        """
        rules = {"examples_per_s": self.work.examples_rule, "tokens_per_s": self.work.tokens_rule}
        with AcquiredLock(self._lock):
            found = [self._tail(name, series, buckets_read, "step") for name, series in self.returned.items()]
            for name, unit in LOOP_METRICS.items():
                if name in self.measured:
                    found.append(self._tail(name, self.measured[name], buckets_read, "loop", unit, rules.get(name)))
        return found

    def _tail(self, name: str, series: Series, known: Mapping[str, tuple[int, int]], *how: str | None) -> CurveTail:
        count, width = known.get(name, (0, series.width))
        # The last bucket may have grown since. After a merge (another width) all buckets are new.
        start = max(0, count - 1) if width == series.width else 0
        source, *more = how
        return CurveTail(_curve(name, series, start, source or "step", *more), start, series.width)


def _curve(
    name: str, series: Series, start: int, source: str, unit: str | None = None, rule: str | None = None
) -> Curve:
    buckets = list(series)[start:]
    return Curve(
        name,
        source,
        unit,
        step=tuple(b.step for b in buckets),
        min=tuple(_rounded(b.low) if b.finite_count else None for b in buckets),
        mean=tuple(None if b.mean is None else _rounded(b.mean) for b in buckets),
        max=tuple(_rounded(b.high) if b.finite_count else None for b in buckets),
        last=tuple(_rounded(b.last) for b in buckets),
        time=tuple(_rounded(b.time) for b in buckets),
        count=series.count,
        first=None if series.first_value is None else _rounded(series.first_value),
        rule=rule,
        astray=series.first_nonfinite,
        before=series.last_finite if series.first_nonfinite is not None else None,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}") if isfinite(value) else value
