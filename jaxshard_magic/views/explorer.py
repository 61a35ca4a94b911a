"""An explorer as text for a terminal, and as HTML without script: its mesh, what each device holds, and the line."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxshard_magic.report import Leaf, MeshInfo
from jaxshard_magic.views import leaf_rows, svg, words
from jaxshard_magic.views.format import byte_text, count_text, printable, type_parts, type_text
from jaxshard_magic.views.page import document
from jaxshard_magic.views.tags import axis, code, joined, mesh_axes, small, table, text
from jaxshard_magic.views.terminal import cells, fitted, plain, printed, shorten, wrap, wrapped
from jaxshard_magic.views.terminal import table as columns_of

if TYPE_CHECKING:
    from jaxshard_magic.explorer import Explorer

SHOWN = 12  # arrays beside those that are set by hand


def lead(ex: "Explorer") -> str:
    """What a device holds of all arrays; `All 53 arrays: 1.86 GiB on each device, now 1.91 GiB.`"""
    n, total, now = len(ex.arrays), ex.bytes_per_device, ex.bytes_now
    what = "One array" if n == 1 else f"All {count_text(n)} arrays"
    before = "" if now is None or now == total else f", now {byte_text(now)}"
    return f"{what}: {byte_text(total)} on each device{before}."


def devices_text(ex: "Explorer") -> str:
    """`8 of 8 devices`; without what is there where nobody knows."""
    there = ex.place.count
    of = "" if there is None else f" of {count_text(there)}"
    return f"{count_text(ex.devices)}{of} devices"


def sets_text(ex: "Explorer") -> str:
    """How many arrays lie otherwise than the strategy alone would have them."""
    n = len(ex.changed)
    if not n:
        return "the strategy's own layout" if ex.stepped is not None else "nothing is cut yet"
    by_hand = sum(ex.arrays[i].path in ex.wishes for i in ex.changed)
    more = f": {count_text(by_hand)} by hand, {count_text(n - by_hand)} that follow" if n > by_hand else ""
    moved = f"; {count_text(len(ex.moved))} more lie otherwise because of it" if ex.moved else ""
    return f"sets {words.leaves_text(n)}{more}{moved}"


def to_text(ex: "Explorer", width: int | None = None) -> str:
    """Lines of at most `width` columns, the terminal's by default, held between 60 and 100; the line for the cell is
    never broken."""
    room = fitted(width)
    head = "   ".join([printable(ex.strategy), printable(ex.mesh), devices_text(ex)])
    head = [head] if cells(head) <= room else wrap(head, room, "", "  ")
    bytes_held = wrap(plain(lead(ex)), room)
    note = wrapped([ex.note], room, "! ", "  ") if ex.note else []
    line = [f"The line for your cell, {sets_text(ex)}:", f"    {printable(ex.line)}"]
    return "\n\n".join(printed(part) for part in ([*head, *bytes_held, *note], _lines(ex, room), line))


def _lines(ex: "Explorer", room: int) -> list[str]:
    (rows, left), info = _shown(ex), ex.mesh_info
    names = [printable(leaf.path) for leaf, _ in rows]
    kinds = [printable(type_text(leaf)) for leaf, _ in rows]
    columns = {
        "array": names,
        "type": kinds,
        "copies": [count_text(leaf_rows.copies(leaf, info)) for leaf, _ in rows],
        "per device": [byte_text(leaf.bytes_per_device) for leaf, _ in rows],
    }
    if ex.held_now is not None:
        columns["now"] = [byte_text(now) for _, now in rows]
    below = max(map(cells, names)) + _others(columns) > room  # then types stand on lines of their own
    if below:
        columns.pop("type")
    columns["array"] = [shorten(name, room - _others(columns)) for name in names]
    head, *lines = columns_of(columns, ("array", "type"), "")
    if below:
        pairs = zip(lines, kinds, strict=True)
        lines = [part for line, kind in pairs for part in (line, *wrap(kind, room, "  ", "    "))]
    return [head, *lines, *([left] if left else [])]


def _others(columns: Mapping[str, list[str]]) -> int:
    """Columns of the terminal that all but the arrays' names take."""
    narrow = {name: values if name != "array" else [""] * len(values) for name, values in columns.items()}
    return cells(columns_of(narrow, ("array", "type"), "")[0]) - cells("array")


def _shown(ex: "Explorer") -> tuple[list[tuple[Leaf, int | None]], str]:
    """Those that are set by hand, then the largest, each with its bytes in the last run; and how many are left."""
    leaves, changed, now = ex.leaves, set(ex.changed), ex.held_now
    order = sorted(range(len(leaves)), key=lambda i: (i not in changed, -leaves[i].bytes_per_device))
    chosen = order[: max(SHOWN, min(len(changed), 3 * SHOWN))]
    left = len(leaves) - len(chosen)
    rest = f"and {count_text(left)} more" if left else ""
    return [(leaves[i], None if now is None else now[i]) for i in chosen], rest


def to_html(ex: "Explorer") -> str:
    """A fragment to stand in a notebook or a page."""
    mesh = f"{mesh_axes(ex.mesh_info)} &nbsp; {text(devices_text(ex))}"
    head = f"<p><code><b>{text(ex.strategy)}</b></code> &nbsp; {mesh}</p>"
    note = small(text(ex.note))
    line = f"<p>The line for your cell, {text(sets_text(ex))}:<br>{code(ex.line)}</p>"
    said = f'<p class="jss-verdict">{text(lead(ex))}</p>'
    return f'<div class="jss">\n{joined([said, head, note, line, _table(ex)])}\n</div>\n'


def _table(ex: "Explorer") -> str:
    (rows, left), info = _shown(ex), ex.mesh_info
    head: list[tuple[str, str]] = [("", "left"), ("array", "wrap"), ("type", "left"), ("copies", "right")]
    head += [("per device", "right"), *([("now", "right")] if ex.held_now is not None else [])]
    body: Sequence[Sequence[str]] = [_cells(ex, info, leaf, now) for leaf, now in rows]
    return table(head, body) + small(f"{text(left)}." if left else "")


def _cells(ex: "Explorer", info: MeshInfo, leaf: Leaf, now: int | None) -> list[str]:
    kind = "".join(axis(name, info) if name else text(piece) for piece, name in type_parts(leaf))
    why = f"<br><small>{text(leaf.why)}</small>" if leaf.why else ""
    row = [
        svg.leaf_blocks(leaf, info),
        f"{code(leaf.path)}{why}",
        f"<code>{kind}</code>",
        count_text(leaf_rows.copies(leaf, info)),
        byte_text(leaf.bytes_per_device),
    ]
    return row if ex.held_now is None else [*row, byte_text(now)]


def page(ex: "Explorer") -> str:
    """A whole document that follows the reader's light or dark theme."""
    return document(printable(f"{ex.strategy} {ex.mesh}"), to_html(ex))
