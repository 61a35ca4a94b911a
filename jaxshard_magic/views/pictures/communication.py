"""The picture of communication: what is sent by kind of collective and mesh axes, and by line of code."""

from collections.abc import Sequence

from jaxshard_magic.report import Report
from jaxshard_magic.views import communication as comm
from jaxshard_magic.views import svg, words
from jaxshard_magic.views.divided.figures import turn_figures
from jaxshard_magic.views.format import UNKNOWN, count_text, share_text
from jaxshard_magic.views.pictures import divided
from jaxshard_magic.views.pictures.sheet import ROOM, Sheet, fitting
from jaxshard_magic.views.source_lines import code_text
from jaxshard_magic.views.terminal import clip
from jaxshard_magic.views.words import Span

KINDS, LINES = 10, 14
OVER, COUNT, BAR, SENT, ROW = 130, 330, 350, ROOM - 110, 20  # px
SOURCE, LINE_BAR, HIGH = 80, 500, 10


def communication(report: Report, theme: str) -> str:
    """The collectives of a report, the heaviest kinds first, and its lines in their order."""
    rows = report.collectives or ()
    sheet, timed = Sheet(report.mesh), comm.is_timed(report)
    sheet.sentence(words.communication_lead(report))
    kinds, sending = comm.kinds(report, rows), comm.lines(report)
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
        shown, most = comm.in_order(report, sending[:LINES]), weigh(sending[0].part) or 1
        for line, name in zip(shown, comm.names(shown, UNKNOWN), strict=True):
            room = fitting(LINE_BAR - SOURCE - 12, mono=True)
            known = line.number is not None
            source = code_text(line.text, line.calls, room) if known else clip(comm.UNTRACED, room)
            sheet.text(0, _clipped(name, fitting(SOURCE)), down=12)
            sheet.text(SOURCE, source, down=12, mono=True)
            parts = comm.kinds(report, line.part.collectives)
            sheet.draw(LINE_BAR, _bar(report, parts, most, SENT - 80 - LINE_BAR), down=3)
            _figures(sheet, report, line.part, timed)
    left = len(sending) - LINES
    sheet.small(f"{count_text(left)} more lines send less" if left > 0 else "")
    divided.add(sheet, turn_figures(report), report.mesh)
    return sheet.svg("communication", theme)


def _heads(sheet: Sheet, names: dict[int, str], timed: bool) -> None:
    for x, name in names.items():
        sheet.text(x, [Span(name, "quiet")], down=11, end=x == COUNT, size=11)
    sheet.text(SENT, [Span("sent per device", "quiet")], down=11, end=True, size=11)
    sheet.text(ROOM, [Span("predicted" if timed else "share", "quiet")], down=11, end=True, size=11)
    sheet.down(ROW)


def _figures(sheet: Sheet, report: Report, part: comm.Part, timed: bool) -> None:
    total = words.sent(report)
    sheet.text(SENT, part.sent_text, down=12, end=True)
    share = part.seconds_text if timed else share_text(part.sent / total if total else 0)
    sheet.text(ROOM, share, down=12, end=True)
    sheet.down(ROW)


def _clipped(name: str, room: int) -> str:
    """`long_na…:31`: the name of a line in `room` signs, its number whole."""
    file, colon, number = name.rpartition(":")
    return clip(file, room - len(colon + number)) + colon + number


def _over(part: comm.Part) -> list[Span]:
    if not part.axes:
        return [Span(clip(part.over, fitting(COUNT - OVER - 50)))]
    return [span for i, axis in enumerate(part.axes) for span in (Span(" " * bool(i)), Span(axis, "axis"))]


def _bar(report: Report, parts: Sequence[comm.Part], most: float, width: float) -> str:
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
