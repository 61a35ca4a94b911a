"""Time breakdown of a recorded step for a terminal."""

from collections.abc import Sequence

from jaxshard_magic.report import Report
from jaxshard_magic.views import words
from jaxshard_magic.views.format import UNKNOWN, count_text, printable, share_text
from jaxshard_magic.views.measured import data
from jaxshard_magic.views.source_lines import code_text
from jaxshard_magic.views.terminal import display_width, pad, plain_signs, shorten, table, wrap

ROWS, LEAST_SOURCE, DEVICES = 12, 16, 8


def lines(report: Report, width: int) -> list[str]:
    """Return the text, lines of code by time, collectives and devices; empty without a measurement.

    Args:
        report: Report to show.
        width: Columns of the terminal.
    """
    m = report.measured
    if m is None:
        return []
    lead = "".join(span.text for span in words.measured_lead(m))
    summary = f"{lead} {words.sentence_case(words.measured_about(m))}"
    notes = [line for note in words.measured_notes(report) for line in wrap(plain_signs(printable(note)), width)]
    tables = [*_lines(report, width), *_collectives(report, width), *_devices(report, width)]
    return [*wrap(plain_signs(summary), width), *notes, *tables]


def _lines(report: Report, width: int) -> list[str]:
    every = data.rows(report)
    shown, rest = every[:ROWS], every[ROWS:]
    if not shown:
        return []
    names = [shorten(printable(row.name), width // 5) for row in shown]
    name_width = max(map(display_width, names))
    heads = data.heads(shown)
    while True:
        columns = {head: [plain_signs(row.figures[head]) or UNKNOWN for row in shown] for head in heads}
        figures = table(columns, ("phase",))
        room = width - name_width - 4 - display_width(figures[0])
        less = [head for head in ("compute", "waiting", "moving", "of step") if head in heads]
        if room >= LEAST_SOURCE or not less:
            break
        heads = [head for head in heads if head != less[0]]
    text_lines = ["", pad("Lines by measured time", name_width + room + 4) + figures[0]]
    for name, row, figure in zip(names, shown, figures[1:], strict=True):
        source = code_text(row.text, row.callers, room)
        text_lines.append(f"  {pad(name, name_width, 'right')}  {pad(source, room)}{figure}")
    left = sum(row.share for row in rest)
    return [*text_lines, *([f"  {count_text(len(rest))} more take {share_text(left)} of the step"] if rest else [])]


def _collectives(report: Report, width: int) -> list[str]:
    heads, rows = data.collectives(report)
    return _fitting(heads, rows, ("links carry", "on the links, predicted", "waiting"), width) if rows else []


def _devices(report: Report, width: int) -> list[str]:
    m = report.measured
    if m is None or len(m.devices) < 2:
        return []
    heads, rows = data.devices(m)
    left = m.of_devices - min(DEVICES, len(rows))
    more = [f"  {count_text(left)} more devices"] if left else []
    return [*_fitting(heads, rows[:DEVICES], ("hidden", "idle"), width), *more]


def _fitting(heads: Sequence[str], rows: Sequence[Sequence[str]], less: Sequence[str], width: int) -> list[str]:
    """Return a table below an empty line.

    Args:
        heads: Column heads.
        rows: Cells.
        less: Columns to drop if the table is too wide, the first one first.
        width: Columns of the terminal.
    """
    told = [[plain_signs(printable(cell)) for cell in column] for column in zip(*rows, strict=True)]
    columns = dict(zip(heads, told, strict=True))
    lefts = ("collective", "over")
    for head in less:
        if display_width(table(columns, lefts)[0]) > width:
            columns.pop(head, None)
    return ["", *table(columns, lefts)]
