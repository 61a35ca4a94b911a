"""Table of a report's options: figures of the step compiled with and without each option."""

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
class OptionRow:
    """Figures of one variant of the step.

    Attributes:
        change: Changed option, as typed.
        values: Figures in the order of `HEADS`.
        shares: Figures relative to the step as it is; empty texts for that step itself.
        reason: Reason for missing figures; None if they are known.
    """

    change: str
    values: tuple[str, ...]
    shares: tuple[str, ...]
    reason: str | None


def rows(report: Report) -> tuple[OptionRow, ...]:
    """Return the step as it is, then each change; empty for a report without options to compare."""
    if len(report.alternatives) < 2:
        return ()
    own = report.alternatives[0]
    return tuple(_row(a, own) for a in report.alternatives)


def _row(a: Alternative, own: Alternative) -> OptionRow:
    values = byte_text(a.peak), flops_text(a.flops), byte_text(a.sent)
    pairs = ((a.peak, own.peak), (a.flops, own.flops), (a.sent, own.sent))
    shares = ("",) * 3 if a is own else tuple(_share(x, y) for x, y in pairs)
    return OptionRow(a.change or AS_IT_IS, values, shares, a.why)


def _share(x: int | None, own: int | None) -> str:
    return "" if x is None or not own else share_text(x / own)
