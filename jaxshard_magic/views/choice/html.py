"""What an automatic search chose, as HTML without script."""

from collections.abc import Sequence

from jaxshard_magic.report import MeshInfo
from jaxshard_magic.report.choice import Choice, Considered
from jaxshard_magic.views.choice import tree
from jaxshard_magic.views.choice.text import about, notes, others, others_title, runs
from jaxshard_magic.views.comparison import chart, data, html
from jaxshard_magic.views.format import count_text, printable
from jaxshard_magic.views.page import document
from jaxshard_magic.views.tags import axis, cell, joined, row, section, small, text
from jaxshard_magic.views.words import choice as phrases

MOST_ROWS = 40  # candidates that were not compiled
_HEADS = (
    ("strategy", "wrap", "44%"),
    ("mesh", "wrap", "28%"),
    ("at least", "right", "12%"),
    ("needs about", "right", "16%"),
)


def to_html(choice: Choice) -> str:
    """The choice as a fragment to stand in a notebook or a page, without script."""
    lead = "".join(
        f"<b>{tree.typed(span.text)}</b>" if span.kind == "strong" else tree.typed(span.text)
        for span in phrases.choice_lead(choice)
    )
    agreed = f"<p>{tree.typed(phrases.agreement(choice))}</p>" if choice.path else ""
    compiled = [html.trials(choice.comparison), chart.scatter(choice.comparison)]
    parts = [
        f'<p class="jss-verdict">{lead}</p>',
        small(f"{text(about(choice))} {text(phrases.choice_counts(choice))}"),
        section(tree.TITLE, tree.tree(choice.path), agreed) if choice.path else "",
        section("Compiled", *compiled) if choice.comparison.trials else "",
        _others_table(choice),
        "".join(f"<p>Run {name} as <code>{tree.typed(line)}</code></p>\n" for name, line in runs(choice)),
        small("<br>".join(map(text, notes(choice)))),
    ]
    return f'<div class="jss">\n{joined(parts)}\n</div>\n'


def _others_table(choice: Choice) -> str:
    """A row for each candidate that was not compiled, under what ruled it out; folded where others were compiled."""
    mesh, rows = axes_of(choice), list[str]()
    for fate, alike, left in others(choice, MOST_ROWS):
        rows.append(_whole(f"<b>{text(fate)}</b>"))
        for candidates, why in alike:
            rows += _rows(candidates, why, mesh)
        if left:
            rows.append(_whole(f"<small>and {count_text(left)} more</small>"))
    if not rows:
        return ""
    heads = row(cell(name, align, "th", f' width="{width}"') for name, align, width in _HEADS)
    told = f'<table width="100%" style="width:100%"><thead>{heads}</thead><tbody>\n{joined(rows)}</tbody></table>'
    title = others_title(choice)
    if choice.source == "planned":
        return section(title, told)
    return f"<details><summary><b>{title}</b></summary>\n{told}</details>"


def _whole(content: str) -> str:
    return row([cell(content, "wrap", more=f' colspan="{len(_HEADS)}"')])


def axes_of(choice: Choice) -> MeshInfo:
    """All mesh axes, those of what was compiled first."""
    axes = dict(data.axes_of(choice.comparison).axes)
    for candidate in choice.candidates:
        axes |= {name: size for name, size in candidate.mesh.items() if name not in axes}
    return MeshInfo(axes, "", "", "", (), 1)


def _rows(candidates: Sequence[Considered], why: str, mesh: MeshInfo) -> list[str]:
    """A row for each, and below all of them what ruled them out."""
    return [
        *(_row(each, mesh) for each in candidates),
        *([_whole(f"<small>{tree.typed(why)}</small>")] if why else []),
    ]


def _row(candidate: Considered, mesh: MeshInfo) -> str:
    needs, arrays = phrases.needs_text(candidate)
    options = phrases.options_of(candidate)
    name = f"<b>{tree.typed(candidate.strategy)}</b>" + (f" {tree.typed(options)}" if options else "")
    on = " ".join(_sized(name, size, mesh) for name, size in candidate.mesh.items())
    more = f"<br><small>{arrays}</small>" if arrays else ""
    columns = (
        f"<code>{name}</code>",
        f"<code>{on}</code>",
        phrases.bound_text(candidate),
        needs + more,
    )
    top = ' valign="top"'
    return row(cell(told, align, more=top) for told, (_, align, _) in zip(columns, _HEADS, strict=True))


def _sized(name: str, size: int, mesh: MeshInfo) -> str:
    told = f"{axis(name, mesh)}={size}"
    breaks = "overflow-wrap:anywhere" if len(name) > tree.LONG else "white-space:nowrap"
    return f'<span style="{breaks}">{told}</span>'


def page(choice: Choice) -> str:
    """The choice as a whole document that follows the reader's light or dark theme."""
    return document(printable(f"{choice.name or 'step'}, a strategy chosen"), to_html(choice))
