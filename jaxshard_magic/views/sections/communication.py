"""Communication of a report: collectives by kind and axes, and by the line of code that causes them."""

from collections.abc import Sequence
from dataclasses import replace

from jaxshard_magic.report import Report
from jaxshard_magic.views import communication as comm
from jaxshard_magic.views import measured as spent
from jaxshard_magic.views import words
from jaxshard_magic.views.document import parts as doc
from jaxshard_magic.views.experts_positions import ring_figures
from jaxshard_magic.views.format import UNKNOWN, count_text, share_text
from jaxshard_magic.views.words import Span

KINDS = 12
LINES, PAGE_LINES = 8, 40
LEAST_BAR, MOST_BAR = 8, 40  # columns in a terminal
LEAST_SOURCE = 16  # columns of code in a terminal, at least
BOTH_TIMES = 72  # columns from which a line has room for measured and predicted times
LINKS = "on the links"  # heading of the time on the links; "predicted" is the time that the device waits
TRACED = "Lines that move data"
NOTHING = "Communication: nothing moves between devices in this step"


def communication(report: Report, *, page: bool = False) -> list[doc.Part]:
    """Return the section on communication; nothing if it is unknown.

    Args:
        report: Report.
        page: Whether there is room for more lines of code; they stand in source order then.
    """
    if report.collectives is None:
        return []
    if not report.collectives:
        return [doc.Section(NOTHING, ())]
    share, total = words.communication_share(report), words.sent_text(report.collectives)
    title = f"{share} of the predicted step, {total} sent by each device"
    if share is None:
        title = f"{total} sent by each device per step"
    links: list[doc.Words] = [(Span(axis, "axis"), Span(f": {way}")) for axis, way in words.link_texts(report)]
    kinds = comm.group_by_kind(report, report.collectives)
    rest = kinds[KINDS:]
    omitted = (f"{count_text(len(rest))} more send {comm.merge(rest).sent_text}",) if rest else ()
    return [
        doc.Section(
            f"Communication: {title}",
            (
                _kinds(report, kinds[:KINDS]),
                doc.Notes(omitted),
                doc.Notes(tuple(links)),
                *_lines(report, page),
                *(replace(figure, shows=doc.PAGES) for figure in ring_figures(report)),
            ),
            short=f"Communication, {total} sent per device and step",
        )
    ]


def _kinds(report: Report, shown: Sequence[comm.CollectiveGroup]) -> doc.Table:
    """Return the table of collectives by kind and axes."""
    total = words.sent_bytes(report) or 0
    timed, weigh = comm.is_timed(report), comm.weight(report)
    between = comm.inter_island_heading(report)
    most, most_sent = max(map(weigh, shown)) or 1, max(part.sent for part in shown) or 1
    # A terminal shows predicted times of collectives above already, with those of the whole step.
    predicted = doc.PAGES if words.time_parts(report) else doc.EVERYWHERE
    columns = (
        doc.Column("collective", "wrap", most=20),
        doc.Column("over", "left", most=16),
        doc.Column("count", "right"),
        doc.Column("bytes each", "right", "each", drop=2),
        doc.Column("sent per device", "right", "sent"),
        doc.Column("share", "right", drop=1, shows=frozenset((doc.TEXT, doc.MARKDOWN)) if timed else doc.TERMINAL),
        doc.Column(between or "", "right", shows=_if(bool(between))),
        doc.Column("", "left", least=LEAST_BAR, most=MOST_BAR, shows=frozenset((doc.TEXT, doc.HTML))),
        doc.Column(LINKS, "right", shows=_if(timed and comm.has_overlap(report), doc.PAGES)),
        doc.Column("predicted", "right", shows=_if(timed, predicted)),
        doc.Column("share", "right", shows=_if(not timed, doc.PAGES)),
    )
    rows = []
    for part in shown:
        share = doc.WordCell(share_text(part.sent / total if total else 0))
        bar = doc.BarCell((_bar_part(part, weigh(part) / most),), part.sent / most_sent, 56 if timed else 80)
        figures = (part.count_text, part.each_text, part.sent_text)
        more = (doc.WordCell(part.link_time_text), doc.WordCell(part.seconds_text), share)
        over = doc.axis_names(part.axes) if part.axes else part.axes_text
        cells = (doc.WordCell(doc.names(part.kind), part.jobs), doc.WordCell(over), *map(doc.WordCell, figures), share)
        rows.append(doc.TableRow((*cells, doc.WordCell(part.inter_island_text), bar, *more)))
    return doc.Table(columns, tuple(rows))


def _if(shown: bool, forms: frozenset[str] = doc.EVERYWHERE) -> frozenset[str]:
    return forms if shown else frozenset()


def _bar_part(part: comm.CollectiveGroup, share: float) -> doc.BarPart:
    return doc.BarPart(part.axes or (), part.kind, share)


def _lines(report: Report, page: bool) -> list[doc.Part]:
    """Return the lines that communicate most, each with its collectives; nothing if no line is known."""
    sending = comm.group_by_line(report)
    if not sending:
        return []
    most = PAGE_LINES if page else LINES
    shown, rest = sending[:most], sending[most:]
    if page:
        # The heaviest lines are selected first, then sorted by source: the table is read like the code.
        shown = comm.in_source_order(report, shown)
    timed, weigh, times = comm.is_timed(report), comm.weight(report), spent.seconds_by_line(report)
    total, longest = sum(weigh(line.group) for line in sending) or 1, weigh(sending[0].group) or 1
    columns = (
        doc.Column("line", "right", "", most=1 / 5),
        doc.Column("source", "wrap", "", least=LEAST_SOURCE),
        doc.Column("measured", "right", shows=_if(bool(times), doc.EVERYWHERE - {doc.HTML})),
        # The table of measured times has the prediction as well.
        doc.Column("predicted", "right", wide=BOTH_TIMES if times else 0, shows=_if(timed)),
        doc.Column("share", "right", shows=_if(not timed, doc.PAGES)),
        doc.Column("", "left", least=1, shows=frozenset((doc.HTML,))),
        doc.Column("measured", "right", shows=_if(bool(times), frozenset((doc.HTML,)))),
        doc.Column("sent", "right"),
        doc.Column("collectives", "wrap", most=1 / 3),
    )
    rows = []
    for line, name in zip(shown, comm.line_labels(shown, UNKNOWN), strict=True):
        kinds = comm.group_by_kind(report, line.group.collectives)
        known = line.number is not None
        measured = doc.WordCell(spent.line_time_text(times, line.file, line.number))
        rows.append(
            doc.TableRow(
                (
                    doc.WordCell(doc.names(name) if known else name),
                    doc.CodeCell(line.text, line.callers, "" if known else comm.UNTRACED),
                    measured,
                    doc.WordCell(line.group.seconds_text),
                    doc.WordCell(share_text(weigh(line.group) / total)),
                    doc.BarCell(tuple(_bar_part(part, weigh(part) / longest) for part in kinds), 0, 64),
                    measured,
                    doc.WordCell(line.group.sent_text),
                    doc.ListCell(tuple((_short(part), part.jobs) for part in kinds)),
                )
            )
        )
    sent = comm.merge(line.group for line in rest).sent_text
    left = (f"{count_text(len(rest))} more send {sent}",) if rest else ()
    kinds_of_lines = {c.kind for line in shown for c in line.group.collectives}
    short = ", ".join(f"{short} {kind}" for kind, short in comm.SHORT.items() if kind in kinds_of_lines)
    notes = (*left, *map(doc.names, comm.source_notes(report, shown)))
    legend = (short,) if short else ()
    below = (doc.Notes(notes, shows=doc.TERMINAL), doc.Notes((*notes, *legend), shows=doc.PAGES))
    return [doc.Section("", (doc.Table(columns, tuple(rows), TRACED), *below))]


def _short(part: comm.CollectiveGroup) -> doc.Words:
    """Return a group of collectives in short: `AG data ×96`."""
    over = doc.axis_names(part.axes) if part.axes else (Span(part.axes_text),)
    times = (Span(part.count_text, "times"),) if part.count_text != "1" else ()
    return (Span(comm.SHORT.get(part.kind, part.kind), "name"), Span(" "), *over, *times)
