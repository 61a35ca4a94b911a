"""A number over a run of any length in a fixed number of buckets: exact least, mean, most and last of each."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isfinite

MOST = 128  # buckets; even, so that they merge in pairs


@dataclass(slots=True)
class Bucket:
    """The values of steps that follow each other, up to `step`, which was seen `time` seconds into the run.

    `low`, `high` and `total` are over the `finite` ones, `last` is the newest, whatever it is.
    """

    step: int
    time: float
    low: float
    high: float
    total: float
    finite: int
    last: float

    @property
    def mean(self) -> float | None:
        """Of the finite values; None where there is none."""
        return self.total / self.finite if self.finite else None

    def add(self, step: int, time: float, value: float) -> None:
        """Take in the value of a later step."""
        self.step, self.time, self.last = step, time, value
        if isfinite(value):
            self.finite, self.total = self.finite + 1, self.total + value
            if value < self.low:
                self.low = value
            if value > self.high:
                self.high = value

    def merge(self, later: "Bucket") -> None:
        """Take in the bucket that follows."""
        self.step, self.time, self.last = later.step, later.time, later.last
        self.finite, self.total = self.finite + later.finite, self.total + later.total
        self.low, self.high = min(self.low, later.low), max(self.high, later.high)


class Series:
    """Values by their steps, in rising order, in at most `most` buckets of `width` values each.

    A value costs the same however many there were: when all buckets are full they merge in pairs and hold twice as
    many. What is not a number, or infinite, is in no least, mean or most; `astray` is the first step that had one,
    `before` the last one before it whose value was finite; `first` is the first value of all.

    >>> loss = Series(most=2)
    >>> for step, value in enumerate([4.0, 2.0, 3.0, 1.0, 0.5], 1):
    ...     loss.add(step, time=step / 10, value=value)
    >>> [(b.step, b.low, b.mean, b.high, b.last) for b in loss], loss.width
    ([(4, 1.0, 2.5, 4.0, 1.0), (5, 0.5, 0.5, 0.5, 0.5)], 4)
    """

    def __init__(self, most: int = MOST):
        if most < 2 or most % 2:
            raise ValueError(f"buckets merge in pairs: an even number of them, not {most}")
        self._most, self._buckets, self._room = most, list[Bucket](), 0
        self.width = 1
        self.count = 0
        self.first: float | None = None
        self.astray: int | None = None
        self.before: int | None = None

    def add(self, step: int, time: float, value: float) -> None:
        """Take the value of a step that is later than those before, `time` seconds into the run."""
        self.count += 1
        if self.first is None:
            self.first = value
        if self.astray is None:
            if isfinite(value):
                self.before = step
            else:
                self.astray = step
        if not self._room:
            if len(self._buckets) == self._most:
                self._halve()
            self._buckets.append(Bucket(step, time, inf, -inf, 0.0, 0, value))
            self._room = self.width
        self._buckets[-1].add(step, time, value)
        self._room -= 1

    def _halve(self) -> None:
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
