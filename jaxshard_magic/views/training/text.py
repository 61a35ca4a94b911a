"""Metrics of a run for a terminal: a row for each number, with its first and last value and a curve of blocks."""

from collections.abc import Sequence

from jaxshard_magic.report.metrics import Curve, Metrics
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.terminal import clip, display_width, plain_signs, shorten, table, wrap_all
from jaxshard_magic.views.training import chart, data

ROWS = 12
MOST_BLOCKS = 32


def lines(metrics: Metrics | None, width: int) -> list[str]:
    """Return the section of a report on metrics; empty without metrics.

    Args:
        metrics: Metrics of a run.
        width: Columns of the terminal.
    """
    if metrics is None:
        return []
    shown = metrics.curves[:ROWS]
    cell_columns = list(zip(*data.rows(metrics)[:ROWS], strict=True))
    columns = {"": [shorten(printable(name), width // 4) for name in cell_columns[0]]}
    columns |= {
        head: [plain_signs(each) for each in column]
        for head, column in zip(data.HEADS[1:], cell_columns[1:], strict=True)
    }
    if display_width(table(columns, ("",))[0]) > width:
        columns = {head: column for head, column in columns.items() if head not in ("least", "most")}
    room = min(MOST_BLOCKS, width - display_width(table(columns, ("",))[0]) - 2)
    if room >= 14:  # columns of the heading "over the steps"
        columns["over the steps"] = [_blocks([curve], curve, room) for curve in shown]
    more = [f"  {len(metrics.curves) - ROWS} more in report.metrics"] if len(metrics.curves) > ROWS else []
    notes = [line for note in data.notes(metrics) for line in wrap_all([note], width, "  ", "    ")]
    return [
        *wrap_all([f"Training: {data.summary_text(metrics)}"], width),
        *table(columns, ("", "over the steps")),
        *more,
        *notes,
    ]


def curves(runs: Sequence[tuple[str, Metrics | None]], width: int) -> list[str]:
    """Return the curves of several runs below each other on one scale, for each number of at least two runs.

    Args:
        runs: (name, metrics) of each run; None for a run without metrics.
        width: Columns of the terminal.
    """
    text_lines = []
    for own in data.shared_curves(runs)[1]:
        every = [c for _, c in own]
        columns = {
            data.label_of(every[0]): [clip(printable(run), width // 3) for run, _ in own],
            "first": [plain_signs(data.value_text(c, c.first)) for c in every],
            "last": [plain_signs(data.value_text(c, c.last[-1])) for c in every],
        }
        head = data.label_of(every[0])
        room = max(8, min(MOST_BLOCKS, width - display_width(table(columns, (head,))[0]) - 2))
        columns["over the steps"] = [_blocks(every, c, room) for c in every]
        text_lines += table(columns, (head, "over the steps"))
    return ["Curves", *text_lines] if text_lines else []


def _blocks(curves: Sequence[Curve], curve: Curve, room: int) -> str:
    scale = chart.scale_of(curves)
    return "" if scale is None else chart.blocks(curve, scale, max(c.step[-1] for c in curves), room)
