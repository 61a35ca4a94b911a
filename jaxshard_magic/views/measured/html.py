"""Time breakdown of a recorded step as HTML without script: text, tables, and one step in lanes."""

from jaxshard_magic.report import Measured, Report
from jaxshard_magic.views import words
from jaxshard_magic.views.format import count_text, share_text
from jaxshard_magic.views.html_tags import code, escaped, join_nonempty, section, small, table
from jaxshard_magic.views.measured import data
from jaxshard_magic.views.source_lines import code_text
from jaxshard_magic.views.timeline import svg as timeline_svg

ROWS, LONG_SOURCE = 40, 80
_LEFT = ("phase", "collective", "over")


def measured_section(report: Report) -> str:
    """Return the section of a report on measured times; empty without a measurement."""
    m = report.measured
    if m is None:
        return ""
    lead = "".join(span.text for span in words.measured_lead(m)).rstrip(".")
    about = " ".join([words.sentence_case(words.measured_about(m)), *words.measured_notes(report)])
    return section(escaped(lead), small(escaped(about)), drawing(m), _legend(m), _lines(report), *_tables(report, m))


def drawing(m: Measured) -> str:
    """Return one typical step as one `<svg>`: a lane for each device, painted by phase and kind; empty without
    lanes."""
    height, marks = lane_drawing(m)
    label = f"One recorded step in lanes, a device each, {len(m.lanes)} of {m.of_devices}"
    return timeline_svg.wrap_marks(height, marks, label) if marks else ""


def lane_drawing(m: Measured) -> tuple[float, str]:
    """Return the height of the lanes in px, and their marks; no marks without lanes."""
    names = [f"device {lane.device}" for lane in m.lanes]
    return timeline_svg.lane_marks(data.lane_events(m), names, data.idle_shares(m), data.lanes_end(m))


def _legend(m: Measured) -> str:
    keys = [f"{timeline_svg.kind_mark(kind)} {escaped(words.TIME_KINDS[kind])}" for kind in data.lane_letters(m)]
    lanes = "" if len(m.lanes) == m.of_devices else f", {len(m.lanes)} of {count_text(m.of_devices)} devices"
    about = f"one typical step{lanes}; at the right the share of it that is idle"
    return small(" &nbsp; ".join([*keys, f"{timeline_svg.idle_mark()} idle", about]))


def _lines(report: Report) -> str:
    """Return the table of lines by phase, the longest first."""
    every = data.rows(report)
    shown, rest = every[:ROWS], every[ROWS:]
    predicted = "predicted" in data.heads(shown)
    head = [("line", "right"), ("source", "wrap"), ("measured", "right")]
    head += [("predicted", "right")] if predicted else []
    most = max((row.share for row in shown), default=1.0) or 1.0
    cells = []
    for row in shown:
        figures = row.figures
        parts = [f"{name} {figures[name]}" for name in ("compute", "moving", "waiting") if figures[name]]
        of = escaped(f"{figures['phase']}: {', '.join(parts)}")
        bar = timeline_svg.kinds_bar([(kind, share / most) for kind, share in data.parts(row)])
        predicted_cell = [escaped(figures["predicted"])] if predicted else []
        cells.append(
            [
                escaped(row.name),
                f"{_source(row)}<br><small>{of}</small>",
                f"{escaped(figures['measured'])}<br>{bar}",
                *predicted_cell,
            ]
        )
    left = sum(row.share for row in rest)
    more = f"{count_text(len(rest))} more take {share_text(left)} of the step" if rest else ""
    return join_nonempty([table(head, cells), small(more)]) if shown else ""


def _source(row: data.LineTimeRow) -> str:
    source = code_text(row.text, row.callers, LONG_SOURCE)
    return code(source) if source else ""


def _tables(report: Report, m: Measured) -> list[str]:
    """Return the tables of collectives and devices, as far as they have rows."""
    tables = []
    for heads, rows in (data.collectives(report), data.devices(m)):
        if rows:
            head = [(name, _align(name)) for name in heads]
            tables.append(table(head, [[escaped(cell) for cell in row] for row in rows]))
    return tables


def _align(head: str) -> str:
    return "left" if head in _LEFT else "right"
