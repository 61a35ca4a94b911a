"""Picture of layouts: each array as blocks, the first device's block shaded, with its type and its bytes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxshard_magic.report import Leaf, MeshInfo, Report
from jaxshard_magic.report.exports import Picture
from jaxshard_magic.views import leaf_rows, svg, words
from jaxshard_magic.views.document.parts import RowFigure
from jaxshard_magic.views.experts_positions.figures import layout_figures
from jaxshard_magic.views.explorer import devices_text
from jaxshard_magic.views.format import byte_text, count_text, submesh_parts, type_parts
from jaxshard_magic.views.pictures import experts_positions
from jaxshard_magic.views.pictures.sheet import CONTENT_WIDTH, Sheet, columns_in
from jaxshard_magic.views.terminal import clip, shorten
from jaxshard_magic.views.words import Span

if TYPE_CHECKING:
    from jaxshard_magic.explorer import Explorer

ROWS = 16
PATH, TYPE, ROW = 62, 440, 36  # px: left edges of paths and types, height of a row


def layout(report: Report, theme: str) -> str:
    """Draw the layout of a report's arrays, the largest first, repeated layers in one row; return SVG."""
    figures, there = layout_figures(report), words.reported_devices(report)
    return _drawn(report.leaves, report.mesh, words.title_text(report), there, theme, figures)


def explorer_pictures(ex: "Explorer") -> Mapping[str, Picture]:
    """Return the picture of an explorer's present layout, by name."""
    # Values are read now: the explorer may change before the picture is drawn.
    leaves, mesh, strategy, there = ex.leaves, ex.mesh_info, ex.strategy, devices_text(ex)
    return {"layout": lambda theme: _drawn(leaves, mesh, strategy, there, theme)}


def _drawn(
    leaves: Sequence[Leaf], mesh: MeshInfo, strategy: str, devices: str, theme: str, figures: Sequence[RowFigure] = ()
) -> str:
    lead = [Span(f"{strategy} ", "strong"), Span("on "), *_axes(mesh), Span(f", {devices}")]
    sheet, rows = Sheet(mesh), leaf_rows.fold(leaves)
    sheet.sentence(lead)
    per = "on the fullest device" if leaf_rows.partial_axes(leaves) else "per device"
    sizes = ", ".join(f"{role} {byte_text(n)}" for role, n in leaf_rows.role_bytes(leaves).items())
    sheet.small(f"{words.leaves_text(len(leaves))}: {sizes} {per}" if sizes else words.leaves_text(len(leaves)))
    sheet.skip(4)
    for row in rows[:ROWS]:
        times = f" ×{count_text(row.members)}" if row.members > 1 else ""
        name = shorten(row.path, columns_in(TYPE - PATH - 12, mono=True) - len(times))
        sheet.draw(0, svg.leaf_blocks(row.leaf, mesh))
        sheet.text(PATH, [Span(name), Span(times, "quiet")], down=14, mono=True)
        why = leaf_rows.unsharded_text(row) or row.leaf.why
        sheet.text(PATH, [Span(clip(why, columns_in(TYPE - PATH - 12, 11)), "quiet")], down=28, size=11)
        sheet.text(TYPE, _type(row.leaf), down=14, mono=True)
        place = [Span(text, "axis" if name else "quiet") for text, name in submesh_parts(row.leaves)]
        sheet.text(TYPE, place, down=28, size=11)
        sheet.text(CONTENT_WIDTH, byte_text(row.bytes_per_device), down=14, end=True)
        sheet.skip(ROW)
    left = sum(row.members for row in rows[ROWS:])
    first = "the first of its devices" if leaf_rows.partial_axes(leaves) else "the first device"
    sheet.small(
        f"and {count_text(left)} more, none larger" if left else "",
        f"Shaded: what {first} holds; a second sheet: a copy elsewhere.",
    )
    experts_positions.add_figures(sheet, figures, mesh)
    return sheet.svg(f"layout of {words.leaves_text(len(leaves))}", theme)


def _axes(mesh: MeshInfo) -> list[Span]:
    """Return the mesh as spans, each axis in its hue: `data=4 model=2`."""
    spans: list[Span] = []
    for axis, size in mesh.axes.items():
        spans += [Span(" ")] * bool(spans) + [Span(axis, "axis"), Span(f"={size}")]
    return spans


def _type(leaf: Leaf) -> list[Span]:
    """Return the type of a leaf, cut to the width of its column, each axis in its hue."""
    most, spans = columns_in(CONTENT_WIDTH - TYPE - 70, mono=True), list[Span]()
    for text, axis in type_parts(leaf):
        said = clip(text if axis is None else axis, most)
        spans.append(Span(said, "axis" if axis else "text"))
        most -= len(said)
        if most <= 1:
            break
    return spans
