"""Small drawings as inline SVG: how a leaf is cut, bars, and the marks of mesh axes.

Hue is a mesh axis, with a dash pattern each; ink is what the first device holds. The colours are seen on white
and on #111; a host page may set others through the classes.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from math import prod

from jaxshard_magic.report import Leaf, MeshInfo
from jaxshard_magic.views.colours import BOTH
from jaxshard_magic.views.format import place_text, printable
from jaxshard_magic.views.hues import HUES, hues
from jaxshard_magic.views.leaf_rows import copies, cuts

AXES = tuple(BOTH[f"a{i}"] for i in range(HUES))
DASHES = ("", "5 2", "2 2", "6 2 2 2", "9 3", "1 2", "6 2 2 2 2 2", "10 2 4 2")
RULE, LIMIT = BOTH["rule"], BOTH["limit"]
OWN_OPACITY = {"compute": 1.0, "memory": 0.6}
KIND_OPACITY = {"all-gather": 1.0, "all-reduce": 0.8, "reduce-scatter": 0.6, "all-to-all": 0.4}

WIDTH, HEIGHT, SHEET = 44, 28, 3
MOST_LINES = 12

Cut = tuple[tuple[str, int], ...]


def number(value: float) -> str:
    """A coordinate in as few characters as it needs."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def drawing(width: float, height: float, label: str, marks: Iterable[str]) -> str:
    """An `<svg>` of that many px; `label` is what a screen reader says."""
    w, h = number(width), number(height)
    role = f'role="img" aria-label="{escape(label)}"' if label else 'aria-hidden="true"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" {role}'
        f' style="max-width:none">{"".join(marks)}</svg>'
    )


def rect(x: float, y: float, w: float, h: float, paint: str) -> str:
    """A rectangle at (x, y), in px; `paint` are its further attributes."""
    return f'<rect x="{number(x)}" y="{number(y)}" width="{number(w)}" height="{number(h)}" {paint}/>'


def label(x: float, y: float, content: str, size: float, more: str = "") -> str:
    """A text that begins at (x, y), in letters of `size` px; `more` are its further attributes."""
    where = f'x="{number(x)}" y="{number(y)}" font-size="{size}" fill="currentColor"'
    return f"<text {where}{more}>{escape(printable(content))}</text>"


def axis_index(axis: str, mesh: MeshInfo) -> int:
    """The number of an axis among those of the mesh, by which `stroke` and `fill` choose its look."""
    return hues([*mesh.axes, axis])[axis]


def stroke(i: int) -> str:
    """The attributes of a line in the hue and dash of an axis, by its number."""
    pattern, hue = DASHES[(i + i // HUES) % HUES], i % HUES
    dash = f' stroke-dasharray="{pattern}"' if pattern else ""
    return f'class="jss-s{hue}" stroke="{AXES[hue]}"{dash}'


def fill(i: int) -> str:
    """The attributes of an area in the hue of an axis, by its number."""
    return f'class="jss-f{i % HUES}" fill="{AXES[i % HUES]}"'


def axis_mark(axis: str, mesh: MeshInfo) -> str:
    """A short line in the hue and dash of a mesh axis."""
    return drawing(18, 8, "", [f'<path d="M0 5H18" {stroke(axis_index(axis, mesh))} stroke-width="3"/>'])


def role_mark(role: str) -> str:
    """A square in the colour of a role of memory, for legends."""
    return drawing(10, 10, "", [rect(0.5, 0.5, 9, 9, role_paint(role))])


def measured_mark() -> str:
    """The tick of a measured peak."""
    return drawing(4, 12, "", [rect(0.5, 0, 3, 12, 'fill="currentColor"')])


def role_paint(role: str) -> str:
    """The attributes of an area in the colour of a role of memory; `other` is hollow."""
    if role == "other":
        return f'class="jss-r-other" fill="none" stroke="{RULE}" vector-effect="non-scaling-stroke"'
    return f'class="jss-r-{role}" fill="{BOTH[role]}"'


def leaf_blocks(leaf: Leaf, mesh: MeshInfo) -> str:
    """How a leaf is cut: a line in its axis' hue at each cut, ink on what the first of its devices holds, and a
    second sheet where each block lies on more than one device."""
    cut = cuts(leaf, mesh)
    down, across, deep = _shown(cut)
    kept = copies(leaf, mesh)
    width, height = (8, 8) if not cut else (WIDTH, 8 if len(cut) == 1 else HEIGHT)
    top = (HEIGHT - height) / 2 + SHEET + 0.5
    marks = []
    if deep is not None or kept > 1:
        sheet = stroke(axis_index(deep[0][0], mesh)) if deep else f'class="jss-rule" stroke="{RULE}"'
        path = f"M{SHEET + 0.5} {top}v-{SHEET}h{width}v{height}h-{SHEET}"
        marks.append(f'<path d="{path}" fill="none" {sheet}/>')
    rows, columns = prod(n for _, n in down), prod(n for _, n in across)
    marks.append(rect(0.5, top, width / columns, height / rows, 'fill="currentColor" fill-opacity=".28"'))
    marks += _lines(
        across, mesh, width, lambda x: f"M{number(0.5 + x)} {number(top)}v{height}", top, height, True
    )
    marks += _lines(down, mesh, height, lambda y: f"M.5 {number(top + y)}h{width}", top, width, False)
    marks.append(rect(0.5, top, width, height, f'class="jss-rule" fill="none" stroke="{RULE}"'))
    return drawing(WIDTH + SHEET + 1, HEIGHT + SHEET + 1, blocks_text(leaf, mesh), marks)


def _shown(cut: Sequence[Cut]) -> tuple[Cut, Cut, Cut | None]:
    """The cuts to draw down, across and as a second sheet: dimensions that are cut go before whole ones."""
    dims = [i for i, axes in enumerate(cut) if prod(n for _, n in axes) > 1]
    deep = cut[dims[0]] if len(dims) > 2 else None
    shown = dims[-2:]
    whole = [i for i in reversed(range(len(cut))) if i not in shown]
    shown = sorted(shown + whole[: 2 - len(shown)])
    if not shown:
        return (), (), None
    return (cut[shown[0]] if len(shown) == 2 else ()), cut[shown[-1]], deep


def _lines(cut: Cut, mesh: MeshInfo, length: float, at, top: float, other: float, upright: bool) -> list[str]:
    """Lines between the blocks of one dimension; what is too fine for lines is a tint."""
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
        path = "".join(at(length * k / blocks) for k in range(1, blocks) if k % size or before == 1)
        marks.append(f'<path d="{path}" {stroke(i)} stroke-width="1.5"/>')
    return marks


def blocks_text(leaf: Leaf, mesh: MeshInfo) -> str:
    """The drawing in words: `dim 0 in 4 over data; each block on 2 devices`."""
    said = [
        f"dim {i} in {prod(n for _, n in axes)} over {' and '.join(axis for axis, _ in axes)}"
        for i, axes in enumerate(cuts(leaf, mesh))
        if axes
    ]
    kept = copies(leaf, mesh)
    where = f"on {kept} devices" if kept > 1 else "on one device"
    told = f"{'; '.join(said)}; each block {where}" if said else f"whole, {where}"
    return f"{told}, {place_text([leaf])} only" if leaf.within else told


def memory_bar(
    segments: Sequence[tuple[str, int]],
    peak: int | None,
    measured: int | None,
    limit: int | None,
    full: int,
    label: str,
) -> str:
    """One device's memory on a scale that ends at `full` bytes, as wide as its cell; a tick where it was measured."""
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
        marks.append(rect(min(997.0, limit * scale - 3), top, 3, 12, f'class="jss-limit" fill="{LIMIT}"'))
    if measured is not None:
        at = max(0.0, min(997.0, measured * scale - 1.5))
        title = f"<title>{escape(label)}</title>"
        marks.append(f'<g fill="currentColor">{title}{rect(at, 0, 3, 16, "")}</g>')
    return stretched(12 + 2 * top, label, marks)


def limit_bar(held: int, limit: int) -> str:
    """How little of a limit is held, on a scale that ends there; never nothing."""
    marks = [
        rect(0, 0, 1000, 6, 'fill="currentColor" fill-opacity=".07"'),
        rect(0, 0, max(3.0, 1000 * held / limit), 6, 'fill="currentColor"'),
        rect(997, 0, 3, 6, f'class="jss-limit" fill="{LIMIT}"'),
    ]
    return stretched(6, "", marks)


def stretched(height: float, label: str, marks: Iterable[str], more: str = "") -> str:
    """A drawing 1000 units wide that takes the width of its cell; `more` are its further attributes."""
    h = number(height)
    role = f'role="img" aria-label="{escape(label)}"' if label else 'aria-hidden="true"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="100%" height="{h}" viewBox="0 0 1000 {h}"'
        f' preserveAspectRatio="none" {role}{more}>{"".join(marks)}</svg>'
    )


def share_bar(parts: Sequence[tuple[int | None, float, float]], width: float = 112, height: float = 6) -> str:
    """Parts of a whole side by side: (an axis' number or None for no axis, share of the width, opacity)."""
    edges = (
        "" if axis is None or opacity == 1 else f' stroke="{AXES[axis % HUES]}"' for axis, _, opacity in parts
    )
    return drawing(width, height, "", _side_by_side(parts, edges, width, height, 0.5))


def whole_bar(parts: Sequence[tuple[int | None, float, float]], height: float = 12) -> str:
    """The same parts as in `share_bar` over the width of their cell."""
    return stretched(height, "", _side_by_side(parts, [""] * len(parts), 1000, height, 1))


def _side_by_side(
    parts: Sequence[tuple[int | None, float, float]],
    edges: Iterable[str],
    width: float,
    height: float,
    gap: float,
) -> Iterator[str]:
    """The rectangles of `share_bar` with their `edges`, a `gap` behind each."""
    x = 0.0
    for (axis, share, opacity), edge in zip(parts, edges, strict=True):
        paint = fill(axis) if axis is not None else f'class="jss-grey" fill="{RULE}"'
        paint += f' fill-opacity="{number(opacity)}"{edge}'
        yield rect(x, 0, max(share * width - gap, gap), height, paint)
        x += share * width


def cell_bar(share: float, paint: str, tick: float | None = None, *, hollow: bool = False) -> str:
    """A bar below the figure of a cell, over its width; `hollow` for what is predicted, `tick` a second value. Without
    `paint` it is empty room, as high."""
    marks = []
    if paint:
        marks.append(rect(0, 2, 1000, 5, 'fill="currentColor" fill-opacity=".07"'))
        width = 1000 * min(1.0, share)
        edge = 'fill="none" stroke="currentColor" stroke-opacity=".7" vector-effect="non-scaling-stroke"'
        marks.append(rect(0, 2.5, width, 4, edge) if hollow else rect(0, 2, width, 5, paint))
    if tick is not None:
        line = 'stroke="currentColor" stroke-width="2" vector-effect="non-scaling-stroke"'
        marks.append(f'<path d="M{number(min(995.0, 1000 * tick))} 0V9" {line}/>')
    return stretched(9, "", marks, ' style="display:block"')


def range_mark(low: float, middle: float, high: float, width: float = 112) -> str:
    """The spread of a figure on a scale that starts at 0: a line from least to most, a dot at the median."""
    scale = (width - 6) / high if high else 0
    x0, x1, x2 = (3 + v * scale for v in (low, middle, high))
    ink = 'stroke="currentColor"'
    return drawing(
        width,
        8,
        "",
        [
            f'<path d="M0 4H{number(width)}" {ink} stroke-opacity=".2"/>',
            f'<path d="M{number(x0)} 4H{number(x2)}" {ink} stroke-opacity=".6" stroke-width="3"/>',
            f'<circle cx="{number(x1)}" cy="4" r="3" fill="currentColor"/>',
        ],
    )
