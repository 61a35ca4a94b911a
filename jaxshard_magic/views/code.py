"""A step's program in plain JAX as text to paste, and as HTML without script below what it moves."""

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
from jaxshard_magic.views.communication import Part
from jaxshard_magic.views.format import byte_text, count_text, printable
from jaxshard_magic.views.html import SIGNS
from jaxshard_magic.views.page import document
from jaxshard_magic.views.tags import axis, code, joined, mesh_axes, small, table, text

if TYPE_CHECKING:
    from jaxshard_magic.codegen import Code

MOST_ROWS = 12
_YES = "\u2714\ufe0e"
_LETTERS = {Comment: "com", String: "str", Number: "num", Keyword: "kw", Operator.Word: "kw"}
_HUES = {"kw": BOTH["a2"], "str": BOTH["a1"], "com": BOTH["rule"], "num": BOTH["a0"]}
_FONT = "12px/18px ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace"
_PRE = (
    f"margin:0;padding:0;border:0;background:none;color:inherit;font:{_FONT};white-space:pre;overflow:visible"
)
_CELL = "border:0;background:none;text-align:left;vertical-align:top"


def to_text(program: "Code", width: int | None = None) -> str:
    """The program as it is, whatever the width: it is there to be pasted."""
    return program.text


def to_html(program: "Code") -> str:
    """A fragment to stand in a notebook or a page: what it is of, what it moves, and the program."""
    parts = [_title(program), _verdict(program), _collectives(program), _program(program.text)]
    return f'<div class="jss">\n{joined(parts)}\n</div>\n'


def page(program: "Code") -> str:
    """The same as a whole document that follows the reader's light or dark theme."""
    return document(printable(f"{program.name} under {program.strategy}, in plain JAX"), to_html(program))


def verdict(program: "Code") -> str:
    """What the program moves beside the plan, in a sentence; bytes are those that one device sends in a step."""
    if program.planned is None or program.sent is None:
        return "What it moves is not known: the compiler gave no text to read that from."
    if not program.sent and not program.planned:
        return "Moves nothing between devices, as the plan."
    here, there = Part(program.sent), Part(program.planned)
    if program.same:
        return f"Moves what the plan moves: {here.sent_text} per device and step."
    more = _more(program)
    if not more:
        return f"Sends as much as the plan, by other collectives: {here.sent_text} per device and step."
    amount = f"{byte_text(abs(more))} {'more' if more > 0 else 'less'}"
    return f"Sends {amount} per device and step than the plan: {here.sent_text} instead of {there.sent_text}."


def _more(program: "Code") -> int:
    """Bytes that a device sends in a step of the program and not in one of the plan."""
    return Part(program.sent or ()).sent - Part(program.planned or ()).sent


def _title(program: "Code") -> str:
    axes = mesh_axes(_mesh(program))
    lines = _lines(program.text)
    size = f"{count_text(lines)} line{'s' * (lines != 1)} of plain JAX"
    return f"<p>{code(program.name)} under <b>{text(program.strategy)}</b> &nbsp; {axes} &nbsp; {size}</p>"


def _mesh(program: "Code") -> MeshInfo:
    return MeshInfo(dict(program.mesh), "", "", "", (), 1)


def _verdict(program: "Code") -> str:
    level = "ok" if program.same else "warning" if program.same is not None and _more(program) > 0 else "info"
    sign = f'<span class="jss-{level}">{SIGNS.get(level, _YES)}</span>'
    return f'<p class="jss-verdict">{sign} {text(verdict(program))}</p>'


def _collectives(program: "Code") -> str:
    """Those of both side by side where they differ, what differs first and strong."""
    if program.same is not False:
        return ""
    rows, mesh = _rows(program.sent or (), program.planned or ()), _mesh(program)
    head = [("collective", "left"), ("over", "wrap"), ("bytes each", "right"), ("in the program", "right")]
    head += [("in the plan", "right"), ("bytes sent", "right")]
    shown, left = rows[:MOST_ROWS], len(rows) - MOST_ROWS
    more = f"{count_text(left)} more are told where the program begins." if left > 0 else ""
    return joined([table(head, [_cells(*row, mesh) for row in shown]), small(more)])


def _rows(sent: Iterable[Collective], planned: Iterable[Collective]) -> list[tuple[Part, Part]]:
    """Those of the program and of the plan by kind, axes and bytes; first what the two have not equally often."""
    both: dict[tuple[object, ...], tuple[list[Collective], list[Collective]]] = defaultdict(lambda: ([], []))
    for which, found in enumerate((sent, planned)):
        for c in found:
            both[c.kind, c.axes, c.bytes][which].append(c)
    rows = [(Part(tuple(here)), Part(tuple(there))) for here, there in both.values()]
    return sorted(rows, key=lambda row: (row[0].count == row[1].count, -max(row[0].sent, row[1].sent)))


def _cells(here: Part, there: Part, mesh: MeshInfo) -> list[str]:
    alike, more = here if here.collectives else there, here.sent - there.sent
    counts = [text(part.count_text) if part.collectives else "none" for part in (here, there)]
    if here.count != there.count:
        counts[0] = f"<b>{counts[0]}</b>"
    over = " ".join(axis(name, mesh) for name in alike.axes) if alike.axes else text(alike.over)
    difference = f"{'+' * (more > 0)}{byte_text(more)}" if more else "the same"
    return [text(alike.kind), over, alike.each_text, *counts, text(difference)]


def _program(program: str) -> str:
    """The lines beside their numbers, in a window that scrolls; what is selected in it are lines alone."""
    numbers = "\n".join(map(str, range(1, _lines(program) + 1)))
    mixed = (f"--jss-{name}:color-mix(in srgb,currentColor 40%,{hue})" for name, hue in _HUES.items())
    window = f"max-height:420px;overflow:auto;border:1px solid {BOTH['rule']}66;{';'.join(mixed)}"
    unselected = f"{_PRE};color:var(--jss-com);text-align:right;-webkit-user-select:none;user-select:none"
    return joined(
        [
            f'<div role="region" aria-label="the program" tabindex="0" style="{window}">',
            '<table role="presentation" style="margin:0;border:0;table-layout:auto"><tbody>',
            '<tr style="background:none">',
            f'<td style="{_CELL};padding:8px 12px"><pre aria-hidden="true" style="{unselected}">{numbers}</pre></td>',
            f'<td style="{_CELL};padding:8px 16px 8px 0"><pre style="{_PRE}">{_highlighted(program)}</pre></td>',
            "</tr></tbody></table></div>",
        ]
    )


def _lines(program: str) -> int:
    return program.removesuffix("\n").count("\n") + 1


def _highlighted(program: str) -> str:
    """The program in HTML, every letter of it. Hues are mixed with the host's ink: they are read on any ground."""
    tokens = PythonLexer().get_tokens_unprocessed(program)
    named = (
        (next((n for kind, n in _LETTERS.items() if token in kind), ""), said) for _, token, said in tokens
    )
    parts = [
        (name, escape("".join(said for _, said in same))) for name, same in groupby(named, itemgetter(0))
    ]
    return "".join(f'<span style="color:var(--jss-{n})">{said}</span>' if n else said for n, said in parts)
