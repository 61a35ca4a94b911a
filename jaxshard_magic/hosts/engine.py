"""Functions called on the hosts by the kernel: join the other hosts, prepare, run a cell, return values.

A host is an ipyparallel engine, an IPython kernel of its own. Nothing of JAX runs there before `join`.
"""

import builtins
import getpass
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ShardError
from ..packages import program_versions
from ..report import MeshInfo
from . import native_output
from .step_barrier import Call, HostFailed, StepBarrier, failure_text
from .transfer import Transfer

# JAX settings that change numbers. A notebook makes them in its first cell, before there are hosts, so hosts take the
# kernel's values when they join.
NUMERICS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_random_seed_offset",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_softmax_custom_jvp",
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_disable_jit",
)
_now: dict[str, StepBarrier] = {}  # barrier of the running cell, under "cell"
_group: list[str] = []  # token of the cluster joined; an engine joins once
_sent: dict[str, Any] = {}  # values received from the kernel, by name
_before: list[Any] = []  # restored by `release_engine`: SIGINT handler, and the session's `view` and `remember`


@dataclass(frozen=True)
class JoinedHost:
    """Host after joining.

    Attributes:
        process: JAX's process index.
        hosts: Number of JAX processes.
        pid: Process id of the operating system.
        machine: Name of the machine.
        devices: Local devices as `platform:id`.
        platform: Platform of the local devices.
        kind: Kind of the local devices.
        versions: Versions of the running packages, by name.
    """

    process: int
    hosts: int
    pid: int
    machine: str
    devices: tuple[str, ...]
    platform: str
    kind: str
    versions: dict[str, str]


@dataclass(frozen=True)
class EngineState:
    """Engine before joining.

    Attributes:
        machine_id: Name and boot id of the machine: differs between machines.
        machine: Name of the machine.
        accelerators: Whether the machine has a GPU or TPU that JAX may use.
        cluster_token: Token of the cluster joined before; None for none.
    """

    machine_id: str
    machine: str
    accelerators: bool
    cluster_token: str | None


@dataclass(frozen=True)
class HostsMesh:
    """Mesh over all hosts.

    Attributes:
        info: Description of the mesh.
        local_indices: For each device of the mesh, in order, the index among the devices of its host.
    """

    info: MeshInfo
    local_indices: tuple[int, ...]


@dataclass(frozen=True)
class CellEnd:
    """End of a cell on one host.

    Attributes:
        error: Class name and text of the exception; None for none.
        caused: Whether Ctrl-C or the failure of another host caused the exception.
        steps: Number of steps begun.
    """

    error: tuple[str, str] | None = None
    caused: bool = False
    steps: int = 0


def engine_state() -> EngineState:
    """Return the state of this engine; runs before JAX starts here."""
    from ..doctor.devices import find_accelerators

    name, boot = os.uname().nodename, Path("/proc/sys/kernel/random/boot_id")
    seen = None if os.environ.get("JAX_PLATFORMS") == "cpu" else find_accelerators()
    return EngineState(
        f"{name} {boot.read_text().strip() if boot.exists() else ''}",
        name,
        seen is not None and bool(seen.gpu or seen.tpu),
        _group[0] if _group else None,
    )


def joined_host() -> JoinedHost:
    """Return the description of this host, which has joined."""
    import jax

    own = jax.local_devices()
    return JoinedHost(
        jax.process_index(),
        jax.process_count(),
        os.getpid(),
        os.uname().nodename,
        tuple(f"{device.platform}:{device.id}" for device in own),
        own[0].platform,
        own[0].device_kind,
        program_versions(),
    )


def join(options: dict[str, Any]) -> JoinedHost:
    """Make this engine a process of `jax.distributed`.

    Args:
        options: Options of the join, by name:
            - `hosts`: Number of processes.
            - `process`: Index of this process.
            - `seconds`: Time limit of the join.
            - `group`: Token of the cluster.
            - `settings`: JAX settings that numbers depend on.
            - `devices`: Number of simulated devices of this process; None for the machine's own.
            - `gloo`: Address of this machine for collectives of CPU devices. "" leaves the choice to gloo, the address
              of the machine's name; None disables the collectives.
            - `address`: Address of the coordinator. Without one JAX detects its cluster.
            - `bind`: Address that the coordinator listens on; read with an `address`, by process 0.

    Returns:
        The description of this host.

    Raises:
        Exception: From JAX, for example with the port taken.
    """
    # With few threads collectives between simulated devices can stall.
    os.environ.setdefault("NPROC", "32")
    import jax

    if options.get("devices"):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options["devices"])
    for name, value in options["settings"].items():
        if name in jax.config.values:
            jax.config.update(name, value)
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_enable_recoverability", True)  # a death does not end other processes, nor lose their values
    initialize_args: dict[str, Any] = {"initialization_timeout": options["seconds"], "heartbeat_timeout_seconds": 20}
    if options.get("address"):
        initialize_args |= {
            "coordinator_address": options["address"],
            "num_processes": options["hosts"],
            "process_id": options["process"],
            "cluster_detection_method": "deactivate",
        }
        if options["process"] == 0:
            initialize_args["coordinator_bind_address"] = options["bind"]  # by default JAX binds all addresses
    from ..coordination import set_gloo_address

    native_output.start_capture()
    set_gloo_address(options["gloo"])
    jax.distributed.initialize(**initialize_args)
    _group[:] = [options["group"]]
    return joined_host()


def numerics() -> dict[str, Any]:
    """Return the JAX settings of this process that numbers depend on; empty without JAX loaded."""
    jax = sys.modules.get("jax")
    return {} if jax is None else {name: jax.config.values[name] for name in NUMERICS if name in jax.config.values}


def free_port() -> int:
    """Return a port of 127.0.0.1 with no listener at present."""
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def prepare_host(line: str, settings: dict[str, Any]) -> HostsMesh:
    """Prepare this host: load the extension, make a mesh over all hosts, put a barrier before every step.

    Args:
        line: Axes of the mesh as text.
        settings: Attributes of the session to set.

    Returns:
        The mesh.
    """
    from IPython.core import page

    from ..analysis.mesh_info import detect_mesh_info
    from ..step.multihost_calls import MultihostCalls

    shell = _shell()
    if not _is_ready(shell):
        shell.run_line_magic("load_ext", "jaxshard_magic")
    session = shell.magics_manager.registry["ShardMagics"].session
    if not _before:
        _before[:] = [signal.default_int_handler, session.view, session.remember]
    session.view, session.remember = "data", False  # the kernel shows reports and stores them
    native_output.start_capture()
    shell.show_usage_error = _show_nothing
    # ipykernel installs this handler after each request: SIGINT outside a cell would end the engine.
    shell.kernel.saved_sigint_handler = signal.SIG_IGN
    apply_settings(settings)
    builtins.input = getpass.getpass = sys.breakpointhook = _refuse_input
    # Text for a pager goes to a kernel's own front end, which a host lacks: it becomes normal output.
    shell.set_hook("show_in_pager", page.as_hook(page.display_page), 0)
    MultihostCalls.barriers[:], MultihostCalls.release_hooks[:] = [_before_step], [_leave_loop]
    shell.run_line_magic("mesh", f"{line};")
    mesh = session.mesh.mesh
    return HostsMesh(detect_mesh_info(mesh), tuple(map(_local_index, mesh.devices.flat)))


def apply_settings(settings: dict[str, Any]) -> None:
    """Set attributes of the session, as `%config` has in the kernel."""
    session = _shell().magics_manager.registry["ShardMagics"].session
    for name, value in settings.items():
        setattr(session, name, value)


def release_engine() -> None:
    """Undo `prepare_host`, except for the join, which lasts as long as the process."""
    from ..step.multihost_calls import MultihostCalls

    shell = _shell()
    session = shell.magics_manager.registry["ShardMagics"].session
    shell.kernel.saved_sigint_handler, session.view, session.remember = _before
    del shell.show_usage_error
    MultihostCalls.barriers.clear()
    MultihostCalls.release_hooks.clear()
    _before.clear()
    _now.clear()
    native_output.stop_capture()


def run_cell(text: str, name: str, number: int) -> CellEnd:
    """Run a cell.

    Barriers and keys are numbered anew for each cell.

    Args:
        text: Source of the cell.
        name: Name of the run, new for each run.
        number: Execution count.

    Returns:
        The end of the cell, also for an exception of the cell.
    """
    import jax
    from ipyparallel.engine.datapub import publish_data

    from ..coordination import begin_scope
    from ..step.multihost_calls import MultihostCalls

    shell = _shell()
    shell.execution_count = number
    # Barriers are numbered anew: a host stopped between two would otherwise stay one ahead for good.
    begin_scope(name)
    MultihostCalls.cell_number += 1
    every = shell.magics_manager.registry["ShardMagics"].session.meet_every if _is_ready(shell) else 0
    guard = _now["cell"] = StepBarrier(name, jax.process_index(), jax.process_count(), every or None)
    caught: list[BaseException] = []
    try:
        with guard.around_cell():
            publish_data({"begun": name})  # seen by the kernel as `cell_run.BEGUN`
            result = shell.run_cell(text, store_history=True)
            error = result.error_before_exec or result.error_in_exec
            if error is not None:
                raise error
    except BaseException as error:
        caught.append(error)
    native_output.flush_capture()
    if not caught:
        return CellEnd(steps=guard.steps)
    error = caught[0]
    caused = isinstance(error, HostFailed | KeyboardInterrupt)
    return CellEnd((type(error).__name__, str(error)), caused, guard.steps)


def leave_cell(why: str) -> None:
    """Release the other hosts from their step barrier, after the end of this host's cell."""
    if (guard := _now.get("cell")) is not None:
        guard.leave(why)


def unbound_names(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names among `names` that are unbound here, and all names still bound to a value from the kernel."""
    space = _shell().user_ns
    for name in [name for name, value in _sent.items() if space.get(name) is not value]:
        del _sent[name]
    return [name for name in names if name not in space], [*_sent]


def bind_names(transfer: Transfer) -> dict[str, str]:
    """Bind names of the kernel.

    Returns:
        Error text of the first name that could not be bound, by name; later names stay unbound. Empty on success.
    """
    from .pickling import bind_transfer

    values, failed = bind_transfer(transfer, _shell())
    _sent.update(values)
    return failed


def completions(text: str, cursor: int) -> dict[str, Any]:
    """Return completions of `text` at `cursor`, in the form of a kernel's reply."""
    return _shell().kernel.do_complete(text, cursor)


def plain_values(names: Sequence[str]) -> tuple[dict[str, Any], list[str], bool]:
    """Return values of this host as plain containers of NumPy arrays.

    Args:
        names: Names in the host's namespace.

    Returns:
        Values by name; paths of omitted parts; whether typed keys were converted to key data.

    Raises:
        ValueError: A name is unbound, or this host has only a part of its value.
    """
    from .plain_values import PlainValues

    space, rescued = _shell().user_ns, PlainValues()
    if unknown := [name for name in names if name not in space]:
        raise ValueError(f"{unknown[0]} means nothing on the hosts")
    return ({name: rescued.convert(space[name], name) for name in names}, rescued.omitted_paths, rescued.has_keys)


def shapes_of(names: Sequence[str]) -> dict[str, Any]:
    """Return the values of bound names among `names`, with `jax.ShapeDtypeStruct` in place of arrays."""
    import jax

    from ..program.arrays import to_plain_tree

    def shape(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") and hasattr(x, "dtype") else x

    space = _shell().user_ns
    return {name: jax.tree.map(shape, to_plain_tree(space[name])) for name in names if name in space}


def _show_nothing(_: BaseException) -> None:
    """Print nothing for a UsageError: the kernel raises it again."""


def _refuse_input(*_: Any, **__: Any) -> str:
    """Refuse input."""
    raise ShardError(
        "nobody types on a host: ask in a cell that begins with %%here; the cells that follow have what it binds"
    )


def _leave_loop(error: BaseException | None) -> None:
    """Release the other hosts at the end of a loop on this host, normal or by an exception."""
    if (guard := _now.get("cell")) is not None:
        guard.leave("its loop had ended" if error is None else failure_text(error))


def _before_step(call: Call) -> None:
    """Wait for the other hosts before a step."""
    if (guard := _now.get("cell")) is not None:
        guard.before_step(call)


def _shell() -> Any:
    from IPython.core.getipython import get_ipython

    return get_ipython()


def _is_ready(shell: Any) -> bool:
    return "ShardMagics" in shell.magics_manager.registry


def _local_index(device: Any) -> int:
    """Return the index of a device among the devices of its process, in order of id."""
    import jax

    own = [each for each in jax.devices(device.platform) if each.process_index == device.process_index]
    return sorted(own, key=lambda each: each.id).index(device)
