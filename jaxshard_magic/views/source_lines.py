"""Lines of the user's code: names, texts, and positions among a report's sources."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from jaxshard_magic.code_locations import caller_text, line_text, short_location
from jaxshard_magic.report import SourceExcerpt
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.terminal import clip, display_width

_LEAST = 6  # columns of code below which it is left out


class HasLine(Protocol):
    """Part of a report with a line of code, and the calling line."""

    @property
    def file(self) -> str | None: ...
    @property
    def line(self) -> int | None: ...
    @property
    def called(self) -> str | None: ...


def line_facts(part: HasLine, sources: Sequence[SourceExcerpt]) -> dict[str, Any]:
    """Return a line as data for the widget: index of the source, names, callers and text.

    Args:
        part: Part of a report with a line.
        sources: Sources of the report.
    """
    file, line = part.file, part.line
    text = source_line_text(file, line, sources)
    return {
        "source": source_index(file, line, None, sources),
        "line": line,
        "place": None if line is None else printable(line_in_words(part)),
        "short": None if line is None else printable(short_location(file, line)),
        "calls": printable(callers_comment([part.called]).removeprefix("# ")),
        "text": None if text is None else printable(text.strip()),
    }


def source_line_text(file: str | None, line: int | None, sources: Sequence[SourceExcerpt]) -> str | None:
    """Return the text of a line, or None if unknown.

    Args:
        file: Name of the source.
        line: Line number.
        sources: Sources of the report.
    """
    index = source_index(file, line, None, sources)
    return None if index is None else _source_line(sources[index], line)


def line_in_words(part: HasLine) -> str:
    """Return a line in words, `gpt.py, line 31, called at cell [7], line 12`; empty if no line is known."""
    if part.line is None:
        return ""
    where = line_text(part.file, part.line)
    return f"{where}, {caller_text(part.called)}" if part.called else where


def short_line(part: HasLine) -> str:
    """Return a line in short, `gpt.py:31 from [7]:12`; empty if no line is known."""
    calls = callers_comment([part.called]).removeprefix("#")
    return "" if part.line is None else f"{short_location(part.file, part.line)}{calls}"


def callers_comment(called: Iterable[str | None]) -> str:
    """Return calling lines as a comment to follow a line of code; empty for none.

    >>> callers_comment(["cell [7]:14", "cell [7]:12", None, "cell [8]:3"])
    '# from [7]:12, 14, [8]:3'
    """
    split = (one.rpartition(":") for one in called if one)
    last_name, pieces = None, list[str]()
    for name, line in sorted({(name, int(line)) for name, _, line in split}):
        pieces.append(str(line) if name == last_name else short_location(name, line))
        last_name = name
    return f"# from {', '.join(pieces)}" if pieces else ""


def code_text(text: str | None, calls: str, room: int) -> str:
    """Return a line of code followed by its callers.

    Args:
        text: Line of code; None if unknown.
        calls: Callers as a comment, or empty.
        room: Maximal number of columns. The code is cut before the callers.
    """
    source = printable((text or "").strip())
    if not calls:
        return clip(source, room)
    # The word `from` is dropped first, then the code, if too few columns of it remain.
    for callers in (calls, calls.replace("from ", "")):
        left = room - display_width(callers) - 2
        if source and left >= _LEAST:
            return f"{clip(source, left)}  {callers}"
    return clip(calls, room)


def source_index(file: str | None, line: int | None, text: str | None, sources: Sequence[SourceExcerpt]) -> int | None:
    """Return the index of a line's source, or None.

    Two cells, or files in different folders, may have equal names. Then the first source with this text on the line
    wins, else the first that has the line.

    Args:
        file: Name of the source.
        line: Line number.
        text: Text of the line, if known.
        sources: Sources of the report.
    """
    matching = [i for i, source in enumerate(sources) if source.name == file]
    if len(matching) < 2:
        return matching[0] if matching else None

    def unlike(i: int) -> int:
        there = _source_line(sources[i], line)
        return 2 if there is None else int(text is not None and there.strip() != text.strip())

    # `min` returns the first of equally good sources.
    return min(matching, key=unlike)


def _source_line(source: SourceExcerpt, line: int | None) -> str | None:
    return None if line is None else dict(zip(source.numbers, source.text, strict=True)).get(line)
