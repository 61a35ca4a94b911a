"""Time breakdown of a recorded step: lines of code by time, collectives and devices."""

from collections.abc import Sequence

from jaxshard_magic.report import Report
from jaxshard_magic.views import words
from jaxshard_magic.views.document.parts import (
    Cell,
    CodeCell,
    Column,
    Notes,
    Part,
    Row,
    Section,
    Table,
    names,
)
from jaxshard_magic.views.format import UNKNOWN, count_text, share_text
from jaxshard_magic.views.measured import data

LINES, DEVICES = 12, 8  # in a terminal
LEAST_SOURCE = 16  # columns of code in a terminal, at least
_LEFT = ("phase", "collective", "over")
_LESS = ("compute", "waiting", "moving", "of step")  # figures that a narrow terminal leaves out, the first one first


def measured(report: Report, lines: int = LINES, devices: int = DEVICES) -> list[Part]:
    """Return the section on measured times; nothing without a measurement.

    Args:
        report: Report.
        lines: Number of lines of code to list.
        devices: Number of devices to list.
    """
    m = report.measured
    if m is None:
        return []
    about = (words.sentence_case(words.measured_about(m)), *words.measured_notes(report))
    heads, rows = data.devices(m)
    left = m.of_devices - min(devices, len(rows))
    more = Notes((f"{count_text(left)} more devices",) if left else ())
    parts = [
        *_lines(report, lines),
        *_figures(*data.collectives(report), ("links carry", "on the links, predicted", "waiting")),
        *(_figures(heads, rows[:devices], ("hidden", "idle"), more) if len(rows) > 1 else []),
    ]
    return [Section(words.measured_lead(m), tuple(parts), about)]


def _lines(report: Report, most: int) -> list[Part]:
    every = data.rows(report)
    shown, rest = every[:most], every[most:]
    if not shown:
        return []
    heads = data.heads(shown)
    columns = [Column("line", "right", "", most=1 / 5), Column("source", "wrap", "", least=LEAST_SOURCE)]
    columns += [Column(head, _align(head), drop=_LESS.index(head) + 1 if head in _LESS else 0) for head in heads]
    rows = (
        Row((Cell(names(row.name)), CodeCell(row.text, row.callers), *(Cell(row.figures[h] or UNKNOWN) for h in heads)))
        for row in shown
    )
    left = share_text(sum(row.share for row in rest))
    notes = Notes((f"{count_text(len(rest))} more take {left} of the step",) if rest else ())
    return [Section("", (Table(tuple(columns), tuple(rows), "Lines by measured time"), notes))]


def _figures(heads: Sequence[str], rows: Sequence[Sequence[str]], less: Sequence[str], *below: Notes) -> list[Part]:
    """Return a table of figures set apart.

    Args:
        heads: Column heads.
        rows: Cells.
        less: Columns that a narrow terminal leaves out, the first one first.
        *below: Notes below the table.
    """
    if not rows:
        return []
    columns = (Column(head, _align(head), drop=less.index(head) + 1 if head in less else 0) for head in heads)
    cells = (Row(tuple(map(Cell, row))) for row in rows)
    return [Section("", (Table(tuple(columns), tuple(cells)), *below))]


def _align(head: str) -> str:
    return "left" if head in _LEFT else "right"
