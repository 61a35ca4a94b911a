"""A mesh over several hosts as a table: machine and device positions for each host."""

from collections.abc import Sequence

from ..report import MeshInfo
from .html_tags import code, escaped, table
from .meshgrid import mesh_html, mesh_text


def hosts_text(info: MeshInfo, local_indices: Sequence[int], machines: Sequence[str], width: int = 80) -> str:
    """Render the table as text.

    Args:
        info: Mesh.
        local_indices: For each device of the mesh, the last axis fastest, its index among the devices of its host.
        machines: Machine name of each host.
        width: Columns of the grid above the table.
    """
    rows = [f"  host {host}  {machine}  {devices}" for host, machine, devices in _rows(info, local_indices, machines)]
    return "\n".join([mesh_text(info, width, hosts=False), "", *rows])


def hosts_html(info: MeshInfo, local_indices: Sequence[int], machines: Sequence[str]) -> str:
    """Render a grid and the table as HTML without script.

    Args:
        info: Mesh.
        local_indices: For each device of the mesh, the last axis fastest, its index among the devices of its host.
        machines: Machine name of each host.
    """
    rows = [[f"host {host}", escaped(machine), code(at)] for host, machine, at in _rows(info, local_indices, machines)]
    head = [("host", "left"), ("machine", "left"), ("device there: its place on the mesh", "left")]
    return mesh_html(info, hosts=False) + f'<div class="jss">{table(head, rows)}</div>\n'


def _rows(info: MeshInfo, local_indices: Sequence[int], machines: Sequence[str]) -> list[tuple[int, str, str]]:
    """Return (host, machine, devices with their mesh coordinates) of each host."""
    of_host: dict[int, list[str]] = {host: [] for host in range(len(machines))}
    # `MeshInfo.hosts` is empty for a mesh on one host.
    hosts = info.hosts or (0,) * len(local_indices)
    for index, (host, device) in sorted(enumerate(zip(hosts, local_indices, strict=True)), key=lambda each: each[1]):
        of_host[host].append(f"{device}: {','.join(map(str, info.place(index).values()))}")
    return [(host, machine, "  ".join(of_host[host])) for host, machine in enumerate(machines)]
