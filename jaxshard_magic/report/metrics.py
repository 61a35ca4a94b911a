"""The metrics of a run: what its step returned and what was measured of its loop, in as many rows however long."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxshard_magic.errors import ShardError, none_of, one_of
from jaxshard_magic.packages import data_frame

COLUMNS = ("step", "name", "min", "mean", "max", "last", "time")


@dataclass(frozen=True)
class Curve:
    """One number over a run, in buckets of steps that follow each other; all tuples have one entry a bucket.

    `source`: "step", returned by the step, or "loop", measured of its loop, in `unit`. `step` is the last of a bucket,
    from 1 on, and `time` the seconds into the run at which that was seen to have finished. `min`, `mean` and `max` are
    of the bucket's finite values, None where it has none; `last` is the last step's, whatever it is. `count`: values
    that all buckets together are of; `first` is the first of them. `rule`: by what a rate is counted. `astray` is the
    first step whose value was not finite, None for none, and `before` the last one before it that was seen to be.
    """

    name: str
    source: str
    unit: str | None
    step: tuple[int, ...]
    min: tuple[float | None, ...]
    mean: tuple[float | None, ...]
    max: tuple[float | None, ...]
    last: tuple[float, ...]
    time: tuple[float, ...]
    count: int
    first: float | None = None
    rule: str | None = None
    astray: int | None = None
    before: int | None = None

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class Tail:
    """The buckets of a curve from the one at `start` on, which hold `width` values each: what is new of it."""

    curve: Curve
    start: int
    width: int


@dataclass(frozen=True)
class Metrics:
    """The numbers of a run of `steps` steps, `of` so many where that was known, over `seconds`; the step's own first.

    `skipped`: steps that came too fast to be read. `left_out`: names of numbers beyond those that are kept. `loss`: the
    name of the loss among the curves, None where the step returns none.

    >>> loss = Curve("loss", "step", None, (2, 4), (2.0, 1.0), (3.0, 1.5), (4.0, 2.0), (2.0, 1.0), (0.2, 0.4), 4)
    >>> metrics = Metrics(4, 0.4, (loss,))
    >>> metrics["loss"].last[-1], list(metrics.rows())[0]["mean"]
    (1.0, 3.0)
    """

    steps: int
    seconds: float
    curves: tuple[Curve, ...]
    of: int | None = None
    skipped: int = 0
    left_out: int = 0
    loss: str | None = None

    def __getitem__(self, name: str) -> Curve:
        """The curve of this name. Raises ShardError where there is none."""
        names = [curve.name for curve in self.curves]
        if name not in names:
            raise ShardError(none_of(f"no metric '{name}'", name, names, f"the metrics are {one_of(names)}"))
        return self.curves[names.index(name)]

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """A row for each bucket of each curve, by the names of `COLUMNS`: `step`, `name`, `min`, `mean`, `max`, `last`
        and `time`, seconds."""
        for curve in self.curves:
            columns = (curve.step, curve.min, curve.mean, curve.max, curve.last, curve.time)
            for step, low, mean, high, last, time in zip(*columns, strict=True):
                yield dict(zip(COLUMNS, (step, curve.name, low, mean, high, last, time), strict=True))

    def to_pandas(self) -> Any:
        """The rows as a DataFrame. Raises ShardError where pandas is not installed."""
        return data_frame(self.rows(), COLUMNS)
