"""A number over a run of any length, in a bounded number of buckets with exact minimum, mean, maximum and last
value."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isfinite

MAX_BUCKETS = 128  # even, as buckets merge in pairs


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

    def __init__(self, max_buckets: int = MAX_BUCKETS):
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
