"""The picture of layouts: each array as blocks with what the first device holds, its type and its bytes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxshard_magic.report import Leaf, MeshInfo, Report
from jaxshard_magic.report.sent import Picture
from jaxshard_magic.views import leaf_rows, svg, words
from jaxshard_magic.views.divided.figures import Figure, layout_figures
from jaxshard_magic.views.explorer import devices_text
from jaxshard_magic.views.format import byte_text, count_text, place_parts, type_parts
from jaxshard_magic.views.pictures import divided
from jaxshard_magic.views.pictures.sheet import ROOM, Sheet, fitting
from jaxshard_magic.views.terminal import clip, shorten
from jaxshard_magic.views.words import Span

if TYPE_CHECKING:
    from jaxshard_magic.explorer import Explorer

ROWS = 16
PATH, TYPE, ROW = 62, 440, 36  # px: where names and types begin, and the height of a row


def layout(report: Report, theme: str) -> str:
    """The layout of a report's arrays, the largest first, repeated layers in one row."""
    figures, there = layout_figures(report), words.reported_devices(report)
    return _drawn(report.leaves, report.mesh, words.title_text(report), there, theme, figures)


def of_explorer(ex: "Explorer") -> Mapping[str, Picture]:
    """The layout of an explorer's arrays as they lie now."""
    leaves, mesh, strategy, there = ex.leaves, ex.mesh_info, ex.strategy, devices_text(ex)
    return {"layout": lambda theme: _drawn(leaves, mesh, strategy, there, theme)}


def _drawn(
    leaves: Sequence[Leaf],
    mesh: MeshInfo,
    strategy: str,
    devices: str,
    theme: str,
    figures: Sequence[Figure] = (),
) -> str:
    lead = [Span(f"{strategy} ", "strong"), Span("on "), *_axes(mesh), Span(f", {devices}")]
    sheet, rows = Sheet(mesh), leaf_rows.fold(leaves)
    sheet.sentence(lead)
    per = "on the fullest device" if leaf_rows.parted(leaves) else "per device"
    sizes = ", ".join(f"{role} {byte_text(n)}" for role, n in leaf_rows.role_bytes(leaves).items())
    sheet.small(
        f"{words.leaves_text(len(leaves))}: {sizes} {per}" if sizes else words.leaves_text(len(leaves))
    )
    sheet.down(4)
    for row in rows[:ROWS]:
        times = f" ×{count_text(row.members)}" if row.members > 1 else ""
        name = shorten(row.path, fitting(TYPE - PATH - 12, mono=True) - len(times))
        sheet.draw(0, svg.leaf_blocks(row.leaf, mesh))
        sheet.text(PATH, [Span(name), Span(times, "quiet")], down=14, mono=True)
        why = leaf_rows.not_cut(row) or row.leaf.why
        sheet.text(PATH, [Span(clip(why, fitting(TYPE - PATH - 12, 11)), "quiet")], down=28, size=11)
        sheet.text(TYPE, _type(row.leaf), down=14, mono=True)
        place = [Span(text, "axis" if name else "quiet") for text, name in place_parts(row.leaves)]
        sheet.text(TYPE, place, down=28, size=11)
        sheet.text(ROOM, byte_text(row.bytes_per_device), down=14, end=True)
        sheet.down(ROW)
    left = sum(row.members for row in rows[ROWS:])
    first = "the first of its devices" if leaf_rows.parted(leaves) else "the first device"
    sheet.small(
        f"and {count_text(left)} more, none larger" if left else "",
        f"Shaded: what {first} holds; a second sheet: a copy elsewhere.",
    )
    divided.add(sheet, figures, mesh)
    return sheet.svg(f"layout of {words.leaves_text(len(leaves))}", theme)


def _axes(mesh: MeshInfo) -> list[Span]:
    """`data=4 model=2`, each axis in its hue."""
    spans: list[Span] = []
    for axis, size in mesh.axes.items():
        spans += [Span(" ")] * bool(spans) + [Span(axis, "axis"), Span(f"={size}")]
    return spans


def _type(leaf: Leaf) -> list[Span]:
    """The type in as much room as there is, each axis in its hue."""
    most, spans = fitting(ROOM - TYPE - 70, mono=True), list[Span]()
    for text, axis in type_parts(leaf):
        said = clip(text if axis is None else axis, most)
        spans.append(Span(said, "axis" if axis else "text"))
        most -= len(said)
        if most <= 1:
            break
    return spans
