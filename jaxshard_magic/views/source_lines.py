"""Lines of the user's code by their place among a report's sources."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from jaxshard_magic.places import called_in_words, in_short, in_words
from jaxshard_magic.report import Source
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.terminal import cells, clip

_LEAST = 6  # columns of a line's text that are worth the room


class Lined(Protocol):
    """A part of a report that has a line, and the line that led there."""

    @property
    def file(self) -> str | None: ...
    @property
    def line(self) -> int | None: ...
    @property
    def called(self) -> str | None: ...


def line_facts(part: Lined, sources: Sequence[Source]) -> dict[str, Any]:
    """A part's line as the payload tells it: of which source, in words and in a table's few signs, its text."""
    file, line = part.file, part.line
    text = text_of(file, line, sources)
    return {
        "source": source_of(file, line, None, sources),
        "line": line,
        "place": None if line is None else printable(place_in_words(part)),
        "short": None if line is None else printable(in_short(file, line)),
        "calls": printable(calls_text([part.called]).removeprefix("# ")),
        "text": None if text is None else printable(text.strip()),
    }


def text_of(file: str | None, line: int | None, sources: Sequence[Source]) -> str | None:
    """The text of a line; None where it is not known."""
    index = source_of(file, line, None, sources)
    return None if index is None else _text(sources[index], line)


def place_in_words(part: Lined) -> str:
    """`gpt.py, line 31, called at cell [7], line 12`; empty where no line is known."""
    if part.line is None:
        return ""
    where = in_words(part.file, part.line)
    return f"{where}, {called_in_words(part.called)}" if part.called else where


def place_in_short(part: Lined) -> str:
    """`gpt.py:31 from [7]:12`; empty where no line is known."""
    calls = calls_text([part.called]).removeprefix("#")
    return "" if part.line is None else f"{in_short(part.file, part.line)}{calls}"


def calls_text(called: Iterable[str | None]) -> str:
    """The lines that led to one, as a comment behind its text: `# from [7]:12, 14`; empty for none.

    >>> calls_text(["cell [7]:14", "cell [7]:12", None, "cell [8]:3"])
    '# from [7]:12, 14, [8]:3'
    """
    split = (one.rpartition(":") for one in called if one)
    before, said = None, list[str]()
    for name, line in sorted({(name, int(line)) for name, _, line in split}):
        said.append(str(line) if name == before else in_short(name, line))
        before = name
    return f"# from {', '.join(said)}" if said else ""


def code_text(text: str | None, calls: str, room: int) -> str:
    """The text of a line in `room` columns, and behind it its `calls`, for which the text is cut first."""
    source = printable((text or "").strip())
    if not calls:
        return clip(source, room)
    for said in (calls, calls.replace("from ", "")):
        left = room - cells(said) - 2
        if source and left >= _LEAST:
            return f"{clip(source, left)}  {said}"
    return clip(calls, room)


def source_of(file: str | None, line: int | None, text: str | None, sources: Sequence[Source]) -> int | None:
    """The position of the source that a line is of, None for none.

    Two cells, or files of different folders, may have one name: then it is the one with this `text` on that line,
    else the first that has the line.
    """
    named = [i for i, source in enumerate(sources) if source.name == file]
    if len(named) < 2:
        return named[0] if named else None

    def unlike(i: int) -> int:
        there = _text(sources[i], line)
        return 2 if there is None else int(text is not None and there.strip() != text.strip())

    return min(named, key=unlike)


def _text(source: Source, line: int | None) -> str | None:
    return None if line is None else dict(zip(source.numbers, source.text, strict=True)).get(line)
