"""A `jax.sharding.Mesh` as the plain data of a Report."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from ..hardware import Chip
from ..placing import number_of
from ..report import MeshInfo
from ..targets import target_of


def mesh_info(mesh: Mesh, source: str) -> MeshInfo:
    """Axes, devices and processes of `mesh`; `source` is attached, simulated or topology.

    >>> import jax
    >>> mesh_info(jax.make_mesh((1,), ("data",)), "attached").axes
    {'data': 1}
    """
    return _info(dict(mesh.shape), mesh.devices.flatten().tolist(), source)


def info_of(mesh: Mesh) -> MeshInfo:
    """The same, with the source that its devices say."""
    devices = mesh.devices.flatten().tolist()
    return mesh_info(mesh, "topology" if target_of(mesh) is not None else _source(devices))


def devices_info(devices: Sequence[Any]) -> MeshInfo:
    """Devices without a mesh, in a row: `device=8`."""
    return _info({"device": len(devices)}, devices, _source(devices))


def in_nodes(chip: Chip, info: MeshInfo) -> Chip:
    """A GPU with as many in a node as each host of the mesh has devices; any other chip as it is."""
    if chip.kind != "gpu" or not info.islands:
        return chip
    return replace(chip, node=max(Counter(info.islands).values()))


def _source(devices: Sequence[Any]) -> str:
    return "simulated" if devices[0].platform == "cpu" else "attached"


def _info(axes: dict[str, int], devices: Sequence[Any], source: str) -> MeshInfo:
    return MeshInfo(
        axes=axes,
        platform=devices[0].platform,
        device_kind=devices[0].device_kind,
        source=source,
        devices=tuple(map(number_of, devices)),
        processes=len({d.process_index for d in devices}),
        hosts=_several([_host(d) for d in devices]),
        islands=_several([_slice(d) if d.platform == "tpu" else _host(d) for d in devices]),
    )


def _host(device: Any) -> int:
    """The host of a device; of a GPU, each of which may have a process of its own, the node that XLA finds."""
    node = getattr(device, "slice_index", None) if device.platform == "gpu" else None
    return device.process_index if node is None else node


def _slice(device: Any) -> int:
    return getattr(device, "slice_index", None) or 0


def _several(parts: Sequence[int]) -> tuple[int, ...]:
    return tuple(parts) if len(set(parts)) > 1 else ()
