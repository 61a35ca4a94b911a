"""Where the time of a recorded step went, in HTML without script: its words, tables, and one step in lanes."""

from jaxshard_magic.report import Measured, Report
from jaxshard_magic.views import words
from jaxshard_magic.views.format import count_text, share_text
from jaxshard_magic.views.measured import data
from jaxshard_magic.views.source_lines import code_text
from jaxshard_magic.views.tags import code, joined, section, small, table, text
from jaxshard_magic.views.timeline import svg as timeline_svg

ROWS, LONG_SOURCE = 40, 80
_LEFT = ("phase", "collective", "over")


def measured_section(report: Report) -> str:
    """The section of a report on what was measured, empty where nothing was."""
    m = report.measured
    if m is None:
        return ""
    lead = "".join(span.text for span in words.spent_lead(m)).rstrip(".")
    about = " ".join([words.sentence_case(words.spent_about(m)), *words.spent_notes(report)])
    return section(
        text(lead), small(text(about)), drawing(m), _legend(m), _lines(report), *_tables(report, m)
    )


def drawing(m: Measured) -> str:
    """One typical step as one `<svg>`: a lane a device, painted by phase and kind."""
    height, marks = drawn(m)
    label = f"One recorded step in lanes, a device each, {len(m.lanes)} of {m.of_devices}"
    return timeline_svg.whole(height, marks, label) if marks else ""


def drawn(m: Measured) -> tuple[float, str]:
    """The height of that in px, and its marks, none without lanes."""
    names = [f"device {lane.device}" for lane in m.lanes]
    return timeline_svg.drawn_lanes(data.marks(m), names, data.idle(m), data.end(m))


def _legend(m: Measured) -> str:
    keys = [f"{timeline_svg.kind_mark(kind)} {text(words.SPENT[kind])}" for kind in data.kinds(m)]
    lanes = "" if len(m.lanes) == m.of_devices else f", {len(m.lanes)} of {count_text(m.of_devices)} devices"
    about = f"one typical step{lanes}; at the right the share of it that is idle"
    return small(" &nbsp; ".join([*keys, f"{timeline_svg.idle_mark()} idle", about]))


def _lines(report: Report) -> str:
    """The lines of code by phase, those that take longest first."""
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
        of = text(f"{figures['phase']}: {', '.join(parts)}")
        bar = timeline_svg.kinds_bar([(kind, share / most) for kind, share in data.parts(row)])
        told = [text(figures["predicted"])] if predicted else []
        cells.append(
            [
                text(row.name),
                f"{_source(row)}<br><small>{of}</small>",
                f"{text(figures['measured'])}<br>{bar}",
                *told,
            ]
        )
    left = sum(row.share for row in rest)
    more = f"{count_text(len(rest))} more take {share_text(left)} of the step" if rest else ""
    return joined([table(head, cells), small(more)]) if shown else ""


def _source(row: data.Row) -> str:
    source = code_text(row.text, row.calls, LONG_SOURCE)
    return code(source) if source else ""


def _tables(report: Report, m: Measured) -> list[str]:
    """Collectives with what they reached, and the devices."""
    tables = []
    for heads, rows in (data.collectives(report), data.devices(m)):
        if rows:
            head = [(name, _align(name)) for name in heads]
            tables.append(table(head, [[text(cell) for cell in row] for row in rows]))
    return tables


def _align(head: str) -> str:
    return "left" if head in _LEFT else "right"
