"""Formatting of numbers in reports, views and messages. Cases: `tests/data/format_cases.json`.

Quantities have three significant digits everywhere, so that a quantity reads the same in each view. Limits are given as
the hardware states them. Rounding is half up on the exact value. A narrow no-break space comes before a unit. An
unknown figure (None) is a dash.
"""

from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from math import floor, isfinite, isnan

SPACE = "\u202f"
MINUS = "\u2212"
UNKNOWN = "\u2013"

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
SECOND_UNITS = ("us", "ms", "s")
FLOP_UNITS = ("", "k", "M", "G", "T", "P", "E")
NEXT_UNIT = 999.5  # rounds to 1000
LEAST_TIME = 5e-10  # seconds; shorter times round to 0


def rounded(value: float, decimals: int) -> str:
    """Return `value` with so many decimals, rounded half up: `rounded(2.5, 0)` is '3'.

    Args:
        value: The number.
        decimals: Number of decimals.
    """
    # Python's own `round` and `format` round halves to even.
    exact = Decimal(value).quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP)
    text = str(abs(exact))
    return MINUS + text if exact < 0 else text


def trimmed(number: str) -> str:
    """Return a written number without trailing zeros in its decimals: `15.50` as `15.5`, `16.00` as `16`."""
    return number.rstrip("0").rstrip(".") if "." in number else number


def significant(value: float, digits: int = 3) -> str:
    """Return `value` with so many significant digits. Digits before the point are never dropped.

    Args:
        value: The number.
        digits: Number of significant digits.
    """
    decimals = digits - 1
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1 - 0.5 * 10.0**-digits and digits > 2:
        return rounded(value, digits)
    while decimals > 0 and size >= 10.0 ** (digits - decimals) - 0.5 * 10.0**-decimals:
        decimals -= 1
    return rounded(value, decimals)


def with_unit(value: float, units: Sequence[str], step: float) -> tuple[str, str]:
    """Return number and unit of `value`: the first unit that leaves the number below 1000, else the last.

    Args:
        value: The quantity, in the first of `units`.
        units: Units, each `step` times the one before.
        step: Ratio of the units.
    """
    for unit in units[:-1]:
        if abs(value) < NEXT_UNIT:
            return significant(value), unit
        value /= step
    return significant(value), units[-1]


def byte_parts(n: float) -> tuple[str, str]:
    """Return number and unit of `n` bytes: `("4.63", "GiB")`."""
    if abs(n) < NEXT_UNIT:
        return rounded(n, 0), "B"
    return with_unit(n / 1024, BYTE_UNITS[1:], 1024)


def byte_text(n: float | None) -> str:
    """Return `n` bytes in B, KiB, MiB, GiB, ...: `4.63 GiB`; a dash for None."""
    return UNKNOWN if n is None else SPACE.join(byte_parts(n))


def limit_parts(n: int) -> tuple[str, str]:
    """Return number and unit of a memory limit as the hardware states it, with up to two decimals: `("15.75",
    "GiB")`."""
    power = next(i for i in reversed(range(len(BYTE_UNITS))) if n >= 1024**i or i == 0)
    return trimmed(rounded(n / 1024**power, 2)), BYTE_UNITS[power]


def limit_text(n: int | None) -> str:
    """Return a memory limit as the hardware states it: `15.75 GiB`; a dash for None."""
    return UNKNOWN if n is None else SPACE.join(limit_parts(n))


def usage_text(bytes_held: int, most: int) -> str:
    """Return memory in use and its limit: `5.09 of 15.75 GiB`, with a common unit once.

    Args:
        bytes_held: Bytes in use.
        most: The limit in bytes.
    """
    (size, own), (limit, unit) = byte_parts(bytes_held), limit_parts(most)
    return f"{size}{'' if own == unit else SPACE + own} of {limit}{SPACE}{unit}"


def seconds_text(s: float | None) -> str:
    """Return `s` seconds in us, ms or s: `47.3 ms`, `<0.001 us`; a dash for None, NaN and infinity."""
    if s is None or not isfinite(s):
        return UNKNOWN
    if 0 < s < LEAST_TIME:
        return f"<0.001{SPACE}us"
    return SPACE.join(with_unit(s * 1e6, SECOND_UNITS, 1000))


def range_text(low: float, high: float) -> str:
    """Return two times as a range, with a common unit once: `46.8 to 49.1 ms`.

    Args:
        low: Shortest time in seconds.
        high: Longest time in seconds.
    """
    first, last = seconds_text(low), seconds_text(high)
    number, _, unit = first.partition(SPACE)
    return f"{number if unit and last.endswith(SPACE + unit) else first} to {last}"


def time_text(value: float | None, unit: str) -> str:
    """Return a time or a cost: `35.3 ms`; `33 units`, `1.5 units`.

    Args:
        value: The time in seconds, or the cost.
        unit: "s" for a time; anything else for a cost without a unit.
    """
    if value is None or unit == "s":
        return seconds_text(value)
    number = trimmed(significant(value))
    return f"{number} unit{'s' * (number != '1')}"


def rate_text(bytes_per_s: float) -> str:
    """Return the rate of a link or a memory in GB/s, as published: `34 GB/s`, `1228 GB/s`."""
    return f"{trimmed(significant(bytes_per_s / 1e9))}{SPACE}GB/s"


def flops_text(n: float | None) -> str:
    """Return FLOPs with SI prefixes: `1.23 G`; a dash for None."""
    return UNKNOWN if n is None else SPACE.join(with_unit(float(n), FLOP_UNITS, 1000)).rstrip()


def share_text(fraction: float | None) -> str:
    """Return a fraction in percent: whole percents from 10%, one decimal below, `<0.1%` below 0.1%; a dash for None."""
    if fraction is None:
        return UNKNOWN
    percent = 100 * fraction
    if 0 < percent < 0.1:
        return "<0.1%"
    return rounded(percent, 0 if percent >= 9.95 or percent == 0 else 1) + "%"


def percent_text(share: float | None) -> str:
    """Return a fraction in percent with one decimal, for comparisons as of bubbles: `24.4%`; a dash for None."""
    return UNKNOWN if share is None else f"{rounded(100 * share, 1)}%"


def round_to_sum(shares: Sequence[float], whole: float) -> list[float]:
    """Round shares to thousandths, as `percent_text` shows them, so that they add up to `whole` as shown.

    Shares that lose most by rounding down are rounded up.

    Args:
        shares: Fractions.
        whole: Sum of the shares.

    >>> round_to_sum([0.20048, 0.08634, 0.13246], 0.41928)
    [0.201, 0.086, 0.132]
    """
    wanted = int(Decimal(1000 * whole).to_integral_value(ROUND_HALF_UP))
    down = [floor(1000 * share) for share in shares]
    first = sorted(range(len(shares)), key=lambda i: down[i] - 1000 * shares[i])
    for i in range(wanted - sum(down)):
        down[first[i % len(first)]] += 1
    for i in range(sum(down) - wanted):
        down[first[-1 - i % len(first)]] -= 1
    return [thousandths / 1000 for thousandths in down]


def count_text(n: int | None) -> str:
    """Return a count: `2,064`; a dash for None."""
    return UNKNOWN if n is None else f"{n:,}".replace("-", MINUS)


def more_text(count: int, shown: int) -> str:
    """Return ` and 3 more` for hidden things; empty where all are shown.

    Args:
        count: Number of things.
        shown: Number of things shown.
    """
    return f" and {count_text(count - shown)} more" if count > shown else ""


def difference_text(value: float | None) -> str:
    """Return a numerical difference or tolerance with up to two digits: `4.3e−4`, `0.012`, `0`; a dash for None."""
    if value is None:
        return UNKNOWN
    if not isfinite(value):
        return "NaN" if isnan(value) else "infinity"
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.1e}".split("e")
    power = int(exponent)
    if -3 <= power < 4:
        return trimmed(rounded(value, max(0, 1 - power)))
    return f"{mantissa.removesuffix('.0')}e{str(power).replace('-', MINUS)}"


def number_text(value: float | None) -> str:
    """Return a number without a unit, to four digits: `0.04213`, `1.5e−9`; a dash for None."""
    if value is None:
        return UNKNOWN
    if isnan(value):
        return "NaN"
    if not isfinite(value):
        return "infinity" if value > 0 else f"{MINUS}infinity"
    return f"{value:.4g}".replace("-", MINUS)
