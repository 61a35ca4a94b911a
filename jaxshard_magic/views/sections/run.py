"""Pipeline and metrics of a run as parts of a document."""

from jaxshard_magic.report import Pipeline
from jaxshard_magic.report.metrics import Metrics
from jaxshard_magic.views import words
from jaxshard_magic.views.document.parts import (
    HTML,
    MARKDOWN,
    TEXT,
    Cell,
    Column,
    CurveCell,
    Lanes,
    Notes,
    Part,
    Row,
    Section,
    Table,
    names,
    plain,
)
from jaxshard_magic.views.format import UNKNOWN, count_text
from jaxshard_magic.views.training import data
from jaxshard_magic.views.words import Span

LONG_FORMS = frozenset((HTML, MARKDOWN))
CURVES = 12  # in a terminal
LEAST_CURVE, MOST_CURVE = 14, 32  # columns in a terminal; 14 are those of the heading
RANKS = 64


def pipeline(p: Pipeline | None) -> list[Part]:
    """Return the section on a pipeline; nothing without one."""
    if p is None:
        return []
    lead = plain(words.pipeline_lead(p))
    lead = lead[:1].lower() + lead[1:]
    bubble = words.bubble_parts(p)
    shares = (
        f"{words.part_text(part, i == 0)} {part.what}{f' ({part.more})' if part.more else ''}"
        for i, part in enumerate(bubble)
    )
    told = f"The bubble: {', '.join(shares)}."
    several = len(bubble) > 1
    parts: list[Part] = [
        Notes((told,) if several else (), below=False, shows=frozenset((TEXT,))),
        Notes((f"{told} {words.work_text(p)} of device time is work.",) if several else (), shows=LONG_FORMS),
        *([Section("", (Lanes(p),))] if p.ranks else []),
        *_ranks(p),
    ]
    return [Section(f"Pipeline: {lead}", tuple(parts), (words.pipeline_about(p),))]


def _ranks(p: Pipeline) -> list[Part]:
    """Return the figures of each rank, without columns of unknown figures."""
    rows = range(min(RANKS, len(p.ranks)))
    columns = {
        "rank": ([(Span(words.rank_name(p, i), "strong"),) for i in rows], "left"),
        "stages": ([(words.stages_text(p, i) or "").removeprefix("stages ") for i in rows], "left"),
        "of the model": ([names(p.ranks[i].holds or "") for i in rows], "wrap"),
        "devices": ([_bare(words.devices_of(p.ranks[i])) for i in rows], "left"),
        "bubble": ([words.percent_text(p.ranks[i].bubble) for i in rows], "right"),
        "ideal bubble": ([words.percent_text(p.ranks[i].ideal) for i in rows], "right"),
        "work": ([words.time_text(p.ranks[i].work, p.unit) for i in rows], "right"),
        "activations held": ([(words.held_text(p.ranks[i]) or UNKNOWN).removeprefix("holds ") for i in rows], "right"),
    }
    sizes = [words.held_bytes(p.ranks[i]) or "" for i in rows]
    shown = {head: column for head, column in columns.items() if any(plain(c) not in ("", UNKNOWN) for c in column[0])}
    if len(shown) < 2:
        return []
    heads = tuple(Column("" if head == "rank" else head, align) for head, (_, align) in shown.items())
    cells = (
        Row(tuple(Cell(told[i], sizes[i] if head == "activations held" else "") for head, (told, _) in shown.items()))
        for i in rows
    )
    left = len(p.ranks) - RANKS
    more = Notes((f"{count_text(left)} more ranks",) if left > 0 else ())
    return [Section("", (Table(heads, tuple(cells)), more), shows=LONG_FORMS)]


def _bare(devices: str | None) -> str:
    return (devices or "").removeprefix("devices").removeprefix("device").strip()


def training(metrics: Metrics | None, most: int | None = CURVES) -> list[Part]:
    """Return the section on the numbers of a run; nothing without metrics.

    Args:
        metrics: Metrics of a run.
        most: Number of curves to list; None for all.
    """
    if metrics is None:
        return []
    columns = (
        Column(data.HEADS[0], most=1 / 4),
        *(Column(head, "right", drop=head in ("least", "most")) for head in data.HEADS[1:]),
        Column("over the steps", least=LEAST_CURVE, most=MOST_CURVE, shows=frozenset((TEXT, MARKDOWN))),
    )
    rows = (
        Row((Cell(names(label)), *map(Cell, figures), CurveCell(curve, (curve,))))
        for (label, *figures), curve in zip(data.rows(metrics)[:most], metrics.curves, strict=False)
    )
    left = 0 if most is None else len(metrics.curves) - most
    more = (f"{count_text(left)} more in report.metrics",) if left > 0 else ()
    notes = Notes((*more, *data.notes(metrics)))
    return [Section(f"Training: {data.summary_text(metrics)}", (Table(columns, tuple(rows)), notes))]
