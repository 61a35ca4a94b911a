"""Meshes from text, and what is the matter with them and with the machine."""

from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AxisType, Mesh

from ..compiler_log import captured
from ..config.mesh import BuiltMesh, MeshSpec, build, default_spec
from ..config.mesh_text import axes_text
from ..config.strategy_text import jobs_of, parse_strategy
from ..doctor import Doctor, examine
from ..errors import ShardError
from ..targets import compiler_of, target_of
from ..temporary import within

if TYPE_CHECKING:
    from ..hosts.cluster import Cluster


def mesh(text: str, *, namespaces: Sequence[MutableMapping[str, Any]] = ()) -> Any:
    """Build the mesh that a text describes: devices in a grid whose axes have names.

    Args:
        text: what `%mesh` takes: `"data=4 model=2"`; `"data=-1"` for as many devices as are left; `"cpu:8 data=8"` for
            simulated ones; `"v5e:4x4 data=16"` for a TPU slice, or `"h100:8 data=8"` for GPUs, that are not attached.
            Sizes are numbers of devices. A mesh of what is not attached compiles and does not run
            (`ShardedStep.prepare`). `"hosts:2 data=8"`, `"ssh:node1,node2 data=16"` and the like start hosts, with
            ipyparallel: 5 to 10 s.
        namespaces: dicts whose arrays are moved along where devices have to be simulated, which restarts the CPU
            backend: a second or so, and once.

    Returns:
        A `jax.sharding.Mesh`; of hosts a `jaxshard_magic.hosts.cluster.Cluster`, whose `run(text)` runs Python on all
        of them and `close()` ends them. In a notebook `%mesh` has every cell run there.

    Raises:
        ShardError: for text that is no mesh, and for one that these devices cannot make.

    >>> mesh("cpu:8 data=4 model=2").shape["model"]
    2
    """
    spec = MeshSpec.parse(text)
    if spec.hosts is None:
        return build_mesh(text, namespaces=namespaces).mesh
    from ..hosts.starting import opened

    return opened(spec.hosts, axes_text(spec.axes), spec.size)


def build_mesh(text: str, *, namespaces: Sequence[MutableMapping[str, Any]] = ()) -> BuiltMesh:
    """As `mesh`, with where its devices come from and notes to show: what was simulated, what was moved."""
    return build(MeshSpec.parse(text), namespaces)


def get_ready(mesh: Mesh) -> None:
    """Start the compiler of a mesh whose devices are not attached, while there is something else to do."""
    if (target := target_of(mesh)) is not None:
        compiler_of(target).ready(target.topology())


@within(captured)
def default_mesh(
    strategy: str, *, stages: int | None = None, namespaces: Sequence[MutableMapping[str, Any]] = ()
) -> BuiltMesh:
    """The mesh that `strategy` gets when none was named: all devices, or 8 simulated ones on a lone CPU.

    `stages`: those of its pipeline. Raises `ShardError` for more of them than there are devices.
    """
    jobs = jobs_of(parse_strategy(strategy)) or ("data",)
    count, platform = jax.device_count(), jax.default_backend()
    if stages is not None and stages > count and (platform, count) != ("cpu", 1):
        line = f"%mesh cpu:{stages} {default_spec(jobs, stages, platform, stages)}"
        raise ShardError(
            f"--stages {stages}: a stage takes at least one device, and there {'is' if count == 1 else 'are'} {count}. "
            f"Use --stages {count}{' or fewer' if count > 1 else ''}, or simulated devices: {line}",
            fix=line,
        )
    return build(default_spec(jobs, count, platform, stages), namespaces)


def doctor(mesh: "Mesh | Cluster | str | None" = None) -> Doctor:
    """Examine this machine: versions, devices, compilers, variables, and the mesh axis by axis, each failure with its
    remedy.

    It takes seconds: a small all-reduce runs along each axis of the mesh, with a time limit. Of several hosts it tells
    also which answer, whether their versions and devices are alike, whether each reaches every other one, and what an
    all-reduce over all of them takes. Under `jax.distributed` all processes call it together.

    Args:
        mesh: a `jax.sharding.Mesh`, mesh text, the hosts that `mesh("hosts:2 data=8")` gave, or None for a mesh of all
            devices.

    Returns:
        A `Doctor`: `ok`, and its `findings`.

    Raises:
        ShardError: for text that is no mesh, and for one that these devices cannot make.

    >>> doctor("cpu:8 data=8").findings[0].name
    'python'
    """
    if mesh is not None and not isinstance(mesh, (Mesh, str)):
        from ..hosts.health import examined

        return examine(None, hosts=examined(mesh))
    try:
        mesh = given_or(mesh, _all_devices)
    except RuntimeError:  # a backend does not start, which `examine` tells
        mesh = None
    return examine(mesh)


@within(captured)
def _all_devices() -> Mesh:
    devices = jax.devices()
    return jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)


def given_or(given: Mesh | str | None, default: Callable[[], Mesh]) -> Mesh:
    """The mesh that was given, or that its text describes; `default()` where none was."""
    if given is None:
        return default()
    return build_mesh(given).mesh if isinstance(given, str) else given
