"""Running hosts of one notebook and their shutdown; `starting` makes them."""

import atexit
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from ..errors import ShardError
from ..report.parts import mesh_text
from . import engine, reaper
from .spec import RUNNING, HostsSpec

LEAVE_TRIES, LEAVE_S = 20, 0.25  # interrupts to survivors of a death, and seconds between two
ANSWER_S = 120.0
SIGNAL_S = 2.0  # for a signal that goes through the hub, which may be gone


class Cluster:
    """Joined hosts, in the order of JAX's process indices.

    Args:
        spec: Hosts as requested.
        client: Connected `ipyparallel.Client`.
        ipp_cluster: `ipyparallel.Cluster` of hosts started here; None for engines started by somebody else.
        folder: Profile folder with the keys; None for engines started by somebody else.
        ids: Engine ids.
        watcher: Reaper process of `folder`.

    Attributes:
        joined: Description of each host, as reported by the host.
        mesh: Mesh made last; None before the first.
        death_reason: Reason for the loss of the hosts; None while they run.
        survivors: Hosts still answering after the death of another one.
        token: Id of this cluster alone, part of the names of barriers and keys.
    """

    def __init__(
        self,
        spec: HostsSpec,
        client: Any,
        ipp_cluster: Any,
        folder: Path | None,
        ids: Sequence[int],
        watcher: "subprocess.Popen[Any] | None" = None,
    ):
        self.spec, self.client, self._ipp_cluster, self.folder = spec, client, ipp_cluster, folder
        self._watcher, self._kernel = watcher, os.getpid()
        self.ids = list(ids)
        self.joined: list[engine.JoinedHost] = []
        self.mesh: engine.HostsMesh | None = None
        self.death_reason: str | None = None
        # `jax.distributed.initialize` runs once in a process, so engines of `cluster:` keep their coordination service
        # for later clusters, and there each barrier's name can be used only once.
        self.token = uuid4().hex[:12]
        self._runs = 0
        self._leaving: threading.Thread | None = None
        self.survivors: tuple[int, ...] = ()
        self._hub: list[psutil.Process] = []
        self._processes: list[psutil.Process] = []
        atexit.register(self._at_exit)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_local(self) -> bool:
        """Return whether all hosts run on this machine."""
        return self.spec.is_local

    @property
    def is_ours(self) -> bool:
        """Return whether the hosts were started for this mesh and end with it; engines of `cluster:` belong to somebody
        else."""
        return self.spec.kind != RUNNING

    @property
    def restart_hint(self) -> str:
        """Instruction for starting the hosts again, with the axes of their last mesh."""
        axes = mesh_text(self.mesh.info.axes) if self.mesh else ""
        return self.spec.restart_hint(len(self), axes)

    def call(self, function: Callable[..., Any], *args: Any, seconds: float = ANSWER_S, host: int | None = None) -> Any:
        """Call a function of `engine` on each host, or on one.

        Args:
            function: Function to call.
            *args: Arguments, pickled.
            seconds: Time limit for each answer.
            host: Index of the one host to call; None calls all.

        Returns:
            List of results, one per host; the result alone with `host`.

        Raises:
            ShardError: A host has died or does not answer in time, or the function raised.
        """
        from ipyparallel.error import EngineError, RemoteError
        from ipyparallel.error import TimeoutError as Late

        ids = self.ids if host is None else [self.ids[host]]
        if any(self.ids.index(i) in self.lost_hosts() for i in ids):
            raise ShardError(f"a host of {self.spec} has died: {self.restart_hint}")
        try:
            results = [self.client[i].apply_async(function, *args) for i in ids]
            got = [each.get(seconds) for each in results]
        except (EngineError, IndexError):  # from the client, for a host that the hub has lost since the check
            raise ShardError(f"a host of {self.spec} has died: {self.restart_hint}") from None
        except (Late, TimeoutError):
            raise ShardError(f"a host of {self.spec} has not answered within {seconds:g} s") from None
        except RemoteError as error:
            if error.ename == EngineError.__name__:
                raise ShardError(f"a host of {self.spec} has died: {self.restart_hint}") from None
            raise ShardError(f"{self.spec}: {error.ename}: {error_line(error.evalue)}") from None
        return got if host is None else got[0]

    def run(self, text: str) -> None:
        """Run Python code, or a cell with magics, on all hosts and print the output of host 0.

        Args:
            text: Source code.

        Raises:
            ShardError: The code failed on a host, and the message names the host and the reason; or hosts are lost.
        """
        from . import cell_run

        self._runs += 1
        if self.death_reason is not None:
            raise ShardError(f"the hosts are gone: {self.death_reason}")
        try:
            with cell_run.Interrupts() as interrupts:
                outcome = cell_run.run_on_hosts(self, text, f"run {self._runs}", self._runs, _printed, interrupts)
        except cell_run.HostsLost as lost:
            raise ShardError(str(lost)) from None
        if any(each.error is not None for each in outcome.hosts):
            raise ShardError(outcome.summary())

    def close(self) -> None:
        """End the hosts; engines started by somebody else keep running."""
        if not self.is_ours and self.death_reason is None:
            with suppress(ShardError):  # an engine that does not answer stays as it is
                self.call(engine.release_engine, seconds=SIGNAL_S)
        self.kill("they were closed")

    def describe_running(self) -> str | None:
        """Return a line about engines still running after `close`, or None without any."""
        if self.is_ours:
            return None
        axes = mesh_text(self.mesh.info.axes) if self.mesh else ""
        return (
            f"The {len(self)} engines of {self.spec} go on, with what cells made there, and stay joined under jax: "
            f"%mesh {self.spec} {axes} takes them again, all other jax programs on them see each other's devices."
        )

    def check_device_count(self, devices: int | None, axes: str = "") -> None:
        """Check that the hosts have enough simulated devices for a mesh.

        Args:
            devices: Devices of the mesh; None passes.
            axes: Axes of the mesh as text, for the message.

        Raises:
            ShardError: All hosts have CPU devices, and fewer than the mesh takes: their number is fixed at the join.
        """
        have = sum(len(each.devices) for each in self.joined)
        if devices is not None and devices > have and all(each.platform == "cpu" for each in self.joined):
            new = f"after %mesh --close, %mesh {self.spec} {axes} starts it with as many"
            how = new if self.is_ours else self.restart_hint
            has = f"{self.spec} has {have} CPU devices, those that its hosts joined with"
            raise ShardError(f"{has}, and the mesh takes {devices}: {how}")

    def lost_hosts(self) -> list[int]:
        """Return the indices of hosts lost by the hub."""
        there = set(self.client.ids)
        return [host for host, i in enumerate(self.ids) if i not in there]

    def hub_processes(self) -> list[psutil.Process]:
        """Return the hub's processes, the controller first; without them the hosts can't be reached. Empty unless all
        hosts run on this machine."""
        return self._hub

    def interrupt(self, hosts: Sequence[int]) -> None:
        """Send SIGINT to some hosts."""
        self._signal(signal.SIGINT, hosts)

    def processes_of(self, host: int) -> list[psutil.Process]:
        """Return the process of a host on this machine, in a list; empty for a remote host."""
        return self._processes[host : host + 1]

    def record_loss(self, survivors: Sequence[int], why: str, free: Callable[[], bool]) -> None:
        """Record the loss of hosts and free the survivors from their blocked calls; without survivors end everything.

        Each blocking call of a survivor takes one interrupt, sent from a thread until `free()`. Survivors stay alive,
        so that their values can be read.

        Args:
            survivors: Hosts still answering.
            why: Reason of the loss, in a line.
            free: Returns whether the survivors have left their cell.
        """
        if not survivors:
            self.kill(why, wait_s=0)
            return
        self.death_reason = self.death_reason or why
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

    def wait_for_survivors(self) -> None:
        """Wait until the survivors have left the step in which another host died."""
        if self._leaving is not None:
            self._leaving.join()

    def kill(self, why: str | None = None, wait_s: float = 5.0) -> None:
        """End all hosts at once, and everything started for them; engines started by somebody else keep running.

        Args:
            why: Reason to report, if none is recorded yet.
            wait_s: Seconds to wait for the processes to end.
        """
        self.death_reason, self.survivors = self.death_reason or why or "they were ended", ()
        everything = [*self._processes, *self._hub]
        remote = self._ipp_cluster if not self.is_local else None
        # Processes on other machines get the signal through the hub, so it is sent before the hub is killed.
        if remote is not None:
            self._signal(signal.SIGKILL, range(len(self)))
        for process in everything:
            with suppress(psutil.Error):
                process.kill()
        try:
            self.client.close(linger=0)
            atexit.unregister(self._at_exit)
            if remote is not None:
                with suppress(*launch_errors()):  # a launcher that no longer reaches what it started
                    remote.stop_cluster_sync()
            psutil.wait_procs(everything, timeout=wait_s)
        finally:
            if self.folder is not None:
                remove_cluster(self.folder, self._ipp_cluster, self._watcher, wait_s)

    def _at_exit(self) -> None:
        """End the hosts with the kernel; a process forked from the kernel inherits the exit handler and must not."""
        if os.getpid() == self._kernel:
            self.kill()

    def _signal(self, number: int, hosts: Sequence[int]) -> None:
        """Send a signal to hosts: directly to processes of this machine, else through the hub."""
        if self._processes:
            for host in hosts:
                with suppress(psutil.Error):
                    self._processes[host].send_signal(number)
            return
        # `Client.send_signal` waits for the hub, which may be gone: it runs in a thread with a limit.
        threads = [threading.Thread(target=self._send, args=(number, host), daemon=True) for host in hosts]
        for each in threads:
            each.start()
        end = time.monotonic() + SIGNAL_S
        for each in threads:
            each.join(max(0.0, end - time.monotonic()))

    def _send(self, number: int, host: int) -> None:
        """Send a signal through the hub and the host's nanny, and wait for the answer."""
        from ipyparallel.error import KernelError

        # Nothing is sent to a host that is gone: the client does not know the engine, is closed, or hears so from the
        # hub.
        with suppress(IndexError, OSError, KernelError):
            self.client.send_signal(number, targets=[self.ids[host]], block=True)

    def record_processes(self) -> None:
        """Record the processes of this machine that belong to the cluster, while all are alive; hosts in the order of
        JAX's processes once joined."""
        if not self.is_local:
            return
        controller = self._ipp_cluster.controller
        pid = controller.pid if hasattr(controller, "pid") else controller.process.pid
        hub = psutil.Process(pid)
        self._hub = [hub, *hub.children(recursive=True)]
        # The launchers' own objects: an exit status is read once, and kept by the object that has read it.
        launched = {each.process.pid: each.process for each in self._launchers()}
        joined = [launched.get(joined.pid) or psutil.Process(joined.pid) for joined in self.joined]
        self._processes = joined or [*launched.values()]

    def _launchers(self) -> list[Any]:
        return [each for set_ in self._ipp_cluster.engines.values() for each in set_.launchers.values()]


def _printed(host: int, message: dict[str, Any]) -> None:
    """Print output of host 0; drop all other messages."""
    kind, content = message["header"]["msg_type"], message["content"]
    if host == 0 and kind == "stream":
        print(content["text"], end="")
    elif host == 0 and kind in ("display_data", "execute_result"):
        print(content["data"].get("text/plain", ""))


def remove_cluster(
    folder: Path, ipp_cluster: Any, watcher: "subprocess.Popen[Any] | None", wait_s: float = 5.0
) -> None:
    """End everything started on this machine for the cluster of a folder, and remove the folder.

    Args:
        folder: Profile folder of the cluster.
        ipp_cluster: `ipyparallel.Cluster`, or None.
        watcher: Reaper process, which would do the same later; ended last.
        wait_s: Seconds to wait for the processes to end.
    """
    if (thread := getattr(ipp_cluster, "_async_thread", None)) is not None:
        # ipyparallel 9.2 does not stop the thread of its launchers, which may be starting a process.
        ipp_cluster._thread_loop.add_callback(ipp_cluster._thread_loop.stop)
        thread.join(wait_s)
    reaper.end_cluster(str(folder), wait_s)
    if watcher is not None:
        watcher.kill()
        watcher.wait()


def launch_errors() -> tuple[type[Exception], ...]:
    """Return the exception types of ipyparallel's launchers: failures to start, reach or end something.

    Besides `LauncherError`: errors of the commands run (`ssh`, `sbatch`), of files and sockets, and RuntimeError of
    asyncio after its loop has ended.
    """
    from ipyparallel.cluster.launcher import LauncherError

    return LauncherError, subprocess.SubprocessError, OSError, RuntimeError, TimeoutError


def error_line(error: Any) -> str:
    """Return the first line of an error, with whitespace collapsed, at most 300 characters."""
    return " ".join(str(error).partition("\n")[0].split())[:300]
