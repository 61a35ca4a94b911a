"""Collectives as text and HTML tell them: by kind and axes, and by the line of code that causes them."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxshard_magic.places import in_short
from jaxshard_magic.report import Collective, Report
from jaxshard_magic.report.parts import finite
from jaxshard_magic.views import words
from jaxshard_magic.views.format import byte_text, count_text, seconds_text
from jaxshard_magic.views.source_lines import calls_text

SHORT = {
    "all-gather": "AG",
    "all-reduce": "AR",
    "reduce-scatter": "RS",
    "all-to-all": "A2A",
    "collective-permute": "CP",
}
UNTRACED = "not traced to a line"


@dataclass(frozen=True)
class Part:
    """Collectives that are told as one: of all of them together are `count`, `sent` bytes and `seconds`, those of the
    predicted step that the device waits for them."""

    collectives: tuple[Collective, ...]

    @property
    def kind(self) -> str:
        return self.collectives[0].kind

    @property
    def axes(self) -> tuple[str, ...] | None:
        return self.collectives[0].axes

    @property
    def count(self) -> int:
        return sum(c.count for c in self.collectives)

    @property
    def sent(self) -> int:
        return sum(c.wire_bytes for c in self.collectives)

    @property
    def leaving(self) -> int | None:
        """Bytes that one island of the mesh sends to others; None where there is but one, or it is not known."""
        return words.network(self.collectives)

    @property
    def seconds(self) -> float | None:
        known = [seconds for c in self.collectives if (seconds := finite(c.waited)) is not None]
        return sum(known) if known else None

    @property
    def over(self) -> str:
        """`data+model`, or `groups of 4` of those that match no axes."""
        groups = f"groups of {count_text(self.collectives[0].group_size)}"
        return words.axes_text(self.axes) if self.axes else groups

    @property
    def jobs(self) -> str:
        """`dispatch, combine`: what those that are for something are for."""
        return ", ".join(dict.fromkeys(c.job for c in self.collectives if c.job))

    @property
    def count_text(self) -> str:
        return self._least(count_text(self.count))

    @property
    def each_text(self) -> str:
        """The size of one; of several sizes the largest."""
        sizes = {c.bytes for c in self.collectives}
        return "up to " * (len(sizes) > 1) + byte_text(max(sizes))

    @property
    def sent_text(self) -> str:
        return self._least(byte_text(self.sent))

    @property
    def leaving_text(self) -> str:
        return byte_text(None) if self.leaving is None else self._least(byte_text(self.leaving))

    @property
    def seconds_text(self) -> str:
        return seconds_text(None) if self.seconds is None else self._least(seconds_text(self.seconds))

    @property
    def links_text(self) -> str:
        """`14.3 ms`: what they take on the links, whether the device waits for that or not."""
        known = [seconds for c in self.collectives if (seconds := finite(c.seconds)) is not None]
        return self._least(seconds_text(sum(known))) if known else seconds_text(None)

    def _least(self, text: str) -> str:
        """`text`, marked as the least that it may be where the program decides how often it communicates."""
        return words.least(text, self.collectives)


@dataclass(frozen=True)
class Line:
    """A line of the user's code and what it moves; `number` is None of what could not be traced to one."""

    file: str | None
    number: int | None
    text: str | None
    part: Part

    @property
    def calls(self) -> str:
        """`# from [7]:12`: the lines that led there, empty where it is the step's own."""
        return calls_text(c.called for c in self.part.collectives)


def together(parts: Iterable[Part]) -> Part:
    """All of `parts` as one."""
    return Part(tuple(c for part in parts for c in part.collectives))


def is_timed(report: Report) -> bool:
    """Whether times are predicted."""
    return Part(tuple(report.collectives or ())).seconds is not None


def is_hidden(report: Report) -> bool:
    """Whether the device computes beside some of what is on the links, so that it waits for less."""
    return any(part.links_text != part.seconds_text for part in kinds(report, report.collectives or ()))


def between(report: Report) -> str | None:
    """The head of the column of bytes that leave an island: `between hosts`; None where nothing is known of them."""
    known = any(c.network_bytes is not None for c in report.collectives or ())
    return f"between {words.island_word(report.mesh)}s" if known else None


def weight(report: Report) -> Callable[[Part], float]:
    """What a part counts for: its predicted time, else the bytes that it sends."""
    return (lambda part: part.seconds or 0.0) if is_timed(report) else (lambda part: part.sent)


def kinds(report: Report, collectives: Sequence[Collective]) -> list[Part]:
    """Collectives by kind and axes, the heaviest first."""
    parts = _parts(collectives, lambda c: (c.kind, c.axes, c.axes or c.group_size))
    return _heaviest(report, parts, lambda part: part)


def lines(report: Report) -> list[Line]:
    """What each line moves, the heaviest first; empty where no line is known."""
    collectives = report.collectives or ()
    if all(c.line is None for c in collectives):
        return []
    lines = []
    for part in _parts(collectives, lambda c: None if c.line is None else (c.file, c.line, c.source)):
        first = part.collectives[0]
        traced = first.line is not None
        lines.append(Line(first.file if traced else None, first.line, first.source if traced else None, part))
    return _heaviest(report, lines, lambda line: line.part)


def in_order(report: Report, lines: Iterable[Line]) -> list[Line]:
    """Lines as they stand in the sources, what is not traced last."""
    place = {source.name: i for i, source in enumerate(report.sources)}
    last = len(place)
    return sorted(
        lines,
        key=lambda line: (
            line.number is None,
            place.get(line.file or "", last),
            line.file or "",
            line.number or 0,
        ),
    )


def names(lines: Sequence[Line], unknown: str) -> list[str]:
    """What each line is called in a table."""
    return [unknown if line.number is None else in_short(line.file, line.number) for line in lines]


def notes(report: Report, lines: Iterable[Line]) -> list[str]:
    """Why there is no text, of the sources of these lines."""
    files = {line.file for line in lines}
    return [
        f"{source.name}: {source.note}" for source in report.sources if source.note and source.name in files
    ]


def _parts(collectives: Iterable[Collective], key: Callable[[Collective], Hashable]) -> list[Part]:
    groups: dict[Hashable, list[Collective]] = defaultdict(list)
    for c in collectives:
        groups[key(c)].append(c)
    return [Part(tuple(group)) for group in groups.values()]


def _heaviest(report: Report, rows: list[Any], part_of: Callable[[Any], Part]) -> list[Any]:
    weigh = weight(report)
    return sorted(rows, key=lambda one: (-weigh(part_of(one)), -part_of(one).sent))
