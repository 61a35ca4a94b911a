"""Small inline SVG drawings: the sharding of a leaf, bars, marks of mesh axes, and labels of charts.

A hue with a dash pattern stands for a mesh axis, ink for the block on the first device. The colours are legible on
white and on #111; a host page may set others through the classes.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from math import prod
from typing import NamedTuple

from jaxshard_magic.report import Leaf, MeshInfo
from jaxshard_magic.views.colours import BOTH, HUES, hues
from jaxshard_magic.views.format import printable, submesh_text
from jaxshard_magic.views.leaf_rows import replica_count, sized_dim_axes

AXES = tuple(BOTH[f"a{i}"] for i in range(HUES))
DASHES = ("", "5 2", "2 2", "6 2 2 2", "9 3", "1 2", "6 2 2 2 2 2", "10 2 4 2")
RULE, LIMIT = BOTH["rule"], BOTH["limit"]
OWN_OPACITY = {"compute": 1.0, "memory": 0.6}
KIND_OPACITY = {"all-gather": 1.0, "all-reduce": 0.8, "reduce-scatter": 0.6, "all-to-all": 0.4}

WIDTH, HEIGHT, SHEET = 44, 28, 3  # px: the blocks of a leaf, offset of the second sheet
MOST_LINES = 12  # blocks up to which lines separate them

Cut = tuple[tuple[str, int], ...]


def coordinate(value: float) -> str:
    """Return a coordinate with at most two decimals and no trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def drawing(width: float, height: float, label: str, marks: Iterable[str]) -> str:
    """Return an `<svg>` element.

    Args:
        width: Width in px.
        height: Height in px.
        label: Text for screen readers; empty hides the drawing from them.
        marks: SVG elements inside.
    """
    w, h = coordinate(width), coordinate(height)
    role = f'role="img" aria-label="{escape(label)}"' if label else 'aria-hidden="true"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" {role}'
        f' style="max-width:none">{"".join(marks)}</svg>'
    )


def rect(x: float, y: float, w: float, h: float, paint: str) -> str:
    """Return a rectangle.

    Args:
        x: Left edge in px.
        y: Top edge in px.
        w: Width in px.
        h: Height in px.
        paint: Further attributes.
    """
    return f'<rect x="{coordinate(x)}" y="{coordinate(y)}" width="{coordinate(w)}" height="{coordinate(h)}" {paint}/>'


def label(x: float, y: float, content: str, size: float, more: str = "") -> str:
    """Return a text element.

    Args:
        x: Left edge in px.
        y: Baseline in px.
        content: Plain text.
        size: Font size in px.
        more: Further attributes, with a leading space.
    """
    where = f'x="{coordinate(x)}" y="{coordinate(y)}" font-size="{size}" fill="currentColor"'
    return f"<text {where}{more}>{escape(printable(content))}</text>"


def axis_index(axis: str, mesh: MeshInfo) -> int:
    """Return the number of an axis in its mesh; `stroke` and `fill` choose a look by this number.

    Args:
        axis: Name of the axis; may be absent from the mesh.
        mesh: Mesh with all other axes.
    """
    return hues([*mesh.axes, axis])[axis]


def stroke(i: int) -> str:
    """Return the attributes of a line in the hue and dash pattern of axis number `i`."""
    # From `HUES` on a hue repeats, with the next dash pattern.
    pattern, hue = DASHES[(i + i // HUES) % HUES], i % HUES
    dash = f' stroke-dasharray="{pattern}"' if pattern else ""
    return f'class="jss-s{hue}" stroke="{AXES[hue]}"{dash}'


def fill(i: int) -> str:
    """Return the attributes of an area in the hue of axis number `i`."""
    return f'class="jss-f{i % HUES}" fill="{AXES[i % HUES]}"'


def axis_mark(axis: str, mesh: MeshInfo) -> str:
    """Return a short line in the hue and dash pattern of a mesh axis."""
    return drawing(18, 8, "", [f'<path d="M0 5H18" {stroke(axis_index(axis, mesh))} stroke-width="3"/>'])


def role_mark(role: str) -> str:
    """Return a square in the colour of a memory role, for legends."""
    return drawing(10, 10, "", [rect(0.5, 0.5, 9, 9, role_paint(role))])


def measured_mark() -> str:
    """Return a tick as drawn for a measured peak, for legends."""
    return drawing(4, 12, "", [rect(0.5, 0, 3, 12, 'fill="currentColor"')])


def role_paint(role: str) -> str:
    """Return the attributes of an area in the colour of a memory role; `other` is hollow."""
    if role == "other":
        # Bars are stretched to their cells; the effect keeps the line width of the outline.
        return f'class="jss-r-other" fill="none" stroke="{RULE}" vector-effect="non-scaling-stroke"'
    return f'class="jss-r-{role}" fill="{BOTH[role]}"'


def leaf_blocks(leaf: Leaf, mesh: MeshInfo) -> str:
    """Draw the sharding of a leaf.

    Lines in the hue of a mesh axis separate blocks, ink fills the block on the first of the leaf's devices, and a
    second sheet stands for replicas, or for a third sharded dimension in the hue of its axis.
    """
    cut = sized_dim_axes(leaf, mesh)
    down, across, deep = _drawn_dims(cut)
    replicas = replica_count(leaf, mesh)
    width, height = (8, 8) if not cut else (WIDTH, 8 if len(cut) == 1 else HEIGHT)
    top = (HEIGHT - height) / 2 + SHEET + 0.5
    marks = []
    if deep is not None or replicas > 1:
        sheet = stroke(axis_index(deep[0][0], mesh)) if deep else f'class="jss-rule" stroke="{RULE}"'
        path = f"M{SHEET + 0.5} {top}v-{SHEET}h{width}v{height}h-{SHEET}"
        marks.append(f'<path d="{path}" fill="none" {sheet}/>')
    rows, columns = prod(n for _, n in down), prod(n for _, n in across)
    marks.append(rect(0.5, top, width / columns, height / rows, 'fill="currentColor" fill-opacity=".28"'))
    marks += _lines(
        across, mesh, width, lambda x: f"M{coordinate(0.5 + x)} {coordinate(top)}v{height}", top, height, True
    )
    marks += _lines(down, mesh, height, lambda y: f"M.5 {coordinate(top + y)}h{width}", top, width, False)
    marks.append(rect(0.5, top, width, height, f'class="jss-rule" fill="none" stroke="{RULE}"'))
    return drawing(WIDTH + SHEET + 1, HEIGHT + SHEET + 1, blocks_text(leaf, mesh), marks)


def _drawn_dims(cut: Sequence[Cut]) -> tuple[Cut, Cut, Cut | None]:
    """Return the axes of the dimensions drawn downwards, across and as a second sheet; sharded dimensions take
    precedence."""
    dims = [i for i, axes in enumerate(cut) if prod(n for _, n in axes) > 1]
    deep = cut[dims[0]] if len(dims) > 2 else None
    shown = dims[-2:]
    whole = [i for i in reversed(range(len(cut))) if i not in shown]
    shown = sorted(shown + whole[: 2 - len(shown)])
    if not shown:
        return (), (), None
    return (cut[shown[0]] if len(shown) == 2 else ()), cut[shown[-1]], deep


def _lines(cut: Cut, mesh: MeshInfo, length: float, at, top: float, other: float, upright: bool) -> list[str]:
    """Return lines between the blocks of one dimension; above 12 blocks a tint replaces the lines."""
    marks, blocks = [], 1
    for axis, size in cut:
        i = axis_index(axis, mesh)
        before, blocks = blocks, blocks * size
        if size == 1:
            continue
        if blocks > MOST_LINES:
            box = (0.5, top, length, other) if upright else (0.5, top, other, length)
            marks.append(rect(*box, f'{fill(i)} fill-opacity=".45"'))
            continue
        # Every `size`-th line belongs to the previous axes, which have drawn it.
        path = "".join(at(length * k / blocks) for k in range(1, blocks) if k % size or before == 1)
        marks.append(f'<path d="{path}" {stroke(i)} stroke-width="1.5"/>')
    return marks


def blocks_text(leaf: Leaf, mesh: MeshInfo) -> str:
    """Return the sharding of a leaf in words: `dim 0 in 4 over data; each block on 2 devices`.

    Args:
        leaf: Leaf with a spec.
        mesh: Gives the sizes of axes.
    """
    sharded = [
        f"dim {i} in {prod(n for _, n in axes)} over {' and '.join(axis for axis, _ in axes)}"
        for i, axes in enumerate(sized_dim_axes(leaf, mesh))
        if axes
    ]
    replicas = replica_count(leaf, mesh)
    where = f"on {replicas} devices" if replicas > 1 else "on one device"
    description = f"{'; '.join(sharded)}; each block {where}" if sharded else f"whole, {where}"
    return f"{description}, {submesh_text([leaf])} only" if leaf.within else description


def memory_bar(
    segments: Sequence[tuple[str, int]],
    peak: int | None,
    measured: int | None,
    limit: int | None,
    full: int,
    label: str,
) -> str:
    """Draw the memory of one device as a bar over the width of its cell.

    Args:
        segments: (role, bytes) in stacking order.
        peak: Bytes at the peak; the part above the limit has the colour of an error.
        measured: Measured peak in bytes, drawn as a tick; None for none.
        limit: Memory limit in bytes, drawn as a mark; None if the scale doesn't include the limit.
        full: Bytes at the end of the scale.
        label: Text for screen readers.
    """
    scale = 1000 / full if full else 0
    top = 0 if measured is None else 2
    marks, x = [rect(0, top, 1000, 12, 'fill="currentColor" fill-opacity=".07"')], 0.0
    for role, size in segments:
        inset = 0.5 if role == "other" else 0
        marks.append(rect(x, top + inset, size * scale, 12 - 2 * inset, role_paint(role)))
        x += size * scale
    if limit is not None and peak is not None and peak > limit:
        over = (limit * scale, top, (peak - limit) * scale, 12.0)
        marks.append(rect(*over, f'class="jss-limit" fill="{LIMIT}"'))
    elif limit is not None:
        # A mark is 3 of 1000 units wide: beyond 997 a part would be clipped.
        marks.append(rect(min(997.0, limit * scale - 3), top, 3, 12, f'class="jss-limit" fill="{LIMIT}"'))
    if measured is not None:
        at = max(0.0, min(997.0, measured * scale - 1.5))
        title = f"<title>{escape(label)}</title>"
        marks.append(f'<g fill="currentColor">{title}{rect(at, 0, 3, 16, "")}</g>')
    return full_width_drawing(12 + 2 * top, label, marks)


def limit_bar(held: int, limit: int) -> str:
    """Draw used bytes on a scale that ends at the limit, with at least 3 of 1000 units for used bytes."""
    marks = [
        rect(0, 0, 1000, 6, 'fill="currentColor" fill-opacity=".07"'),
        rect(0, 0, max(3.0, 1000 * held / limit), 6, 'fill="currentColor"'),
        rect(997, 0, 3, 6, f'class="jss-limit" fill="{LIMIT}"'),
    ]
    return full_width_drawing(6, "", marks)


def full_width_drawing(height: float, label: str, marks: Iterable[str], more: str = "") -> str:
    """Return a drawing 1000 units wide that is stretched to the width of its cell.

    Args:
        height: Height in px.
        label: Text for screen readers; empty hides the drawing from them.
        marks: SVG elements inside.
        more: Further attributes, with a leading space.
    """
    h = coordinate(height)
    role = f'role="img" aria-label="{escape(label)}"' if label else 'aria-hidden="true"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="100%" height="{h}" viewBox="0 0 1000 {h}"'
        # By default a browser keeps the proportions, and the bar would not fill its cell.
        f' preserveAspectRatio="none" {role}{more}>{"".join(marks)}</svg>'
    )


def share_bar(parts: Sequence[tuple[int | None, float, float]], width: float = 112, height: float = 6) -> str:
    """Draw shares of a whole side by side.

    Args:
        parts: (number of a mesh axis or None, share of the width, opacity).
        width: Width in px.
        height: Height in px.
    """
    edges = ("" if axis is None or opacity == 1 else f' stroke="{AXES[axis % HUES]}"' for axis, _, opacity in parts)
    return drawing(width, height, "", _side_by_side(parts, edges, width, height, 0.5))


def whole_bar(parts: Sequence[tuple[int | None, float, float]], height: float = 12) -> str:
    """Draw shares of a whole side by side over the width of a cell.

    Args:
        parts: As for `share_bar`.
        height: Height in px.
    """
    return full_width_drawing(height, "", _side_by_side(parts, [""] * len(parts), 1000, height, 1))


def _side_by_side(
    parts: Sequence[tuple[int | None, float, float]], edges: Iterable[str], width: float, height: float, gap: float
) -> Iterator[str]:
    """Yield the rectangles of a bar of shares.

    Args:
        parts: As for `share_bar`.
        edges: Stroke attributes of each part.
        width: Width of the whole bar.
        height: Height of the bar.
        gap: Space after each part.
    """
    x = 0.0
    for (axis, share, opacity), edge in zip(parts, edges, strict=True):
        paint = fill(axis) if axis is not None else f'class="jss-grey" fill="{RULE}"'
        paint += f' fill-opacity="{coordinate(opacity)}"{edge}'
        yield rect(x, 0, max(share * width - gap, gap), height, paint)
        x += share * width


def cell_bar(share: float, paint: str, tick: float | None = None, *, hollow: bool = False) -> str:
    """Draw a bar below the figure in a table cell, over the width of the cell.

    Args:
        share: Length of the bar relative to the cell, clamped to 1.
        paint: Attributes of the bar; empty gives an empty drawing of equal height.
        tick: Second value on the same scale.
        hollow: Draw an outline, for predicted values.
    """
    marks = []
    if paint:
        marks.append(rect(0, 2, 1000, 5, 'fill="currentColor" fill-opacity=".07"'))
        width = 1000 * min(1.0, share)
        edge = 'fill="none" stroke="currentColor" stroke-opacity=".7" vector-effect="non-scaling-stroke"'
        marks.append(rect(0, 2.5, width, 4, edge) if hollow else rect(0, 2, width, 5, paint))
    if tick is not None:
        line = 'stroke="currentColor" stroke-width="2" vector-effect="non-scaling-stroke"'
        marks.append(f'<path d="M{coordinate(min(995.0, 1000 * tick))} 0V9" {line}/>')
    return full_width_drawing(9, "", marks, ' style="display:block"')


def range_mark(low: float, middle: float, high: float, width: float = 112) -> str:
    """Draw the spread of a figure on a scale from 0: a line from least to most, a dot at the median.

    Args:
        low: Least value.
        middle: Median.
        high: Largest value, at the end of the scale.
        width: Width in px.
    """
    scale = (width - 6) / high if high else 0
    x0, x1, x2 = (3 + v * scale for v in (low, middle, high))
    ink = 'stroke="currentColor"'
    return drawing(
        width,
        8,
        "",
        [
            f'<path d="M0 4H{coordinate(width)}" {ink} stroke-opacity=".2"/>',
            f'<path d="M{coordinate(x0)} 4H{coordinate(x2)}" {ink} stroke-opacity=".6" stroke-width="3"/>',
            f'<circle cx="{coordinate(x1)}" cy="4" r="3" fill="currentColor"/>',
        ],
    )


class Box(NamedTuple):
    """Rectangle in px from the top left of a chart.

    Attributes:
        x: Left edge.
        y: Top edge.
        width: Width.
        height: Height.
    """

    x: float
    y: float
    width: float
    height: float

    def overlaps(self, other: "Box") -> bool:
        """Return whether two boxes share an area."""
        return (
            self.x < other.x + other.width
            and other.x < self.x + self.width
            and self.y < other.y + other.height
            and other.y < self.y + self.height
        )


def join_names(names: Iterable[str], most: int) -> str:
    """Join names with commas, and cut the list to a number of characters: `gpipe, 1f1b +2`.

    Args:
        names: Names, the most important first.
        most: Maximal length. The first name is kept even if it is longer.

    Returns:
        The names that fit, and `+n` for `n` omitted names.
    """
    names = list(names)
    text = ""
    for shown in range(len(names), 0, -1):
        rest = f" +{len(names) - shown}" if shown < len(names) else ""
        text = ", ".join(names[:shown]) + rest
        if len(text) <= most:
            return text
    return text
