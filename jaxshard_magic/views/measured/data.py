"""What was measured of a step as the views list it: lines with their text and what they send, collectives, lanes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxshard_magic.places import in_short
from jaxshard_magic.report import Measured, Report, Spent
from jaxshard_magic.report.measured import COMPUTE, MOVING
from jaxshard_magic.views.format import UNKNOWN, percent_text, rate_text, seconds_text, share_text
from jaxshard_magic.views.source_lines import calls_text, place_in_short, text_of
from jaxshard_magic.views.timeline.data import Mark
from jaxshard_magic.views.timeline.data import Part as Action
from jaxshard_magic.views.words.measured import LETTERS, SPENT

Place = tuple[str | None, int | None]


@dataclass(frozen=True)
class Row:
    """One phase of one line. `text` is that of the line, None where it can't be read; `share` is of the step."""

    spent: Spent
    name: str
    text: str | None
    share: float

    @property
    def calls(self) -> str:
        """`# from [7]:12`: the line that led there, empty where it is the step's own."""
        return calls_text([self.spent.called])

    @property
    def place(self) -> str:
        """`gpt2.py:31 from [7]:12`."""
        return place_in_short(self.spent)

    @property
    def figures(self) -> dict[str, str]:
        """Each under the head of its column, as far as it is known."""
        s = self.spent
        return {
            "phase": s.phase or UNKNOWN,
            "measured": seconds_text(s.seconds),
            "of step": share_text(self.share),
            "compute": seconds_text(s.compute) if s.compute else "",
            "moving": seconds_text(s.moving) if s.moving else "",
            "waiting": seconds_text(s.waiting) if s.waiting else "",
            "predicted": "" if s.predicted is None else seconds_text(s.predicted),
        }


def rows(report: Report) -> list[Row]:
    """The lines by phase, those that take longest first."""
    m = report.measured
    if m is None:
        return []
    return [
        Row(
            s,
            in_short(s.file, s.line or 0),
            text_of(s.file, s.line, report.sources),
            s.seconds / m.seconds if m.seconds else 0.0,
        )
        for s in m.lines
    ]


def parts(row: Row) -> list[tuple[str, float]]:
    """The share of the step that each kind of a row's has, by the letters that lanes are painted by."""
    s = row.spent
    took = {LETTERS.get(s.phase or "", "O"): s.compute, "M": s.moving, "X": s.waiting or 0.0}
    return [(kind, row.share * each / s.seconds) for kind, each in took.items() if each]


def heads(listed: Sequence[Row]) -> list[str]:
    """The columns that some row has something for."""
    columns = ("phase", "measured", "of step", "compute", "moving", "waiting", "predicted")
    return [head for head in columns if any(row.figures[head] for row in listed)]


def by_line(report: Report) -> Mapping[Place, float]:
    """Measured seconds of each line, its phases together; empty where nothing was measured."""
    found: dict[Place, float] = {}
    for s in report.measured.lines if report.measured else ():
        found[s.file, s.line] = found.get((s.file, s.line), 0.0) + s.seconds
    return found


def of_line(times: Mapping[Place, float], file: str | None, number: int | None) -> str:
    """What a line took, in a column; a dash where that was not measured."""
    return seconds_text(times.get((file, number)))


def collectives(report: Report) -> tuple[list[str], list[list[str]]]:
    """The heads of the table of collectives, and its cells: those that took longest first."""
    m = report.measured
    if m is None:
        return [], []
    columns: dict[str, list[str]] = {
        "collective": [c.kind for c in m.collectives],
        "over": ["" if c.axes is None else "+".join(c.axes) for c in m.collectives],
        "on the links": [seconds_text(c.seconds) for c in m.collectives],
        "on the links, predicted": [
            "" if c.predicted is None else seconds_text(c.predicted) for c in m.collectives
        ],
        "waiting": ["" if c.waiting is None else seconds_text(c.waiting) for c in m.collectives],
        "reached": ["" if c.bandwidth is None else rate_text(c.bandwidth) for c in m.collectives],
        "links carry": ["" if c.link is None else rate_text(c.link) for c in m.collectives],
    }
    shown = {head: cells for head, cells in columns.items() if any(cells)}
    return [*shown], [list(row) for row in zip(*shown.values(), strict=True)]


def devices(m: Measured) -> tuple[list[str], list[list[str]]]:
    """The heads of the table of devices, and its cells, one row a device; what compute hides is of what it computes."""
    heads = ["device", "compute", "moving", "waiting", "idle", "hidden"]
    cells = [
        [
            str(d.device),
            *(seconds_text(s) for s in (d.compute, d.moving, d.waiting, d.idle, d.overlap)),
        ]
        for d in m.devices
    ]
    if any(d.waiting is None for d in m.devices):
        heads, cells = [h for h in heads if h != "waiting"], [[*row[:3], *row[4:]] for row in cells]
    return heads, cells


def kind_of(m: Measured, row: int, kind: str) -> str:
    """The letter that a piece of a lane is painted by."""
    if kind != COMPUTE:
        return "M" if kind == MOVING else "X"
    phase = m.lines[row].phase if 0 <= row < len(m.lines) else None
    return LETTERS.get(phase or "", "O")


def marks(m: Measured) -> list[list[Mark]]:
    """The lanes, as a timeline draws those of ranks: the stage of an action is the position of its line."""
    return [
        [
            Mark((Action(of, kind_of(m, of, kind), 0),), start * m.tick, (start + takes) * m.tick)
            for start, takes, of, kind in zip(lane.starts, lane.takes, lane.of, lane.kinds, strict=True)
        ]
        for lane in m.lanes
    ]


def end(m: Measured) -> float:
    """When the last piece of the lanes ends, in seconds."""
    return max((mark.end for lane in marks(m) for mark in lane), default=0.0)


def idle(m: Measured) -> list[str]:
    """Of each lane the share of the step in which its device does nothing."""
    whole = end(m) or 1.0
    took = (sum(mark.end - mark.start for mark in lane) for lane in marks(m))
    return [percent_text(max(0.0, 1 - each / whole)) for each in took]


def kinds(m: Measured) -> list[str]:
    """The letters that the lanes have, in the order in which they are told."""
    there = {mark.parts[0].kind for lane in marks(m) for mark in lane}
    return [letter for letter in SPENT if letter in there]
