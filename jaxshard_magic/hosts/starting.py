"""Hosts that are started, or reached where they run already, and joined under `jax.distributed`."""

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
from .cluster import Cluster, launch_errors, leave_nothing, line_of
from .spec import LAUNCHERS, RUNNING, SSH, UNENCRYPTED, HostsSpec, is_file

TRIES = 3  # ports, where one is taken between being found free and being bound
LIMIT_S = 120.0  # within which hosts have to come, and then to join
ANSWER_S = 15.0  # of engines that somebody else started, which may be busy
SETTLED_S = 1.0  # after which no more of those engines are waited for
SIMULATED = 8  # devices of all hosts together, where nothing says how many
BEATS = (
    "--HeartMonitor.period=500",
    "--HeartMonitor.max_heartmonitor_misses=6",
)  # a frozen host is told after 3.5 s
ENCRYPTED = ("--IPController.enable_curve=True", "--ip=*")  # for hosts on other machines
COMMANDS = {
    SSH: "ssh",
    "slurm": "sbatch",
    "mpi": "mpiexec",
    "pbs": "qsub",
    "sge": "qsub",
    "lsf": "bsub",
    "htcondor": "condor_submit",
}  # what ipyparallel's launchers run
PORT = 8476  # of the coordinator on another machine, as jax's own detection takes it
LOOPBACK = "127.0.0.1"


def start(
    spec: HostsSpec,
    devices: int | None,
    say: Callable[[str], None] = lambda _: None,
    limit_s: float = LIMIT_S,
) -> Cluster:
    """Start the hosts of `spec`, or reach those that run, and join them under jax.

    Args:
        spec: which.
        devices: simulated ones of all hosts together, where these have no accelerators; None for 8 or so.
        say: is told what is being done.
        limit_s: seconds within which hosts have to come.

    It takes 5 to 10 s for two, most of it Python's and jax's own start. Raises ShardError where ipyparallel is not
    installed, where hosts do not come in time, and where jax can't join them.
    """
    try:
        import cloudpickle  # noqa: F401
        import ipyparallel  # noqa: F401
    except ImportError as error:
        raise ShardError(f"{spec} needs {error.name}", fix=_install()) from None
    if spec.is_local:
        _each(devices, spec.count or 1)
    elif (command := COMMANDS.get(spec.kind)) is not None and shutil.which(command) is None:
        raise ShardError(f"{spec} is started by {command}, which is not on this machine's PATH")
    say(f"starting {spec.count or 'the'} hosts")
    cluster = _connected(spec, limit_s)
    try:
        for left in reversed(range(TRIES)):
            try:
                _join(cluster, devices, say)
                break
            except ShardError:
                if not left or not cluster.is_local:
                    raise
                cluster.kill()
                cluster = _connected(spec, limit_s)
        cluster.learn()
    except BaseException:
        cluster.kill()
        raise
    return cluster


def opened(spec: HostsSpec, axes: str, devices: int | None) -> Cluster:
    """The hosts of `spec` with a mesh of these axes over them, such as `data=8`. Raises ShardError where there can be
    none."""
    cluster = start(spec, devices)
    try:
        cluster.meshed = cluster.call(engine.get_ready, axes, {"progress": False, "view": "text"})[0]
    except BaseException:
        cluster.kill()
        raise
    return cluster


def options(spec: HostsSpec, folder: Path) -> dict[str, Any]:
    """What ipyparallel is to start: those of other machines only over encrypted connections. Raises ShardError where
    there can be none."""
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
        "shutdown_atexit": False,  # it waits for each of its processes; `Cluster.kill` does not
        # What schedulers are given is a file, by default in the notebook's folder.
        "config": Config({"BatchSystemLauncher": {"batch_file_name": str(folder / "engines")}}),
    }


def _connected(spec: HostsSpec, limit_s: float) -> Cluster:
    if spec.kind == RUNNING:
        return _reached(spec)
    import ipyparallel as ipp

    folder = Path(tempfile.mkdtemp(prefix="jaxshard-hosts-"))  # for its user alone, as its keys are
    own: Any = None
    client: Any = None
    came = 0
    watcher: Any = None
    try:
        watcher = _watched_over(folder)
        own = ipp.Cluster(**options(spec, folder))
        if spec.names:
            own.config.SSHEngineSetLauncher.engines = dict.fromkeys(spec.names, 1)
        own.start_cluster_sync()
        # Known before it begins: an interrupt in the middle of it leaves a thread and sockets.
        client = ipp.Client.__new__(ipp.Client)
        client.__init__(_connections(folder), cluster=own, profile_dir=str(folder), cluster_id=own.cluster_id)
        client.wait_for_engines(spec.count, timeout=limit_s, interactive=False)
    except BaseException as error:
        try:
            if client is not None:
                came = len(client.ids)
                client.close(linger=0)
            if own is not None and not spec.is_local:
                _stop_elsewhere(own)
        finally:
            leave_nothing(folder, own, watcher)
        if isinstance(error, ShardError) or not isinstance(error, Exception):
            raise
        raise _late(spec, came, error, limit_s) from None
    for path in (folder / "security").glob("*"):  # keys are in them
        path.chmod(0o600)
    cluster = Cluster(spec, client, own, folder, sorted(client.ids)[: spec.count], watcher)
    cluster.learn()
    return cluster


def _connections(folder: Path) -> str:
    """The file that tells a client of a cluster of ours how to connect."""
    [path] = (folder / "security").glob("ipcontroller*-client.json")
    return str(path)


def _watched_over(folder: Path) -> "subprocess.Popen[Any]":
    """The process that ends what is started for a folder once this one has ended."""
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    command = [sys.executable, "-P", reaper.__file__, str(os.getpid()), str(folder)]
    return subprocess.Popen(command, start_new_session=True, **quiet)


def _stop_elsewhere(own: Any) -> None:
    """End what launchers have started on other machines, or asked a scheduler for."""
    for each in own.engines.values():
        started = getattr(each, "launchers", None)
        with suppress(*launch_errors()):
            if started is None:
                own.stop_engines_sync()
                return
            for launcher in started.values():
                launcher.signal(signal.SIGKILL)


def _late(spec: HostsSpec, came: int, error: Exception, limit_s: float) -> ShardError:
    """Why hosts did not start: too late, or what a launcher raised."""
    if isinstance(error, TimeoutError):
        said = f"{spec}: {came} of {spec.count} hosts came within {limit_s:g} s"
        more = "%config ShardSession.hosts_limit = SECONDS waits longer"
        return ShardError(f"{said}. {more}")
    return ShardError(f"{spec}: the hosts did not start, {came} of {spec.count} came: {line_of(error)}")


def _reached(spec: HostsSpec) -> Cluster:
    """The engines of a cluster that somebody else has started."""
    import ipyparallel as ipp
    from IPython.core.profiledir import ProfileDirError

    assert spec.cluster is not None
    begins = f"ipcluster start -n 2{'' if is_file(spec.cluster) else f' --profile={spec.cluster}'} starts one"
    try:
        client: Any = ipp.Client(_connection_file(spec.cluster), timeout=10)
    # No such file or profile, a file that is none of theirs, nobody there.
    except (OSError, ValueError, KeyError, TimeoutError, ProfileDirError) as error:
        raise ShardError(f"{spec}: {line_of(error).rstrip('.')}. {begins}") from None
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
    """Where the addresses and the key of a cluster are: the path itself, or that of a profile. Raises ProfileDirError
    where there is no such profile."""
    from IPython.core.profiledir import ProfileDir
    from IPython.paths import get_ipython_dir

    if is_file(cluster):
        return cluster
    profile = ProfileDir.find_profile_dir_by_name(get_ipython_dir(), cluster)
    return os.path.join(profile.security_dir, "ipcontroller-client.json")


def _join(cluster: Cluster, devices: int | None, say: Callable[[str], None]) -> None:
    """Make processes of jax of the engines, which come back in the order that jax gives them."""
    spec, hosts = cluster.spec, len(cluster)
    say(f"joining {hosts} hosts")
    stand = [] if spec.is_local else _standing(cluster)
    alone = len({each.place for each in stand}) < 2
    simulated = not any(each.accelerators for each in stand)
    if simulated:
        _may_be_heard(spec, alone)
    if joined := _joined_before(cluster, stand):
        cluster.joined = joined
        cluster.has_room(devices)
    else:
        where: dict[str, Any] = {"hosts": hosts, "seconds": int(LIMIT_S), "group": cluster.token}
        where["gloo"] = LOOPBACK if alone else "" if spec.unencrypted else None
        where["devices"] = _each(devices, hosts) if simulated else None
        where["settings"] = engine.numerics()
        if spec.kind not in LAUNCHERS:
            first = spec.names[0].rpartition("@")[2] if spec.names else stand[0].machine if stand else ""
            address = f"{LOOPBACK}:{_port(cluster)}" if alone else f"{first}:{PORT}"
            where |= {"address": address, "bind": address}
        asked = [
            cluster.client[i].apply_async(engine.join, where | {"process": process})
            for process, i in enumerate(cluster.ids)
        ]
        cluster.joined = _all(asked, cluster)
    order = sorted(range(hosts), key=lambda i: cluster.joined[i].process)
    cluster.ids = [cluster.ids[i] for i in order]
    cluster.joined = [cluster.joined[i] for i in order]
    if any(each.platform == "cpu" for each in cluster.joined):
        _may_be_heard(spec, alone)


def _standing(cluster: Cluster) -> list[engine.Standing]:
    try:
        return cluster.call(engine.standing, seconds=ANSWER_S)
    except ShardError as error:
        raise ShardError(f"{error}: {cluster.again}") from None


def _joined_before(cluster: Cluster, stand: Sequence[engine.Standing]) -> list[engine.Joined]:
    """What each engine says of itself where they have joined each other before, which they can do once; empty where
    none has joined anything. Raises ShardError for any other mixture."""
    groups = {each.group for each in stand} - {None}
    if not groups:
        return []
    joined = cluster.call(engine.joined) if all(each.group for each in stand) and len(groups) == 1 else []
    if sorted(each.process for each in joined) != [*range(len(cluster))] or joined[0].hosts != len(cluster):
        raise ShardError(
            f"{cluster.spec}: engines join under jax once, and these have joined others: {cluster.again}"
        )
    return joined


def _may_be_heard(spec: HostsSpec, alone: bool) -> None:
    """Raise ShardError where CPU devices would tell each other between machines what anybody can read and change,
    unless that was asked for."""
    if not (alone or spec.unencrypted):
        raise ShardError(
            f"{spec}: these hosts have CPU devices alone, and what those send between machines (gloo) has neither "
            f"password nor encryption. In a network that you trust write %mesh {spec} {UNENCRYPTED}, then the axes"
        )


def _each(devices: int | None, hosts: int) -> int:
    """Simulated devices of each host. Raises ShardError where they do not divide."""
    if devices is None:
        return max(1, SIMULATED // hosts)
    if devices % hosts:
        raise ShardError(f"{devices} devices don't divide over {hosts} hosts; a mesh takes as many of each")
    return devices // hosts


def _port(cluster: Cluster) -> int:
    """A port that is free now on the machine of the first host."""
    return cluster.call(engine.free_port, host=0)


def _all(asked: Sequence[Any], cluster: Cluster) -> list[Any]:
    """What all of them give; as soon as one fails that is raised, for the others wait for it."""
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
                how = "" if cluster.is_ours else f". {cluster.again[0].upper()}{cluster.again[1:]}"
                raise ShardError(f"{cluster.spec}: {error.ename}: {line_of(error.evalue)}{how}") from None
        if len(ready) == len(asked):
            return [each.get(0) for each in asked]
        time.sleep(0.02)
    late = [host for host, each in enumerate(asked) if not each.ready()]
    raise ShardError(f"{cluster.spec}: hosts {', '.join(map(str, late))} did not join within {LIMIT_S:g} s")


def _install() -> str:
    from ..packages import install

    return install("hosts")
