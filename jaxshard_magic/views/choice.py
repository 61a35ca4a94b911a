"""What an automatic search found, as text for a terminal and as HTML without script.

The choice, the usual decision path with this step's figures, what was compiled, and what ruled the others out."""

import shutil
from collections.abc import Sequence
from itertools import islice

from jaxshard_magic.report import MeshInfo
from jaxshard_magic.report.choice import Choice, Considered
from jaxshard_magic.views import choice_tree as path
from jaxshard_magic.views import comparison, words
from jaxshard_magic.views import comparison_chart as chart
from jaxshard_magic.views import comparison_data as data
from jaxshard_magic.views import comparison_table as tables
from jaxshard_magic.views.format import count_text, printable
from jaxshard_magic.views.lines import cells, clip, plain, printed, table, wrap
from jaxshard_magic.views.page import document
from jaxshard_magic.views.tags import axis, cell, joined, row, section, text
from jaxshard_magic.views.words import choice as said

MOST_ROWS, MOST_LINES = 40, 12  # candidates that were not compiled, in HTML and in text
_HEADS = (
    ("strategy", "wrap", "44%"),
    ("mesh", "wrap", "28%"),
    ("at least", "right", "12%"),
    ("needs about", "right", "16%"),
)


def to_text(found: Choice, width: int | None = None) -> str:
    """The choice in lines of at most `width` columns, the terminal's by default, held between 60 and 100; a line to
    paste is never broken."""
    room = max(60, min(100, shutil.get_terminal_size().columns if width is None else width))
    lead = "".join(span.text for span in said.choice_lead(found))
    tried = found.comparison
    parts = [
        [line for one in (lead, _about(found), said.choice_counts(found)) for line in _wrapped(one, room)],
        path.lines(found.path, room),
        _wrapped(said.agreement(found), room) if found.path else [],
        *comparison.figures(tried, room),
        comparison.failures(tried, room),
        *_others(found, room),
        _again(found),
        [line for note in _notes(found) for line in _wrapped(note, room)],
    ]
    return "\n\n".join(printed(part) for part in parts if part)


def _wrapped(one: str, room: int, first: str = "", rest: str = "") -> list[str]:
    return wrap(plain(printable(one)), room, first, rest)


def _about(found: Choice) -> str:
    tried = found.comparison
    return words.comparison_about(tried) if tried.trials else said.choice_about(found)


def _notes(found: Choice) -> list[str]:
    tried = found.comparison
    notes = [*words.comparison_notes(tried), *comparison.left_out(tried)]
    return [*found.notes, *notes, *([said.estimates_note(found)] if said.not_compiled(found) else [])]


def _shares(sizes: Sequence[int], most: int) -> list[int]:
    """How many rows of each group are shown, so that no group takes the room of a smaller one."""
    kept = [0] * len(sizes)
    for _ in range(min(most, sum(sizes))):
        kept[min((k, i) for i, k in enumerate(kept) if k < sizes[i])[1]] += 1
    return kept


def _others(found: Choice, room: int) -> list[list[str]]:
    """Those that were not compiled, each with its figures, and below those of one reason the reason."""
    groups = said.not_compiled(found)
    parts = []
    for (outcome, group), kept in zip(groups, _shares([len(g) for _, g in groups], MOST_LINES), strict=True):
        alike = said.by_reason(group, kept)
        shown = [each for candidates, _ in alike for each in candidates]
        names, options = _named(shown, room)
        columns = {
            "strategy": names,
            "mesh": [clip(printable(said.mesh_of(c)), _columns_left(room) // 2) for c in shown],
            "at least": [said.bound_text(c) for c in shown],
            "needs about": [said.needs_text(c)[0] for c in shown],
        }
        head, *rows = table(
            {name: list(map(plain, told)) for name, told in columns.items()}, ("strategy", "mesh")
        )
        lines = [*_wrapped(f"{said.fate_text(found, outcome, len(group))}:", room), head]
        told = zip(rows, options, strict=True)
        for candidates, why in alike:
            for line, option in islice(told, len(candidates)):
                lines += [line, *_below(option, room)]
            lines += _below(why, room)
        parts.append(lines + [f"  and {count_text(len(group) - kept)} more"] * (kept < len(group)))
    return parts


def _below(one: str, room: int) -> list[str]:
    return _wrapped(one, room, "      ", "      ") if one else []


def _columns_left(room: int) -> int:
    """Those that strategies and meshes have together, beside two figures."""
    return room - 30


def _named(shown: Sequence[Considered], room: int) -> tuple[list[str], list[str]]:
    """What stands in the column of strategies, and what below: the options, where there is no room beside them."""
    names = [printable(f"{c.strategy} {said.options_of(c)}".rstrip()) for c in shown]
    meshes = max(cells(printable(said.mesh_of(c))) for c in shown)
    width = _columns_left(room) - min(meshes, _columns_left(room) // 2)
    if all(cells(name) <= width for name in names):
        return names, [""] * len(names)
    return [clip(printable(c.strategy), width) for c in shown], [said.options_of(c) for c in shown]


def _runs(found: Choice) -> list[tuple[str, str]]:
    """What runs the choice and the runner-up, each with what it is."""
    named = ((found.chosen, "the choice"), (found.runner_up, "the runner-up"))
    return [(name, f"%%shard {each.line}") for each, name in named if each is not None]


def _again(found: Choice) -> list[str]:
    runs = _runs(found)
    if not runs:
        return []
    return [
        f"Run {' and '.join(name for name, _ in runs)} as",
        *("    " + printable(line) for _, line in runs),
    ]


def to_html(found: Choice) -> str:
    """The choice as a fragment to stand in a notebook or a page, without script."""
    lead = "".join(
        f"<b>{path.typed(span.text)}</b>" if span.kind == "strong" else path.typed(span.text)
        for span in said.choice_lead(found)
    )
    agreed = f"<p>{path.typed(said.agreement(found))}</p>" if found.path else ""
    compiled = [tables.trials(found.comparison), chart.scatter(found.comparison)]
    notes = _notes(found)
    parts = [
        f'<p class="jss-verdict">{lead}</p>',
        f"<p><small>{text(_about(found))} {text(said.choice_counts(found))}</small></p>",
        section(path.TITLE, path.tree(found.path), agreed) if found.path else "",
        section("Compiled", *compiled) if found.comparison.trials else "",
        _others_table(found),
        "".join(f"<p>Run {name} as <code>{path.typed(line)}</code></p>\n" for name, line in _runs(found)),
        f"<p><small>{'<br>'.join(map(text, notes))}</small></p>" if notes else "",
    ]
    return f'<div class="jss">\n{joined(parts)}\n</div>\n'


def _others_table(found: Choice) -> str:
    """A row for each candidate that was not compiled, under what ruled it out; folded where others were compiled."""
    groups = said.not_compiled(found)
    if not groups:
        return ""
    mesh, rows = _axes_of(found), list[str]()
    for (outcome, group), kept in zip(groups, _shares([len(g) for _, g in groups], MOST_ROWS), strict=True):
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
        *([_whole(f"<small>{path.typed(why)}</small>")] if why else []),
    ]


def _row(candidate: Considered, mesh: MeshInfo) -> str:
    needs, arrays = said.needs_text(candidate)
    options = said.options_of(candidate)
    name = f"<b>{path.typed(candidate.strategy)}</b>" + (f" {path.typed(options)}" if options else "")
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
    breaks = "overflow-wrap:anywhere" if len(name) > path.LONG else "white-space:nowrap"
    return f'<span style="{breaks}">{told}</span>'


def page(found: Choice) -> str:
    """The choice as a whole document that follows the reader's light or dark theme."""
    return document(printable(f"{found.name or 'step'}, a strategy chosen"), to_html(found))
