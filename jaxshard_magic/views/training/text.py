"""A run's metrics for a terminal: each number from its first value to its last, with a curve of blocks."""

from collections.abc import Sequence

from jaxshard_magic.report.metrics import Curve, Metrics
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.terminal import cells, clip, plain, shorten, table, wrapped
from jaxshard_magic.views.training import chart, data

ROWS = 12
MOST_BLOCKS = 32


def lines(metrics: Metrics | None, width: int) -> list[str]:
    """The section of a report, in `width` columns; none without metrics."""
    if metrics is None:
        return []
    shown = metrics.curves[:ROWS]
    told = list(zip(*data.rows(metrics)[:ROWS], strict=True))
    columns = {"": [shorten(printable(name), width // 4) for name in told[0]]}
    columns |= {
        head: [plain(each) for each in column] for head, column in zip(data.HEADS[1:], told[1:], strict=True)
    }
    if cells(table(columns, ("",))[0]) > width:
        columns = {head: column for head, column in columns.items() if head not in ("least", "most")}
    room = min(MOST_BLOCKS, width - cells(table(columns, ("",))[0]) - 2)
    if room >= 14:  # of its head
        columns["over the steps"] = [_blocks([curve], curve, room) for curve in shown]
    more = [f"  {len(metrics.curves) - ROWS} more in report.metrics"] if len(metrics.curves) > ROWS else []
    notes = [line for note in data.notes(metrics) for line in wrapped([note], width, "  ", "    ")]
    return [
        *wrapped([f"Training: {data.lead_text(metrics)}"], width),
        *table(columns, ("", "over the steps")),
        *more,
        *notes,
    ]


def curves(runs: Sequence[tuple[str, Metrics | None]], width: int) -> list[str]:
    """The curves of several runs below each other on one scale, for each number that two of them have."""
    told = []
    for own in data.over_each_other(runs)[1]:
        every = [c for _, c in own]
        columns = {
            data.label_of(every[0]): [clip(printable(run), width // 3) for run, _ in own],
            "first": [plain(data.value_text(c, c.first)) for c in every],
            "last": [plain(data.value_text(c, c.last[-1])) for c in every],
        }
        head = data.label_of(every[0])
        room = max(8, min(MOST_BLOCKS, width - cells(table(columns, (head,))[0]) - 2))
        columns["over the steps"] = [_blocks(every, c, room) for c in every]
        told += table(columns, (head, "over the steps"))
    return ["Curves", *told] if told else []


def _blocks(curves: Sequence[Curve], curve: Curve, room: int) -> str:
    scale = chart.scale_of(curves)
    return "" if scale is None else chart.blocks(curve, scale, max(c.step[-1] for c in curves), room)
