"""Gloo's lines told apart from what else is written on a file descriptor.

Whenever devices of several processes connect, jaxlib's gloo writes for each of them (jaxlib 0.10.2, 0.12.0), on file
descriptor 1,

    [Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1

from several threads at once and piece by piece, so that lines are mixed, number by number. Text is taken away where it
is exactly such lines, mixed in whatever way; anything else is left.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

RANK = "[Gloo] Rank "
# The pieces of one line, in the order in which a thread writes them; None for a number.
PIECES = (
    RANK,
    None,
    " is connected to ",
    None,
    " peer ranks. ",
    "Expected number of connected peer ranks is : ",
    None,
    "\n",
)
_DIGITS = 4  # of a number, at most
_LINES = 512  # mixed into each other, at most


@dataclass(frozen=True)
class _Mixed:
    """Lines of gloo's read up to some place: how often each of PIECES was read, the number of peers, which is the same
    for all, and the highest rank; -1 before there is one."""

    counts: tuple[int, ...] = (0,) * len(PIECES)
    peers: int = -1
    rank: int = -1

    @property
    def is_whole(self) -> bool:
        return len(set(self.counts)) == 1

    def takes(self, piece: int) -> bool:
        """Whether one of the lines, or another one, goes on with this piece."""
        before = self.counts[piece - 1] if piece else _LINES
        return self.counts[piece] < before

    def after(self, piece: int) -> "_Mixed":
        counts = (*self.counts[:piece], self.counts[piece] + 1, *self.counts[piece + 1 :])
        return replace(self, counts=counts)

    def numbered(self, piece: int, number: int) -> "_Mixed | None":
        """These lines after a number, None where it can't be this one."""
        if piece == PIECES.index(None):
            rank, peers = max(self.rank, number), self.peers
        else:
            rank, peers = self.rank, number
        if peers >= 0 and (peers < max(rank, 1) or self.peers not in (-1, peers)):
            return None
        return replace(self.after(piece), peers=peers, rank=rank)


class GlooFilter:
    """Takes gloo's lines out of a text that comes bit by bit.

    >>> only = GlooFilter()
    >>> only.feed("a 7[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connec")
    'a 7'
    >>> only.feed("ted peer ranks is : 1\\n5 b")
    '5 b'
    """

    def __init__(self) -> None:
        self.held = ""  # what may become a line of gloo's

    def feed(self, text: str) -> str:
        """Take the next bit, and return what is known by now not to be of gloo's lines."""
        text, shown = self.held + text, []
        while (start := text.find(RANK)) >= 0:
            end = _end_of_lines(text, start)
            if end is None:
                shown.append(text[:start])
                self.held = text[start:]
                return "".join(shown)
            after = start + len(RANK) if end == start else start
            shown.append(text[:after])
            text = text[max(end, after) :]
        cut = len(text) - _begun(text)
        self.held = text[cut:]
        return "".join((*shown, text[:cut]))

    def release(self) -> str:
        """Stop waiting for the rest of what may be gloo's, and return it."""
        text, self.held = self.held, ""
        return text


def _begun(text: str) -> int:
    """Return how many of the last characters may begin a line of gloo's."""
    return next((n for n in range(min(len(text), len(RANK) - 1), 0, -1) if RANK.startswith(text[-n:])), 0)


def _end_of_lines(text: str, start: int) -> int | None:
    """Return where mixed lines of gloo's end that begin at `start`: `start` itself where they are something else, None
    where the text ends before they do."""
    todo, seen, ends_early = [(start, _Mixed())], set[tuple[int, _Mixed]](), False
    while todo:
        at, lines = todo.pop()
        if lines.is_whole and at > start:
            return at
        for after, rest in _steps(text, at, lines):
            if after is None:
                ends_early = True
            elif (after, rest) not in seen:
                seen.add((after, rest))
                todo.append((after, rest))
    return None if ends_early else start


def _steps(text: str, at: int, lines: _Mixed) -> Iterator[tuple[int | None, _Mixed]]:
    """The ways to read on at a place in the text: where a piece of one of the lines ends, None where the text ends
    before, and the lines after it."""
    for i, piece in enumerate(PIECES):
        if not lines.takes(i):
            continue
        if piece is None:
            yield from _numbers(text, at, i, lines)
        elif text.startswith(piece, at):
            yield at + len(piece), lines.after(i)
        elif piece.startswith(text[at:]):
            yield None, lines


def _numbers(text: str, at: int, piece: int, lines: _Mixed) -> Iterator[tuple[int | None, _Mixed]]:
    """The numbers that begin at a place, of one digit and more: those of two lines may stand side by side."""
    for end in range(at + 1, at + _DIGITS + 1):
        digits = text[at:end]
        if len(digits) < end - at:  # more of it may be still to come
            yield None, lines
            return
        if not (digits.isascii() and digits.isdecimal()) or (len(digits) > 1 and digits[0] == "0"):
            return
        if (after := lines.numbered(piece, int(digits))) is not None:
            yield end, after
