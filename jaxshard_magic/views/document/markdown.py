"""Documents as GitHub-flavoured Markdown: tables with pipes, hints as a list, lines to paste as code.

Footguns:
- Signs in words are escaped, and code has a fence that is longer than any in it. In a table a pipe ends a cell even in
  code, where two backslashes before it can't be told from one: such code becomes text there.
- A line break ends a row of a table. No words have one, as all pass through `printable`.
"""

import re
from collections.abc import Iterable, Sequence

from jaxshard_magic.report.choice import Question
from jaxshard_magic.report.parts import mesh_text
from jaxshard_magic.views.choice import decision_tree
from jaxshard_magic.views.document import parts as doc
from jaxshard_magic.views.document.text import row_drawing
from jaxshard_magic.views.format import count_text, device_text, printable
from jaxshard_magic.views.source_lines import code_text
from jaxshard_magic.views.timeline.grid import grid
from jaxshard_magic.views.training import chart
from jaxshard_magic.views.words import Span

LANES, SOURCE, BLOCKS = 100, 80, 24  # columns of a timeline, of a line of code, of a curve
# GitHub makes links of addresses, and formulas of what stands between dollars.
_SIGNS = re.compile(r"([\\`*_{}\[\]<>#|~&!$]|:(?=//)|(?<=www)\.)")
# It also links users, issues and mail addresses, and draws emoji, in text as it reads: an escape stops none of them, an
# empty comment between the sign and the name does.
_REFERENCE = re.compile(r"(?<=@)(?=\w)|(?<=#)(?=\d)|(?<=:)(?=[\w+-]+:)")
_ORDERED = re.compile(r"(\d+)([.)])(?=\s|$)")
_BACKTICKS = re.compile("`+")


def to_markdown(parts: Iterable[doc.Part | doc.ChoicePart]) -> str:
    """Return the parts of a document as Markdown."""
    return "\n\n".join(block for part in parts for block in _blocks(part)) + "\n"


def _blocks(part: doc.Part | doc.ChoicePart) -> list[str]:
    """Return the paragraphs, tables and lists of a part."""
    match part:
        case doc.Section():
            return _section(part)
        case doc.Header():
            return _header(part)
        case doc.Paragraph(words, sign):
            return [f"{f'**{sign.capitalize()}:** ' if sign else ''}{_start(_words(words))}"] if words else []
        case doc.Notes(lines, _, shows):
            return [_start(_words(line)) for line in lines] if doc.MARKDOWN in shows else []
        case doc.KeyFigures(figures, _):
            rows = [[_escaped(f.label), f"**{_escaped(f.value)}**", _escaped(f.note)] for f in figures]
            return [_grid(["", "", ""], ["left", "right", "left"], rows)]
        case doc.Hints():
            return _hints(part)
        case doc.Table():
            return [f"**{_escaped(part.title)}**"] * bool(part.title) + [_table(part)]
        case doc.Breakdown():
            return _breakdown(part)
        case doc.MemoryBars():
            return _memory(part)
        case doc.RowFigure():
            return _figure(part) if doc.MARKDOWN in part.shows else []
        case doc.ActionLanes(pipeline):
            return [_fenced(grid(pipeline, LANES))]
        case doc.RecordedLanes() | doc.Charts():
            return []
        case doc.Leaves():
            return _leaves(part)
        case doc.DecisionPath(path):
            return _decision_path(path)
        case doc.Candidates():
            return _candidates(part)
        case doc.Commands(lead, lines):
            return [_start(_escaped(lead)), _fenced(lines)]


def _section(part: doc.Section) -> list[str]:
    if doc.MARKDOWN not in part.shows:
        return []
    title = doc.plain(part.heading(doc.MARKDOWN)).rstrip(".")
    lead = " ".join(_escaped(line) for line in part.about if line)
    head = [f"### {_escaped(title)}"] * bool(title) + [_start(lead)] * bool(lead)
    return [*head, *(block for one in part.parts for block in _blocks(one))]


def _header(part: doc.Header) -> list[str]:
    typed = f" {_code(part.typed)}" if part.typed else ""
    facts = (_code(mesh_text(part.mesh)) if part.mesh else "", _escaped(part.devices[1]), _escaped(part.name))
    return [f"## {_escaped(part.subject)}{typed}", _start(" \u00b7 ".join(filter(None, facts)))]


def _hints(part: doc.Hints) -> list[str]:
    items = []
    for hint in part.hints:
        item = f"- **{_escaped(hint.level)}:** {_escaped(hint.message)}"
        # A fence belongs to an item if it is indented like the item's text.
        fix = _fenced(hint.fix).replace("\n", "\n  ") if hint.fix else ""
        items.append(f"{item}\n\n  {fix}" if fix else item)
    shown, rest = items[: part.shown], items[part.shown :]
    return ["\n".join(shown), *([f"{count_text(len(rest))} more:", "\n".join(rest)] if rest else [])]


def _breakdown(part: doc.Breakdown) -> list[str]:
    rows = [[_escaped(p.kind), _code(p.over, table=True), _escaped(p.time), _escaped(p.share_text)] for p in part.parts]
    table = _grid(["part", "over", "time", "share"], ["left", "left", "right", "right"], rows)
    more = [f"{count_text(part.omitted)} more take {_escaped(part.omitted_text)}."] if part.omitted else []
    return [f"**{part.subject}, {_escaped(part.total)}**", table, *more]


def _memory(part: doc.MemoryBars) -> list[str]:
    heads = ["", *part.rows[0].roles, "peak", *["measured peak"] * part.measured]
    rows = []
    for row in part.rows:
        stage = f" ({row.stage})" if row.stage else ""
        error = f" ({row.error})" if row.error else ""
        measured = [f"{row.measured_text}{error}"] * part.measured
        cells = (f"{device_text(row.group.devices)}{stage}", *row.roles.values(), f"{row.peak_of_limit}", *measured)
        rows.append([_escaped(cell) for cell in cells])
    more = [f"{part.omitted}."] if part.omitted else []
    return [_grid(heads, ["left", *["right"] * (len(heads) - 1)], rows), *more]


def _figure(part: doc.RowFigure) -> list[str]:
    # Code keeps blanks, which stand for idle experts.
    rows = [[_escaped(row.name), _code(row_drawing(row), table=True), _escaped(row.text)] for row in part.rows]
    return [_start(_escaped(part.lead)), *([_grid(["", "", ""], ["left"] * 3, rows)] if rows else [])]


def _leaves(part: doc.Leaves) -> list[str]:
    items = [f"- {_code(path)} {_escaped(amount)}".rstrip() for path, amount in part.leaves[: part.most]]
    left = len(part.leaves) - part.most
    items += [f"- and {count_text(left)} more"] * (left > 0)
    return [_start(_escaped(part.sentence)), *(["\n".join(items)] if items else [])]


def _decision_path(path: Sequence[Question]) -> list[str]:
    """Return the questions as a list, with the way taken in bold."""
    items = []
    for each in decision_tree.nodes(path):
        items.append(f"- {_emphasised(each.question.asks, each.emphasis)}")
        figures = decision_tree.figures_text(each.question)
        items += [f"  - {_start(_escaped(figures))}"] * bool(figures)
        for branch in each.branches:
            answer = f"{branch.answer}: {branch.leaf or decision_tree.NEXT}"
            items.append(f"  - {_emphasised(answer, branch.emphasis)}")
    return [f"### {_escaped(decision_tree.TITLE)}", "\n".join(items)]


def _emphasised(text: str, emphasis: str) -> str:
    if emphasis == decision_tree.STRONG:
        return f"**{_escaped(text)}**"
    return f"{_escaped(text)} (not known)" if emphasis == decision_tree.UNSURE else _escaped(text)


def _candidates(part: doc.Candidates) -> list[str]:
    rows = []
    for candidates, why in part.by_reason:
        for i, one in enumerate(candidates):
            name = _code(f"{one.strategy} {one.options}".rstrip(), table=True)
            mesh = _code(mesh_text(one.mesh), table=True)
            # Candidates with one reason stand together: it is given once.
            rows.append([name, mesh, _escaped(one.bound), _escaped(one.needs), _escaped(why) if i == 0 else ""])
    table = _grid(["strategy", "mesh", "at least", "needs about", "why"], ["", "", "right", "right", ""], rows)
    more = [f"And {count_text(part.omitted)} more."] if part.omitted else []
    return [_start(_escaped(f"{part.outcome}:")), *([table] if rows else []), *more]


def _table(part: doc.Table) -> str:
    shown = [i for i, c in enumerate(part.columns) if doc.MARKDOWN in c.shows]
    heads = [_escaped(part.columns[i].heading(doc.MARKDOWN)) for i in shown]
    rows = []
    for row in part.rows:
        cells = [_cell(row.cells[i]) for i in shown]
        cells[0] = f"\\* {cells[0]}" if row.front else cells[0]
        if row.below and (row.warn or row.always):
            # A table has no lines of its own below a row.
            cells[0] += f"<br>{_words(row.below, table=True)}"
        rows.append(cells)
    return _grid(heads, [part.columns[i].align for i in shown], rows)


def _grid(heads: Sequence[str], aligns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with pipes.

    Args:
        heads: Headings as Markdown.
        aligns: "left", "right" or "wrap" for each column.
        rows: Cells as Markdown.
    """
    rule = ("---:" if align == "right" else "---" for align in aligns)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, tuple(rule), *rows))


def _cell(cell: doc.AnyCell) -> str:
    match cell:
        case doc.WordCell(words, more, _, code):
            text = _code(doc.plain(words), table=True) if code else _words(words, table=True)
            return f"{text} {_words(more, table=True)}" if more else text
        case doc.CodeCell(text, callers, instead):
            return _escaped(instead) if instead else _code(code_text(text, callers, SOURCE), table=True)
        case doc.TimeCell(text):
            return _escaped(text)
        case doc.ListCell(items):
            return ", ".join(_words(words, True) + (f" ({_escaped(job)})" if job else "") for words, job in items)
        case doc.CurveCell(curve, scaled) if (scale := chart.scale_of(scaled)) is not None:
            return _code(chart.blocks(curve, scale, max(c.step[-1] for c in scaled), BLOCKS), table=True)
        case _:
            return ""


def _words(words: doc.Words, table: bool = False) -> str:
    """Return words as Markdown.

    Args:
        words: Words.
        table: Whether they stand in a table.
    """
    return "".join(_span(span, table) for span in _joined(doc.spans(words)))


def _joined(parts: Iterable[Span]) -> Iterable[Span]:
    """Yield spans with mesh axes and the signs between them as one: `data+model` is one piece of code."""
    run = ""
    for span in parts:
        if span.kind == "axis" or (run and span.text == "+"):
            run += span.text
            continue
        if run:
            yield Span(run, "axis")
            run = ""
        yield span
    if run:
        yield Span(run, "axis")


def _span(span: Span, table: bool) -> str:
    match span.kind:
        case "strong":
            return f"**{_escaped(span.text)}**"
        case "code" | "axis":
            return _code(span.text, table)
        case "times":
            return f" \u00d7{span.text}"
        case _:
            return _escaped(span.text)


def _escaped(text: str) -> str:
    """Return text of which no sign is markup."""
    return "<!-- -->".join(_SIGNS.sub(r"\\\1", piece) for piece in _REFERENCE.split(printable(text)))


def _start(text: str) -> str:
    """Return text for the start of a line, where some signs begin a list or a heading."""
    text = text.lstrip()
    if text[:1] in ("-", "+", "=", ":"):
        return f"\\{text}"
    return _ORDERED.sub(r"\1\\\2", text, count=1) if _ORDERED.match(text) else text


def _code(text: str, table: bool = False) -> str:
    """Return text as code; empty for no text.

    Args:
        text: Plain text.
        table: Whether it stands in a table.
    """
    text = printable(text)
    if table and "|" in text:
        return _escaped(text)
    if not text.strip():
        return ""
    fence = "`" * (1 + max(map(len, _BACKTICKS.findall(text)), default=0))
    # One space at each end is dropped by a reader, where both ends have one.
    space = " " if text[0] in "` " or text[-1] in "` " else ""
    return f"{fence}{space}{text}{space}{fence}"


def _fenced(lines: Iterable[str]) -> str:
    """Return lines as a block of code."""
    body = [printable(line) for line in lines]
    longest = max((len(run) for line in body for run in _BACKTICKS.findall(line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}text", *(line.rstrip() for line in body), fence])
