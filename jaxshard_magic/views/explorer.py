"""Layout explorer as text for a terminal, and as HTML without script: its mesh, arrays and line."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxshard_magic.report import Leaf, MeshInfo
from jaxshard_magic.views import leaf_rows, svg, words
from jaxshard_magic.views.format import byte_text, count_text, printable, type_parts, type_text
from jaxshard_magic.views.html_tags import axis, code, document, escaped, join_nonempty, mesh_axes, small, table
from jaxshard_magic.views.terminal import display_width, plain_signs, shorten, terminal_text, text_width, wrap, wrap_all
from jaxshard_magic.views.terminal import table as columns_of

if TYPE_CHECKING:
    from jaxshard_magic.explorer import Explorer

SHOWN = 12  # arrays listed; more if more are set by hand


def summary(ex: "Explorer") -> str:
    """Return the bytes of all arrays on a device: `All 53 arrays: 1.86 GiB on each device, now 1.91 GiB.`"""
    n, total, now = len(ex.arrays), ex.bytes_per_device, ex.bytes_now
    what = "One array" if n == 1 else f"All {count_text(n)} arrays"
    before = "" if now is None or now == total else f", now {byte_text(now)}"
    return f"{what}: {byte_text(total)} on each device{before}."


def devices_text(ex: "Explorer") -> str:
    """Return `8 of 8 devices`; without the second number if the available devices are unknown."""
    there = ex.place.count
    of = "" if there is None else f" of {count_text(there)}"
    return f"{count_text(ex.devices)}{of} devices"


def overrides_text(ex: "Explorer") -> str:
    """Return the number of arrays with a layout other than the strategy's: set by hand, and changed as a
    consequence."""
    n = len(ex.changed)
    if not n:
        return "the strategy's own layout" if ex.stepped is not None else "nothing is cut yet"
    by_hand = sum(ex.arrays[i].path in ex.wishes for i in ex.changed)
    more = f": {count_text(by_hand)} by hand, {count_text(n - by_hand)} that follow" if n > by_hand else ""
    moved = f"; {count_text(len(ex.moved))} more lie otherwise because of it" if ex.moved else ""
    return f"sets {words.leaves_text(n)}{more}{moved}"


def to_text(ex: "Explorer", width: int | None = None) -> str:
    """Render the explorer as lines for a terminal. The line for the cell is never broken.

    Args:
        ex: Explorer to show.
        width: Columns, clamped to 60 to 100; None takes the width of the terminal.
    """
    room = text_width(width)
    head = "   ".join([printable(ex.strategy), printable(ex.mesh), devices_text(ex)])
    head = [head] if display_width(head) <= room else wrap(head, room, "", "  ")
    bytes_held = wrap(plain_signs(summary(ex)), room)
    note = wrap_all([ex.note], room, "! ", "  ") if ex.note else []
    # Not wrapped: a broken line could not be pasted.
    line = [f"The line for your cell, {overrides_text(ex)}:", f"    {printable(ex.line)}"]
    return "\n\n".join(terminal_text(part) for part in ([*head, *bytes_held, *note], _lines(ex, room), line))


def _lines(ex: "Explorer", room: int) -> list[str]:
    """Return the table of arrays; types move below their arrays if the table is too wide."""
    (rows, left), info = _shown_leaves(ex), ex.mesh_info
    names = [printable(leaf.path) for leaf, _ in rows]
    kinds = [printable(type_text(leaf)) for leaf, _ in rows]
    columns = {
        "array": names,
        "type": kinds,
        "copies": [count_text(leaf_rows.replica_count(leaf, info)) for leaf, _ in rows],
        "per device": [byte_text(leaf.bytes_per_device) for leaf, _ in rows],
    }
    if ex.held_now is not None:
        columns["now"] = [byte_text(now) for _, now in rows]
    below = max(map(display_width, names)) + _other_width(columns) > room  # types then get lines of their own
    if below:
        columns.pop("type")
    columns["array"] = [shorten(name, room - _other_width(columns)) for name in names]
    head, *lines = columns_of(columns, ("array", "type"), "")
    if below:
        pairs = zip(lines, kinds, strict=True)
        lines = [part for line, kind in pairs for part in (line, *wrap(kind, room, "  ", "    "))]
    return [head, *lines, *([left] if left else [])]


def _other_width(columns: Mapping[str, list[str]]) -> int:
    """Return the columns taken by everything except array names."""
    narrow = {name: values if name != "array" else [""] * len(values) for name, values in columns.items()}
    return display_width(columns_of(narrow, ("array", "type"), "")[0]) - display_width("array")


def _shown_leaves(ex: "Explorer") -> tuple[list[tuple[Leaf, int | None]], str]:
    """Return the arrays to list and a note on the number of others.

    Arrays set by hand come first, then the largest; each has its bytes in the last run, None if unknown.
    """
    leaves, changed, now = ex.leaves, set(ex.changed), ex.held_now
    order = sorted(range(len(leaves)), key=lambda i: (i not in changed, -leaves[i].bytes_per_device))
    chosen = order[: max(SHOWN, min(len(changed), 3 * SHOWN))]
    left = len(leaves) - len(chosen)
    rest = f"and {count_text(left)} more" if left else ""
    return [(leaves[i], None if now is None else now[i]) for i in chosen], rest


def to_html(ex: "Explorer") -> str:
    """Render the explorer as an HTML fragment for a notebook or a page."""
    mesh = f"{mesh_axes(ex.mesh_info)} &nbsp; {escaped(devices_text(ex))}"
    head = f"<p><code><b>{escaped(ex.strategy)}</b></code> &nbsp; {mesh}</p>"
    note = small(escaped(ex.note))
    line = f"<p>The line for your cell, {escaped(overrides_text(ex))}:<br>{code(ex.line)}</p>"
    summary_html = f'<p class="jss-verdict">{escaped(summary(ex))}</p>'
    return f'<div class="jss">\n{join_nonempty([summary_html, head, note, line, _table(ex)])}\n</div>\n'


def _table(ex: "Explorer") -> str:
    (rows, left), info = _shown_leaves(ex), ex.mesh_info
    head: list[tuple[str, str]] = [("", "left"), ("array", "wrap"), ("type", "left"), ("copies", "right")]
    head += [("per device", "right"), *([("now", "right")] if ex.held_now is not None else [])]
    body: Sequence[Sequence[str]] = [_cells(ex, info, leaf, now) for leaf, now in rows]
    return table(head, body) + small(f"{escaped(left)}." if left else "")


def _cells(ex: "Explorer", info: MeshInfo, leaf: Leaf, now: int | None) -> list[str]:
    kind = "".join(axis(name, info) if name else escaped(piece) for piece, name in type_parts(leaf))
    why = f"<br><small>{escaped(leaf.why)}</small>" if leaf.why else ""
    row = [
        svg.leaf_blocks(leaf, info),
        f"{code(leaf.path)}{why}",
        f"<code>{kind}</code>",
        count_text(leaf_rows.replica_count(leaf, info)),
        byte_text(leaf.bytes_per_device),
    ]
    return row if ex.held_now is None else [*row, byte_text(now)]


def page(ex: "Explorer") -> str:
    """Render the explorer as a whole HTML document; the theme, light or dark, is the reader's."""
    return document(printable(f"{ex.strategy} {ex.mesh}"), to_html(ex))
