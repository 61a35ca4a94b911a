"""What the HTML views are written with: escaped text, mesh axes in their hue, tables, sections."""

from collections.abc import Iterable, Sequence
from html import escape

from jaxshard_magic.report import MeshInfo
from jaxshard_magic.views import svg
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.hues import HUES


def joined(parts: Iterable[str]) -> str:
    """The parts that are not empty, a line each."""
    return "\n".join(part for part in parts if part)


def text(value: str) -> str:
    """Plain text as HTML: on one line, escaped."""
    return escape(printable(value))


def code(value: str) -> str:
    """Plain text as HTML in a `<code>`."""
    return f"<code>{text(value)}</code>"


def unbroken(value: str) -> str:
    """`value`, whose lines break between words alone, and not at a hyphen."""
    words = (text(word) for word in value.split(" "))
    return " ".join(f'<span style="white-space:nowrap">{w}</span>' if "-" in w else w for w in words)


def axis(name: str, mesh: MeshInfo) -> str:
    """The name of a mesh axis in its hue."""
    return f'<b class="jss-a{svg.axis_index(name, mesh) % HUES}">{text(name)}</b>'


def mesh_axes(mesh: MeshInfo) -> str:
    """The axes of a mesh with their sizes, each with its mark and in its hue."""
    return " &nbsp;".join(
        f"{svg.axis_mark(name, mesh)} <code>{axis(name, mesh)}={size}</code>"
        for name, size in mesh.axes.items()
    )


def small(content: str) -> str:
    """A paragraph of small print; empty where `content`, which is HTML, is."""
    return f"<p><small>{content}</small></p>" if content else ""


def cell(content: str, align: str = "left", tag: str = "td", more: str = "") -> str:
    """A table cell; `align` is left, right, or wrap: left, and may break into lines."""
    if align == "wrap":
        return f'<{tag} align="left" style="text-align:left"{more}>{content}</{tag}>'
    return (
        f'<{tag} align="{align}" style="text-align:{align};white-space:nowrap" nowrap{more}>{content}</{tag}>'
    )


def row(cells: Iterable[str]) -> str:
    """A table row of cells, which `cell` wrote."""
    return f"<tr>{''.join(cells)}</tr>"


def table(head: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
    """A table; `head` holds (title, alignment) of each column."""
    top = row(cell(title, align, "th") for title, align in head)
    body = "\n".join(row(cell(c, align) for c, (_, align) in zip(r, head, strict=True)) for r in rows)
    return f"<table><thead>{top}</thead><tbody>\n{body}</tbody></table>"


def section(title: str, *content: str) -> str:
    """A section that folds, open: its title and what stands in it, both HTML."""
    return f"<details open><summary><b>{title}</b></summary>\n{joined(content)}</details>"
