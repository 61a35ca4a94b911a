"""Hosts of one notebook while they live, and their end: engines of ipyparallel that `starting` has joined."""

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

LEAVE_TRIES, LEAVE_S = 20, 0.25  # interrupts to hosts that are left after a death, and seconds between them
ANSWER_S = 120.0
SIGNAL_S = 2.0  # for a signal that goes through the hub, which may be gone


class Cluster:
    """Engines, a host each, in the order of jax's processes. `joined` is what each said of itself, `meshed` the mesh
    that they made last; `died` is why they are gone, once they are."""

    def __init__(
        self,
        spec: HostsSpec,
        client: Any,
        own: Any,
        folder: Path | None,
        ids: Sequence[int],
        watcher: "subprocess.Popen[Any] | None" = None,
    ):
        self.spec, self.client, self._own, self.folder = spec, client, own, folder
        self._watcher, self._kernel = watcher, os.getpid()
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
        atexit.register(self._at_exit)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_local(self) -> bool:
        """Whether all hosts run on this machine."""
        return self.spec.is_local

    @property
    def is_ours(self) -> bool:
        """Whether the hosts were started for this mesh, and end with it; those of `cluster:` are somebody's own."""
        return self.spec.kind != RUNNING

    @property
    def again(self) -> str:
        """What starts the hosts again, with the mesh that they had."""
        axes = mesh_text(self.meshed.info.axes) if self.meshed else ""
        return self.spec.again(len(self), axes)

    def call(
        self, function: Callable[..., Any], *args: Any, seconds: float = ANSWER_S, host: int | None = None
    ) -> Any:
        """What a function of `engine` gives on each host, or on one. Raises ShardError where a host does not answer,
        and for what the function raises there."""
        from ipyparallel.error import EngineError, RemoteError
        from ipyparallel.error import TimeoutError as Late

        ids = self.ids if host is None else [self.ids[host]]
        if any(self.ids.index(i) in self.missing() for i in ids):
            raise ShardError(f"a host of {self.spec} has died: {self.again}")
        try:
            asked = [self.client[i].apply_async(function, *args) for i in ids]
            got = [each.get(seconds) for each in asked]
        except (EngineError, IndexError):  # the client's own, of one that the hub has lost since
            raise ShardError(f"a host of {self.spec} has died: {self.again}") from None
        except (Late, TimeoutError):
            raise ShardError(f"a host of {self.spec} has not answered within {seconds:g} s") from None
        except RemoteError as error:
            if error.ename == EngineError.__name__:
                raise ShardError(f"a host of {self.spec} has died: {self.again}") from None
            raise ShardError(f"{self.spec}: {error.ename}: {line_of(error.evalue)}") from None
        return got if host is None else got[0]

    def run(self, text: str) -> None:
        """Run Python, or a cell with magics, on all hosts and print what host 0 says. Raises ShardError where it ends
        early, on any of them: the line says on which, and why."""
        from . import watch

        self._runs += 1
        if self.died is not None:
            raise ShardError(f"the hosts are gone: {self.died}")
        try:
            with watch.Interrupts() as interrupts:
                outcome = watch.run(self, text, f"run {self._runs}", self._runs, _printed, interrupts)
        except watch.HostsLost as lost:
            raise ShardError(str(lost)) from None
        if any(each.error is not None for each in outcome.hosts):
            raise ShardError(outcome.told())

    def close(self) -> None:
        """End the hosts; engines that somebody else started go on."""
        if not self.is_ours and self.died is None:
            with suppress(ShardError):  # one that does not answer is let go of as it is
                self.call(engine.let_go, seconds=SIGNAL_S)
        self.kill("they were closed")

    def left(self) -> str | None:
        """What is left of hosts that were closed, in a line; None where nothing is."""
        if self.is_ours:
            return None
        axes = mesh_text(self.meshed.info.axes) if self.meshed else ""
        return (
            f"The {len(self)} engines of {self.spec} go on, with what cells made there, and stay joined under jax: "
            f"%mesh {self.spec} {axes} takes them again, all other jax programs on them see each other's devices."
        )

    def has_room(self, devices: int | None, axes: str = "") -> None:
        """Raise ShardError where a mesh takes more simulated devices than the hosts got when they joined."""
        have = sum(len(each.devices) for each in self.joined)
        if devices is not None and devices > have and all(each.platform == "cpu" for each in self.joined):
            new = f"after %mesh --close, %mesh {self.spec} {axes} starts it with as many"
            how = new if self.is_ours else self.again
            has = f"{self.spec} has {have} CPU devices, those that its hosts joined with"
            raise ShardError(f"{has}, and the mesh takes {devices}: {how}")

    def missing(self) -> list[int]:
        """The hosts that the hub has lost."""
        there = set(self.client.ids)
        return [host for host, i in enumerate(self.ids) if i not in there]

    def watched(self) -> list[psutil.Process]:
        """The processes of this machine without which the hosts can't be reached."""
        return self._hub

    def interrupt(self, hosts: Sequence[int]) -> None:
        """Send SIGINT to some of them."""
        self._signal(signal.SIGINT, hosts)

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
        far = self._own if not self.is_local else None
        if far is not None:
            self._signal(signal.SIGKILL, range(len(self)))
        for process in everything:
            with suppress(psutil.Error):
                process.kill()
        try:
            self.client.close(linger=0)
            atexit.unregister(self._at_exit)
            if far is not None:
                with suppress(*launch_errors()):  # launchers that can't reach what they started any more
                    far.stop_cluster_sync()
            psutil.wait_procs(everything, timeout=wait_s)
        finally:
            if self.folder is not None:
                leave_nothing(self.folder, self._own, self._watcher, wait_s)

    def _at_exit(self) -> None:
        """End with the kernel, but not with a process that was forked of it."""
        if os.getpid() == self._kernel:
            self.kill()

    def _signal(self, number: int, hosts: Sequence[int]) -> None:
        if self._processes:
            for host in hosts:
                with suppress(psutil.Error):
                    self._processes[host].send_signal(number)
            return
        sent = [threading.Thread(target=self._send, args=(number, host), daemon=True) for host in hosts]
        for each in sent:
            each.start()
        end = time.monotonic() + SIGNAL_S
        for each in sent:
            each.join(max(0.0, end - time.monotonic()))

    def _send(self, number: int, host: int) -> None:
        """Send a signal through the hub and the host's nanny, and wait until it was."""
        from ipyparallel.error import KernelError

        # One that is gone gets none: the client knows no such engine, is closed, or is told so by the hub.
        with suppress(IndexError, OSError, KernelError):
            self.client.send_signal(number, targets=[self.ids[host]], block=True)

    def learn(self) -> None:
        """Remember the processes of this machine that belong to it, while they are all there: the hosts' in the order
        of jax's processes, once they have joined."""
        if not self.is_local:
            return
        controller = self._own.controller
        pid = controller.pid if hasattr(controller, "pid") else controller.process.pid
        hub = psutil.Process(pid)
        self._hub = [hub, *hub.children(recursive=True)]
        # The launchers' own objects: whoever waits for a process keeps the status it ended with.
        own = {each.process.pid: each.process for each in self._launchers()}
        joined = [own.get(joined.pid) or psutil.Process(joined.pid) for joined in self.joined]
        self._processes = joined or [*own.values()]

    def _launchers(self) -> list[Any]:
        return [each for set_ in self._own.engines.values() for each in set_.launchers.values()]


def _printed(host: int, message: dict[str, Any]) -> None:
    kind, content = message["header"]["msg_type"], message["content"]
    if host == 0 and kind == "stream":
        print(content["text"], end="")
    elif host == 0 and kind in ("display_data", "execute_result"):
        print(content["data"].get("text/plain", ""))


def leave_nothing(
    folder: Path, own: Any, watcher: "subprocess.Popen[Any] | None", wait_s: float = 5.0
) -> None:
    """End what was started on this machine for the cluster of a folder, remove the folder, and end `watcher`, which
    would do so in its turn."""
    if (thread := getattr(own, "_async_thread", None)) is not None:
        # ipyparallel 9.2 leaves the thread that its launchers run in, which may be starting something.
        own._thread_loop.add_callback(own._thread_loop.stop)
        thread.join(wait_s)
    reaper.end(str(folder), wait_s)
    if watcher is not None:
        watcher.kill()
        watcher.wait()


def launch_errors() -> tuple[type[Exception], ...]:
    """What ipyparallel's launchers raise where they can't start, reach or end something: their own, of the commands
    that they run (`ssh`, `sbatch`), of files and sockets, and asyncio's where its loop has ended."""
    from ipyparallel.cluster.launcher import LauncherError

    return LauncherError, subprocess.SubprocessError, OSError, RuntimeError, TimeoutError


def line_of(error: Any) -> str:
    """An error's first line, in one of at most 300 characters."""
    return " ".join(str(error).partition("\n")[0].split())[:300]
