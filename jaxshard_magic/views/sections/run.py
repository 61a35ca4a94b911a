"""Pipeline and metrics of a run as parts of a document."""

from jaxshard_magic.report import Pipeline
from jaxshard_magic.report.metrics import Metrics
from jaxshard_magic.views import words
from jaxshard_magic.views.document import parts as doc
from jaxshard_magic.views.format import UNKNOWN, count_text
from jaxshard_magic.views.training import data
from jaxshard_magic.views.words import Span
from jaxshard_magic.views.words.spans import strong

CURVES = 12  # in a terminal
LEAST_CURVE, MOST_CURVE = 14, 32  # columns in a terminal; 14 are those of the heading
RANKS = 64
HELD = "activations held"
GAP = " \u00a0 "


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
