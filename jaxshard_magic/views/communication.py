"""Collectives grouped for display: by kind and mesh axes, and by the line of code that causes them."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxshard_magic.code_locations import short_location
from jaxshard_magic.report import Collective, Report
from jaxshard_magic.report.parts import finite_or_none
from jaxshard_magic.views import words
from jaxshard_magic.views.format import byte_text, count_text, seconds_text
from jaxshard_magic.views.source_lines import callers_comment

SHORT = {
    "all-gather": "AG",
    "all-reduce": "AR",
    "reduce-scatter": "RS",
    "all-to-all": "A2A",
    "collective-permute": "CP",
}
UNTRACED = "not traced to a line"


@dataclass(frozen=True)
class CollectiveGroup:
    """Collectives shown as one row; sums are over all of them.

    Attributes:
        collectives: Members, at least one.
    """

    collectives: tuple[Collective, ...]

    @property
    def kind(self) -> str:
        """Kind of collective, such as "all-gather"."""
        return self.collectives[0].kind

    @property
    def axes(self) -> tuple[str, ...] | None:
        """Mesh axes of the first collective; None if its groups follow no axes."""
        return self.collectives[0].axes

    @property
    def count(self) -> int:
        """Number of runs in a step."""
        return sum(c.count for c in self.collectives)

    @property
    def sent(self) -> int:
        """Bytes sent by one device in a step."""
        return sum(c.wire_bytes for c in self.collectives)

    @property
    def inter_island_bytes(self) -> int | None:
        """Bytes sent by one island of the mesh to others; None for a single island, or if unknown."""
        return words.inter_island_bytes(self.collectives)

    @property
    def seconds(self) -> float | None:
        """Seconds of the predicted step spent waiting for the collectives; None if unknown."""
        known = [seconds for c in self.collectives if (seconds := finite_or_none(c.waited)) is not None]
        return sum(known) if known else None

    @property
    def axes_text(self) -> str:
        """Mesh axes as text, `data+model`; `groups of 4` for groups that match no axes."""
        groups = f"groups of {count_text(self.collectives[0].group_size)}"
        return words.axes_text(self.axes) if self.axes else groups

    @property
    def jobs(self) -> str:
        """Purposes of the collectives, without duplicates: `dispatch, combine`. Empty if none has a purpose."""
        return ", ".join(dict.fromkeys(c.job for c in self.collectives if c.job))

    @property
    def count_text(self) -> str:
        return self._mark_lower_bound(count_text(self.count))

    @property
    def each_text(self) -> str:
        """Size of one collective; of several sizes the largest, as `up to 2 MiB`."""
        sizes = {c.bytes for c in self.collectives}
        return "up to " * (len(sizes) > 1) + byte_text(max(sizes))

    @property
    def sent_text(self) -> str:
        return self._mark_lower_bound(byte_text(self.sent))

    @property
    def inter_island_text(self) -> str:
        return (
            byte_text(None)
            if self.inter_island_bytes is None
            else self._mark_lower_bound(byte_text(self.inter_island_bytes))
        )

    @property
    def seconds_text(self) -> str:
        return seconds_text(None) if self.seconds is None else self._mark_lower_bound(seconds_text(self.seconds))

    @property
    def link_time_text(self) -> str:
        """Seconds on the links, overlapped with compute or not: `14.3 ms`."""
        known = [seconds for c in self.collectives if (seconds := finite_or_none(c.seconds)) is not None]
        return self._mark_lower_bound(seconds_text(sum(known))) if known else seconds_text(None)

    def _mark_lower_bound(self, text: str) -> str:
        """Mark `text` as a lower bound if the number of runs is decided at run time."""
        return words.mark_lower_bound(text, self.collectives)


@dataclass(frozen=True)
class CodeLine:
    """Line of the user's code and its collectives.

    Attributes:
        file: Source, by name; None for untraced collectives.
        number: Line number; None for untraced collectives.
        text: Text of the line, if known.
        group: Collectives caused by the line.
    """

    file: str | None
    number: int | None
    text: str | None
    group: CollectiveGroup

    @property
    def callers(self) -> str:
        """Calling lines as a comment, `# from [7]:12`; empty for the step's own lines."""
        return callers_comment(c.called for c in self.group.collectives)


def merge(parts: Iterable[CollectiveGroup]) -> CollectiveGroup:
    """Merge groups into one."""
    return CollectiveGroup(tuple(c for part in parts for c in part.collectives))


def is_timed(report: Report) -> bool:
    """Return whether the report has predicted times of collectives."""
    return CollectiveGroup(tuple(report.collectives or ())).seconds is not None


def has_overlap(report: Report) -> bool:
    """Return whether some collectives overlap with compute, so that the device waits less than the links are busy."""
    return any(part.link_time_text != part.seconds_text for part in group_by_kind(report, report.collectives or ()))


def inter_island_heading(report: Report) -> str | None:
    """Return the heading for bytes that leave an island, `between hosts`; None if no such bytes are known."""
    known = any(c.network_bytes is not None for c in report.collectives or ())
    return f"between {words.island_word(report.mesh)}s" if known else None


def weight(report: Report) -> Callable[[CollectiveGroup], float]:
    """Return the sort key of groups: predicted seconds if the report has times, else bytes sent."""
    return (lambda part: part.seconds or 0.0) if is_timed(report) else (lambda part: part.sent)


def group_by_kind(report: Report, collectives: Sequence[Collective]) -> list[CollectiveGroup]:
    """Group collectives by kind and axes, the heaviest first.

    Args:
        report: Decides between times and bytes as weight.
        collectives: Collectives of the report, or of one line.
    """
    # Groups that follow no mesh axes are distinguished by size.
    parts = _group_by(collectives, lambda c: (c.kind, c.axes, c.axes or c.group_size))
    return _heaviest(report, parts, lambda part: part)


def group_by_line(report: Report) -> list[CodeLine]:
    """Group collectives by line of code, the heaviest first; empty if no line is known."""
    collectives = report.collectives or ()
    if all(c.line is None for c in collectives):
        return []
    lines = []
    for part in _group_by(collectives, lambda c: None if c.line is None else (c.file, c.line, c.source)):
        first = part.collectives[0]
        traced = first.line is not None
        lines.append(CodeLine(first.file if traced else None, first.line, first.source if traced else None, part))
    return _heaviest(report, lines, lambda line: line.group)


def in_source_order(report: Report, lines: Iterable[CodeLine]) -> list[CodeLine]:
    """Sort lines by their position in the sources, untraced collectives last.

    Args:
        report: Gives the order of the sources.
        lines: Lines in any order.
    """
    place = {source.name: i for i, source in enumerate(report.sources)}
    last = len(place)
    return sorted(
        lines,
        key=lambda line: (line.number is None, place.get(line.file or "", last), line.file or "", line.number or 0),
    )


def line_labels(lines: Sequence[CodeLine], unknown: str) -> list[str]:
    """Return the short name of each line for a table.

    Args:
        lines: Lines of code.
        unknown: Name of collectives that have no line.
    """
    return [unknown if line.number is None else short_location(line.file, line.number) for line in lines]


def source_notes(report: Report, lines: Iterable[CodeLine]) -> list[str]:
    """Return a note for each source of these lines whose text is missing.

    Args:
        report: Has the sources and their notes.
        lines: Lines of code.
    """
    files = {line.file for line in lines}
    return [f"{source.name}: {source.note}" for source in report.sources if source.note and source.name in files]


def _group_by(collectives: Iterable[Collective], key: Callable[[Collective], Hashable]) -> list[CollectiveGroup]:
    """Group collectives by a key, in order of first occurrence."""
    groups: dict[Hashable, list[Collective]] = defaultdict(list)
    for c in collectives:
        groups[key(c)].append(c)
    return [CollectiveGroup(tuple(group)) for group in groups.values()]


def _heaviest(report: Report, rows: list[Any], part_of: Callable[[Any], CollectiveGroup]) -> list[Any]:
    """Sort rows by descending weight, then by bytes sent."""
    weigh = weight(report)
    return sorted(rows, key=lambda one: (-weigh(part_of(one)), -part_of(one).sent))
