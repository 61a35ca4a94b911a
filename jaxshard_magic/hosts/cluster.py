"""Hosts of one notebook: engines of ipyparallel that are started, joined under `jax.distributed`, watched and ended."""

import atexit
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from ..errors import ShardError
from . import engine
from .spec import RUNNING, HostsSpec

LEAVE_TRIES, LEAVE_S = 20, 0.25  # interrupts to hosts that are left after a death, and seconds between them
TRIES = 3  # ports, where one is taken between being found free and being bound
START_S = 120.0
BEATS = (
    "--HeartMonitor.period=500",
    "--HeartMonitor.max_heartmonitor_misses=6",
)  # a frozen host is told after 3.5 s
PORT = 8476  # of the coordinator on another machine, as jax's own detection takes it


class Cluster:
    """Engines, a host each, in the order of jax's processes. `joined` is what each said of itself, `meshed` the mesh
    that they made last; `died` is why they are gone, once they are."""

    def __init__(self, spec: HostsSpec, client: Any, own: Any, folder: Path | None, ids: Sequence[int]):
        self.spec, self.client, self._own, self._folder = spec, client, own, folder
        self.ids = list(ids)
        self.joined: list[engine.Joined] = []
        self.meshed: engine.Meshed | None = None
        self.died: str | None = None
        self.token = uuid4().hex[:12]  # of this cluster alone: what hosts agree on goes under it
        self._runs = 0
        self._leaving: threading.Thread | None = None
        self.survivors: tuple[int, ...] = ()  # hosts that are there after another one has died
        self._hub: list[psutil.Process] = []
        self._processes: list[psutil.Process] = []
        atexit.register(self.kill)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_local(self) -> bool:
        """Whether all hosts run on this machine."""
        return self.spec.is_local

    @property
    def again(self) -> str:
        """What starts the hosts again, with the mesh that they had."""
        axes = " ".join(f"{axis}={size}" for axis, size in self.meshed.axes.items()) if self.meshed else ""
        return self.spec.again(len(self), axes)

    def call(
        self, function: Callable[..., Any], *args: Any, seconds: float = START_S, host: int | None = None
    ) -> Any:
        """What a function of `engine` gives on each host, or on one. Raises ShardError where a host does not answer,
        and for what the function raises there."""
        from ipyparallel.error import EngineError, RemoteError
        from ipyparallel.error import TimeoutError as Late

        ids = self.ids if host is None else [self.ids[host]]
        if any(self.ids.index(i) in self.missing() for i in ids):
            raise ShardError(f"a host of {self.spec} has died: {self.again}")
        asked = [self.client[i].apply_async(function, *args) for i in ids]
        try:
            got = [each.get(seconds) for each in asked]
        except EngineError:
            raise ShardError(f"a host of {self.spec} has died: {self.again}") from None
        except (Late, TimeoutError):
            raise ShardError(f"a host of {self.spec} has not answered within {seconds:g} s") from None
        except RemoteError as error:
            if error.ename == EngineError.__name__:
                raise ShardError(f"a host of {self.spec} has died: {self.again}") from None
            raise ShardError(f"{self.spec}: {error.ename}: {_line(error.evalue)}") from None
        return got if host is None else got[0]

    def run(self, text: str) -> None:
        """Run Python, or a cell with magics, on all hosts and print what host 0 says. Raises ShardError where it ends
        early, on any of them: the line says on which, and why."""
        from . import watch

        self._runs += 1
        if self.died is not None:
            raise ShardError(f"the hosts are gone: {self.died}")
        try:
            outcome = watch.run(self, text, f"run {self._runs}", self._runs, _printed)
        except watch.HostsLost as lost:
            raise ShardError(str(lost)) from None
        if any(each.error is not None for each in outcome.hosts):
            raise ShardError(outcome.told())

    def close(self) -> None:
        """End the hosts."""
        self.kill("they were closed")

    def missing(self) -> list[int]:
        """The hosts that the hub has lost."""
        there = set(self.client.ids)
        return [host for host, i in enumerate(self.ids) if i not in there]

    def watched(self) -> list[psutil.Process]:
        """The processes of this machine without which the hosts can't be reached."""
        return self._hub

    def interrupt(self, hosts: Sequence[int]) -> None:
        """Send SIGINT to some of them."""
        self._signal(2, hosts)

    def processes_of(self, host: int) -> list[psutil.Process]:
        """A host's own process, where it runs on this machine."""
        return self._processes[host : host + 1]

    def bury(self, survivors: Sequence[int], why: str, free: Callable[[], bool]) -> None:
        """The other hosts have died: the survivors leave what they are in, each wait of theirs in turn, until `free()`,
        while this goes on; they stay to be asked what they hold. Where there are none all is ended."""
        if not survivors:
            self.kill(why, wait_s=0)
            return
        self.died = self.died or why
        self.survivors = tuple(survivors)

        def leave() -> None:
            for _ in range(LEAVE_TRIES):
                self.interrupt(self.survivors)
                end = time.monotonic() + LEAVE_S
                while time.monotonic() < end:
                    if free():
                        return
                    time.sleep(0.01)

        self._leaving = threading.Thread(target=leave, name="jaxshard hosts", daemon=True)
        self._leaving.start()

    def has_left(self) -> None:
        """Wait until hosts that are left have left the step that another one died in."""
        if self._leaving is not None:
            self._leaving.join()

    def kill(self, why: str | None = None, wait_s: float = 5.0) -> None:
        """End all hosts at once, and what was started for them; wait so long until they are gone. A cluster that
        somebody else started keeps its engines."""
        self.died, self.survivors = self.died or why or "they were ended", ()
        everything = [*self._processes, *self._hub]
        if not self.is_local and self._own is not None:
            self._signal(9, range(len(self)))
        for process in everything:
            with suppress(psutil.Error):
                process.kill()
        with suppress(Exception):  # whatever is left of connections to processes that are gone
            self.client.close(linger=0)
        atexit.unregister(self.kill)
        if self._own is not None and not self.is_local:
            with suppress(Exception):  # launchers that can't reach what they started any more
                self._own.stop_cluster_sync()
        psutil.wait_procs(everything, timeout=wait_s)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _signal(self, number: int, hosts: Sequence[int]) -> None:
        for host in hosts:
            if self._processes:
                with suppress(psutil.Error):
                    self._processes[host].send_signal(number)
            else:
                with suppress(Exception):  # one that is gone gets none, and the others still do
                    self.client.send_signal(number, targets=[self.ids[host]], block=True)

    def learn(self) -> None:
        """Remember the processes of this machine that belong to it, while they are all there."""
        if not self.is_local:
            return
        controller = self._own.controller
        pid = controller.pid if hasattr(controller, "pid") else controller.process.pid
        hub = psutil.Process(pid)
        self._hub = [hub, *hub.children(recursive=True)]
        # The launchers' own objects: whoever waits for a process keeps the status it ended with.
        own = {each.process.pid: each.process for each in self._launchers()}
        self._processes = [own.get(joined.pid) or psutil.Process(joined.pid) for joined in self.joined]

    def _launchers(self) -> list[Any]:
        return [each for set_ in self._own.engines.values() for each in set_.launchers.values()]


def start(spec: HostsSpec, devices: int | None, say: Callable[[str], None] = lambda _: None) -> Cluster:
    """Start the hosts of `spec`, or reach those that run, and join them under jax.

    Args:
        spec: which.
        devices: simulated ones of all hosts together, where these are processes of this machine.
        say: is told what is being done.

    It takes 5 to 10 s for two, most of it Python's and jax's own start. Raises ShardError where ipyparallel is not
    installed, where hosts do not come within two minutes, and where jax can't join them.
    """
    try:
        import ipyparallel  # noqa: F401
    except ImportError:
        raise ShardError(f"{spec} needs ipyparallel", fix=_install()) from None
    if devices is not None and devices % (spec.count or 1):
        raise ShardError(
            f"{devices} devices don't divide over {spec.count} hosts; a mesh takes as many of each"
        )
    say(f"starting {spec.count or 'the'} hosts")
    cluster = _connected(spec)
    try:
        for left in reversed(range(TRIES)):
            try:
                _join(cluster, devices, say)
                break
            except ShardError:
                if not left or not cluster.is_local:
                    raise
                cluster.kill()
                cluster = _connected(spec)
        cluster.learn()
        if cluster.is_local:
            hub = [process.pid for process in cluster.watched()]
            for host in range(len(cluster)):
                cluster.call(engine.tie, os.getpid(), hub if host == 0 else [], host=host)
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


def _printed(host: int, message: dict[str, Any]) -> None:
    kind, content = message["header"]["msg_type"], message["content"]
    if host == 0 and kind == "stream":
        print(content["text"], end="")
    elif host == 0 and kind in ("display_data", "execute_result"):
        print(content["data"].get("text/plain", ""))


def _connected(spec: HostsSpec) -> Cluster:
    import logging

    import ipyparallel as ipp

    if spec.kind == RUNNING:
        assert spec.cluster is not None
        given: Any = {"url_file": spec.cluster} if os.path.exists(spec.cluster) else {"profile": spec.cluster}
        try:
            client = ipp.Client(**given, timeout=10)
        except (OSError, TimeoutError) as error:
            raise ShardError(f"{spec}: {_line(error)}. ipcluster start -n 2 starts one") from None
        if len(client.ids) < 2:
            raise ShardError(f"{spec} has {len(client.ids)} engines; a mesh over hosts takes two or more")
        return Cluster(spec, client, None, None, sorted(client.ids))
    folder = Path(tempfile.mkdtemp(prefix="jaxshard-hosts-"))  # for its user alone, as its keys are
    options: Any = {
        "n": spec.count,
        "engines": "local" if spec.is_local else spec.kind,
        "profile_dir": str(folder),
        "controller_args": [*BEATS],
        "engine_timeout": int(START_S),
        "send_engines_connection_env": True,
        "log_level": logging.CRITICAL,
        "shutdown_atexit": False,  # it waits for each of its processes; `Cluster.kill` does not
    }
    if not spec.is_local:
        options["controller_args"] += ["--IPController.enable_curve=True", "--ip=*"]
    own: Any = ipp.Cluster(**options)
    if spec.names:
        own.config.SSHEngineSetLauncher.engines = dict.fromkeys(spec.names, 1)
    try:
        own.start_cluster_sync()
        client = own.connect_client_sync()
        client.wait_for_engines(spec.count, timeout=START_S, interactive=False)
    except (
        Exception
    ) as error:  # whatever a launcher raises: a command that is not there, hosts that do not come
        with suppress(Exception):
            own.stop_cluster_sync()
        shutil.rmtree(folder, ignore_errors=True)
        raise ShardError(f"{spec}: the hosts did not start: {_line(error)}") from None
    for path in (folder / "security").glob("*"):  # keys are in them
        path.chmod(0o600)
    return Cluster(spec, client, own, folder, sorted(client.ids)[: spec.count])


def _join(cluster: Cluster, devices: int | None, say: Callable[[str], None]) -> None:
    """Make processes of jax of the engines, which come back in the order that jax gives them."""
    hosts = len(cluster)
    say(f"joining {hosts} hosts")
    where: dict[str, Any] = {"hosts": hosts, "seconds": int(START_S)}
    if cluster.is_local:
        address = f"127.0.0.1:{_free_port()}"
        where |= {"address": address, "bind": address, "devices": (devices or hosts) // hosts}
    elif cluster.spec.names:
        first = cluster.spec.names[0].rpartition("@")[2]
        where |= {"address": f"{first}:{PORT}", "bind": f"{first}:{PORT}"}
    asked = [
        cluster.client[i].apply_async(engine.join, where | {"process": process})
        for process, i in enumerate(cluster.ids)
    ]
    joined = _all(asked, cluster)
    order = sorted(range(hosts), key=lambda i: joined[i].process)
    cluster.ids = [cluster.ids[i] for i in order]
    cluster.joined = [joined[i] for i in order]


def _all(asked: Sequence[Any], cluster: Cluster) -> list[Any]:
    """What all of them give; as soon as one fails that is raised, for the others wait for it."""
    from ipyparallel.error import EngineError, RemoteError

    end = time.monotonic() + START_S
    while time.monotonic() < end:
        ready = [each for each in asked if each.ready()]
        for each in ready:
            try:
                each.get(0)
            except EngineError:
                raise ShardError(f"{cluster.spec}: a host died while it joined the others") from None
            except RemoteError as error:
                raise ShardError(f"{cluster.spec}: {error.ename}: {_line(error.evalue)}") from None
        if len(ready) == len(asked):
            return [each.get(0) for each in asked]
        time.sleep(0.02)
    late = [host for host, each in enumerate(asked) if not each.ready()]
    raise ShardError(f"{cluster.spec}: hosts {', '.join(map(str, late))} did not join within {START_S:g} s")


def _free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _line(error: Any) -> str:
    return " ".join(str(error).partition("\n")[0].split())[:300]


def _install() -> str:
    from ..packages import install

    return install("hosts")
