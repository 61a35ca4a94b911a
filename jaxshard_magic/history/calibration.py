"""Accuracy of time predictions: measured over predicted step time, by chip and strategy."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from ..report.records import Displayable
from .row import Row


@dataclass(frozen=True)
class Ratio:
    """Measured over predicted seconds of a step, for one strategy on one chip; above 1 is slower than predicted.

    Attributes:
        chip: Name of the chip.
        strategy: Name of the strategy.
        count: Number of reports.
        low: Lowest ratio.
        median: Median ratio.
        high: Highest ratio.
    """

    chip: str
    strategy: str
    count: int
    low: float
    median: float
    high: float


@dataclass(frozen=True, repr=False)
class Calibration(Displayable):
    """Measured over predicted step time, for steps run on the chip of the prediction.

    Attributes:
        ratios: Ratios by chip and strategy, most reports first.
        left: Number of reports without a measured step on a chip, or without a prediction for that chip.
        asked: Search text; empty for all reports.
    """

    ratios: tuple[Ratio, ...]
    left: int
    asked: str = ""

    def _summary_line(self) -> str:
        return f"<Calibration: {sum(each.count for each in self.ratios)} measured steps>"


def calibration(rows: Iterable[Row], asked: str = "") -> Calibration:
    """Compare measured with predicted step times, by chip and strategy.

    Args:
        rows: Rows of the history.
        asked: Search text that selected the rows, for display.
    """
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    left = 0
    for row in rows:
        if row.source == "attached" and row.on and row.step_s and row.predicted_s:
            found[row.on, row.strategy].append(row.step_s / row.predicted_s)
        else:
            left += 1
    ratios = [
        Ratio(chip, strategy, len(all_), min(all_), median(all_), max(all_)) for (chip, strategy), all_ in found.items()
    ]
    return Calibration(tuple(sorted(ratios, key=lambda r: (-r.count, r.chip, r.strategy))), left, asked)
