"""The options of a report's line, each beside what the step takes without it."""

from dataclasses import dataclass

from jaxshard_magic.report import Alternative, Report
from jaxshard_magic.views.format import byte_text, flops_text, share_text

HEADS = {
    "peak": "Bytes on the fullest device at its peak",
    "FLOPs": "Of matrix products and convolutions on one device, with those that are done again",
    "sent": "Bytes that one device sends in a step",
}
TITLE = "Options, each compiled with and without"
AS_IT_IS = "as it is"


@dataclass(frozen=True)
class Row:
    """`values` and what they are of those of the step as it is, in the order of `HEADS`; `why` where it has none."""

    change: str
    values: tuple[str, ...]
    shares: tuple[str, ...]
    why: str | None


def rows(report: Report) -> tuple[Row, ...]:
    """The step as it is, then each change; none for a report without options to compare."""
    if len(report.alternatives) < 2:
        return ()
    own = report.alternatives[0]
    return tuple(_row(a, own) for a in report.alternatives)


def cell(row: Row, k: int, width: int) -> str:
    """The k-th figure with its share; of less than 80 columns the share alone, where there is one."""
    if width >= 80:
        return f"{row.values[k]} {row.shares[k]:>5}"
    return row.shares[k] or row.values[k]


def _row(a: Alternative, own: Alternative) -> Row:
    values = byte_text(a.peak), flops_text(a.flops), byte_text(a.sent)
    pairs = ((a.peak, own.peak), (a.flops, own.flops), (a.sent, own.sent))
    shares = ("",) * 3 if a is own else tuple(_share(x, y) for x, y in pairs)
    return Row(a.change or AS_IT_IS, values, shares, a.why)


def _share(x: int | None, own: int | None) -> str:
    return "" if x is None or not own else share_text(x / own)
