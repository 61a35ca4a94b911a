"""Metrics of a run: numbers returned by the step and measured in its loop, in a bounded number of rows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxshard_magic.errors import ShardError, list_names, unknown_name
from jaxshard_magic.packages import data_frame

COLUMNS = ("step", "name", "min", "mean", "max", "last", "time")


@dataclass(frozen=True)
class Curve:
    """A number over a run, in consecutive buckets of steps. All tuples have an entry per bucket.

    Attributes:
        name: Name of the number.
        source: "step" for a number returned by the step, "loop" for a number measured in the loop.
        unit: Unit of a number of the loop.
        step: Last step of each bucket, from 1.
        min: Minimum of the finite values of each bucket; None without a finite value, as `mean` and `max`.
        mean: Mean of the finite values.
        max: Maximum of the finite values.
        last: Value of the last step, finite or not.
        time: Seconds since the start of the run at which the last step was observed to be finished.
        count: Number of values in all buckets.
        first: First value.
        rule: Counting rule of a rate.
        astray: First step with a value that is not finite; None if there is none.
        before: Last step before `astray` with a value known to be finite.
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
class CurveTail:
    """New buckets of a curve.

    Attributes:
        curve: Buckets from `start` on.
        start: Index of the first bucket.
        width: Values per bucket.
    """

    curve: Curve
    start: int
    width: int


@dataclass(frozen=True)
class Metrics:
    """Numbers of a run.

    Attributes:
        steps: Number of steps.
        seconds: Duration of the run.
        curves: The numbers, those returned by the step first.
        of: Planned number of steps, if known.
        skipped: Number of steps too fast to be read.
        left_out: Count of further numbers, beyond the limit on curves.
        loss: Name of the loss among the curves; None if the step returns no loss.

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
        """Return the curve of this name.

        Raises:
            ShardError: No such curve.
        """
        names = [curve.name for curve in self.curves]
        if name not in names:
            raise ShardError(unknown_name(f"no metric '{name}'", name, names, f"the metrics are {list_names(names)}"))
        return self.curves[names.index(name)]

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield a row for each bucket of each curve, with the keys `COLUMNS`: `step`, `name`, `min`, `mean`, `max`,
        `last` and `time` in seconds."""
        for curve in self.curves:
            columns = (curve.step, curve.min, curve.mean, curve.max, curve.last, curve.time)
            for step, low, mean, high, last, time in zip(*columns, strict=True):
                yield dict(zip(COLUMNS, (step, curve.name, low, mean, high, last, time), strict=True))

    def to_pandas(self) -> Any:
        """Return the rows as a DataFrame.

        Raises:
            ShardError: pandas is not installed.
        """
        return data_frame(self.rows(), COLUMNS)
