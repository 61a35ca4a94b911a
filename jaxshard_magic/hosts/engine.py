"""What the kernel has a host do, each a call from there: join the others, get ready, run a cell, tell what it has.

A host is an engine of ipyparallel, that is an IPython kernel of its own. Nothing of jax runs there before `join`.
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
from ..packages import running
from ..report import MeshInfo
from . import native_output
from .guard import Call, Guard, HostFailed, reason
from .transfer import Transfer

# Settings of jax that numbers depend on. A notebook makes them in its first cell: hosts begin with the kernel's.
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
_now: dict[str, Guard] = {}  # the guard of the cell that runs, under "cell"
_group: list[str] = []  # the cluster that this engine has joined, which it can do once
_sent: dict[str, Any] = {}  # values of the kernel's, by the names that they were sent under
_before: list[
    Any
] = []  # what `let_go` puts back: how ipykernel takes Ctrl-C, how reports are shown, whether kept


@dataclass(frozen=True)
class Joined:
    """A host that has joined: its number among the processes, how many there are, its id for the operating system, the
    machine that it runs on, its own devices, and the versions of what it runs."""

    process: int
    hosts: int
    pid: int
    machine: str
    devices: tuple[str, ...]
    platform: str
    kind: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Standing:
    """An engine before it joins: what tells its machine from others, and that one's name; whether it has accelerators;
    and the cluster under which it has joined before, if it has."""

    place: str
    machine: str
    accelerators: bool
    group: str | None


@dataclass(frozen=True)
class Meshed:
    """The mesh over all hosts, and for each of its devices, in its order, the place among those of its host."""

    info: MeshInfo
    places: tuple[int, ...]


@dataclass(frozen=True)
class Ended:
    """How a cell ended on one host: an exception's name and text, None for none; whether it is one that another host's
    fault or Ctrl-C caused; and the steps that had run."""

    error: tuple[str, str] | None = None
    caused: bool = False
    steps: int = 0


def standing() -> Standing:
    """How this engine stands, before anything of jax runs here."""
    from ..doctor.devices import look

    name, boot = os.uname().nodename, Path("/proc/sys/kernel/random/boot_id")
    seen = None if os.environ.get("JAX_PLATFORMS") == "cpu" else look()
    return Standing(
        f"{name} {boot.read_text().strip() if boot.exists() else ''}",
        name,
        seen is not None and bool(seen.gpu or seen.tpu),
        _group[0] if _group else None,
    )


def joined() -> Joined:
    """This host, which has joined the others."""
    import jax

    own = jax.local_devices()
    return Joined(
        jax.process_index(),
        jax.process_count(),
        os.getpid(),
        os.uname().nodename,
        tuple(f"{device.platform}:{device.id}" for device in own),
        own[0].platform,
        own[0].device_kind,
        running(),
    )


def join(where: dict[str, Any]) -> Joined:
    """Become process `process` of `hosts` under `jax.distributed`, whose coordinator is at `address`; with `devices`
    simulated ones, where that is said, else as jax detects its cluster. `gloo` is the address of this machine that
    simulated devices of several processes meet at: "" for whatever jax takes, None for no such collectives at all.

    Raises what jax raises, as where the port is taken.
    """
    os.environ.setdefault("NPROC", "32")
    import jax

    if where.get("devices"):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", where["devices"])
    for name, value in where["settings"].items():
        if name in jax.config.values:
            jax.config.update(name, value)
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_enable_recoverability", True)  # survivors of a death stay, and keep what they hold
    given: dict[str, Any] = {"initialization_timeout": where["seconds"], "heartbeat_timeout_seconds": 20}
    if where.get("address"):
        given |= {
            "coordinator_address": where["address"],
            "num_processes": where["hosts"],
            "process_id": where["process"],
            "cluster_detection_method": "deactivate",
        }
        if where["process"] == 0:
            given["coordinator_bind_address"] = where["bind"]  # jax binds all addresses otherwise
    from ..coordination import gloo_at

    native_output.take()
    gloo_at(where["gloo"])
    jax.distributed.initialize(**given)
    _group[:] = [where["group"]]
    return joined()


def numerics() -> dict[str, Any]:
    """The settings of jax in this process that numbers depend on; none where jax is not loaded."""
    jax = sys.modules.get("jax")
    return (
        {}
        if jax is None
        else {name: jax.config.values[name] for name in NUMERICS if name in jax.config.values}
    )


def free_port() -> int:
    """A port of this machine's 127.0.0.1 that nobody listens on now."""
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def get_ready(line: str, settings: dict[str, Any]) -> Meshed:
    """Load the extension, make the mesh of a `%mesh` line over all hosts, and guard every step."""
    from IPython.core import page

    from ..analysis.mesh_info import info_of
    from ..step.together import OnHosts

    shell = _shell()
    if not _is_ready(shell):
        shell.run_line_magic("load_ext", "jaxshard_magic")
    session = shell.magics_manager.registry["ShardMagics"].session
    if not _before:
        _before[:] = [signal.default_int_handler, session.view, session.remember]
    session.view, session.remember = "data", False  # the kernel shows reports, and keeps them
    native_output.take()
    shell.show_usage_error = _in_the_kernel
    shell.kernel.saved_sigint_handler = signal.SIG_IGN  # what ipykernel goes back to after each request
    settle(settings)
    builtins.input = getpass.getpass = sys.breakpointhook = _asked
    shell.set_hook(
        "show_in_pager", page.as_hook(page.display_page), 0
    )  # a pager is of a kernel's own front end
    OnHosts.meet[:], OnHosts.leave[:] = [_enter], [_leave_by]
    shell.run_line_magic("mesh", f"{line};")
    mesh = session.mesh.mesh
    return Meshed(info_of(mesh), tuple(map(_local_index, mesh.devices.flat)))


def settle(settings: dict[str, Any]) -> None:
    """Take over what `%config` has set in the kernel."""
    session = _shell().magics_manager.registry["ShardMagics"].session
    for name, value in settings.items():
        setattr(session, name, value)


def let_go() -> None:
    """Be an engine as any other again, but for what has joined."""
    from ..step.together import OnHosts

    shell = _shell()
    session = shell.magics_manager.registry["ShardMagics"].session
    shell.kernel.saved_sigint_handler, session.view, session.remember = _before
    del shell.show_usage_error
    OnHosts.meet.clear()
    OnHosts.leave.clear()
    _before.clear()
    _now.clear()
    native_output.give_back()


def run_cell(text: str, name: str, number: int) -> Ended:
    """Run a cell as the kernel's cell `number`; its output is the host's own."""
    import jax
    from ipyparallel.engine.datapub import publish_data

    from ..coordination import begin
    from ..step.together import OnHosts

    shell = _shell()
    shell.execution_count = number
    begin(name)
    OnHosts.cell += 1
    every = shell.magics_manager.registry["ShardMagics"].session.meet_every if _is_ready(shell) else 0
    guard = _now["cell"] = Guard(name, jax.process_index(), jax.process_count(), every or None)
    caught: list[BaseException] = []
    try:
        with guard.runs():
            publish_data({"begun": name})  # as `watch.BEGUN`
            result = shell.run_cell(text, store_history=True)
            error = result.error_before_exec or result.error_in_exec
            if error is not None:
                raise error
    except BaseException as error:
        caught.append(error)
    native_output.settle()
    if not caught:
        return Ended(steps=guard.steps)
    error = caught[0]
    caused = isinstance(error, HostFailed | KeyboardInterrupt)
    return Ended((type(error).__name__, str(error)), caused, guard.steps)


def leave(why: str) -> None:
    """Let the others out of the step that they wait to make: this host's cell has ended."""
    if (guard := _now.get("cell")) is not None:
        guard.leave(why)


def lacking(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those of the names that mean nothing here; and those that still stand for what the kernel sent."""
    space = _shell().user_ns
    for name in [name for name, value in _sent.items() if space.get(name) is not value]:
        del _sent[name]
    return [name for name in names if name not in space], [*_sent]


def take(transfer: Transfer) -> dict[str, str]:
    """Bind names of the kernel's here. Returns why one could not be bound, by its name; those after it are not bound
    either then."""
    from .pickling import received

    values, failed = received(transfer, _shell())
    _sent.update(values)
    return failed


def completions(text: str, cursor: int) -> dict[str, Any]:
    """What completes `text` here, as a kernel answers."""
    return _shell().kernel.do_complete(text, cursor)


def whole_on_this(names: Sequence[str]) -> tuple[dict[str, Any], list[str], bool]:
    """The values under these names as `Rescued` has them, where this host alone has all of each; what was left out of
    them; and whether typed keys were among them. Raises ValueError for one of which it has a part."""
    from .rescued import Rescued

    space, rescued = _shell().user_ns, Rescued()
    if unknown := [name for name in names if name not in space]:
        raise ValueError(f"{unknown[0]} means nothing on the hosts")
    return {name: rescued.value(space[name], name) for name in names}, rescued.without, rescued.keys


def shapes_of(names: Sequence[str]) -> dict[str, Any]:
    """What stands here under those of the names that mean something, with shapes for arrays."""
    import jax

    from ..program.arrays import plain_tree

    def shape(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") and hasattr(x, "dtype") else x

    space = _shell().user_ns
    return {name: jax.tree.map(shape, plain_tree(space[name])) for name in names if name in space}


def _in_the_kernel(_: BaseException) -> None:
    """Show no line of a UsageError: the kernel raises it in its turn."""


def _asked(*_: Any, **__: Any) -> str:
    raise ShardError(
        "nobody types on a host: ask in a cell that begins with %%here; the cells that follow have what it binds"
    )


def _leave_by(error: BaseException | None) -> None:
    if (guard := _now.get("cell")) is not None:
        guard.leave("its loop had ended" if error is None else reason(error))


def _enter(call: Call) -> None:
    if (guard := _now.get("cell")) is not None:
        guard.check(call)


def _shell() -> Any:
    from IPython.core.getipython import get_ipython

    return get_ipython()


def _is_ready(shell: Any) -> bool:
    return "ShardMagics" in shell.magics_manager.registry


def _local_index(device: Any) -> int:
    import jax

    own = [each for each in jax.devices(device.platform) if each.process_index == device.process_index]
    return sorted(own, key=lambda each: each.id).index(device)
