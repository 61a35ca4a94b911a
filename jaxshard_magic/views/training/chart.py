"""Curve over the steps of a run, as SVG and as a row of blocks: the mean of each bucket, between its least and largest
value."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import log10

from jaxshard_magic.report.metrics import Curve
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.svg import LIMIT, coordinate, drawing, label
from jaxshard_magic.views.training import data

WIDTH, HEIGHT = 276, 108
LEFT, RIGHT, TOP, BOTTOM = 1, 1, 14, 16
SIZE = 10  # font size in px
LOG = 50  # ratio of largest to least value from which on the scale is logarithmic
DASHES = ("", "5 3", "2 2", "8 3 2 3")  # dash patterns of runs drawn over each other
BLOCKS = "▁▂▃▄▅▆▇█"

BucketPoint = tuple[int, float, float, float]  # (last step, least, mean, largest value)


@dataclass(frozen=True)
class CurveScale:
    """Range of values.

    Attributes:
        low: Smallest value.
        high: Largest value.
        log: Whether the scale is logarithmic.
    """

    low: float
    high: float
    log: bool

    def share(self, value: float) -> float:
        """Return the position of a value: 0 at the low end, 1 at the high end, 0.5 on an empty range."""
        if self.high <= self.low:
            return 0.5
        if self.log:
            return (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return (value - self.low) / (self.high - self.low)


def scale_of(curves: Sequence[Curve]) -> CurveScale | None:
    """Return a scale for all values of the curves; None without a finite value.

    The scale is logarithmic for positive values of the step if the largest is at least 50 times the least.
    """
    points = [point for curve in curves for part in parts_of(curve) for point in part]
    if not points:
        return None
    low, high = min(point[1] for point in points), max(point[3] for point in points)
    if curves[0].source == "loop":  # a scale from 0, on which small noise looks small
        return CurveScale(min(0.0, low), high, log=False)
    return CurveScale(low, high, low > 0 and high >= LOG * low)


def parts_of(curve: Curve) -> list[list[BucketPoint]]:
    """Return runs of consecutive buckets with finite values, split at buckets without one."""
    parts: list[list[BucketPoint]] = [[]]
    for step, low, mean, high in zip(curve.step, curve.min, curve.mean, curve.max, strict=True):
        if low is None or mean is None or high is None:
            parts.append([])
        else:
            parts[-1].append((step, low, mean, high))
    return [part for part in parts if part]


def chart(curves: Sequence[Curve], names: Sequence[str] = ()) -> str:
    """Return an `<svg>` of curves of one number, each with its own dash pattern; empty without a finite value.

    Args:
        curves: A curve for each run.
        names: Names of the runs, for screen readers.
    """
    scale = scale_of(curves)
    if scale is None:
        return ""
    last = max(curve.step[-1] for curve in curves)
    marks = [*_axes(curves[0], scale, last)]
    for place, curve in enumerate(curves):
        marks += _drawn(curve, scale, last, DASHES[place % len(DASHES)])
    range_texts = "; ".join(
        f"{name + ' ' if name else ''}{data.value_text(c, c.first)} to {data.newest_text(c)}"
        for c, name in zip(curves, names or [""] * len(curves), strict=True)
    )
    what = f"{data.label_of(curves[0])} over {data.step_text(last)} steps: {range_texts}"
    return drawing(WIDTH, HEIGHT, printable(what), marks)


def legend_line(place: int) -> str:
    """Return a short line in the dash pattern of a run, for a legend."""
    dash = DASHES[place % len(DASHES)]
    line = f'<path d="M0 4H24" fill="none" stroke="currentColor" stroke-width="1.5"{_dash(dash)}/>'
    return drawing(24, 8, "", [line])


def blocks(curve: Curve, scale: CurveScale, last: int, width: int) -> str:
    """Return the means as blocks of eight heights.

    A column without a bucket repeats the previous mean; columns before the first and after the last bucket are blank.

    Args:
        curve: Curve to show.
        scale: Scale of the heights.
        last: Last step of the row.
        width: Columns of the row.
    """
    columns: list[list[float]] = [[] for _ in range(width)]
    for part in parts_of(curve):
        for step, _, mean, _ in part:
            columns[min(width - 1, (step - 1) * width // last)].append(mean)
    drawn, latest_mean = "", None
    for at, means in enumerate(columns):
        if means:
            latest_mean = sum(means) / len(means)
        is_within = latest_mean is not None and at * last < curve.step[-1] * width
        shown = means or is_within
        height = 0 if latest_mean is None else scale.share(min(max(latest_mean, scale.low), scale.high))
        drawn += BLOCKS[min(7, int(8 * height))] if shown else " "
    return drawn


def _axes(curve: Curve, scale: CurveScale, last: int) -> Iterator[str]:
    floor = HEIGHT - BOTTOM
    quiet, end = ' fill-opacity=".8"', ' fill-opacity=".8" text-anchor="end"'
    for y in (TOP, floor):
        yield f'<path d="M0 {y + 0.5}H{WIDTH}" stroke="currentColor" stroke-opacity=".18"/>'
    log = ", log scale" if scale.log else ""
    yield label(0, TOP - 4, f"{data.value_text(curve, scale.high)}{log}", SIZE, quiet)
    yield label(0, HEIGHT - 4, data.value_text(curve, scale.low), SIZE, quiet)
    yield label(WIDTH, HEIGHT - 4, f"step {data.step_text(last)}", SIZE, end)


def _drawn(curve: Curve, scale: CurveScale, last: int, dash: str) -> Iterator[str]:
    def at(step: int, value: float) -> str:
        share = (step - 1) / (last - 1) if last > 1 else 0.5
        x = LEFT + share * (WIDTH - LEFT - RIGHT)
        y = TOP + 2 + (1 - scale.share(value)) * (HEIGHT - BOTTOM - TOP - 4)
        return f"{coordinate(round(x, 1))} {coordinate(round(y, 1))}"

    for part in parts_of(curve):
        # SVG draws in order: the area between least and largest values would cover the line of means.
        above = [at(step, high) for step, _, _, high in part]
        below = [at(step, low) for step, low, _, _ in reversed(part)]
        if above != below[::-1]:
            yield f'<path d="M{"L".join([*above, *below])}Z" fill="currentColor" fill-opacity=".16"/>'
        path = "L".join(at(step, mean) for step, _, mean, _ in part)
        yield (
            # A path of a single point draws nothing: a tiny line with round caps draws a dot.
            f'<path d="M{path}{"h.01" * (len(part) == 1)}" fill="none" stroke="currentColor" stroke-width="1.5"'
            f' stroke-linejoin="round" stroke-linecap="round"{_dash(dash)}/>'
        )
    if curve.astray is not None:
        x = at(curve.astray, scale.low).split(" ")[0]
        title = f"<title>{escape(f'not finite from step {curve.astray} on')}</title>"
        path = f"M{x} {TOP}V{HEIGHT - BOTTOM}"
        yield f'<path d="{path}" class="jss-limit" stroke="{LIMIT}" stroke-width="1.5">{title}</path>'


def _dash(dash: str) -> str:
    return f' stroke-dasharray="{dash}"' if dash else ""
