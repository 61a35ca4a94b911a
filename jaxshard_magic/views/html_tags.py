"""HTML helpers: escaped text, mesh axes in their hue, tables, sections.

`escaped`, `code`, `unbroken` and the functions for axes take plain text and escape it; all others take HTML.
"""

from collections.abc import Iterable, Sequence
from html import escape

from jaxshard_magic.report import MeshInfo
from jaxshard_magic.views import svg
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.hues import HUES

# U+FE0E selects the text form of a sign: some fonts would draw an emoji.
SIGNS = {"error": "\u2716", "warning": "\u26a0\ufe0e", "info": "\u2139\ufe0e"}


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
