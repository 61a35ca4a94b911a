"""What an automatic search chose, as HTML without script."""

from collections.abc import Sequence

from jaxshard_magic.report import MeshInfo
from jaxshard_magic.report.choice import Choice, Considered
from jaxshard_magic.views.choice import tree
from jaxshard_magic.views.choice.text import about, notes, runs, shares
from jaxshard_magic.views.comparison import chart, data, html
from jaxshard_magic.views.format import count_text, printable
from jaxshard_magic.views.page import document
from jaxshard_magic.views.tags import axis, cell, joined, row, section, text
from jaxshard_magic.views.words import choice as said

MOST_ROWS = 40  # candidates that were not compiled
_HEADS = (
    ("strategy", "wrap", "44%"),
    ("mesh", "wrap", "28%"),
    ("at least", "right", "12%"),
    ("needs about", "right", "16%"),
)


def to_html(found: Choice) -> str:
    """The choice as a fragment to stand in a notebook or a page, without script."""
    lead = "".join(
        f"<b>{tree.typed(span.text)}</b>" if span.kind == "strong" else tree.typed(span.text)
        for span in said.choice_lead(found)
    )
    agreed = f"<p>{tree.typed(said.agreement(found))}</p>" if found.path else ""
    compiled = [html.trials(found.comparison), chart.scatter(found.comparison)]
    below = notes(found)
    parts = [
        f'<p class="jss-verdict">{lead}</p>',
        f"<p><small>{text(about(found))} {text(said.choice_counts(found))}</small></p>",
        section(tree.TITLE, tree.tree(found.path), agreed) if found.path else "",
        section("Compiled", *compiled) if found.comparison.trials else "",
        _others_table(found),
        "".join(f"<p>Run {name} as <code>{tree.typed(line)}</code></p>\n" for name, line in runs(found)),
        f"<p><small>{'<br>'.join(map(text, below))}</small></p>" if below else "",
    ]
    return f'<div class="jss">\n{joined(parts)}\n</div>\n'


def _others_table(found: Choice) -> str:
    """A row for each candidate that was not compiled, under what ruled it out; folded where others were compiled."""
    groups = said.not_compiled(found)
    if not groups:
        return ""
    mesh, rows = _axes_of(found), list[str]()
    for (outcome, group), kept in zip(groups, shares([len(g) for _, g in groups], MOST_ROWS), strict=True):
        rows.append(_whole(f"<b>{text(said.fate_text(found, outcome, len(group)))}</b>"))
        rows += [
            each for candidates, why in said.by_reason(group, kept) for each in _rows(candidates, why, mesh)
        ]
        if kept < len(group):
            rows.append(_whole(f"<small>and {count_text(len(group) - kept)} more</small>"))
    heads = row(cell(name, align, "th", f' width="{width}"') for name, align, width in _HEADS)
    told = f'<table width="100%" style="width:100%"><thead>{heads}</thead><tbody>\n{joined(rows)}</tbody></table>'
    if found.source == "planned":
        return section("What is known without compiling", told)
    title = f"Not compiled, and why: {count_text(sum(len(group) for _, group in groups))}"
    return f"<details><summary><b>{title}</b></summary>\n{told}</details>"


def _whole(content: str) -> str:
    return row([cell(content, "wrap", more=f' colspan="{len(_HEADS)}"')])


def _axes_of(found: Choice) -> MeshInfo:
    """All mesh axes, those of what was compiled first: an axis has the same hue everywhere."""
    axes = dict(data.axes_of(found.comparison).axes)
    for candidate in found.candidates:
        axes |= {name: size for name, size in candidate.mesh.items() if name not in axes}
    return MeshInfo(axes, "", "", "", (), 1)


def _rows(candidates: Sequence[Considered], why: str, mesh: MeshInfo) -> list[str]:
    """A row for each, and below all of them what ruled them out."""
    return [
        *(_row(each, mesh) for each in candidates),
        *([_whole(f"<small>{tree.typed(why)}</small>")] if why else []),
    ]


def _row(candidate: Considered, mesh: MeshInfo) -> str:
    needs, arrays = said.needs_text(candidate)
    options = said.options_of(candidate)
    name = f"<b>{tree.typed(candidate.strategy)}</b>" + (f" {tree.typed(options)}" if options else "")
    on = " ".join(_sized(name, size, mesh) for name, size in candidate.mesh.items())
    more = f"<br><small>{arrays}</small>" if arrays else ""
    columns = (
        f"<code>{name}</code>",
        f"<code>{on}</code>",
        said.bound_text(candidate),
        needs + more,
    )
    top = ' valign="top"'
    return row(cell(told, align, more=top) for told, (_, align, _) in zip(columns, _HEADS, strict=True))


def _sized(name: str, size: int, mesh: MeshInfo) -> str:
    told = f"{axis(name, mesh)}={size}"
    breaks = "overflow-wrap:anywhere" if len(name) > tree.LONG else "white-space:nowrap"
    return f'<span style="{breaks}">{told}</span>'


def page(found: Choice) -> str:
    """The choice as a whole document that follows the reader's light or dark theme."""
    return document(printable(f"{found.name or 'step'}, a strategy chosen"), to_html(found))
