"""A `jax.sharding.Mesh` as the plain data of a Report."""

from jax.sharding import Mesh

from ..report import MeshInfo


def mesh_info(mesh: Mesh, source: str) -> MeshInfo:
    """Axes, devices and processes of `mesh`; `source` is attached, simulated or topology.

    >>> import jax
    >>> mesh_info(jax.make_mesh((1,), ("data",)), "attached").axes
    {'data': 1}
    """
    devices = mesh.devices.flatten().tolist()
    return MeshInfo(
        axes=dict(mesh.shape),
        platform=devices[0].platform,
        device_kind=devices[0].device_kind,
        source=source,
        devices=tuple(d.id for d in devices),
        processes=len({d.process_index for d in devices}),
    )
