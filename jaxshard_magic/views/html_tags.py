"""HTML helpers: escaped text, mesh axes in their hue, tables, sections, and a standalone document around a fragment.

`escaped`, `code`, `unbroken` and the functions for axes take plain text and escape it; all others take HTML.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from jaxshard_magic.report import MeshInfo
from jaxshard_magic.views import svg
from jaxshard_magic.views.colours import DARK, HUES, LIGHT, ROLES, SPENT
from jaxshard_magic.views.format import printable

# U+FE0E selects the text form of a sign: some fonts would draw an emoji.
SIGNS = {"error": "\u2716", "warning": "\u26a0\ufe0e", "info": "\u2139\ufe0e"}
_RULES = """
body{margin:0;padding:16px;background:var(--bg);color:var(--ink);
font:13px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
font-variant-numeric:tabular-nums}
.jss{max-width:868px;margin:0 auto}
p{margin:8px 0;overflow-wrap:anywhere}
.jss-verdict{font-size:15px}
.jss-value{font-size:17px}
small{font-size:11.5px;color:var(--ink-2)}
code{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
table{border-collapse:collapse;font-size:12px;margin:8px 0}
th,td{padding:4px 16px 4px 0;border-bottom:1px solid var(--line)}
th{font-weight:400;color:var(--ink-2);font-size:11.5px}
th:last-child,td:last-child{padding-right:0}
th{vertical-align:bottom}
tr.jss-figures td{border-bottom:0;padding-bottom:0}
details{margin:16px 0}
summary{cursor:pointer;margin-bottom:4px}
svg{vertical-align:middle}
"""


def join_nonempty(parts: Iterable[str]) -> str:
    """Join the nonempty parts, one per line."""
    return "\n".join(part for part in parts if part)


def escaped(value: str) -> str:
    """Return plain text as HTML: on one line, escaped."""
    return escape(printable(value))


def code(value: str) -> str:
    """Return plain text as an HTML `<code>` element."""
    return f"<code>{escaped(value)}</code>"


def unbroken(value: str) -> str:
    """Return plain text as HTML that may break between words, but not at a hyphen."""
    words = (escaped(word) for word in value.split(" "))
    return " ".join(f'<span style="white-space:nowrap">{w}</span>' if "-" in w else w for w in words)


def axis(name: str, mesh: MeshInfo) -> str:
    """Return the name of a mesh axis in its hue.

    Args:
        name: Name of the axis.
        mesh: Mesh of the axis.
    """
    return f'<b class="jss-a{svg.axis_index(name, mesh) % HUES}">{escaped(name)}</b>'


def mesh_axes(mesh: MeshInfo) -> str:
    """Return the axes of a mesh with their sizes, each with a mark and in its hue."""
    return " &nbsp;".join(
        f"{svg.axis_mark(name, mesh)} <code>{axis(name, mesh)}={size}</code>" for name, size in mesh.axes.items()
    )


def small(content: str) -> str:
    """Return a paragraph of small print around HTML; empty for empty content."""
    return f"<p><small>{content}</small></p>" if content else ""


def cell(content: str, align: str = "left", tag: str = "td", more: str = "") -> str:
    """Return a table cell.

    Args:
        content: HTML.
        align: "left", "right", or "wrap" (left, with line breaks).
        tag: "td" or "th".
        more: Further attributes, with a leading space.
    """
    # Alignment is an attribute and a style: GitHub drops styles.
    if align == "wrap":
        return f'<{tag} align="left" style="text-align:left"{more}>{content}</{tag}>'
    return f'<{tag} align="{align}" style="text-align:{align};white-space:nowrap" nowrap{more}>{content}</{tag}>'


def row(cells: Iterable[str]) -> str:
    """Return a table row.

    Args:
        cells: Cells made by `cell`.
    """
    return f"<tr>{''.join(cells)}</tr>"


def table(head: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
    """Return a table.

    Args:
        head: (title, alignment) of each column, as HTML.
        rows: Cells of each row, as HTML.
    """
    top = row(cell(title, align, "th") for title, align in head)
    body = "\n".join(row(cell(c, align) for c, (_, align) in zip(r, head, strict=True)) for r in rows)
    return f"<table><thead>{top}</thead><tbody>\n{body}</tbody></table>"


def section(title: str, *content: str) -> str:
    """Return a section with a title that folds, initially open.

    Args:
        title: HTML.
        content: HTML; empty parts are left out.
    """
    return f"<details open><summary><b>{title}</b></summary>\n{join_nonempty(content)}</details>"


def colour_rules(colour: Callable[[str], str]) -> str:
    """Return the CSS rules for the colours of drawings and texts.

    Args:
        colour: Gives the CSS colour for a name in `views.colours`.
    """
    axes = "".join(
        f".jss b.jss-a{i}{{color:{colour(f'a{i}')}}}.jss-s{i}{{stroke:{colour(f'a{i}')}}}"
        f".jss-f{i}{{fill:{colour(f'a{i}')}}}"
        for i in range(HUES)
    )
    roles = "".join(f".jss-r-{r}{{fill:{colour(r)}}}" for r in ROLES)
    spent = "".join(f".jss-k-{kind}{{fill:{colour(kind)}}}" for kind in SPENT)
    levels = "".join(f".jss-{level}{{color:{colour(level)}}}" for level in ("warning", "error", "ok", "info"))
    return f"{axes}\n{roles}\n{spent}\n{levels}\n.jss-limit{{fill:{colour('error')}}}"


def _variables(theme: Mapping[str, str]) -> str:
    return ";".join(f"--{name}:{colour}" for name, colour in theme.items())


def document(title: str, body: str) -> str:
    """Return a whole HTML document without script; nothing is fetched.

    Args:
        title: Title as plain text.
        body: HTML of the body.
    """
    style = (
        f":root{{color-scheme:light dark;{_variables(LIGHT)}}}\n"
        # The attribute `theme` of the root overrides the setting of the reader's system.
        f"@media (prefers-color-scheme:dark){{:root:not([theme=light]){{{_variables(DARK)}}}}}\n"
        f":root[theme=light]{{color-scheme:light}}:root[theme=dark]{{color-scheme:dark;{_variables(DARK)}}}"
        f"{_RULES}{colour_rules('var(--{})'.format)}"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}\n</style>{_BODY}{body}{_END}"
    )


# `extend_document` finds the body of a document by these texts.
_BODY, _END = "</head><body>\n", "</body></html>\n"


def extend_document(html: str, head: str, body: Callable[[str], str]) -> str:
    """Insert HTML into a document made by `document`.

    Args:
        html: Document.
        head: HTML for the end of the head.
        body: Maps the body to its replacement.
    """
    above, _, rest = html.partition(_BODY)
    return f"{above}{head}{_BODY}{body(rest.removesuffix(_END))}{_END}"


def embedded_styles(dark: str) -> str:
    """Return the styles of fragments for a page with a look of its own, such as the documentation.

    Args:
        dark: CSS selector that matches while the page is dark.
    """
    own = f"color:var(--ink);font-size:13px;font-variant-numeric:tabular-nums;{_RULES}"
    colours = colour_rules("var(--{})".format)
    return f".jss{{{_variables(LIGHT)}}}\n{dark} .jss{{{_variables(DARK)}}}\n.jss{{{own}}}\n{colours}\n"
