"""Communication of a report: collectives by kind and axes, and by the line of code that causes them."""

from collections.abc import Sequence
from dataclasses import replace

from jaxshard_magic.report import Report
from jaxshard_magic.views import communication as comm
from jaxshard_magic.views import words
from jaxshard_magic.views.document.parts import (
    EVERYWHERE,
    HTML,
    MARKDOWN,
    TEXT,
    BarCell,
    BarPart,
    Cell,
    CodeCell,
    Column,
    ListCell,
    Notes,
    Part,
    Row,
    Section,
    Table,
    Words,
    axis_names,
    names,
)
from jaxshard_magic.views.experts_positions.figures import ring_figures
from jaxshard_magic.views.format import UNKNOWN, count_text, share_text
from jaxshard_magic.views.measured import data as spent
from jaxshard_magic.views.words import Span

KINDS = 12
LINES = 8  # in a terminal
LEAST_BAR, MOST_BAR = 8, 40  # columns in a terminal
LEAST_SOURCE = 16  # columns of code in a terminal, at least
BOTH_TIMES = 72  # columns from which a line has room for measured and predicted times
LINKS = "on the links"  # heading of the time on the links; "predicted" is the time that the device waits
TRACED = "Lines that move data"
NOTHING = "Communication: nothing moves between devices in this step"
LONG_FORMS = frozenset((HTML, MARKDOWN))


def communication(report: Report, lines: int = LINES) -> list[Part]:
    """Return the section on communication; nothing if it is unknown.

    Args:
        report: Report.
        lines: Number of lines of code to list.
    """
    if report.collectives is None:
        return []
    if not report.collectives:
        return [Section(NOTHING, ())]
    share, total = words.communication_share(report), words.sent_text(report.collectives)
    title = f"{share} of the predicted step, {total} sent by each device"
    if share is None:
        title = f"{total} sent by each device per step"
    links: list[Words] = [(Span(axis, "axis"), Span(f": {way}")) for axis, way in words.link_texts(report)]
    kinds = comm.group_by_kind(report, report.collectives)
    rest = kinds[KINDS:]
    omitted = (f"{count_text(len(rest))} more send {comm.merge(rest).sent_text}",) if rest else ()
    return [
        Section(
            f"Communication: {title}",
            (
                _kinds(report, kinds[:KINDS]),
                Notes(omitted),
                Notes(tuple(links)),
                *lines_of_code(report, lines),
                *(replace(figure, shows=LONG_FORMS) for figure in ring_figures(report)),
            ),
            short=f"Communication, {total} sent per device and step",
        )
    ]


def _kinds(report: Report, shown: Sequence[comm.CollectiveGroup]) -> Table:
    """Return the table of collectives by kind and axes."""
    total = words.sent_bytes(report) or 0
    timed, weigh = comm.is_timed(report), comm.weight(report)
    between = comm.inter_island_heading(report)
    most, most_sent = max(map(weigh, shown)) or 1, max(part.sent for part in shown) or 1
    # A terminal shows predicted times of collectives above already, with those of the whole step.
    predicted = LONG_FORMS if words.time_parts(report) else EVERYWHERE
    columns = (
        Column("collective", "wrap", most=20),
        Column("over", "left", most=16),
        Column("count", "right"),
        Column("bytes each", "right", "each", drop=2),
        Column("sent per device", "right", "sent"),
        Column("share", "right", drop=1, shows=frozenset((TEXT, MARKDOWN)) if timed else frozenset((TEXT,))),
        Column(between or "", "right", shows=_if(bool(between))),
        Column("", "left", least=LEAST_BAR, most=MOST_BAR, shows=frozenset((TEXT, HTML))),
        Column(LINKS, "right", shows=_if(timed and comm.has_overlap(report), LONG_FORMS)),
        Column("predicted", "right", shows=_if(timed, predicted)),
        Column("share", "right", shows=_if(not timed, LONG_FORMS)),
    )
    rows = []
    for part in shown:
        share = Cell(share_text(part.sent / total if total else 0))
        bar = BarCell((_bar_part(part, weigh(part) / most),), part.sent / most_sent)
        figures = (part.count_text, part.each_text, part.sent_text)
        more = (Cell(part.link_time_text), Cell(part.seconds_text), share)
        over = axis_names(part.axes) if part.axes else part.axes_text
        cells = (Cell(names(part.kind), part.jobs), Cell(over), *map(Cell, figures), share)
        rows.append(Row((*cells, Cell(part.inter_island_text), bar, *more)))
    return Table(columns, tuple(rows))


def _if(shown: bool, forms: frozenset[str] = EVERYWHERE) -> frozenset[str]:
    return forms if shown else frozenset()


def _bar_part(part: comm.CollectiveGroup, share: float) -> BarPart:
    return BarPart(part.axes or (), part.kind, share)


def lines_of_code(report: Report, most: int) -> list[Part]:
    """Return the lines that communicate most, the heaviest first, each with its collectives; nothing if no line is
    known.

    Args:
        report: Report.
        most: Number of lines.
    """
    sending = comm.group_by_line(report)
    if not sending:
        return []
    shown, rest = sending[:most], sending[most:]
    timed, weigh, times = comm.is_timed(report), comm.weight(report), spent.seconds_by_line(report)
    total, longest = sum(weigh(line.group) for line in sending) or 1, weigh(sending[0].group) or 1
    columns = (
        Column("line", "right", "", most=1 / 5),
        Column("source", "wrap", "", least=LEAST_SOURCE),
        Column("measured", "right", shows=_if(bool(times))),
        # The table of measured times has the prediction as well.
        Column("predicted", "right", wide=BOTH_TIMES if times else 0, shows=_if(timed)),
        Column("share", "right", shows=_if(not timed, LONG_FORMS)),
        Column("", "left", least=1, shows=frozenset((HTML,))),
        Column("sent", "right"),
        Column("collectives", "wrap", most=1 / 3),
    )
    rows = []
    for line, name in zip(shown, comm.line_labels(shown, UNKNOWN), strict=True):
        kinds = comm.group_by_kind(report, line.group.collectives)
        known = line.number is not None
        rows.append(
            Row(
                (
                    Cell(names(name) if known else name),
                    CodeCell(line.text, line.callers, "" if known else comm.UNTRACED),
                    Cell(spent.line_time_text(times, line.file, line.number)),
                    Cell(line.group.seconds_text),
                    Cell(share_text(weigh(line.group) / total)),
                    BarCell(tuple(_bar_part(part, weigh(part) / longest) for part in kinds), 0),
                    Cell(line.group.sent_text),
                    ListCell(tuple((_short(part), part.jobs) for part in kinds)),
                )
            )
        )
    sent = comm.merge(line.group for line in rest).sent_text
    left = (f"{count_text(len(rest))} more send {sent}",) if rest else ()
    kinds_of_lines = {c.kind for line in shown for c in line.group.collectives}
    short = ", ".join(f"{short} {kind}" for kind, short in comm.SHORT.items() if kind in kinds_of_lines)
    notes = Notes((*left, *map(names, comm.source_notes(report, shown))))
    legend = Notes((short,) if short else (), shows=LONG_FORMS)
    return [Section("", (Table(columns, tuple(rows), TRACED), notes, legend))]


def _short(part: comm.CollectiveGroup) -> Words:
    """Return a group of collectives in short: `AG data ×96`."""
    over = axis_names(part.axes) if part.axes else (Span(part.axes_text),)
    times = (Span(part.count_text, "times"),) if part.count_text != "1" else ()
    return (Span(comm.SHORT.get(part.kind, part.kind), "name"), Span(" "), *over, *times)
