"""How well predictions did: the steps that a chip ran beside what was predicted for it."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..report.written import Shown
from .row import Row


@dataclass(frozen=True)
class Ratio:
    """Measured over predicted seconds of a step, of `count` reports of one strategy on one chip: above 1 is slower than
    predicted."""

    chip: str
    strategy: str
    count: int
    low: float
    median: float
    high: float


@dataclass(frozen=True, repr=False)
class Calibration(Shown):
    """Predicted beside measured, of reports whose step ran on the chip that it was predicted for; `left` have no
    measured step of a chip, or no prediction for it. `asked`: what was searched for, empty for all."""

    ratios: tuple[Ratio, ...]
    left: int
    asked: str = ""

    def _ways(self) -> tuple[Any, Any, Any]:
        from ..views import calibration

        return calibration.to_text, calibration.to_html, calibration.page

    def _short(self) -> str:
        return f"<Calibration: {sum(each.count for each in self.ratios)} measured steps>"


def calibration(rows: Iterable[Row], asked: str = "") -> Calibration:
    """Of these rows those of steps that ran on the chip they were predicted for, by chip and strategy, those with most
    reports first."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    left = 0
    for row in rows:
        if row.source == "attached" and row.on and row.step_s and row.predicted_s:
            found[row.on, row.strategy].append(row.step_s / row.predicted_s)
        else:
            left += 1
    ratios = [
        Ratio(chip, strategy, len(all_), min(all_), median(all_), max(all_))
        for (chip, strategy), all_ in found.items()
    ]
    return Calibration(tuple(sorted(ratios, key=lambda r: (-r.count, r.chip, r.strategy))), left, asked)
