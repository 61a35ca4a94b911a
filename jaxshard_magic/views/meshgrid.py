"""Mesh as a grid of device ids with axis coordinates, for a terminal and for a notebook; and a mesh over several hosts
as a table of their machines and the positions of their devices.

The last two axes form a grid; each index of the axes before has a grid of its own. Rows and columns that don't fit are
cut in the middle.
"""

from collections.abc import Sequence
from itertools import product
from math import prod

from jaxshard_magic.report import MeshInfo
from jaxshard_magic.report.parts import mesh_text as axes_text
from jaxshard_magic.views import svg, words
from jaxshard_magic.views.colours import HUES
from jaxshard_magic.views.format import count_text, printable
from jaxshard_magic.views.html_tags import axis, code, escaped, mesh_axes, small, table
from jaxshard_magic.views.terminal import display_width, pad

MOST_HOSTS = 8  # hosts listed with their devices, at most
MOST_ROWS, MOST_COLUMNS, MOST_PLANES, MOST_DEVICES = 16, 16, 8, 128
GAP = "\u2026"


def mesh_text(info: MeshInfo, width: int = 80, hosts: bool = True) -> str:
    """Render a mesh as text: axes, devices, grid of device ids, and hosts.

    Args:
        info: Mesh.
        width: Maximal number of columns.
        hosts: List the devices of each host if the mesh has several hosts.
    """
    head = f"{axes_text(info.axes)}   {words.devices_text(info, 'x')}"
    planes = [_plane_text(info, index, width - 2) for index in _plane_indices(info)]
    lines = [printable(head), *_side_by_side(planes, width)]
    left = _planes(info) - len(planes)
    if left:
        lines.append(f"  and {count_text(left)} more grids like these")
    if hosts and info.hosts:
        lines += ["", *(f"  {line}" for line in words.hosts_lines(info, MOST_HOSTS))]
    return "\n".join(line.rstrip() for line in lines)


def mesh_html(info: MeshInfo, hosts: bool = True) -> str:
    """Render a mesh as HTML: a table of device ids with rows and columns marked in the hue of their axis.

    A strong line separates hosts.

    Args:
        info: Mesh.
        hosts: List the devices of each host if the mesh has several hosts.
    """
    head = f"<p>{mesh_axes(info)} &nbsp; {escaped(words.devices_text(info))}</p>"
    planes = [_plane_html(info, index) for index in _plane_indices(info)]
    left = _planes(info) - len(planes)
    more = small(f"and {count_text(left)} more grids like these") if left else ""
    host_lines = words.hosts_lines(info, MOST_HOSTS) if hosts else []
    each = small("<br>".join(escaped(line) for line in host_lines)) if host_lines else ""
    return f'<div class="jss">\n{head}\n{"".join(planes)}{more}{each}\n</div>\n'


def _axes(info: MeshInfo) -> tuple[list[str], str | None, str | None]:
    """Return the axes of planes, rows and columns; a mesh of one axis is one row."""
    names = list(info.axes)
    if len(names) < 2:
        return [], None, names[0] if names else None
    return names[:-2], names[-2], names[-1]


def _planes(info: MeshInfo) -> int:
    return prod(info.axes[name] for name in _axes(info)[0])


def _plane_indices(info: MeshInfo) -> list[tuple[int, ...]]:
    every = product(*(range(info.axes[name]) for name in _axes(info)[0]))
    size = prod(info.axes.values()) // _planes(info)
    most = max(2, min(MOST_PLANES, MOST_DEVICES // size))
    return [index for index, _ in zip(every, range(most), strict=False)]


def _plane_ids(info: MeshInfo, index: Sequence[int]) -> list[list[int]]:
    """Return the device ids of one plane by row and column."""
    planes, row_axis, column_axis = _axes(info)
    rows = info.axes[row_axis] if row_axis else 1
    columns = info.axes[column_axis] if column_axis else 1
    start = 0
    for name, i in zip(planes, index, strict=True):
        start = start * info.axes[name] + i
    start *= rows * columns
    return [list(info.devices[start + r * columns : start + (r + 1) * columns]) for r in range(rows)]


def shown_indices(size: int, most: int) -> list[int | None]:
    """Return the indices to show of `size`, with None for a gap: `[0, 1, 2, None, 9]`."""
    if size <= most:
        return list(range(size))
    return [*range(most - 2), None, size - 1]


def _plane_name(info: MeshInfo, index: Sequence[int]) -> str:
    return ", ".join(f"{name} {i}" for name, i in zip(_axes(info)[0], index, strict=True))


def _plane_text(info: MeshInfo, index: Sequence[int], width: int) -> list[str]:
    _, row_axis, column_axis = _axes(info)
    ids = _plane_ids(info, index)
    digits = max(len(str(i)) for i in info.devices)
    rows = shown_indices(len(ids), MOST_ROWS)
    if row_axis is None:
        labels = ["device"]
    else:
        number = len(str(len(ids) - 1))
        names = [row_axis, *[""] * (len(rows) - 1)]
        labels = [
            f"{pad(name, display_width(row_axis))}  {pad(_index(r), number, 'right')}"
            for name, r in zip(names, rows, strict=True)
        ]
    top = (column_axis or "") if row_axis is None else ""
    label = max(display_width(text) for text in [*labels, top])
    columns = shown_indices(len(ids[0]), max(4, (width - label - 3) // (digits + 2)))

    def line(left: str, rule: str, values: Sequence[str]) -> str:
        return f"{pad(left, label)} {rule} " + "  ".join(pad(v, digits, "right") for v in values)

    lines = [_plane_name(info, index)] if index else []
    lines += [pad("", label + 3) + (column_axis or "")] if row_axis else []
    lines.append(line(top, " ", [_index(c) for c in columns]))
    return lines + [
        line(left, "\u2502", [_id(ids, r, c) for c in columns]) for left, r in zip(labels, rows, strict=True)
    ]


def _index(i: int | None) -> str:
    return GAP if i is None else str(i)


def _id(ids: Sequence[Sequence[int]], r: int | None, c: int | None) -> str:
    return GAP if r is None or c is None else str(ids[r][c])


def _side_by_side(blocks: Sequence[Sequence[str]], width: int) -> list[str]:
    """Arrange blocks of lines side by side up to `width` columns, then below each other."""
    lines: list[str] = []
    row: list[Sequence[str]] = []
    # None ends the last row of blocks.
    for block in [*blocks, None]:
        used = sum(max(map(display_width, b)) + 4 for b in row)
        if row and (block is None or used + max(map(display_width, block)) + 2 > width):
            widths = [max(map(display_width, b)) for b in row]
            lines.append("")
            lines += [
                "  " + "    ".join(pad(b[i], w) for b, w in zip(row, widths, strict=True)) for i in range(len(row[0]))
            ]
            row = []
        if block is not None:
            row.append(block)
    return [printable(line) for line in lines]


_CELL = "text-align:center;padding:3px 8px;min-width:18px;border:1px solid #7a828a"
_APART = "3px solid #7a828a"
_INDEX = "text-align:center;padding:1px 8px;font-weight:normal;border:0"
_AXIS = "text-align:center;vertical-align:middle;padding:1px 8px;border:0"


def _plane_html(info: MeshInfo, index: Sequence[int]) -> str:
    _, row_axis, column_axis = _axes(info)
    ids = _plane_ids(info, index)
    # `MeshInfo.hosts` is empty for a mesh on one host.
    host_of = dict(zip(info.devices, info.hosts, strict=bool(info.hosts)))
    host = [[host_of.get(device, 0) for device in row] for row in ids]
    columns, rows = shown_indices(len(ids[0]), MOST_COLUMNS), shown_indices(len(ids), MOST_ROWS)
    corner = "" if row_axis is None else '<th style="border:0"></th>' * 2
    body = []
    if column_axis:
        body.append(corner + _axis_html(info, column_axis, "bottom", f'colspan="{len(columns)}"'))
    body.append(corner + "".join(map(_index_html, columns)))
    for i, r in enumerate(rows):
        left = "" if row_axis is None else _index_html(r)
        if row_axis and i == 0:
            left = _axis_html(info, row_axis, "right", f'rowspan="{len(rows)}"') + left
        body.append(left + "".join(_cell_html(_id(ids, r, c), _host_borders(host, r, c)) for c in columns))
    title = f"<small>{escaped(_plane_name(info, index))}</small>" if index else ""
    # JupyterLab shades every second table row, which means nothing in a grid.
    trs = "\n".join(f'<tr style="background:transparent">{cells}</tr>' for cells in body)
    grid = f'<table style="border-collapse:collapse;width:auto">{trs}</table>'
    return f'<div style="display:inline-block;margin:0 24px 12px 0;vertical-align:top">{title}{grid}</div>'


def _axis_html(info: MeshInfo, name: str, side: str, span: str) -> str:
    i = svg.axis_index(name, info)
    line = f"border-{side}:3px {('solid', 'dashed', 'dotted', 'double')[i % 4]} {svg.AXES[i % HUES]}"
    return f'<th align="center" style="{_AXIS};{line}" {span}>{axis(name, info)}</th>'


def _index_html(i: int | None) -> str:
    return f'<th align="center" style="{_INDEX}"><small>{_index(i)}</small></th>'


def _host_borders(host: Sequence[Sequence[int]], r: int | None, c: int | None) -> str:
    """Return CSS for a strong line above or left of a cell if the neighbour there is on another host."""
    if r is None or c is None:
        return ""
    above, left = r > 0 and host[r - 1][c] != host[r][c], c > 0 and host[r][c - 1] != host[r][c]
    return f";border-top:{_APART}" * above + f";border-left:{_APART}" * left


def _cell_html(content: str, lines: str) -> str:
    return f'<td align="center" style="{_CELL}{lines}">{content}</td>'


def hosts_text(info: MeshInfo, local_indices: Sequence[int], machines: Sequence[str], width: int = 80) -> str:
    """Render the table as text.

    Args:
        info: Mesh.
        local_indices: For each device of the mesh, the last axis fastest, its index among the devices of its host.
        machines: Machine name of each host.
        width: Columns of the grid above the table.
    """
    rows = [
        f"  host {host}  {machine}  {devices}" for host, machine, devices in _host_rows(info, local_indices, machines)
    ]
    return "\n".join([mesh_text(info, width, hosts=False), "", *rows])


def hosts_html(info: MeshInfo, local_indices: Sequence[int], machines: Sequence[str]) -> str:
    """Render a grid and the table as HTML without script.

    Args:
        info: Mesh.
        local_indices: For each device of the mesh, the last axis fastest, its index among the devices of its host.
        machines: Machine name of each host.
    """
    rows = [
        [f"host {host}", escaped(machine), code(at)] for host, machine, at in _host_rows(info, local_indices, machines)
    ]
    head = [("host", "left"), ("machine", "left"), ("device there: its place on the mesh", "left")]
    return mesh_html(info, hosts=False) + f'<div class="jss">{table(head, rows)}</div>\n'


def _host_rows(info: MeshInfo, local_indices: Sequence[int], machines: Sequence[str]) -> list[tuple[int, str, str]]:
    """Return (host, machine, devices with their mesh coordinates) of each host."""
    of_host: dict[int, list[str]] = {host: [] for host in range(len(machines))}
    # `MeshInfo.hosts` is empty for a mesh on one host.
    hosts = info.hosts or (0,) * len(local_indices)
    for index, (host, device) in sorted(enumerate(zip(hosts, local_indices, strict=True)), key=lambda each: each[1]):
        of_host[host].append(f"{device}: {','.join(map(str, info.place(index).values()))}")
    return [(host, machine, "  ".join(of_host[host])) for host, machine in enumerate(machines)]
