"""Build meshes from text, and examine meshes and the machine."""

from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AxisType, Mesh

from ..compiler_log import capture_messages
from ..config.mesh import BuiltMesh, MeshSpec, build, default_spec
from ..config.mesh_text import axes_text
from ..config.strategy_text import jobs_of, parse_strategy
from ..doctor import Doctor, examine
from ..errors import ShardError
from ..targets import compiler_of, target_of
from ..temporary import run_in_context

if TYPE_CHECKING:
    from ..hosts.cluster import Cluster


def mesh(text: str, *, namespaces: Sequence[MutableMapping[str, Any]] = ()) -> Any:
    """Build a mesh from text: devices in a grid with named axes.

    Args:
        text: Text as `%mesh` takes it: `"data=4 model=2"`; `"data=-1"` for all devices left; `"cpu:8 data=8"` for
            simulated devices; `"v5e:4x4 data=16"` for a TPU slice, or `"h100:8 data=8"` for GPUs, not attached. Sizes
            are numbers of devices. Programs for hardware that is not attached compile and do not run
            (`ShardedStep.prepare`). `"hosts:2 data=8"`, `"ssh:node1,node2 data=16"` and the like start hosts with
            ipyparallel, in 5 to 10 s.
        namespaces: Dicts whose arrays are moved when devices have to be simulated. Simulation restarts the CPU backend,
            once, in about a second.

    Returns:
        A `jax.sharding.Mesh`; for hosts a `jaxshard_magic.hosts.cluster.Cluster`: `run(text)` runs Python on all hosts
        and `close()` ends them. In a notebook, `%mesh` makes every cell run there.

    Raises:
        ShardError: The text is no mesh, or the devices can't form it.

    >>> mesh("cpu:8 data=4 model=2").shape["model"]
    2
    """
    spec = MeshSpec.parse(text)
    if spec.hosts is None:
        return build_mesh(text, namespaces=namespaces).mesh
    from ..hosts.starting import start_with_mesh

    return start_with_mesh(spec.hosts, axes_text(spec.axes), spec.size)


def build_mesh(text: str, *, namespaces: Sequence[MutableMapping[str, Any]] = ()) -> BuiltMesh:
    """Build a mesh as `mesh` does, with the source of the devices and notes on simulated devices and moved arrays.

    Args:
        text: Mesh text without hosts.
        namespaces: Dicts whose arrays are moved.
    """
    return build(MeshSpec.parse(text), namespaces)


def get_ready(mesh: Mesh) -> None:
    """Start the compiler of a mesh whose devices are not attached, in the background."""
    if (target := target_of(mesh)) is not None:
        compiler_of(target).preload(target.topology())


@run_in_context(capture_messages)
def default_mesh(
    strategy: str, *, stages: int | None = None, namespaces: Sequence[MutableMapping[str, Any]] = ()
) -> BuiltMesh:
    """Build the default mesh of a strategy: all devices, or 8 simulated devices on a lone CPU.

    Args:
        strategy: Strategy.
        stages: Number of pipeline stages; None if open.
        namespaces: Dicts whose arrays are moved if devices are simulated.

    Raises:
        ShardError: More stages than devices.
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
    """Examine this machine: versions, devices, compilers, variables, and each mesh axis; each failure has a remedy.

    A small all-reduce with a time limit runs along each axis, in some seconds. With several hosts, the doctor also
    tells the hosts that answer, differences in versions and devices, hosts that can't reach each other, and the time of
    an all-reduce over all hosts. Under `jax.distributed` all processes must call this function.

    Args:
        mesh: A `jax.sharding.Mesh`, mesh text, the result of `mesh("hosts:2 data=8")`, or None for a mesh of all
            devices.

    Returns:
        A `Doctor` with `ok` and `findings`.

    Raises:
        ShardError: The text is no mesh, or the devices can't form it.

    >>> doctor("cpu:8 data=8").findings[0].name
    'python'
    """
    if mesh is not None and not isinstance(mesh, (Mesh, str)):
        from ..hosts.health import examine_hosts

        return examine(None, hosts=examine_hosts(mesh))
    try:
        mesh = given_or(mesh, _all_devices)
    except RuntimeError:  # a backend does not start, as `examine` reports
        mesh = None
    return examine(mesh)


@run_in_context(capture_messages)
def _all_devices() -> Mesh:
    devices = jax.devices()
    return jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)


def given_or(given: Mesh | str | None, default: Callable[[], Mesh]) -> Mesh:
    """Return the given mesh, or the mesh of a text; `default()` if None is given."""
    if given is None:
        return default()
    return build_mesh(given).mesh if isinstance(given, str) else given
