"""Result of an automatic search as HTML without script."""

from jaxshard_magic.report import MeshInfo
from jaxshard_magic.report.choice import Choice
from jaxshard_magic.views.choice import decision_tree
from jaxshard_magic.views.comparison import chart, data, html
from jaxshard_magic.views.document.parts import CandidateRow
from jaxshard_magic.views.format import count_text, printable
from jaxshard_magic.views.html_tags import axis, cell, document, escaped, join_nonempty, row, section, small
from jaxshard_magic.views.sections.choice import about, not_compiled_groups, notes, others_title, run_commands
from jaxshard_magic.views.words import choice as phrases

MOST_ROWS = 40  # candidates that were not compiled, at most
_HEADS = (
    ("strategy", "wrap", "44%"),
    ("mesh", "wrap", "28%"),
    ("at least", "right", "12%"),
    ("needs about", "right", "16%"),
)


def to_html(choice: Choice) -> str:
    """Render the choice as an HTML fragment without script, for a notebook or a page."""
    lead = "".join(
        f"<b>{decision_tree.wrapping_html(span.text)}</b>"
        if span.kind == "strong"
        else decision_tree.wrapping_html(span.text)
        for span in phrases.choice_lead(choice)
    )
    agreement_html = f"<p>{decision_tree.wrapping_html(phrases.agreement(choice))}</p>" if choice.path else ""
    compiled = [html.trials_table(choice.comparison), chart.chart_with_notes(choice.comparison)]
    parts = [
        f'<p class="jss-verdict">{lead}</p>',
        small(f"{escaped(about(choice))} {escaped(phrases.choice_counts(choice))}"),
        section(decision_tree.TITLE, decision_tree.tree_html(choice.path), agreement_html) if choice.path else "",
        section("Compiled", *compiled) if choice.comparison.trials else "",
        _others_table(choice),
        "".join(
            f"<p>Run {name} as <code>{decision_tree.wrapping_html(line)}</code></p>\n"
            for name, line in run_commands(choice)
        ),
        small("<br>".join(map(escaped, notes(choice)))),
    ]
    return f'<div class="jss">\n{join_nonempty(parts)}\n</div>\n'


def _others_table(choice: Choice) -> str:
    """Return a table of the candidates that were not compiled, grouped by outcome.

    The table is folded, unless nothing was compiled at all.
    """
    mesh, rows = axes_of(choice), list[str]()
    for part in not_compiled_groups(choice, MOST_ROWS):
        rows.append(_whole(f"<b>{escaped(part.outcome)}</b>"))
        for candidates, why in part.by_reason:
            rows += [_row(each, mesh) for each in candidates]
            rows += [_whole(f"<small>{decision_tree.wrapping_html(why)}</small>")] * bool(why)
        if part.omitted:
            rows.append(_whole(f"<small>and {count_text(part.omitted)} more</small>"))
    if not rows:
        return ""
    heads = row(cell(name, align, "th", f' width="{width}"') for name, align, width in _HEADS)
    table_html = (
        f'<table width="100%" style="width:100%"><thead>{heads}</thead><tbody>\n{join_nonempty(rows)}</tbody></table>'
    )
    title = others_title(choice)
    if choice.source == "planned":
        return section(title, table_html)
    return f"<details><summary><b>{title}</b></summary>\n{table_html}</details>"


def _whole(content: str) -> str:
    """Return a table row with one cell over all columns."""
    return row([cell(content, "wrap", more=f' colspan="{len(_HEADS)}"')])


def axes_of(choice: Choice) -> MeshInfo:
    """Return a mesh of all axes of the choice, those of compiled trials first. Only the axes are meaningful."""
    axes = dict(data.merged_mesh(choice.comparison).axes)
    for candidate in choice.candidates:
        # Axes of compiled trials go first, so that an axis has the same hue as in the table of trials.
        axes |= {name: size for name, size in candidate.mesh.items() if name not in axes}
    return MeshInfo.of_axes(axes)


def _row(one: CandidateRow, mesh: MeshInfo) -> str:
    """Return the row of one candidate."""
    options = f" {decision_tree.wrapping_html(one.options)}" if one.options else ""
    name = f"<b>{decision_tree.wrapping_html(one.strategy)}</b>{options}"
    on = " ".join(_sized(name, size, mesh) for name, size in one.mesh.items())
    arrays = f"<br><small>{one.arrays}</small>" if one.arrays else ""
    columns = (f"<code>{name}</code>", f"<code>{on}</code>", one.bound, one.needs + arrays)
    top = ' valign="top"'
    return row(cell(told, align, more=top) for told, (_, align, _) in zip(columns, _HEADS, strict=True))


def _sized(name: str, size: int, mesh: MeshInfo) -> str:
    """Return a mesh axis with its size; only a long axis name may break."""
    told = f"{axis(name, mesh)}={size}"
    breaks = "overflow-wrap:anywhere" if len(name) > decision_tree.LONG else "white-space:nowrap"
    return f'<span style="{breaks}">{told}</span>'


def page(choice: Choice) -> str:
    """Render the choice as a whole HTML document; the theme, light or dark, is the reader's."""
    return document(printable(f"{choice.name or 'step'}, a strategy chosen"), to_html(choice))
