"""Start hosts, or connect to running ones, and join them under `jax.distributed`."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import ShardError
from . import engine, reaper
from .cluster import Cluster, error_line, launch_errors, remove_cluster
from .spec import LAUNCHERS, RUNNING, SSH, UNENCRYPTED, HostsSpec, is_file

TRIES = 3  # ports: another process may bind one after it was found free
LIMIT_S = 120.0  # for hosts to register, and again to join
ANSWER_S = 15.0  # for engines started by somebody else, which may be busy
SETTLED_S = 1.0  # without a new engine of those, until their number counts as final
SIMULATED = 8  # devices of all hosts together, by default
# A frozen host is noticed after 3.5 s.
BEATS = ("--HeartMonitor.period=500", "--HeartMonitor.max_heartmonitor_misses=6")
# With CURVE ipyparallel signs no messages: the server key alone keeps others out.
ENCRYPTED = ("--IPController.enable_curve=True", "--ip=*")
COMMANDS = {
    SSH: "ssh",
    "slurm": "sbatch",
    "mpi": "mpiexec",
    "pbs": "qsub",
    "sge": "qsub",
    "lsf": "bsub",
    "htcondor": "condor_submit",
}  # run by ipyparallel's launchers
PORT = 8476  # of a coordinator on another machine, as in JAX's own cluster detection
LOOPBACK = "127.0.0.1"


def start(
    spec: HostsSpec, devices: int | None, say: Callable[[str], None] = lambda _: None, limit_s: float = LIMIT_S
) -> Cluster:
    """Start the hosts of `spec`, or connect to running ones, and join them under JAX.

    Takes 5 to 10 s for two hosts, mostly for Python and JAX to start.

    Args:
        spec: Hosts.
        devices: Number of simulated devices of all hosts together, on hosts without accelerators; None for about 8.
        say: Called with lines about progress.
        limit_s: Seconds within which hosts have to register.

    Raises:
        ShardError: ipyparallel or a launcher's command is not installed, hosts do not register in time, JAX can't join
            them, they do not divide `devices`, or CPU devices of several machines are used without `--unencrypted`.
    """
    try:
        import cloudpickle  # noqa: F401
        import ipyparallel  # noqa: F401
    except ImportError as error:
        raise ShardError(f"{spec} needs {error.name}", fix=_install()) from None
    if spec.is_local:
        _devices_per_host(devices, spec.count or 1)
    elif (command := COMMANDS.get(spec.kind)) is not None and shutil.which(command) is None:
        raise ShardError(f"{spec} is started by {command}, which is not on this machine's PATH")
    say(f"starting {spec.count or 'the'} hosts")
    cluster = _start_engines(spec, limit_s)
    try:
        # Another process may bind the coordinator's port first: engines join once, so new ones are started.
        for left in reversed(range(TRIES)):
            try:
                _join(cluster, devices, say)
                break
            except ShardError:
                if not left or not cluster.is_local:
                    raise
                cluster.kill()
                cluster = _start_engines(spec, limit_s)
        cluster.record_processes()
    except BaseException:
        cluster.kill()
        raise
    return cluster


def start_with_mesh(spec: HostsSpec, axes: str, devices: int | None) -> Cluster:
    """Start hosts and make a mesh over them.

    Args:
        spec: Hosts.
        axes: Axes of the mesh as text, such as `data=8`.
        devices: Number of simulated devices of all hosts together; None for about 8.

    Raises:
        ShardError: The hosts or the mesh can't be made.
    """
    cluster = start(spec, devices)
    try:
        cluster.mesh = cluster.call(engine.prepare_host, axes, {"progress": False, "view": "text"})[0]
    except BaseException:
        cluster.kill()
        raise
    return cluster


def options(spec: HostsSpec, folder: Path) -> dict[str, Any]:
    """Return the options of `ipyparallel.Cluster`; hosts on other machines get encrypted connections only.

    Args:
        spec: Hosts.
        folder: Profile folder.

    Raises:
        ShardError: libzmq lacks CURVE, needed for other machines.
    """
    from traitlets.config import Config

    if not spec.is_local:
        import zmq

        if not zmq.has("curve"):
            raise ShardError(
                f"{spec}: libzmq {zmq.zmq_version()} has no CURVE, without which hosts on other machines would be told "
                "everything in the clear",
                fix="pip install --upgrade pyzmq",
            )
    return {
        "n": spec.count,
        "engines": "local" if spec.is_local else spec.kind,
        "profile_dir": str(folder),
        "controller_args": [*BEATS, *(() if spec.is_local else ENCRYPTED)],
        "engine_timeout": int(LIMIT_S),
        "send_engines_connection_env": True,
        "log_level": logging.CRITICAL,
        "shutdown_atexit": False,  # it waits for each process; `Cluster.kill` does not
        # The job script of a scheduler would otherwise be written to the notebook's folder.
        "config": Config({"BatchSystemLauncher": {"batch_file_name": str(folder / "engines")}}),
    }


def _start_engines(spec: HostsSpec, limit_s: float) -> Cluster:
    """Return a cluster with all its engines registered, not yet joined."""
    if spec.kind == RUNNING:
        return _connect_to_running(spec)
    import ipyparallel as ipp

    folder = Path(tempfile.mkdtemp(prefix="jaxshard-hosts-"))  # readable by this user alone, as it has keys
    ipp_cluster: Any = None
    client: Any = None
    registered = 0
    watcher: Any = None
    try:
        watcher = _start_reaper(folder)
        ipp_cluster = ipp.Cluster(**options(spec, folder))
        if spec.names:
            ipp_cluster.config.SSHEngineSetLauncher.engines = dict.fromkeys(spec.names, 1)
        ipp_cluster.start_cluster_sync()
        # Bound before `__init__`: after an interrupt in the middle of it there are a thread and sockets to close.
        client = ipp.Client.__new__(ipp.Client)
        # The connection file is the first argument: ipyparallel's `Client` ignores `url_file=`.
        client.__init__(
            _connections(folder), cluster=ipp_cluster, profile_dir=str(folder), cluster_id=ipp_cluster.cluster_id
        )
        client.wait_for_engines(spec.count, timeout=limit_s, interactive=False)
    except BaseException as error:
        try:
            if client is not None:
                registered = len(client.ids)
                client.close(linger=0)
            if ipp_cluster is not None and not spec.is_local:
                _stop_elsewhere(ipp_cluster)
        finally:
            remove_cluster(folder, ipp_cluster, watcher)
        if isinstance(error, ShardError) or not isinstance(error, Exception):
            raise
        raise _start_error(spec, registered, error, limit_s) from None
    for path in (folder / "security").glob("*"):  # contain keys
        path.chmod(0o600)
    cluster = Cluster(spec, client, ipp_cluster, folder, sorted(client.ids)[: spec.count], watcher)
    cluster.record_processes()
    return cluster


def _connections(folder: Path) -> str:
    """Return the client's connection file of a cluster started here."""
    [path] = (folder / "security").glob("ipcontroller*-client.json")
    return str(path)


def _start_reaper(folder: Path) -> "subprocess.Popen[Any]":
    """Start the reaper for a folder, which acts after the end of this process."""
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    command = [sys.executable, "-P", reaper.__file__, str(os.getpid()), str(folder)]
    return subprocess.Popen(command, start_new_session=True, **quiet)


def _stop_elsewhere(own: Any) -> None:
    """End remote engines, or a scheduler's jobs."""
    for each in own.engines.values():
        started = getattr(each, "launchers", None)
        with suppress(*launch_errors()):
            if started is None:
                own.stop_engines_sync()
                return
            for launcher in started.values():
                launcher.signal(signal.SIGKILL)


def _start_error(spec: HostsSpec, came: int, error: Exception, limit_s: float) -> ShardError:
    """Return the error for hosts that did not start: too late, or an error of a launcher."""
    if isinstance(error, TimeoutError):
        said = f"{spec}: {came} of {spec.count} hosts came within {limit_s:g} s"
        more = "%config ShardSession.hosts_limit = SECONDS waits longer"
        return ShardError(f"{said}. {more}")
    return ShardError(f"{spec}: the hosts did not start, {came} of {spec.count} came: {error_line(error)}")


def _connect_to_running(spec: HostsSpec) -> Cluster:
    """Return the cluster of engines started by somebody else."""
    import ipyparallel as ipp
    from IPython.core.profiledir import ProfileDirError

    assert spec.cluster is not None
    begins = f"ipcluster start -n 2{'' if is_file(spec.cluster) else f' --profile={spec.cluster}'} starts one"
    try:
        client: Any = ipp.Client(_connection_file(spec.cluster), timeout=10)
    # No such file or profile, another kind of file, no answer.
    except (OSError, ValueError, KeyError, TimeoutError, ProfileDirError) as error:
        raise ShardError(f"{spec}: {error_line(error).rstrip('.')}. {begins}") from None
    # The number of engines is unknown: wait until no more register for `SETTLED_S`.
    end, since, count = time.monotonic() + ANSWER_S, time.monotonic(), -1
    while time.monotonic() < end and (count < 2 or time.monotonic() - since < SETTLED_S):
        if len(client.ids) != count:
            since, count = time.monotonic(), len(client.ids)
        time.sleep(0.05)
    if count < 2:
        client.close(linger=0)
        raise ShardError(
            f"{spec} has {count} engine{'s' * (count != 1)}; a mesh over hosts takes two or more. {begins}"
        )
    return Cluster(spec, client, None, None, sorted(client.ids))


def _connection_file(cluster: str) -> str:
    """Return the path of a running cluster's connection file, with its addresses and key. Raises ProfileDirError for an
    unknown profile."""
    from IPython.core.profiledir import ProfileDir
    from IPython.paths import get_ipython_dir

    if is_file(cluster):
        return cluster
    profile = ProfileDir.find_profile_dir_by_name(get_ipython_dir(), cluster)
    return os.path.join(profile.security_dir, "ipcontroller-client.json")


def _join(cluster: Cluster, devices: int | None, say: Callable[[str], None]) -> None:
    """Join the engines under `jax.distributed`, and reorder them by process index."""
    spec, hosts = cluster.spec, len(cluster)
    say(f"joining {hosts} hosts")
    states = [] if spec.is_local else _engine_states(cluster)
    is_one_machine = len({each.machine_id for each in states}) < 2
    simulated = not any(each.accelerators for each in states)
    if simulated:
        _check_encryption(spec, is_one_machine)
    if joined := _joined_before(cluster, states):
        cluster.joined = joined
        cluster.check_device_count(devices)
    else:
        join_options: dict[str, Any] = {"hosts": hosts, "seconds": int(LIMIT_S), "group": cluster.token}
        join_options["gloo"] = LOOPBACK if is_one_machine else "" if spec.unencrypted else None
        join_options["devices"] = _devices_per_host(devices, hosts) if simulated else None
        join_options["settings"] = engine.numerics()
        if spec.kind not in LAUNCHERS:
            first = spec.names[0].rpartition("@")[2] if spec.names else states[0].machine if states else ""
            address = f"{LOOPBACK}:{_port(cluster)}" if is_one_machine else f"{first}:{PORT}"
            join_options |= {"address": address, "bind": address}
        asked = [
            cluster.client[i].apply_async(engine.join, join_options | {"process": process})
            for process, i in enumerate(cluster.ids)
        ]
        cluster.joined = _wait_for_results(asked, cluster)
    # Where JAX detects the cluster, the scheduler numbers the processes, maybe in another order than engines.
    order = sorted(range(hosts), key=lambda i: cluster.joined[i].process)
    cluster.ids = [cluster.ids[i] for i in order]
    cluster.joined = [cluster.joined[i] for i in order]
    # Only now is it known whether JAX can use the accelerators that were found.
    if any(each.platform == "cpu" for each in cluster.joined):
        _check_encryption(spec, is_one_machine)


def _engine_states(cluster: Cluster) -> list[engine.EngineState]:
    """Return the state of each engine before joining."""
    try:
        return cluster.call(engine.engine_state, seconds=ANSWER_S)
    except ShardError as error:
        raise ShardError(f"{error}: {cluster.restart_hint}") from None


def _joined_before(cluster: Cluster, stand: Sequence[engine.EngineState]) -> list[engine.JoinedHost]:
    """Return the description of engines already joined to each other, or an empty list where none has joined anything.
    Raises ShardError for any mixture: an engine joins once."""
    groups = {each.cluster_token for each in stand} - {None}
    if not groups:
        return []
    joined = cluster.call(engine.joined_host) if all(each.cluster_token for each in stand) and len(groups) == 1 else []
    if sorted(each.process for each in joined) != [*range(len(cluster))] or joined[0].hosts != len(cluster):
        raise ShardError(
            f"{cluster.spec}: engines join under jax once, and these have joined others: {cluster.restart_hint}"
        )
    return joined


def _check_encryption(spec: HostsSpec, alone: bool) -> None:
    """Raise ShardError for CPU devices on several machines without `--unencrypted`: anybody on the network can read and
    change their traffic."""
    if not (alone or spec.unencrypted):
        raise ShardError(
            f"{spec}: these hosts have CPU devices alone, and what those send between machines (gloo) has neither "
            f"password nor encryption. In a network that you trust write %mesh {spec} {UNENCRYPTED}, then the axes"
        )


def _devices_per_host(devices: int | None, hosts: int) -> int:
    """Return the number of simulated devices of each host. Raises ShardError where hosts do not divide the total."""
    if devices is None:
        return max(1, SIMULATED // hosts)
    if devices % hosts:
        raise ShardError(f"{devices} devices don't divide over {hosts} hosts; a mesh takes as many of each")
    return devices // hosts


def _port(cluster: Cluster) -> int:
    """Return a free port on the first host's machine."""
    return cluster.call(engine.free_port, host=0)


def _wait_for_results(asked: Sequence[Any], cluster: Cluster) -> list[Any]:
    """Return the results of all calls, or raise as soon as one fails: the other hosts wait for that one."""
    from ipyparallel.error import EngineError, RemoteError

    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        ready = [each for each in asked if each.ready()]
        for each in ready:
            try:
                each.get(0)
            except EngineError:
                raise ShardError(f"{cluster.spec}: a host died while it joined the others") from None
            except RemoteError as error:
                how = "" if cluster.is_ours else f". {cluster.restart_hint[0].upper()}{cluster.restart_hint[1:]}"
                raise ShardError(f"{cluster.spec}: {error.ename}: {error_line(error.evalue)}{how}") from None
        if len(ready) == len(asked):
            return [each.get(0) for each in asked]
        time.sleep(0.02)
    late = [host for host, each in enumerate(asked) if not each.ready()]
    raise ShardError(f"{cluster.spec}: hosts {', '.join(map(str, late))} did not join within {LIMIT_S:g} s")


def _install() -> str:
    from ..packages import install_command

    return install_command("hosts")
