"""A curve over the steps of a run, as SVG and as a row of blocks: the mean of each bucket, around it least and most."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import log10

from jaxshard_magic.report.metrics import Curve
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.svg import LIMIT, drawing, label, number
from jaxshard_magic.views.training import data

WIDTH, HEIGHT = 276, 108
LEFT, RIGHT, TOP, BOTTOM = 1, 1, 14, 16
SIZE = 10  # of letters, in px
LOG = 50  # so many times the least is the largest value of a scale that counts its digits
DASHES = ("", "5 3", "2 2", "8 3 2 3")  # of runs that lie over each other
BLOCKS = "▁▂▃▄▅▆▇█"

Point = tuple[int, float, float, float]  # a bucket's last step, and its least, mean and largest value


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high`, by their logarithm where they are far apart."""

    low: float
    high: float
    log: bool

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high one."""
        if self.high <= self.low:
            return 0.5
        if self.log:
            return (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return (value - self.low) / (self.high - self.low)


def scale_of(curves: Sequence[Curve]) -> Scale | None:
    """That of all their values; None where none is finite."""
    points = [point for curve in curves for part in parts_of(curve) for point in part]
    if not points:
        return None
    low, high = min(point[1] for point in points), max(point[3] for point in points)
    if curves[0].source == "loop":  # a quantity, whose noise is to look as large as it is
        return Scale(min(0.0, low), high, log=False)
    return Scale(low, high, low > 0 and high >= LOG * low)


def parts_of(curve: Curve) -> list[list[Point]]:
    """The buckets that have finite values, cut where one has none."""
    parts: list[list[Point]] = [[]]
    for step, low, mean, high in zip(curve.step, curve.min, curve.mean, curve.max, strict=True):
        if low is None or mean is None or high is None:
            parts.append([])
        else:
            parts[-1].append((step, low, mean, high))
    return [part for part in parts if part]


def chart(curves: Sequence[Curve], names: Sequence[str] = ()) -> str:
    """An `<svg>` of curves of one number over each other, each with a dash of its own; empty without a finite value.
    `names`: of the runs, for a screen reader."""
    scale = scale_of(curves)
    if scale is None:
        return ""
    last = max(curve.step[-1] for curve in curves)
    marks = [*_axes(curves[0], scale, last)]
    for place, curve in enumerate(curves):
        marks += _drawn(curve, scale, last, DASHES[place % len(DASHES)])
    told = "; ".join(
        f"{name + ' ' if name else ''}{data.value_text(c, c.first)} to {data.value_text(c, c.last[-1])}"
        for c, name in zip(curves, names or [""] * len(curves), strict=True)
    )
    what = f"{data.label_of(curves[0])} over {data.step_text(last)} steps: {told}"
    return drawing(WIDTH, HEIGHT, printable(what), marks)


def sample_of(place: int) -> str:
    """A short line with the dash of a run, for a legend."""
    dash = DASHES[place % len(DASHES)]
    line = f'<path d="M0 4H24" fill="none" stroke="currentColor" stroke-width="1.5"{_dash(dash)}/>'
    return drawing(24, 8, "", [line])


def blocks(curve: Curve, scale: Scale, last: int, width: int) -> str:
    """The means as blocks of eight heights, `width` columns for `last` steps; a dot where there is none."""
    columns: list[list[float]] = [[] for _ in range(width)]
    for part in parts_of(curve):
        for step, _, mean, _ in part:
            columns[min(width - 1, (step - 1) * width // last)].append(mean)
    drawn, before = "", None
    for at, means in enumerate(columns):
        if means:
            before = sum(means) / len(means)
        there = before is not None and at * last < curve.step[-1] * width
        shown = means or there
        height = 0 if before is None else scale.share(min(max(before, scale.low), scale.high))
        drawn += BLOCKS[min(7, int(8 * height))] if shown else " "
    return drawn


def _axes(curve: Curve, scale: Scale, last: int) -> Iterator[str]:
    floor = HEIGHT - BOTTOM
    quiet, end = ' fill-opacity=".8"', ' fill-opacity=".8" text-anchor="end"'
    for y in (TOP, floor):
        yield f'<path d="M0 {y + 0.5}H{WIDTH}" stroke="currentColor" stroke-opacity=".18"/>'
    log = ", log scale" if scale.log else ""
    yield label(0, TOP - 4, f"{data.value_text(curve, scale.high)}{log}", SIZE, quiet)
    yield label(0, HEIGHT - 4, data.value_text(curve, scale.low), SIZE, quiet)
    yield label(WIDTH, HEIGHT - 4, f"step {data.step_text(last)}", SIZE, end)


def _drawn(curve: Curve, scale: Scale, last: int, dash: str) -> Iterator[str]:
    def at(step: int, value: float) -> str:
        share = (step - 1) / (last - 1) if last > 1 else 0.5
        x = LEFT + share * (WIDTH - LEFT - RIGHT)
        y = TOP + 2 + (1 - scale.share(value)) * (HEIGHT - BOTTOM - TOP - 4)
        return f"{number(round(x, 1))} {number(round(y, 1))}"

    for part in parts_of(curve):
        above = [at(step, high) for step, _, _, high in part]
        below = [at(step, low) for step, low, _, _ in reversed(part)]
        if above != below[::-1]:
            yield f'<path d="M{"L".join([*above, *below])}Z" fill="currentColor" fill-opacity=".16"/>'
        path = "L".join(at(step, mean) for step, _, mean, _ in part)
        yield (
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
