"""Parts of a document: what a view says about a report, before it becomes text, Markdown or HTML.

A document holds words, never markup or padding: figures are formatted once, with their units, and names of the user's
are marked as such. A lowering (`document.text`, `document.markdown`, `document.html`) decides how a part is drawn and
what is left out for lack of room.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxshard_magic.report import Leaf, Measured, Pipeline
from jaxshard_magic.report.choice import Question
from jaxshard_magic.report.metrics import Curve, Metrics
from jaxshard_magic.views.device_memory import DeviceGroup
from jaxshard_magic.views.figure_marks import Mark
from jaxshard_magic.views.words import Span
from jaxshard_magic.views.words.summary import KeyFigure

TEXT, HTML, MARKDOWN = "text", "html", "markdown"
EVERYWHERE = frozenset((TEXT, HTML, MARKDOWN))
TERMINAL, PAGES = frozenset((TEXT,)), frozenset((HTML, MARKDOWN))  # where room is scarce, and where it is not
FLAT, TALL = 10, 34  # px: height of a row of positions, and of a row of bars

Words = str | Sequence[Span]  # a string is words of this package


def spans(words: Words) -> tuple[Span, ...]:
    """Return words as spans."""
    return (Span(words),) * bool(words) if isinstance(words, str) else tuple(words)


def names(text: str) -> tuple[Span, ...]:
    """Return text of the user's, whose signs stay as they are."""
    return (Span(text, "name"),)


def axis_names(axes: Iterable[str]) -> tuple[Span, ...]:
    """Return mesh axes: `data+model`."""
    marked = [Span(axis, "axis") for axis in axes]
    return tuple(span for axis in marked for span in (Span("+"), axis))[1:]


def plain(words: Words) -> str:
    """Return the text of words."""
    return "".join(span.text for span in spans(words))


@dataclass(frozen=True)
class Header:
    """First line of a document.

    Attributes:
        subject: Subject, such as the strategy.
        typed: Options as typed.
        mesh: Size of each mesh axis.
        devices: Devices, in a terminal's signs and in others'.
        name: Name of the step and number of the report; empty if there is neither.
    """

    subject: str
    typed: str
    mesh: dict[str, int]
    devices: tuple[str, str]
    name: str


@dataclass(frozen=True)
class Paragraph:
    """Sentences.

    Attributes:
        words: Sentences.
        sign: "error" for a sign in front; None for none.
        leading: Whether it is the most important paragraph of the document.
    """

    words: Words
    sign: str | None = None
    leading: bool = False


@dataclass(frozen=True)
class Notes:
    """Small print: sentences, each on lines of its own.

    Attributes:
        lines: Sentences.
        below: Whether they belong to the part above, and are indented in a terminal.
        shows: Forms of the document with these notes.
    """

    lines: tuple[Words, ...]
    below: bool = True
    shows: frozenset[str] = EVERYWHERE


@dataclass(frozen=True)
class KeyFigures:
    """Key figures of a report.

    Attributes:
        figures: Figures.
        marks: Drawing of each figure, if there is one.
    """

    figures: tuple[KeyFigure, ...]
    marks: tuple[Mark | None, ...]


@dataclass(frozen=True)
class Hint:
    """Problem, or possible improvement.

    Attributes:
        level: "error", "warning" or "info".
        message: Message.
        fix: Lines to paste; empty if there are none.
    """

    level: str
    message: str
    fix: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hints:
    """Hints, the first ones in full.

    Attributes:
        hints: Hints.
        shown: Number of hints that are shown at first.
        where: Name of the attribute with all hints.
    """

    hints: tuple[Hint, ...]
    shown: int
    where: str


@dataclass(frozen=True)
class BarPart:
    """Part of a bar.

    Attributes:
        axes: Mesh axes that give the hue.
        kind: Kind of collective or of time, which gives the opacity.
        share: Length, 0 to 1.
    """

    axes: tuple[str, ...]
    kind: str
    share: float


@dataclass(frozen=True)
class WordCell:
    """Cell of a table, of words.

    Attributes:
        words: Words.
        more: Small print behind.
        short: Shorter form for a narrow terminal; None if there is none.
        code: Whether it is code, with the words of mesh axes in it.
    """

    words: Words
    more: Words = ""
    short: str | None = None
    code: bool = False


@dataclass(frozen=True)
class CodeCell:
    """Cell with a line of code.

    Attributes:
        text: Code; None if unknown.
        callers: Calling lines as a comment.
        instead: Words instead of code; empty for a known line.
        more: Small print below, in HTML.
    """

    text: str | None
    callers: str = ""
    instead: str = ""
    more: str = ""


@dataclass(frozen=True)
class ListCell:
    """Cell with a list, of which a narrow terminal shows the first items.

    Attributes:
        items: (item, its purpose or "") pairs.
    """

    items: tuple[tuple[Words, str], ...]


@dataclass(frozen=True)
class BarCell:
    """Cell with a bar.

    Attributes:
        parts: Parts of the bar, from the left.
        share: Length of the whole bar in a terminal, 0 to 1.
        width: Width of the whole bar in px.
    """

    parts: tuple[BarPart, ...]
    share: float
    width: int


@dataclass(frozen=True)
class TimeCell:
    """Cell with a time, and a bar of its parts where there is room.

    Attributes:
        text: Time with its unit.
        parts: (letter of the kind of time, length from 0 to 1) pairs.
    """

    text: str
    parts: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class CurveCell:
    """Cell with a curve over the steps of a run.

    Attributes:
        curve: Curve.
        scaled: Curves that share the scale.
    """

    curve: Curve
    scaled: tuple[Curve, ...]


@dataclass(frozen=True)
class LeafCell:
    """Cell with the drawing of a leaf's shards.

    Attributes:
        leaf: Leaf.
    """

    leaf: Leaf


AnyCell = WordCell | CodeCell | ListCell | BarCell | TimeCell | CurveCell | LeafCell


@dataclass(frozen=True)
class Column:
    """Column of a table.

    Attributes:
        head: Heading.
        align: "left", "right", or "wrap" (left, with line breaks).
        short: Heading in a terminal; None for the same.
        most: Columns of a terminal at most; below 1 a share of its width, 0 for no limit.
        from_end: Whether a long cell is cut at its end, not in its middle.
        least: Columns of a terminal that a column of varying width gets at least; 0 for a fixed width.
        drop: Order in which columns are left out of a narrow terminal; 0 for a column that stays.
        wide: Width of a terminal below which the column is left out.
        more: Columns of a terminal for small print behind each cell, at least; None leaves it out.
        more_alone: Width of a terminal below which small print replaces the words.
        joint: Signs between words and small print in a terminal.
        shows: Forms of the document with this column.
    """

    head: str
    align: str = "left"
    short: str | None = None
    most: float = 0
    from_end: bool = False
    least: int = 0
    drop: int = 0
    wide: int = 0
    more: int | None = None
    more_alone: int = 0
    joint: str = " "
    shows: frozenset[str] = EVERYWHERE

    def heading(self, form: str) -> str:
        """Return the heading in a form of the document."""
        return self.short if form == TEXT and self.short is not None else self.head


@dataclass(frozen=True)
class TableRow:
    """Row of a table.

    Attributes:
        cells: A cell for each column.
        below: Sentence below the row; in HTML below its name.
        warn: Whether something is wrong with the row.
        always: Whether the sentence is shown in a terminal as well, though nothing is wrong.
        front: Whether the row has a star in front.
    """

    cells: tuple[AnyCell, ...]
    below: Words = ""
    warn: bool = False
    always: bool = False
    front: bool = False


@dataclass(frozen=True)
class Table:
    """Table.

    Attributes:
        columns: Columns.
        rows: Rows.
        title: Words above the first columns in a terminal, whose headings are empty.
        stacks: Whether the second column goes below the first in a narrow terminal.
        second: First column of those that have a table of their own, beside the first column, in a narrow terminal; 0
            for none.
    """

    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
    title: str = ""
    stacks: bool = False
    second: int = 0


@dataclass(frozen=True)
class BreakdownPart:
    """Part of a time.

    Attributes:
        kind: Kind.
        axes: Mesh axes; empty for the device's own time.
        over: Mesh axes as text.
        time: Time with its unit.
        share_text: Share of the whole.
        share: Share of the whole, 0 to 1.
        own: Whether it is time of the device itself.
    """

    kind: str
    axes: tuple[str, ...]
    over: str
    time: str
    share_text: str
    share: float
    own: bool


@dataclass(frozen=True)
class Breakdown:
    """Time, divided into parts.

    Attributes:
        subject: Time of what.
        total: The whole time in words.
        parts: Parts, without the omitted ones.
        omitted: Number of omitted parts.
        omitted_text: Time of the omitted parts.
    """

    subject: str
    total: str
    parts: tuple[BreakdownPart, ...]
    omitted: int
    omitted_text: str


@dataclass(frozen=True)
class MemoryRow:
    """Memory of a group of devices.

    Attributes:
        group: Devices, with the memory of the fullest.
        stage: Pipeline stages of the devices; empty if they cover all.
        roles: Bytes of each role, as text.
        peak: Peak.
        peak_of_limit: Peak, with the limit if there is one.
        measured: Measured peak; None if unknown.
        measured_text: Measured peak as text.
        error: Measured peak relative to the computed one; empty if unknown.
    """

    group: DeviceGroup
    stage: str
    roles: dict[str, str]
    peak: str
    peak_of_limit: str
    measured: int | None
    measured_text: str
    error: str


@dataclass(frozen=True)
class MemoryBars:
    """Bytes on devices by role, as bars.

    Attributes:
        rows: Rows, the fullest group first.
        legend: Bytes of each role on the fullest device, as text.
        full: Bytes at the end of the scale.
        limit: Limit on the scale; None if it is not on it.
        off_scale: Limit beside the scale, and the longest bar; None if the limit is on the scale.
        scale_note: Note on the scale; None for bars on the scale of the limit.
        measured: Whether some peak is measured.
        omitted: Words on omitted devices; empty if there are none.
    """

    rows: tuple[MemoryRow, ...]
    legend: dict[str, str]
    full: int
    limit: int | None
    off_scale: tuple[int, int] | None
    scale_note: str | None
    measured: bool
    omitted: str


@dataclass(frozen=True)
class Area:
    """Rectangle in a drawing with sides of length 1; the origin is the upper left corner.

    Attributes:
        x: Left edge.
        y: Top edge.
        width: Width.
        height: Height.
        opacity: Opacity, 0 to 1.
    """

    x: float
    y: float
    width: float
    height: float
    opacity: float = 1.0


@dataclass(frozen=True)
class FigureRow:
    """Row of a figure.

    Attributes:
        name: Text before the drawing.
        areas: Drawing.
        text: Text after the drawing.
        bars: Heights of a row of bars, 0 to 1; empty if `areas` are positions on a line.
    """

    name: str
    areas: tuple[Area, ...]
    text: str
    bars: tuple[float, ...] = ()


@dataclass(frozen=True)
class RowFigure:
    """Figure of a few rows.

    Attributes:
        lead: One or more sentences.
        axis: Mesh axis that gives the hue.
        rows: Rows, none for a figure of text alone.
        height: Height of a row in px.
        shows: Forms of the document with this figure.
    """

    lead: str
    axis: str
    rows: tuple[FigureRow, ...] = ()
    height: int = FLAT
    shows: frozenset[str] = EVERYWHERE


@dataclass(frozen=True)
class ActionLanes:
    """Actions of a pipeline over time, a lane for each rank.

    Attributes:
        pipeline: Pipeline.
    """

    pipeline: Pipeline


@dataclass(frozen=True)
class RecordedLanes:
    """One recorded step, a lane for each device; in HTML alone.

    Attributes:
        measured: Time breakdown with lanes.
    """

    measured: Measured


@dataclass(frozen=True)
class Charts:
    """Curves over the steps of a run, a chart each; in HTML alone.

    Attributes:
        metrics: Metrics of the run.
    """

    metrics: Metrics


@dataclass(frozen=True)
class Leaves:
    """Sentence about some leaves.

    Attributes:
        sentence: Sentence.
        leaves: (path, amount or "") of each leaf.
        most: Number of leaves to list, at most.
    """

    sentence: str
    leaves: tuple[tuple[str, str], ...] = ()
    most: int = 12


@dataclass(frozen=True)
class DecisionPath:
    """Questions of the usual decision path, with the answers for this step.

    Attributes:
        path: Questions in order.
    """

    path: tuple[Question, ...]


@dataclass(frozen=True)
class CandidateRow:
    """Candidate of a search.

    Attributes:
        strategy: Strategy.
        options: Options as typed.
        mesh: Size of each mesh axis.
        bound: Lower bound of the step time.
        needs: Bytes needed on the fullest device.
        arrays: Bytes of its arrays alone; empty if unknown.
    """

    strategy: str
    options: str
    mesh: Mapping[str, int]
    bound: str
    needs: str
    arrays: str


@dataclass(frozen=True)
class Candidates:
    """Candidates of a search with one outcome.

    Attributes:
        outcome: Outcome in words.
        by_reason: Candidates with one reason, and the reason.
        omitted: Number of omitted candidates.
    """

    outcome: str
    by_reason: tuple[tuple[tuple[CandidateRow, ...], str], ...]
    omitted: int


@dataclass(frozen=True)
class Commands:
    """Lines to paste, which are never broken.

    Attributes:
        lead: Words in front.
        lines: Lines.
    """

    lead: str
    lines: tuple[str, ...]


Block = (
    Header
    | Paragraph
    | Notes
    | KeyFigures
    | Hints
    | Table
    | Breakdown
    | MemoryBars
    | RowFigure
    | ActionLanes
    | RecordedLanes
    | Charts
    | Leaves
    | Commands
)


@dataclass(frozen=True)
class Section:
    """Parts under a title.

    Attributes:
        title: Title; empty for parts that are set apart without one.
        parts: Parts.
        about: Sentences below the title; the first one follows it on the same line in a terminal.
        short: Title in a terminal; None for the same.
        shows: Forms of the document with this section.
    """

    title: Words
    parts: "tuple[Part, ...]"
    about: tuple[str, ...] = ()
    short: Words | None = None
    shows: frozenset[str] = EVERYWHERE

    def heading(self, form: str) -> Words:
        """Return the title in a form of the document."""
        return self.short if form == TEXT and self.short is not None else self.title


Part = Block | Section
ChoicePart = DecisionPath | Candidates  # parts whose HTML is that of a choice, `choice/html`
