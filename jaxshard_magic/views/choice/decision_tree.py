"""Usual decision path as a tree: questions from top to bottom, and beside each question the results of its answers.

The path of this step is strong, other branches are quiet. If an answer is unknown, the branches from there are dashed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxshard_magic.report.choice import Question
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.html_tags import escaped, join_nonempty, table, unbroken
from jaxshard_magic.views.svg import coordinate, drawing, rect
from jaxshard_magic.views.svg import label as svg_text
from jaxshard_magic.views.terminal import wrap
from jaxshard_magic.views.words.choice import figures_text, path_steps

WIDTH, BOX, LEAF = 584, 392, 128  # px: widths of the drawing, of a question, of a result
PAD, GAP = 9, 26  # px: padding of a box, space between questions
SPINE = 24  # px from the left edge to the line between questions
LETTERS, SMALL = 12, 11  # font sizes in px
LINE = 16  # line height in px
LONG = 24  # letters above which a word may be broken
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
# The browser chooses the font: lines are broken by the widths of a wide one, so that they fit in any.
_EMS = {  # em: letters of this width
    0.34: " .,:;'|!ijlI\u202f\u00a0",
    0.43: 'frt/()[]-"',
    1.0: "mwMW%@=+<>\u2026",
}
_EM = {letter: em for em, letters in _EMS.items() for letter in letters}
_CAPITAL, _ELSE, _HEAVIER = 0.79, 0.64, 1.13  # em of other capitals, em of other ASCII letters, factor for bold


@dataclass(frozen=True)
class AnswerBranch:
    """Answer of a question.

    Attributes:
        answer: "yes" or "no".
        leaf: Result of the answer; "" if the next question follows.
        emphasis: `STRONG`, `UNSURE` or `QUIET`.
    """

    answer: str
    leaf: str
    emphasis: str


@dataclass(frozen=True)
class QuestionNode:
    """Question of the tree.

    Attributes:
        question: Question and its answer.
        emphasis: `STRONG`, `UNSURE` or `QUIET`, for the box.
        branches: Both answers, yes first.
    """

    question: Question
    emphasis: str
    branches: tuple[AnswerBranch, AnswerBranch]

    @property
    def leaves(self) -> list[AnswerBranch]:
        """Answers that end the path."""
        return [branch for branch in self.branches if branch.leaf]

    @property
    def onward(self) -> list[AnswerBranch]:
        """Answers that continue to the next question."""
        return [branch for branch in self.branches if not branch.leaf]


def nodes(path: Sequence[Question]) -> list[QuestionNode]:
    """Return the questions of a path in order.

    An answer of the last question without a result of its own leads to `NO_ANSWER`.
    """
    questions = []
    for i, (question, reached) in enumerate(path_steps(path)):
        end = NO_ANSWER if i == len(path) - 1 else ""
        ways = (
            AnswerBranch("yes", question.yes or end, _way(question, reached, True)),
            AnswerBranch("no", question.no or end, _way(question, reached, False)),
        )
        questions.append(QuestionNode(question, STRONG if reached else QUIET if reached is False else UNSURE, ways))
    return questions


def _way(question: Question, reached: bool | None, answer: bool) -> str:
    """Return the emphasis of one answer.

    Args:
        question: Question.
        reached: Whether the path comes to the question; None if unknown.
        answer: Answer of the branch.
    """
    if reached is False or question.answer is (not answer):
        return QUIET
    return STRONG if reached and question.answer is answer else UNSURE


def tree_html(path: Sequence[Question]) -> str:
    """Return the tree as an SVG drawing and as a folded table; empty without questions."""
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
    # Some front ends drop drawings from untrusted output, so the folded table repeats the tree in words.
    return join_nonempty([f"<div>{drawing(WIDTH, y + 1, label, marks)}</div>", _folded(path)])


def _spoken(path: Sequence[Question]) -> Iterator[str]:
    """Yield the questions with the answers in effect, for a screen reader."""
    for each in nodes(path):
        taken = [b for b in each.branches if b.emphasis != QUIET]
        said = " or ".join(f"{b.answer}, {b.leaf or NEXT}" for b in taken) or "not asked"
        yield f"{each.question.asks} {said}"


def width_of(letters: str, size: float) -> float:
    """Return an upper bound for the width of text in px, in a common sans-serif font.

    Args:
        letters: Text.
        size: Font size in px.
    """
    return size * sum(_EM.get(c) or (_CAPITAL if c.isupper() else _ELSE if c.isascii() else 1.0) for c in letters)


def break_lines(said: str, room: float, size: float, *, bold: bool = False) -> list[str]:
    """Break text into lines; a word longer than a line is broken as well.

    Args:
        said: Text.
        room: Width of a line in px.
        size: Font size in px.
        bold: Whether the text is bold, and so wider.
    """
    lines, line, scale = list[str](), "", _HEAVIER if bold else 1.0
    for word in printable(said).split():
        while word:
            longer = f"{line} {word}" if line else word
            if scale * width_of(longer, size) <= room:
                line, word = longer, ""
            elif line:
                lines.append(line)
                line = ""
            else:
                piece = next(i for i in range(len(word), 0, -1) if i == 1 or scale * width_of(word[:i], size) <= room)
                lines.append(word[:piece])
                word = word[piece:]
    return [*lines, line] if line else lines


def _leaf_lines(branch: AnswerBranch) -> list[str]:
    letter = 0.61 * LETTERS  # px, in a monospaced font
    return wrap(printable(branch.leaf), int((LEAF - 2 * PAD) / letter))


def _texts(each: QuestionNode) -> tuple[list[str], list[str]]:
    """Return the lines of a question, and the lines of its figures."""
    room = BOX - 2 * PAD
    asks = break_lines(each.question.asks, room, LETTERS, bold=each.emphasis == STRONG)
    return asks, break_lines(figures_text(each.question), room, SMALL)


def _height(each: QuestionNode) -> float:
    own = LINE * sum(map(len, _texts(each))) + 2 * PAD - 2
    beside = sum(LINE * len(_leaf_lines(b)) + PAD for b in each.leaves) + 8 * (len(each.leaves) - 1)
    return max(own, beside)


def _question(each: QuestionNode, y: float, height: float) -> Iterator[str]:
    yield rect(1, y, BOX - 1, height, f'fill="none" {_LINES[each.emphasis]}')
    asks, figures = _texts(each)
    at = y + (height - LINE * (len(asks) + len(figures))) / 2 + 12
    ink = _INK[each.emphasis]
    for i, line in enumerate((*asks, *figures)):
        first = i < len(asks)
        weight = _BOLD if first and each.emphasis == STRONG else ""
        yield svg_text(PAD, at + LINE * i, line, LETTERS if first else SMALL, ink + weight)


def _leaves(each: QuestionNode, y: float, height: float) -> Iterator[str]:
    shown = [(branch, _leaf_lines(branch)) for branch in each.leaves]
    sizes = [LINE * len(lines) + PAD for _, lines in shown]
    top = y + (height - sum(sizes) - 8 * (len(shown) - 1)) / 2
    for (branch, lines), size in zip(shown, sizes, strict=True):
        left, middle, strong = WIDTH - LEAF, top + size / 2, branch.emphasis == STRONG
        ink = _INK[branch.emphasis] + _BOLD * strong
        yield f'<path d="M{BOX} {coordinate(middle)}H{left}" {_LINES[branch.emphasis]}/>'
        yield svg_text((BOX + left) / 2, middle - 6, branch.answer, SMALL, _MIDDLE + ink)
        paint = 'fill="currentColor" fill-opacity=".1"' if strong else 'fill="none"'
        yield rect(left, top, LEAF - 1, size, f"{paint} {_LINES[branch.emphasis]}")
        for i, line in enumerate(lines):
            yield svg_text(left + PAD, top + LINE * i + 16, line, LETTERS, _MONO + ink)
        top += size + 8


def _onward(onward: Sequence[AnswerBranch], y: float) -> Iterator[str]:
    """Yield the line to the next question, as strong as the strongest answer that continues there."""
    way = min((branch.emphasis for branch in onward), key=(STRONG, UNSURE, QUIET).index)
    answer = " or ".join(branch.answer for branch in onward)
    yield f'<path d="M{SPINE} {coordinate(y)}v{GAP}" {_LINES[way]}/>'
    yield svg_text(SPINE + 8, y + GAP / 2 + 4, answer, SMALL, _INK[way] + _BOLD * (way == STRONG))


def _folded(path: Sequence[Question]) -> str:
    head = [("question", "wrap"), ("answer", "left"), ("figures", "wrap"), ("yes leads to", "wrap")]
    rows = []
    for each in nodes(path):
        yes, no = (_leads(branch) for branch in each.branches)
        answer = {True: "yes", False: "no", None: "not known"}[each.question.answer]
        rows.append([wrapping_html(each.question.asks), answer, wrapping_html(each.question.because), yes, no])
    table_html = table([*head, ("no leads to", "wrap")], rows)
    return f"<details><summary><small>The same in words</small></summary>\n{table_html}</details>"


def wrapping_html(value: str) -> str:
    """Return HTML that breaks between words only; words longer than `LONG` letters may break anywhere."""
    return " ".join(
        f'<span style="overflow-wrap:anywhere">{escaped(word)}</span>' if len(word) > LONG else unbroken(word)
        for word in value.split(" ")
    )


def _leads(branch: AnswerBranch) -> str:
    """Return the result of an answer as HTML."""
    leaf = f"<code>{wrapping_html(branch.leaf)}</code>" if branch.leaf else NEXT
    return f"<b>{leaf}</b>" if branch.emphasis == STRONG else leaf


def lines(path: Sequence[Question], room: int) -> list[str]:
    """Return the tree for a terminal; `>` marks the path of this step, `?` unknown answers.

    Args:
        path: Questions of the usual decision path.
        room: Maximal columns of a line.
    """
    if not path:
        return []
    signs = {STRONG: ">", UNSURE: "?", QUIET: " "}
    text_lines = wrap(f"{TITLE} (> the way taken, ? not known)", room)
    for each in nodes(path):
        text_lines += wrap(printable(each.question.asks), room, f"{signs[each.emphasis]} ", "  ")
        figures = figures_text(each.question)
        text_lines += wrap(printable(figures), room, "    ", "    ") if figures else []
        for branch in each.branches:
            start = f"    {signs[branch.emphasis]} {branch.answer}: "
            text_lines += wrap(printable(branch.leaf or NEXT), room, start, " " * len(start))
    return text_lines
