"""Picture of communication: bytes sent by kind of collective and mesh axes, and by line of code."""

from collections.abc import Sequence

from jaxshard_magic.report import Report
from jaxshard_magic.views import communication as comm
from jaxshard_magic.views import svg, words
from jaxshard_magic.views.experts_positions.figures import ring_figures
from jaxshard_magic.views.format import UNKNOWN, count_text, share_text
from jaxshard_magic.views.pictures import experts_positions
from jaxshard_magic.views.pictures.sheet import CONTENT_WIDTH, Sheet, columns_in
from jaxshard_magic.views.source_lines import code_text
from jaxshard_magic.views.terminal import clip
from jaxshard_magic.views.words import Span

KINDS, LINES = 10, 14
OVER, COUNT, BAR, SENT, ROW = 130, 330, 350, CONTENT_WIDTH - 110, 20  # px: positions of columns, height of a row
SOURCE, LINE_BAR, HIGH = 80, 500, 10


def communication(report: Report, theme: str) -> str:
    """Draw the collectives of a report, the heaviest kinds first, and its lines in source order; return SVG."""
    rows = report.collectives or ()
    sheet, timed = Sheet(report.mesh), comm.is_timed(report)
    sheet.sentence(words.communication_lead(report))
    kinds, sending = comm.group_by_kind(report, rows), comm.group_by_line(report)
    weigh = comm.weight(report)
    if kinds:
        _heads(sheet, {OVER: "over", COUNT: "count"}, timed)
    most = max(map(weigh, kinds), default=0) or 1
    for part in kinds[:KINDS]:
        sheet.text(0, part.kind, down=12)
        sheet.text(OVER, _over(part), down=12)
        sheet.text(COUNT, part.count_text, down=12, end=True)
        sheet.draw(BAR, _bar(report, [part], most, SENT - 80 - BAR), down=3)
        _figures(sheet, report, part, timed)
    if sending:
        sheet.title("By line")
        _heads(sheet, {0: "line"}, timed)
        shown, most = comm.in_source_order(report, sending[:LINES]), weigh(sending[0].group) or 1
        for line, name in zip(shown, comm.line_labels(shown, UNKNOWN), strict=True):
            room = columns_in(LINE_BAR - SOURCE - 12, mono=True)
            known = line.number is not None
            source = code_text(line.text, line.callers, room) if known else clip(comm.UNTRACED, room)
            sheet.text(0, _clipped(name, columns_in(SOURCE)), down=12)
            sheet.text(SOURCE, source, down=12, mono=True)
            parts = comm.group_by_kind(report, line.group.collectives)
            sheet.draw(LINE_BAR, _bar(report, parts, most, SENT - 80 - LINE_BAR), down=3)
            _figures(sheet, report, line.group, timed)
    left = len(sending) - LINES
    sheet.small(f"{count_text(left)} more lines send less" if left > 0 else "")
    experts_positions.add_figures(sheet, ring_figures(report), report.mesh)
    return sheet.svg("communication", theme)


def _heads(sheet: Sheet, names: dict[int, str], timed: bool) -> None:
    for x, name in names.items():
        sheet.text(x, [Span(name, "quiet")], down=11, end=x == COUNT, size=11)
    sheet.text(SENT, [Span("sent per device", "quiet")], down=11, end=True, size=11)
    sheet.text(CONTENT_WIDTH, [Span("predicted" if timed else "share", "quiet")], down=11, end=True, size=11)
    sheet.skip(ROW)


def _figures(sheet: Sheet, report: Report, part: comm.CollectiveGroup, timed: bool) -> None:
    total = words.sent_bytes(report)
    sheet.text(SENT, part.sent_text, down=12, end=True)
    share = part.seconds_text if timed else share_text(part.sent / total if total else 0)
    sheet.text(CONTENT_WIDTH, share, down=12, end=True)
    sheet.skip(ROW)


def _clipped(name: str, room: int) -> str:
    """Shorten the name of a line to `room` columns, and keep its number whole: `long_na…:31`."""
    file, colon, number = name.rpartition(":")
    return clip(file, room - len(colon + number)) + colon + number


def _over(part: comm.CollectiveGroup) -> list[Span]:
    if not part.axes:
        return [Span(clip(part.axes_text, columns_in(COUNT - OVER - 50)))]
    return [span for i, axis in enumerate(part.axes) for span in (Span(" " * bool(i)), Span(axis, "axis"))]


def _bar(report: Report, parts: Sequence[comm.CollectiveGroup], most: float, width: float) -> str:
    weigh = comm.weight(report)
    pieces = [
        (
            svg.axis_index(part.axes[0], report.mesh) if part.axes else None,
            weigh(part) / most,
            svg.KIND_OPACITY.get(part.kind, 0.4),
        )
        for part in parts
    ]
    return svg.share_bar(pieces, width, HIGH)
