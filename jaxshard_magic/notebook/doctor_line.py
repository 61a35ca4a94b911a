"""`%shard doctor`: this machine examined, and the hosts of the notebook where there are some."""

from typing import TYPE_CHECKING

from .options import ShardOptions, check_only

if TYPE_CHECKING:
    from ..doctor import Doctor
    from .mesh_line import Meshes
    from .on_hosts import OnHosts


def examined(options: ShardOptions, hosts: "OnHosts", meshes: "Meshes") -> "Doctor":
    """What `%shard doctor --mesh "data=8"` finds. Raises ShardError for options that it does not take, and for mesh
    text that is no mesh."""
    from ..doctor import examine, jax_error

    check_only(options, "doctor", "mesh", "output")
    if jax_error() is not None:  # without it there is neither a mesh nor the API
        return examine(None)
    from .. import api

    if hosts.cluster is not None and not options.mesh:
        return api.doctor(hosts.cluster)
    try:
        built = meshes.built(options.mesh) if options.mesh else meshes.current()
    except RuntimeError:  # a backend does not start, which the examination tells
        built = None
    return api.doctor(built and built.mesh)
