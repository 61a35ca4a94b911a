"""Pipeline, recorded step and metrics of a run as parts of a document."""

from collections.abc import Sequence

from jaxshard_magic.report import Pipeline, Report
from jaxshard_magic.report.metrics import Metrics
from jaxshard_magic.views import measured as spent
from jaxshard_magic.views import words
from jaxshard_magic.views.document import parts as doc
from jaxshard_magic.views.format import UNKNOWN, count_text, share_text
from jaxshard_magic.views.training import data
from jaxshard_magic.views.words import Span
from jaxshard_magic.views.words.spans import strong

CURVES = 12  # in a terminal
LEAST_CURVE, MOST_CURVE = 14, 32  # columns in a terminal; 14 are those of the heading
RANKS = 64
HELD = "activations held"
GAP = " \u00a0 "
LINES, PAGE_LINES, DEVICES = 12, 40, 8  # of a recorded step, at most: lines, lines on a page, devices
LEAST_SOURCE = 16  # columns of code in a terminal, at least
_LEFT_ALIGNED = ("phase", "collective", "over")
_LESS = ("compute", "waiting", "moving", "of step")  # figures that a narrow terminal leaves out, the first one first


def pipeline(p: Pipeline | None) -> list[doc.Part]:
    """Return the section on a pipeline; nothing without one."""
    if p is None:
        return []
    lead = doc.plain(words.pipeline_lead(p))
    return [doc.Section(f"Pipeline: {lead[:1].lower()}{lead[1:]}", pipeline_parts(p), (words.pipeline_about(p),))]


def pipeline_parts(p: Pipeline) -> tuple[doc.Part, ...]:
    """Return the parts of the bubble, the timeline, and the figures of each rank."""
    lanes = (doc.Section("", (doc.ActionLanes(p),)),) if p.ranks else ()
    return (*_bubble(p), *lanes, *_ranks(p))


def _bubble(p: Pipeline) -> tuple[doc.Part, ...]:
    """Return the parts of the bubble; nothing if the schedule is the only one."""
    parts = words.bubble_parts(p)
    if len(parts) < 2:
        return ()
    sentence, told = list[str](), list[Span]()
    for i, part in enumerate(parts):
        share, more = words.part_text(part, i == 0), f"({part.more})" if part.more else ""
        sentence.append(f"{share} {part.what} {more}".rstrip())
        told += [strong(share), Span(f" {part.what}"), *([Span(" "), Span(more, "quiet")] if more else []), Span(GAP)]
    told.append(Span(f"{words.work_text(p)} of device time is work", "quiet"))
    text = f"The bubble: {', '.join(sentence)}."
    return doc.Notes((text,), below=False, shows=doc.TERMINAL), doc.Section("", (doc.Paragraph(told),), shows=doc.PAGES)


def _ranks(p: Pipeline) -> list[doc.Part]:
    """Return the figures of each rank, without columns of unknown figures."""
    rows = range(min(RANKS, len(p.ranks)))
    columns = {
        "rank": ([(Span(words.rank_name(p, i), "strong"),) for i in rows], "left"),
        "stages": ([(words.stages_text(p, i) or "").removeprefix("stages ") for i in rows], "left"),
        "of the model": ([doc.names(p.ranks[i].holds or "") for i in rows], "wrap"),
        "devices": ([_bare(words.devices_of(p.ranks[i])) for i in rows], "left"),
        "bubble": ([words.percent_text(p.ranks[i].bubble) for i in rows], "right"),
        "ideal bubble": ([words.percent_text(p.ranks[i].ideal) for i in rows], "right"),
        "work": ([words.time_text(p.ranks[i].work, p.unit) for i in rows], "right"),
        HELD: ([(words.held_text(p.ranks[i]) or UNKNOWN).removeprefix("holds ") for i in rows], "right"),
    }
    sizes = [words.held_bytes(p.ranks[i]) or "" for i in rows]
    shown = {
        head: column for head, column in columns.items() if any(doc.plain(c) not in ("", UNKNOWN) for c in column[0])
    }
    if len(shown) < 2:
        return []
    heads = tuple(doc.Column("" if head == "rank" else head, align) for head, (_, align) in shown.items())
    rows_of_cells = []
    for i in rows:
        told = {head: column[i] for head, (column, _) in shown.items()}
        held = told.get(HELD, UNKNOWN) != UNKNOWN
        rows_of_cells.append(
            doc.TableRow(tuple(doc.WordCell(c, sizes[i] if h == HELD and held else "") for h, c in told.items()))
        )
    left = len(p.ranks) - RANKS
    more = doc.Notes((f"{count_text(left)} more ranks",) if left > 0 else ())
    return [doc.Section("", (doc.Table(heads, tuple(rows_of_cells)), more), shows=doc.PAGES)]


def _bare(devices: str | None) -> str:
    return (devices or "").removeprefix("devices").removeprefix("device").strip()


def training(metrics: Metrics | None, *, page: bool = False) -> list[doc.Part]:
    """Return the section on the numbers of a run; nothing without metrics.

    Args:
        metrics: Metrics of a run.
        page: Whether there is room for all curves.
    """
    if metrics is None:
        return []
    return [doc.Section(f"Training: {data.summary_text(metrics)}", training_parts(metrics, page=page))]


def training_parts(metrics: Metrics, *, page: bool = False) -> tuple[doc.Part, ...]:
    """Return charts, table and notes.

    Args:
        metrics: Metrics of a run.
        page: Whether there is room for all curves.
    """
    columns = (
        doc.Column(data.HEADS[0], most=1 / 4),
        *(doc.Column(head, "right", drop=head in ("least", "most")) for head in data.HEADS[1:]),
        doc.Column("over the steps", least=LEAST_CURVE, most=MOST_CURVE, shows=frozenset((doc.TEXT, doc.MARKDOWN))),
    )
    shown = metrics.curves if page else metrics.curves[:CURVES]
    rows = (
        doc.TableRow((doc.WordCell(doc.names(label)), *map(doc.WordCell, figures), doc.CurveCell(curve, (curve,))))
        for (label, *figures), curve in zip(data.rows(metrics), shown, strict=False)
    )
    left = len(metrics.curves) - len(shown)
    more = (f"{count_text(left)} more in report.metrics",) if left else ()
    return doc.Charts(metrics), doc.Table(columns, tuple(rows)), doc.Notes((*more, *data.notes(metrics)))


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
    heads, rows = spent.devices(m)
    shown = rows if page else rows[:DEVICES] * (len(rows) > 1)
    left = m.of_devices - len(shown)
    more = doc.Notes((f"{count_text(left)} more devices",) if left and not page else ())
    parts = [
        doc.RecordedLanes(m),
        *_timed_lines(report, PAGE_LINES if page else LINES),
        *_line_figures(*spent.collectives(report), ("links carry", "on the links, predicted", "waiting")),
        *_line_figures(heads, shown, ("hidden", "idle"), more),
    ]
    return [doc.Section(words.measured_lead(m), tuple(parts), about)]


def _timed_lines(report: Report, most: int) -> list[doc.Part]:
    every = spent.rows(report)
    shown, rest = every[:most], every[most:]
    if not shown:
        return []
    heads, longest = spent.heads(shown), max(row.share for row in shown) or 1.0
    columns = [doc.Column("line", "right", "", most=1 / 5), doc.Column("source", "wrap", "", least=LEAST_SOURCE)]
    for head in heads:
        shows = doc.EVERYWHERE if head in ("measured", "predicted") else doc.EVERYWHERE - {doc.HTML}
        columns.append(doc.Column(head, _align(head), drop=_LESS.index(head) + 1 if head in _LESS else 0, shows=shows))
    rows = []
    for row in shown:
        figures = row.figures
        kinds = (f"{name} {figures[name]}" for name in ("compute", "moving", "waiting") if figures[name])
        source = doc.CodeCell(row.text, row.callers, more=f"{figures['phase']}: {', '.join(kinds)}")
        bar = tuple((kind, share / longest) for kind, share in spent.parts(row))
        cells = (
            doc.TimeCell(figures[h], bar) if h == "measured" else doc.WordCell(figures[h] or UNKNOWN) for h in heads
        )
        rows.append(doc.TableRow((doc.WordCell(doc.names(row.name)), source, *cells)))
    left = share_text(sum(row.share for row in rest))
    notes = doc.Notes((f"{count_text(len(rest))} more take {left} of the step",) if rest else ())
    return [doc.Section("", (doc.Table(tuple(columns), tuple(rows), "Lines by measured time"), notes))]


def _line_figures(
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
    return "left" if head in _LEFT_ALIGNED else "right"
