"""A mesh over hosts as a table: of each host its machine, and where its devices stand on the mesh."""

from collections.abc import Mapping, Sequence
from html import escape
from math import prod

from ..units import count_text


def hosts_text(
    axes: Mapping[str, int], places: Sequence[tuple[int, int]], machines: Sequence[str], kind: str
) -> str:
    """As text. `places`: for each device of the mesh, the last axis fastest, its host and its place there."""
    rows = [f"host {host}  {machine}  {devices}" for host, machine, devices in _rows(axes, places, machines)]
    return "\n".join([_head(axes, len(machines), kind), *rows])


def hosts_html(
    axes: Mapping[str, int], places: Sequence[tuple[int, int]], machines: Sequence[str], kind: str
) -> str:
    """As a table without script."""
    rows = "".join(
        f"<tr><td>host {host}</td><td>{escape(machine)}</td><td><code>{escape(devices)}</code></td></tr>"
        for host, machine, devices in _rows(axes, places, machines)
    )
    head = "<tr><th>host</th><th>machine</th><th>device: place on the mesh</th></tr>"
    return f'<div class="jss"><p>{escape(_head(axes, len(machines), kind))}</p><table>{head}{rows}</table></div>\n'


def _head(axes: Mapping[str, int], hosts: int, kind: str) -> str:
    sizes = " ".join(f"{axis}={size}" for axis, size in axes.items())
    return f"{sizes}: {count_text(prod(axes.values()))} {kind} devices of {hosts} hosts"


def _rows(
    axes: Mapping[str, int], places: Sequence[tuple[int, int]], machines: Sequence[str]
) -> list[tuple[int, str, str]]:
    sizes = list(axes.values())
    of_host: dict[int, list[str]] = {host: [] for host in range(len(machines))}
    for index, (host, device) in sorted(enumerate(places), key=lambda each: each[1]):
        place = []
        for size in reversed(sizes):
            index, at = divmod(index, size)
            place.insert(0, at)
        of_host[host].append(f"{device}: {','.join(map(str, place))}")
    return [(host, machine, "  ".join(of_host[host])) for host, machine in enumerate(machines)]
