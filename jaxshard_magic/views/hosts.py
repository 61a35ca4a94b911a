"""A mesh over hosts as a table: of each host its machine, and where its devices stand on the mesh."""

from collections.abc import Sequence

from ..report import MeshInfo
from .meshgrid import mesh_html, mesh_text
from .tags import code, table, text


def hosts_text(info: MeshInfo, places: Sequence[int], machines: Sequence[str], width: int = 80) -> str:
    """As text. `places`: for each device of the mesh, the last axis fastest, its place among those of its host."""
    rows = [
        f"  host {host}  {machine}  {devices}" for host, machine, devices in _rows(info, places, machines)
    ]
    return "\n".join([mesh_text(info, width, hosts=False), "", *rows])


def hosts_html(info: MeshInfo, places: Sequence[int], machines: Sequence[str]) -> str:
    """As a picture and a table without script."""
    rows = [[f"host {host}", text(machine), code(at)] for host, machine, at in _rows(info, places, machines)]
    head = [("host", "left"), ("machine", "left"), ("device there: its place on the mesh", "left")]
    return mesh_html(info, hosts=False) + f'<div class="jss">{table(head, rows)}</div>\n'


def _rows(info: MeshInfo, places: Sequence[int], machines: Sequence[str]) -> list[tuple[int, str, str]]:
    of_host: dict[int, list[str]] = {host: [] for host in range(len(machines))}
    of = info.hosts or (0,) * len(places)
    for index, (host, device) in sorted(enumerate(zip(of, places, strict=True)), key=lambda each: each[1]):
        of_host[host].append(f"{device}: {','.join(map(str, info.place(index).values()))}")
    return [(host, machine, "  ".join(of_host[host])) for host, machine in enumerate(machines)]
