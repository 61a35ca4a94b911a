"""Time breakdown of a recorded step: lines of code by time, collectives and devices."""

from collections.abc import Sequence

from jaxshard_magic.report import Report
from jaxshard_magic.views import words
from jaxshard_magic.views.document import parts as doc
from jaxshard_magic.views.format import UNKNOWN, count_text, share_text
from jaxshard_magic.views.measured import data

LINES, PAGE_LINES, DEVICES = 12, 40, 8
LEAST_SOURCE = 16  # columns of code in a terminal, at least
_LEFT = ("phase", "collective", "over")
_LESS = ("compute", "waiting", "moving", "of step")  # figures that a narrow terminal leaves out, the first one first


def measured(report: Report, *, page: bool = False) -> list[doc.Part]:
    """Return the section on measured times; nothing without a measurement.

    Args:
        report: Report.
        page: Whether there is room for more lines of code, and for all listed devices.
    """
    m = report.measured
    if m is None:
        return []
    about = (words.sentence_case(words.measured_about(m)), *words.measured_notes(report))
    heads, rows = data.devices(m)
    shown = rows if page else rows[:DEVICES] * (len(rows) > 1)
    left = m.of_devices - len(shown)
    more = doc.Notes((f"{count_text(left)} more devices",) if left and not page else ())
    parts = [
        doc.RecordedLanes(m),
        *_lines(report, PAGE_LINES if page else LINES),
        *_figures(*data.collectives(report), ("links carry", "on the links, predicted", "waiting")),
        *_figures(heads, shown, ("hidden", "idle"), more),
    ]
    return [doc.Section(words.measured_lead(m), tuple(parts), about)]


def _lines(report: Report, most: int) -> list[doc.Part]:
    every = data.rows(report)
    shown, rest = every[:most], every[most:]
    if not shown:
        return []
    heads, longest = data.heads(shown), max(row.share for row in shown) or 1.0
    columns = [doc.Column("line", "right", "", most=1 / 5), doc.Column("source", "wrap", "", least=LEAST_SOURCE)]
    for head in heads:
        shows = doc.EVERYWHERE if head in ("measured", "predicted") else doc.EVERYWHERE - {doc.HTML}
        columns.append(doc.Column(head, _align(head), drop=_LESS.index(head) + 1 if head in _LESS else 0, shows=shows))
    rows = []
    for row in shown:
        figures = row.figures
        kinds = (f"{name} {figures[name]}" for name in ("compute", "moving", "waiting") if figures[name])
        source = doc.CodeCell(row.text, row.callers, more=f"{figures['phase']}: {', '.join(kinds)}")
        bar = tuple((kind, share / longest) for kind, share in data.parts(row))
        cells = (
            doc.TimeCell(figures[h], bar) if h == "measured" else doc.WordCell(figures[h] or UNKNOWN) for h in heads
        )
        rows.append(doc.TableRow((doc.WordCell(doc.names(row.name)), source, *cells)))
    left = share_text(sum(row.share for row in rest))
    notes = doc.Notes((f"{count_text(len(rest))} more take {left} of the step",) if rest else ())
    return [doc.Section("", (doc.Table(tuple(columns), tuple(rows), "Lines by measured time"), notes))]


def _figures(
    heads: Sequence[str], rows: Sequence[Sequence[str]], less: Sequence[str], *below: doc.Notes
) -> list[doc.Part]:
    """Return a table of figures set apart.

    Args:
        heads: Column heads.
        rows: Cells.
        less: Columns that a narrow terminal leaves out, the first one first.
        *below: Notes below the table.
    """
    if not rows:
        return []
    columns = (doc.Column(head, _align(head), drop=less.index(head) + 1 if head in less else 0) for head in heads)
    cells = (doc.TableRow(tuple(map(doc.WordCell, row))) for row in rows)
    return [doc.Section("", (doc.Table(tuple(columns), tuple(cells)), *below))]


def _align(head: str) -> str:
    return "left" if head in _LEFT else "right"
