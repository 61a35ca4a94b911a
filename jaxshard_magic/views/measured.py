"""Time breakdown of a recorded step in the form that views list: lines of code, collectives, devices, and lanes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxshard_magic.code_locations import short_location
from jaxshard_magic.report import LineTime, Measured, Report
from jaxshard_magic.report.measured import COMPUTE, MOVING
from jaxshard_magic.views.format import UNKNOWN, percent_text, rate_text, seconds_text, share_text
from jaxshard_magic.views.source_lines import callers_comment, short_line, source_line_text
from jaxshard_magic.views.timeline.data import LaneEvent
from jaxshard_magic.views.timeline.data import PipelineAction as Action
from jaxshard_magic.views.words.step_time import LETTERS, TIME_KINDS

LineKey = tuple[str | None, int | None]


@dataclass(frozen=True)
class LineTimeRow:
    """Time of one phase of one line of code.

    Attributes:
        line_time: Measured times.
        name: Short name of the line.
        text: Text of the line; None if unreadable.
        share: Share of the step.
    """

    line_time: LineTime
    name: str
    text: str | None
    share: float

    @property
    def callers(self) -> str:
        """Calling line as a comment, `# from [7]:12`; empty for the step's own lines."""
        return callers_comment([self.line_time.called])

    @property
    def location(self) -> str:
        """Line and calling line: `gpt2.py:31 from [7]:12`."""
        return short_line(self.line_time)

    @property
    def figures(self) -> dict[str, str]:
        """Known figures by column head; empty text for unknown ones."""
        s = self.line_time
        return {
            "phase": s.phase or UNKNOWN,
            "measured": seconds_text(s.seconds),
            "of step": share_text(self.share),
            "compute": seconds_text(s.compute) if s.compute else "",
            "moving": seconds_text(s.moving) if s.moving else "",
            "waiting": seconds_text(s.waiting) if s.waiting else "",
            "predicted": "" if s.predicted is None else seconds_text(s.predicted),
        }


def rows(report: Report) -> list[LineTimeRow]:
    """Return the lines by phase, the longest first; empty without a measurement."""
    m = report.measured
    if m is None:
        return []
    return [
        LineTimeRow(
            s,
            short_location(s.file, s.line or 0),
            source_line_text(s.file, s.line, report.sources),
            s.seconds / m.seconds if m.seconds else 0.0,
        )
        for s in m.lines
    ]


def parts(row: LineTimeRow) -> list[tuple[str, float]]:
    """Return (letter, share of the step) of each kind of time in a row; letters are those of the lanes."""
    s = row.line_time
    took = {LETTERS.get(s.phase or "", "O"): s.compute, "M": s.moving, "X": s.waiting or 0.0}
    return [(kind, row.share * each / s.seconds) for kind, each in took.items() if each]


def heads(listed: Sequence[LineTimeRow]) -> list[str]:
    """Return the columns with a figure in at least one row."""
    columns = ("phase", "measured", "of step", "compute", "moving", "waiting", "predicted")
    return [head for head in columns if any(row.figures[head] for row in listed)]


def seconds_by_line(report: Report) -> Mapping[LineKey, float]:
    """Return the measured seconds of each line, summed over phases; empty without a measurement."""
    seconds: dict[LineKey, float] = {}
    for s in report.measured.lines if report.measured else ():
        seconds[s.file, s.line] = seconds.get((s.file, s.line), 0.0) + s.seconds
    return seconds


def line_time_text(times: Mapping[LineKey, float], file: str | None, number: int | None) -> str:
    """Return the measured time of a line for a column; a dash if unknown.

    Args:
        times: Seconds by (file, line).
        file: Source, by name.
        number: Line number.
    """
    return seconds_text(times.get((file, number)))


def collectives(report: Report) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells of the table of collectives, the longest first; empty columns are left out."""
    m = report.measured
    if m is None:
        return [], []
    columns: dict[str, list[str]] = {
        "collective": [c.kind for c in m.collectives],
        "over": ["" if c.axes is None else "+".join(c.axes) for c in m.collectives],
        "on the links": [seconds_text(c.seconds) for c in m.collectives],
        "on the links, predicted": ["" if c.predicted is None else seconds_text(c.predicted) for c in m.collectives],
        "waiting": ["" if c.waiting is None else seconds_text(c.waiting) for c in m.collectives],
        "reached": ["" if c.bandwidth is None else rate_text(c.bandwidth) for c in m.collectives],
        "links carry": ["" if c.link is None else rate_text(c.link) for c in m.collectives],
    }
    shown = {head: cells for head, cells in columns.items() if any(cells)}
    return [*shown], [list(row) for row in zip(*shown.values(), strict=True)]


def devices(m: Measured) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells of the table of devices. "hidden" is the compute time during which data moves."""
    heads = ["device", "compute", "moving", "waiting", "idle", "hidden"]
    cells = [
        [str(d.device), *(seconds_text(s) for s in (d.compute, d.moving, d.waiting, d.idle, d.overlap))]
        for d in m.devices
    ]
    # Some traces do not tell waiting from moving; the column is then dropped for all devices.
    if any(d.waiting is None for d in m.devices):
        heads, cells = [h for h in heads if h != "waiting"], [[*row[:3], *row[4:]] for row in cells]
    return heads, cells


def lane_letter(m: Measured, row: int, kind: str) -> str:
    """Return the letter by which a piece of a lane is painted.

    Args:
        m: Measured step.
        row: Index of the line in `m.lines`; -1 if it is not listed or not known.
        kind: `COMPUTE`, `MOVING` or `WAITING` of `report.measured`.
    """
    if kind != COMPUTE:
        return "M" if kind == MOVING else "X"
    phase = m.lines[row].phase if 0 <= row < len(m.lines) else None
    return LETTERS.get(phase or "", "O")


def lane_events(m: Measured) -> list[list[LaneEvent]]:
    """Return the lanes in the form of a pipeline's timeline; the stage of an action is the index of its line."""
    return [
        [
            LaneEvent((Action(of, lane_letter(m, of, kind), 0),), start * m.tick, (start + takes) * m.tick)
            for start, takes, of, kind in zip(lane.starts, lane.takes, lane.of, lane.kinds, strict=True)
        ]
        for lane in m.lanes
    ]


def lanes_end(m: Measured) -> float:
    """Return the end of the last piece of all lanes in seconds."""
    return max((mark.end for lane in lane_events(m) for mark in lane), default=0.0)


def idle_shares(m: Measured) -> list[str]:
    """Return the idle share of each lane as text."""
    whole = lanes_end(m) or 1.0
    took = (sum(mark.end - mark.start for mark in lane) for lane in lane_events(m))
    return [percent_text(max(0.0, 1 - each / whole)) for each in took]


def lane_letters(m: Measured) -> list[str]:
    """Return the letters that occur in the lanes, in the order of the legend."""
    there = {mark.actions[0].kind for lane in lane_events(m) for mark in lane}
    return [letter for letter in TIME_KINDS if letter in there]
