"""A step exported as plain JAX: as text to paste, and as HTML with a comparison of communication against the plan."""

from collections import defaultdict
from collections.abc import Iterable
from html import escape
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Number, Operator, String

from jaxshard_magic.report import Collective, MeshInfo
from jaxshard_magic.views.colours import BOTH
from jaxshard_magic.views.communication import CollectiveGroup
from jaxshard_magic.views.format import byte_text, count_text, printable
from jaxshard_magic.views.html_tags import SIGNS, axis, code, document, escaped, join_nonempty, mesh_axes, small, table

if TYPE_CHECKING:
    from jaxshard_magic.codegen import Code

MOST_ROWS = 12
_YES = "\u2714\ufe0e"
_LETTERS = {Comment: "com", String: "str", Number: "num", Keyword: "kw", Operator.Word: "kw"}
_HUES = {"kw": BOTH["a2"], "str": BOTH["a1"], "com": BOTH["rule"], "num": BOTH["a0"]}
_FONT = "12px/18px ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace"
_PRE = f"margin:0;padding:0;border:0;background:none;color:inherit;font:{_FONT};white-space:pre;overflow:visible"
_CELL = "border:0;background:none;text-align:left;vertical-align:top"


def to_text(program: "Code", width: int | None = None) -> str:
    """Return the program unchanged: the text is for pasting, so `width` is ignored."""
    return program.text


def to_html(program: "Code") -> str:
    """Render a fragment for a notebook or a page: a title, the communication, and the program."""
    parts = [_title(program), _verdict(program), _collectives(program), _program(program.text)]
    return f'<div class="jss">\n{join_nonempty(parts)}\n</div>\n'


def page(program: "Code") -> str:
    """Render the same as a whole HTML document; the theme, light or dark, is the reader's."""
    return document(printable(f"{program.name} under {program.strategy}, in plain JAX"), to_html(program))


def verdict(program: "Code") -> str:
    """Compare the communication of the program with the plan's in one sentence.

    Bytes are bytes sent by one device in a step.
    """
    if program.planned is None or program.sent is None:
        return "What it moves is not known: the compiler gave no text to read that from."
    if not program.sent and not program.planned:
        return "Moves nothing between devices, as the plan."
    in_program, in_plan = CollectiveGroup(program.sent), CollectiveGroup(program.planned)
    if program.same:
        return f"Moves what the plan moves: {in_program.sent_text} per device and step."
    extra = _extra_bytes(program)
    if not extra:
        return f"Sends as much as the plan, by other collectives: {in_program.sent_text} per device and step."
    amount = f"{byte_text(abs(extra))} {'more' if extra > 0 else 'less'}"
    return f"Sends {amount} per device and step than the plan: {in_program.sent_text} instead of {in_plan.sent_text}."


def _extra_bytes(program: "Code") -> int:
    """Return the bytes sent by one device per step, program minus plan."""
    return CollectiveGroup(program.sent or ()).sent - CollectiveGroup(program.planned or ()).sent


def _title(program: "Code") -> str:
    axes = mesh_axes(_mesh(program))
    lines = _line_count(program.text)
    size = f"{count_text(lines)} line{'s' * (lines != 1)} of plain JAX"
    return f"<p>{code(program.name)} under <b>{escaped(program.strategy)}</b> &nbsp; {axes} &nbsp; {size}</p>"


def _mesh(program: "Code") -> MeshInfo:
    """Return a mesh of named axes alone, without devices."""
    return MeshInfo.of_axes(program.mesh)


def _verdict(program: "Code") -> str:
    level = "ok" if program.same else "warning" if program.same is not None and _extra_bytes(program) > 0 else "info"
    sign = f'<span class="jss-{level}">{SIGNS.get(level, _YES)}</span>'
    return f'<p class="jss-verdict">{sign} {escaped(verdict(program))}</p>'


def _collectives(program: "Code") -> str:
    """Return a table of the collectives of program and plan; rows that differ come first.

    Empty if both agree, or if the collectives of one are unknown.
    """
    if program.same is not False:
        return ""
    rows, mesh = _collective_pairs(program.sent or (), program.planned or ()), _mesh(program)
    head = [("collective", "left"), ("over", "wrap"), ("bytes each", "right"), ("in the program", "right")]
    head += [("in the plan", "right"), ("bytes sent", "right")]
    shown, left = rows[:MOST_ROWS], len(rows) - MOST_ROWS
    more = f"{count_text(left)} more are told where the program begins." if left > 0 else ""
    return join_nonempty([table(head, [_cells(*row, mesh) for row in shown]), small(more)])


def _collective_pairs(
    sent: Iterable[Collective], planned: Iterable[Collective]
) -> list[tuple[CollectiveGroup, CollectiveGroup]]:
    """Pair the collectives of program and plan by kind, axes and bytes.

    Pairs with different counts come first, then pairs that send more bytes.
    """
    both: dict[tuple[object, ...], tuple[list[Collective], list[Collective]]] = defaultdict(lambda: ([], []))
    for which, collectives in enumerate((sent, planned)):
        for c in collectives:
            both[c.kind, c.axes, c.bytes][which].append(c)
    rows = [(CollectiveGroup(tuple(here)), CollectiveGroup(tuple(there))) for here, there in both.values()]
    return sorted(rows, key=lambda row: (row[0].count == row[1].count, -max(row[0].sent, row[1].sent)))


def _cells(in_program: CollectiveGroup, in_plan: CollectiveGroup, mesh: MeshInfo) -> list[str]:
    """Return the cells of one row; a count that differs from the plan's is bold."""
    shown, extra = in_program if in_program.collectives else in_plan, in_program.sent - in_plan.sent
    counts = [escaped(part.count_text) if part.collectives else "none" for part in (in_program, in_plan)]
    if in_program.count != in_plan.count:
        counts[0] = f"<b>{counts[0]}</b>"
    over = " ".join(axis(name, mesh) for name in shown.axes) if shown.axes else escaped(shown.axes_text)
    difference = f"{'+' * (extra > 0)}{byte_text(extra)}" if extra else "the same"
    return [escaped(shown.kind), over, shown.each_text, *counts, escaped(difference)]


def _program(program: str) -> str:
    """Return the program beside line numbers, in a window that scrolls."""
    numbers = "\n".join(map(str, range(1, _line_count(program) + 1)))
    # The page may be light or dark: each hue is mixed with the text colour of the page, so it is legible on both.
    mixed = (f"--jss-{name}:color-mix(in srgb,currentColor 40%,{hue})" for name, hue in _HUES.items())
    window = f"max-height:420px;overflow:auto;border:1px solid {BOTH['rule']}66;{';'.join(mixed)}"
    # Line numbers can't be selected: a reader copies code alone.
    unselected = f"{_PRE};color:var(--jss-com);text-align:right;-webkit-user-select:none;user-select:none"
    return join_nonempty(
        [
            f'<div role="region" aria-label="the program" tabindex="0" style="{window}">',
            '<table role="presentation" style="margin:0;border:0;table-layout:auto"><tbody>',
            '<tr style="background:none">',
            f'<td style="{_CELL};padding:8px 12px"><pre aria-hidden="true" style="{unselected}">{numbers}</pre></td>',
            f'<td style="{_CELL};padding:8px 16px 8px 0"><pre style="{_PRE}">{_highlighted(program)}</pre></td>',
            "</tr></tbody></table></div>",
        ]
    )


def _line_count(program: str) -> int:
    """Return the number of lines."""
    return program.removesuffix("\n").count("\n") + 1


def _highlighted(program: str) -> str:
    """Return the program as HTML with syntax colours."""
    # `get_tokens` would change newlines and drop blank lines at the ends.
    tokens = PythonLexer().get_tokens_unprocessed(program)
    classified = ((next((n for kind, n in _LETTERS.items() if token in kind), ""), said) for _, token, said in tokens)
    parts = [(name, escape("".join(said for _, said in same))) for name, same in groupby(classified, itemgetter(0))]
    return "".join(f'<span style="color:var(--jss-{n})">{said}</span>' if n else said for n, said in parts)
