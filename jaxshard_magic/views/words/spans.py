"""What sentences are made of: spans, axes and lines that a view can mark or open."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxshard_magic.places import in_words
from jaxshard_magic.views.format import count_text


@dataclass(frozen=True)
class Span:
    """A piece of a sentence; `kind` is text, strong, axis (a mesh axis), code (a name of the user's), memory (the
    devices that hold most) or line (one of the user's)."""

    text: str
    kind: str = "text"


def strong(text: str) -> Span:
    """A span in bold."""
    return Span(text, "strong")


def line_span(file: str | None, line: int) -> Span:
    """`cell [3], line 12`, which a view can open."""
    return Span(in_words(file, line), "line")


def called_spans(called: Iterable[str | None]) -> list[Span]:
    """`, called at cell [7], line 12`, where one line led to all that is told of; empty for several, and for none."""
    found = set(called)
    if len(found) != 1 or (one := found.pop()) is None:
        return []
    name, _, line = one.rpartition(":")
    return [Span(", called at "), line_span(name, int(line))]


def axes_spans(axes: Sequence[str] | None) -> list[Span]:
    """` over data and model`, empty where no axes are known."""
    if not axes:
        return []
    spans = [Span(" over ")]
    for i, axis in enumerate(axes):
        spans += [Span(" and ")] * (i > 0) + [Span(axis, "axis")]
    return spans


def axes_text(axes: Sequence[str] | None) -> str:
    """`data+model`: mesh axes in one word."""
    return "other groups" if axes is None else "+".join(axes)


def sentence_case(text: str) -> str:
    """`text` with a capital at its start."""
    return text[:1].upper() + text[1:]


def first_clause(message: str) -> tuple[str, str]:
    """A message's first clause with its colon or full stop, and the rest; a message of one clause, or with a
    long first one, is all rest."""
    ends = [i for mark in (": ", ". ") if 0 < (i := message.find(mark)) <= 100]
    return (message[: min(ends) + 1], message[min(ends) + 2 :]) if ends else ("", message)


def leaves_text(n: int) -> str:
    """`1 leaf`, `53 leaves`."""
    return "1 leaf" if n == 1 else f"{count_text(n)} leaves"
