"""Numbers as they are written everywhere in a report; `tests/data/format_cases.json` holds the cases.

Rounding is half up on the exact value. Units stand after a narrow no-break space, and a figure that is
not known (None) is a dash.
"""

import re
from collections.abc import Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from math import isfinite, isnan

from jaxshard_magic.report import Leaf
from jaxshard_magic.report.parts import cut_of

SPACE = "\u202f"
MINUS = "\u2212"
UNKNOWN = "\u2013"

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
SECOND_UNITS = ("us", "ms", "s")
NEXT_UNIT = 999.5
LEAST_TIME = 5e-10  # seconds, what rounds to no time


def rounded(value: float, decimals: int) -> str:
    """`value` with so many decimals, half up: `rounded(2.5, 0)` is '3'."""
    exact = Decimal(value).quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP)
    text = str(abs(exact))
    return MINUS + text if exact < 0 else text


def trimmed(number: str) -> str:
    """A number as it is written, without zeros at the end of its decimals: `15.50` as `15.5`, `16.00` as `16`."""
    return number.rstrip("0").rstrip(".") if "." in number else number


def significant(value: float, digits: int = 3) -> str:
    """`value` with so many significant digits; digits before the point are never dropped."""
    decimals = digits - 1
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1 - 0.5 * 10.0**-digits and digits > 2:
        return rounded(value, digits)
    while decimals > 0 and size >= 10.0 ** (digits - decimals) - 0.5 * 10.0**-decimals:
        decimals -= 1
    return rounded(value, decimals)


def with_unit(value: float, units: Sequence[str], step: float, digits: int) -> tuple[str, str]:
    """The number and the unit of `value`: the first of `units`, each `step` times the one before, that leaves it below
    1000, else the last."""
    for unit in units[:-1]:
        if abs(value) < NEXT_UNIT:
            return significant(value, digits), unit
        value /= step
    return significant(value, digits), units[-1]


def byte_parts(n: int, digits: int = 3) -> tuple[str, str]:
    """The number and the unit of `n` bytes: `("4.63", "GiB")`."""
    if abs(n) < NEXT_UNIT:
        return rounded(n, 0), "B"
    return with_unit(n / 1024, BYTE_UNITS[1:], 1024, digits)


def byte_text(n: int | None, digits: int = 3) -> str:
    """`n` bytes in B, KiB, MiB, GiB, ...: `4.63 GiB`."""
    return UNKNOWN if n is None else SPACE.join(byte_parts(n, digits))


def limit_parts(n: int) -> tuple[str, str]:
    """A memory limit as the hardware states it, with up to two decimals: `("15.75", "GiB")`."""
    power = next(i for i in reversed(range(len(BYTE_UNITS))) if n >= 1024**i or i == 0)
    return trimmed(rounded(n / 1024**power, 2)), BYTE_UNITS[power]


def limit_text(n: int | None) -> str:
    """A memory limit as the hardware states it: `15.75 GiB`; a dash for None."""
    return UNKNOWN if n is None else SPACE.join(limit_parts(n))


def seconds_text(s: float | None) -> str:
    """`s` seconds in us, ms or s: `47.3 ms`, `<0.001 us`; a dash for what is no time."""
    if s is None or not isfinite(s):
        return UNKNOWN
    if 0 < s < LEAST_TIME:
        return f"<0.001{SPACE}us"
    return SPACE.join(with_unit(s * 1e6, SECOND_UNITS, 1000, 3))


def range_text(low: float, high: float) -> str:
    """Two times as a range, the unit told once where both have the same: `46.8 to 49.1 ms`."""
    first, last = seconds_text(low), seconds_text(high)
    number, _, unit = first.partition(SPACE)
    return f"{number if unit and last.endswith(SPACE + unit) else first} to {last}"


def share_text(fraction: float | None) -> str:
    """A share of a whole: whole percents from 10%, one decimal below, `<0.1%` below that."""
    if fraction is None:
        return UNKNOWN
    percent = 100 * fraction
    if 0 < percent < 0.1:
        return "<0.1%"
    return rounded(percent, 0 if percent >= 9.95 or percent == 0 else 1) + "%"


def count_text(n: int | None) -> str:
    """A count of things: `2,064`."""
    return UNKNOWN if n is None else f"{n:,}".replace("-", MINUS)


def more_text(count: int, shown: int) -> str:
    """` and 3 more`, of `count` things of which so many are shown; empty where all are."""
    return f" and {count_text(count - shown)} more" if count > shown else ""


def difference_text(value: float | None) -> str:
    """A numerical difference or tolerance, two digits at most: `4.3e−4`, `0.012`, `0`."""
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


_DTYPE = re.compile(r"(float|uint|int|complex)([1-9]\d*)(.*)")
_DTYPE_LETTER = {"float": "f", "uint": "u", "int": "i", "complex": "c"}


def dtype_text(name: str) -> str:
    """The short name that jax prints: `f32`, `bf16`, `i32`, `u8`; keys stay `key<fry>`."""
    if name.startswith("bfloat"):
        return "bf" + name.removeprefix("bfloat")
    match = _DTYPE.fullmatch(name)
    return _DTYPE_LETTER[match[1]] + match[2] + match[3] if match else name


def type_parts(leaf: Leaf) -> tuple[tuple[str, str | None], ...]:
    """The type of a leaf in pieces of (text, mesh axis or None), for views that mark the axes."""
    parts: list[tuple[str, str | None]] = [(dtype_text(leaf.dtype) + "[", None)]
    for i, (size, axes) in enumerate(zip(leaf.shape, cut_of(leaf.spec, len(leaf.shape)), strict=True)):
        parts.append((("," if i else "") + str(size), None))
        for j, axis in enumerate(axes):
            parts.append(("," if j else "@(" if len(axes) > 1 else "@", None))
            parts.append((axis, axis))
        if len(axes) > 1:
            parts.append((")", None))
    parts.append(("]", None))
    return tuple(parts)


def type_text(leaf: Leaf) -> str:
    """Type, shape and the mesh axes of each dimension: `f32[50257,768@data]`, `f32[8@(data,model)]`."""
    return "".join(text for text, _ in type_parts(leaf))


def place_parts(leaves: Sequence[Leaf]) -> tuple[tuple[str, str | None], ...]:
    """Where leaves lie that are not on the whole mesh, in pieces as `type_parts`: `on pipe=2`; `on one of pipe=0-3` for
    leaves of a stage each."""
    if not leaves or not leaves[0].within:
        return ()
    parts: list[tuple[str, str | None]] = [("on ", None)]
    for i, axis in enumerate(leaves[0].within):
        spans = {leaf.within[axis] for leaf in leaves}
        first, end = next(iter(spans))
        one_of = "" if len(spans) == 1 else f"{'one' if end - first == 1 else end - first} of "
        indices = index_text({n for span in spans for n in range(*span)})
        parts += [((", " if i else "") + one_of, None), (axis, axis), (f"={indices}", None)]
    return tuple((text, axis) for text, axis in parts if text)


def place_text(leaves: Sequence[Leaf]) -> str:
    """`on pipe=2`, empty for leaves on the whole mesh."""
    return "".join(text for text, _ in place_parts(leaves))


def index_text(indices: Iterable[int]) -> str:
    """Indices as a person lists them: `0-3,8`; of many runs the first and the last."""
    pieces = [str(a) if a == b else f"{a}-{b}" for a, b in runs(indices)]
    return ",".join(pieces) if len(pieces) <= 3 else f"{pieces[0]},\u2026,{pieces[-1]}"


def runs(ids: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of each run of consecutive ids, ascending: `[0, 1, 2, 5]` -> `[(0, 2), (5, 5)]`."""
    spans: list[tuple[int, int]] = []
    for i in sorted(ids):
        if spans and i == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], i)
        else:
            spans.append((i, i))
    return spans


def device_text(ids: Sequence[int]) -> str:
    """Devices as a reader names them: `device 0`, `devices 1 to 7`, `62 devices` for a scattered set."""
    if len(ids) == 1:
        return f"device\u00a0{ids[0]}"
    pieces = [f"{a}" if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in runs(ids)]
    return f"{count_text(len(ids))} devices" if len(pieces) > 3 else "devices " + ", ".join(pieces)


def printable(text: str) -> str:
    """`text` on one line, control and formatting characters replaced, so that no name can move a cursor."""
    if text.isprintable():
        return text
    return "".join(" " if c.isspace() and c not in _SPACES else c if _shows(c) else "\ufffd" for c in text)


_SPACES = f"\u00a0{SPACE}"


def _shows(c: str) -> bool:
    return c.isprintable() or c in _SPACES
