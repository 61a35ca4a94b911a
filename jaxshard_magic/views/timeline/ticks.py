"""Round times along an axis, in one unit."""

from math import ceil, floor, log10

UNITS = ((1e-6, "us"), (1e-3, "ms"), (1.0, "s"))
STEPS = (1, 2, 5, 10)


def ticks(end: float, most: int, unit: str) -> list[tuple[float, str]]:
    """Return ticks from 0 to `end` as (time, label); steps are 1, 2 or 5 times a power of ten, and the first label has
    the unit.

    >>> ticks(0.0353, 8, "s")[:3]
    [(0.0, '0 ms'), (0.005, '5'), (0.01, '10')]

    Args:
        end: End of the axis.
        most: Maximal number of steps.
        unit: "s", or "" for times in units of their own.
    """
    one, name = _unit(end) if unit == "s" else (1.0, "")
    if end <= 0:
        return [(0.0, f"0 {name}".rstrip())]
    least = end / one / most
    size = 10.0 ** floor(log10(least))
    # 1e-9: rounding errors must not add or drop a step or a digit.
    step = next(k * size for k in STEPS if k * size >= least * (1 - 1e-9))
    decimals = max(0, ceil(-log10(step) - 1e-9))
    count = floor(end / one / step + 1e-9)
    return [(k * step * one, f"{k * step:.{decimals}f}" if k else f"0 {name}".rstrip()) for k in range(count + 1)]


def _unit(end: float) -> tuple[float, str]:
    """Return the largest unit that `end` has at least two of, for short labels."""
    return next((pair for pair in reversed(UNITS) if end >= 2 * pair[0]), UNITS[0])
