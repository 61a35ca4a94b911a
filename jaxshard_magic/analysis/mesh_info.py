"""Describe a `jax.sharding.Mesh` as plain data for a report."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from ..device_arrays import device_number
from ..hardware import Chip
from ..report import MeshInfo
from ..targets import target_of


def mesh_info(mesh: Mesh, source: str) -> MeshInfo:
    """Return the axes, devices and processes of a mesh.

    Args:
        mesh: Mesh to describe.
        source: "attached", "simulated" or "topology".

    >>> import jax
    >>> mesh_info(jax.make_mesh((1,), ("data",)), "attached").axes
    {'data': 1}
    """
    return _info(dict(mesh.shape), mesh.devices.flatten().tolist(), source)


def detect_mesh_info(mesh: Mesh) -> MeshInfo:
    """Return the description of a mesh, with the source read from the devices."""
    devices = mesh.devices.flatten().tolist()
    return mesh_info(mesh, "topology" if target_of(mesh) is not None else _source(devices))


def devices_info(devices: Sequence[Any]) -> MeshInfo:
    """Return the description of devices without a mesh, along one axis: `device=8`."""
    return _info({"device": len(devices)}, devices, _source(devices))


def with_node_size(chip: Chip, info: MeshInfo) -> Chip:
    """Return a GPU with the node size set to the number of mesh devices on each host; any other chip unchanged."""
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
        devices=tuple(map(device_number, devices)),
        processes=len({d.process_index for d in devices}),
        hosts=_several([_host(d) for d in devices]),
        # Only the network connects islands: slices of TPUs, hosts of other devices.
        islands=_several([_slice(d) if d.platform == "tpu" else _host(d) for d in devices]),
    )


def _host(device: Any) -> int:
    """Return the host index of a device; for a GPU the node index found by XLA."""
    # Each GPU may have a process of its own, so the process index does not tell the node.
    node = getattr(device, "slice_index", None) if device.platform == "gpu" else None
    return device.process_index if node is None else node


def _slice(device: Any) -> int:
    return getattr(device, "slice_index", None) or 0


def _several(parts: Sequence[int]) -> tuple[int, ...]:
    return tuple(parts) if len(set(parts)) > 1 else ()
