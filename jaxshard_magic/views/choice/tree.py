"""The usual decision path as a tree: questions below each other, and beside them what answers lead to.

The way that this step takes is strong, the others are quiet; where an answer is not known the ways from it are dashed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxshard_magic.report.choice import Question
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.svg import drawing, number, rect
from jaxshard_magic.views.svg import label as svg_text
from jaxshard_magic.views.tags import joined, table, text, unbroken
from jaxshard_magic.views.terminal import wrap
from jaxshard_magic.views.words.choice import because, steps

WIDTH, BOX, LEAF = 584, 392, 128  # px: of the whole, of a question, of what an answer leads to
PAD, GAP = 9, 26  # px inside a box, and between questions
SPINE = 24  # px from the left to the line that joins questions
LETTERS, SMALL = 12, 11  # px
LINE = 16  # px from line to line
LONG = 24  # letters from which on a word may be broken
TITLE = "The usual decision path, with this step's figures"
NEXT, NO_ANSWER = "the next question", "no usual answer"

STRONG, UNSURE, QUIET = "strong", "unsure", "quiet"
_LINES = {
    STRONG: 'stroke="currentColor" stroke-width="2"',
    UNSURE: 'stroke="currentColor" stroke-opacity=".8" stroke-width="1.4" stroke-dasharray="4 3"',
    QUIET: 'stroke="currentColor" stroke-opacity=".5"',
}
_INK = {STRONG: "", UNSURE: "", QUIET: ' fill-opacity=".75"'}
_BOLD, _MIDDLE = ' font-weight="600"', ' text-anchor="middle"'
_MONO = ' font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace"'
_EMS = {  # widths in a wide sans-serif font: of these letters, of other capitals, and of all else
    0.34: " .,:;'|!ijlI\u202f\u00a0",
    0.43: 'frt/()[]-"',
    1.0: "mwMW%@=+<>\u2026",
}
_EM = {letter: em for em, letters in _EMS.items() for letter in letters}
_CAPITAL, _ELSE, _HEAVIER = 0.79, 0.64, 1.13


@dataclass(frozen=True)
class Branch:
    """One answer of a question; `leaf` is "" where it leads to the next question."""

    answer: str
    leaf: str
    way: str


@dataclass(frozen=True)
class Node:
    """A question of the tree, with how its box is drawn and what its answers lead to."""

    question: Question
    way: str
    branches: tuple[Branch, Branch]

    @property
    def leaves(self) -> list[Branch]:
        return [branch for branch in self.branches if branch.leaf]

    @property
    def onward(self) -> list[Branch]:
        return [branch for branch in self.branches if not branch.leaf]


def nodes(path: Sequence[Question]) -> list[Node]:
    """The questions in their order; an answer of the last that leads nowhere has no usual answer."""
    questions = []
    for i, (question, reached) in enumerate(steps(path)):
        end = NO_ANSWER if i == len(path) - 1 else ""
        ways = (
            Branch("yes", question.yes or end, _way(question, reached, True)),
            Branch("no", question.no or end, _way(question, reached, False)),
        )
        questions.append(Node(question, STRONG if reached else QUIET if reached is False else UNSURE, ways))
    return questions


def _way(question: Question, reached: bool | None, answer: bool) -> str:
    if reached is False or question.answer is (not answer):
        return QUIET
    return STRONG if reached and question.answer is answer else UNSURE


def tree(path: Sequence[Question]) -> str:
    """The tree with what it says in words, folded, for where drawings are stripped; empty without questions."""
    if not path:
        return ""
    marks, y = list[str](), 1.0
    for each in nodes(path):
        height = _height(each)
        marks += _question(each, y, height)
        marks += _leaves(each, y, height)
        y += height
        if each.onward:
            marks += _onward(each.onward, y)
            y += GAP
    label = printable("The usual decision path: " + "; ".join(_spoken(path)))
    return joined([f"<div>{drawing(WIDTH, y + 1, label, marks)}</div>", _folded(path)])


def _spoken(path: Sequence[Question]) -> Iterator[str]:
    for each in nodes(path):
        taken = [b for b in each.branches if b.way != QUIET]
        said = " or ".join(f"{b.answer}, {b.leaf or NEXT}" for b in taken) or "not asked"
        yield f"{each.question.asks} {said}"


def width_of(letters: str, size: float) -> float:
    """Px that letters take at most in a common sans-serif font."""
    return size * sum(
        _EM.get(c) or (_CAPITAL if c.isupper() else _ELSE if c.isascii() else 1.0) for c in letters
    )


def folded(said: str, room: float, size: float, *, bold: bool = False) -> list[str]:
    """Words in lines of at most so many px; a word that is longer than a line is broken."""
    lines, line, scale = list[str](), "", _HEAVIER if bold else 1.0
    for word in printable(said).split():
        while word:
            tried = f"{line} {word}" if line else word
            if scale * width_of(tried, size) <= room:
                line, word = tried, ""
            elif line:
                lines.append(line)
                line = ""
            else:
                piece = next(
                    i for i in range(len(word), 0, -1) if i == 1 or scale * width_of(word[:i], size) <= room
                )
                lines.append(word[:piece])
                word = word[piece:]
    return [*lines, line] if line else lines


def _leaf_lines(branch: Branch) -> list[str]:
    letter = 0.61 * LETTERS
    return wrap(printable(branch.leaf), int((LEAF - 2 * PAD) / letter))


def _texts(each: Node) -> tuple[list[str], list[str]]:
    room = BOX - 2 * PAD
    asks = folded(each.question.asks, room, LETTERS, bold=each.way == STRONG)
    return asks, folded(because(each.question), room, SMALL)


def _height(each: Node) -> float:
    own = LINE * sum(map(len, _texts(each))) + 2 * PAD - 2
    beside = sum(LINE * len(_leaf_lines(b)) + PAD for b in each.leaves) + 8 * (len(each.leaves) - 1)
    return max(own, beside)


def _question(each: Node, y: float, height: float) -> Iterator[str]:
    yield rect(1, y, BOX - 1, height, f'fill="none" {_LINES[each.way]}')
    asks, figures = _texts(each)
    at = y + (height - LINE * (len(asks) + len(figures))) / 2 + 12
    ink = _INK[each.way]
    for i, line in enumerate((*asks, *figures)):
        first = i < len(asks)
        weight = _BOLD if first and each.way == STRONG else ""
        yield svg_text(PAD, at + LINE * i, line, LETTERS if first else SMALL, ink + weight)


def _leaves(each: Node, y: float, height: float) -> Iterator[str]:
    shown = [(branch, _leaf_lines(branch)) for branch in each.leaves]
    sizes = [LINE * len(lines) + PAD for _, lines in shown]
    top = y + (height - sum(sizes) - 8 * (len(shown) - 1)) / 2
    for (branch, lines), size in zip(shown, sizes, strict=True):
        left, middle, strong = WIDTH - LEAF, top + size / 2, branch.way == STRONG
        ink = _INK[branch.way] + _BOLD * strong
        yield f'<path d="M{BOX} {number(middle)}H{left}" {_LINES[branch.way]}/>'
        yield svg_text((BOX + left) / 2, middle - 6, branch.answer, SMALL, _MIDDLE + ink)
        paint = 'fill="currentColor" fill-opacity=".1"' if strong else 'fill="none"'
        yield rect(left, top, LEAF - 1, size, f"{paint} {_LINES[branch.way]}")
        for i, line in enumerate(lines):
            yield svg_text(left + PAD, top + LINE * i + 16, line, LETTERS, _MONO + ink)
        top += size + 8


def _onward(onward: Sequence[Branch], y: float) -> Iterator[str]:
    """The line to the next question, as strong as the strongest answer that leads there."""
    way = min((branch.way for branch in onward), key=(STRONG, UNSURE, QUIET).index)
    answer = " or ".join(branch.answer for branch in onward)
    yield f'<path d="M{SPINE} {number(y)}v{GAP}" {_LINES[way]}/>'
    yield svg_text(SPINE + 8, y + GAP / 2 + 4, answer, SMALL, _INK[way] + _BOLD * (way == STRONG))


def _folded(path: Sequence[Question]) -> str:
    head = [("question", "wrap"), ("answer", "left"), ("figures", "wrap"), ("yes leads to", "wrap")]
    rows = []
    for each in nodes(path):
        yes, no = (_leads(branch) for branch in each.branches)
        answer = {True: "yes", False: "no", None: "not known"}[each.question.answer]
        rows.append([typed(each.question.asks), answer, typed(each.question.because), yes, no])
    told = table([*head, ("no leads to", "wrap")], rows)
    return f"<details><summary><small>The same in words</small></summary>\n{told}</details>"


def typed(value: str) -> str:
    """HTML whose lines break between words alone, but for words that are too long for that."""
    return " ".join(
        f'<span style="overflow-wrap:anywhere">{text(word)}</span>' if len(word) > LONG else unbroken(word)
        for word in value.split(" ")
    )


def _leads(branch: Branch) -> str:
    leaf = f"<code>{typed(branch.leaf)}</code>" if branch.leaf else NEXT
    return f"<b>{leaf}</b>" if branch.way == STRONG else leaf


def lines(path: Sequence[Question], room: int) -> list[str]:
    """The tree for a terminal, in lines of at most `room` columns: `>` marks the way taken, `?` what is not known."""
    if not path:
        return []
    signs = {STRONG: ">", UNSURE: "?", QUIET: " "}
    told = wrap(f"{TITLE} (> the way taken, ? not known)", room)
    for each in nodes(path):
        told += wrap(printable(each.question.asks), room, f"{signs[each.way]} ", "  ")
        figures = because(each.question)
        told += wrap(printable(figures), room, "    ", "    ") if figures else []
        for branch in each.branches:
            start = f"    {signs[branch.way]} {branch.answer}: "
            told += wrap(printable(branch.leaf or NEXT), room, start, " " * len(start))
    return told
