"""Lines of the user's code by their place among a report's sources."""

from collections.abc import Sequence
from typing import Any

from jaxshard_magic.places import in_short, in_words
from jaxshard_magic.report import Source
from jaxshard_magic.views.format import printable


def line_facts(file: str | None, line: int | None, sources: Sequence[Source]) -> dict[str, Any]:
    """A line as the payload tells it: of which source, in words and in a table's few signs, its text."""
    index = source_of(file, line, None, sources)
    source = sources[index] if index is not None else None
    text = None if source is None else _text(source, line)
    return {
        "source": index,
        "line": line,
        "place": None if line is None else printable(in_words(file, line)),
        "short": None if line is None else printable(in_short(file, line)),
        "text": None if text is None else printable(text.strip()),
    }


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
