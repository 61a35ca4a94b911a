"""Spans of sentences: text, mesh axes and lines of code, so that views can mark or open them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxshard_magic.code_locations import line_text
from jaxshard_magic.views.format import count_text


@dataclass(frozen=True)
class Span:
    """Piece of a sentence.

    Attributes:
        text: Text.
        kind: "text", "strong", "axis" (a mesh axis), "code" (a name of the user's, as code), "name" (text of the user's
            with its signs as they are), "memory" (the fullest devices), "line" (a line of the user's code), "times"
            (how often something occurs), or "quiet" (less ink).
    """

    text: str
    kind: str = "text"


def strong(text: str) -> Span:
    """Return a bold span."""
    return Span(text, "strong")


def line_span(file: str | None, line: int) -> Span:
    """Return a line of code as a span that views can open: `cell [3], line 12`."""
    return Span(line_text(file, line), "line")


def called_spans(called: Iterable[str | None]) -> list[Span]:
    """Return the calling line: `, called at cell [7], line 12`; empty for several lines, and for none."""
    found = set(called)
    if len(found) != 1 or (one := found.pop()) is None:
        return []
    name, _, line = one.rpartition(":")
    return [Span(", called at "), line_span(name, int(line))]


def axes_spans(axes: Sequence[str] | None) -> list[Span]:
    """Return mesh axes in words: ` over data and model`; empty if unknown."""
    if not axes:
        return []
    spans = [Span(" over ")]
    for i, axis in enumerate(axes):
        spans += [Span(" and ")] * (i > 0) + [Span(axis, "axis")]
    return spans


def axes_text(axes: Sequence[str] | None) -> str:
    """Return mesh axes in one word: `data+model`; `other groups` for None."""
    return "other groups" if axes is None else "+".join(axes)


def sentence_case(text: str) -> str:
    """Return `text` with a capital first letter."""
    return text[:1].upper() + text[1:]


def first_clause(message: str) -> tuple[str, str]:
    """Return the first clause of a message with its colon or full stop, and the remaining text.

    A message of one clause, or with a first clause over 100 characters, has an empty first part.
    """
    ends = [i for mark in (": ", ". ") if 0 < (i := message.find(mark)) <= 100]
    return (message[: min(ends) + 1], message[min(ends) + 2 :]) if ends else ("", message)


def leaves_text(n: int) -> str:
    """Return the number of leaves: `1 leaf`, `53 leaves`."""
    return "1 leaf" if n == 1 else f"{count_text(n)} leaves"
