"""A `jax.sharding.Mesh` as the plain data of a Report."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

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
    )
