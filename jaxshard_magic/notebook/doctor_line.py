"""`%shard doctor`: examine this machine, or the hosts of the notebook."""

from typing import TYPE_CHECKING

from .options import ShardOptions, check_only

if TYPE_CHECKING:
    from ..doctor import Doctor
    from .hosts_session import HostsSession
    from .mesh_line import Meshes


def run_doctor_line(options: ShardOptions, hosts: "HostsSession", meshes: "Meshes") -> "Doctor":
    """Run a `%shard doctor` line.

    Args:
        options: Parsed options; only `--mesh` and `-o` are allowed.
        hosts: Hosts of the notebook, examined if running and the line names no mesh.
        meshes: Source of the mesh to examine.

    Raises:
        ShardError: Another option is given, or the mesh text is malformed.
    """
    from ..doctor import examine, jax_error

    check_only(options, "doctor", "mesh", "output")
    if jax_error() is not None:  # without JAX there are no meshes, and `api` can't be imported
        return examine(None)
    from .. import api

    if hosts.cluster is not None and not options.mesh:
        return api.doctor(hosts.cluster)
    try:
        built = meshes.build(options.mesh) if options.mesh else meshes.current()
    except RuntimeError:  # a backend does not start; the examination reports why
        built = None
    return api.doctor(built and built.mesh)
