"""One cell on all hosts, watched from the kernel, so that it always ends.

Every 20 ms: each host's result, hosts that the hub has lost, the hub's own process. The guard on the hosts (`guard`)
ends all of them where one fails; what it can't is done here: a host whose cell has ended lets the others out of the
step that they wait to make, then they are interrupted, then they are given up, and those whose cell has ended stay to
be asked what they hold. Where one died the others can go no further, as their collectives do not end; they leave them,
and stay as well.
"""

import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil

from ..temporary import Replaced, attribute, handler
from . import engine
from .cluster import ANSWER_S, Cluster

TICK_S = 0.02
OUTPUT_S = (
    5.0  # for the next of what was published before a cell ended, and comes another way than its result
)
TOGETHER_S = 0.15  # within which hosts die of one cause
KILLED = "SIGKILL"
GRACE_S = 3.0  # from the first end of a host to the next means against the others
OURS = ("ShardError", "UsageError")  # whose message is the whole line
OWN = ("Interrupted",)  # of a cell that says itself how far its step has come
STOPPED = ("KeyboardInterrupt", *OWN)
MOST_STOPS = 3  # interrupts, after which the hosts are ended
UNHEARD_S = (
    10.0  # after which an interrupt goes to a host all the same that has not said that its cell has begun
)
NOT_BEGUN = "Stopped before a step"
BEGUN = "data_message"  # of a host whose cell hears interrupts from there on; one that comes earlier is lost
Message = tuple[int, dict[str, Any]]  # the host, and a message as kernels publish them


class HostsLost(RuntimeError):
    """The hosts are gone, or were ended, or wait for ever: `survivors` are those that still answer, `failed` the one
    whose own exception it comes from."""

    def __init__(self, why: str, survivors: tuple[int, ...] = (), failed: int | None = None):
        super().__init__(why)
        self.survivors, self.failed = survivors, failed


@dataclass(frozen=True)
class Outcome:
    """How a cell ended on each host, in their order, and the seconds that it took."""

    hosts: tuple[engine.Ended, ...]
    seconds: float

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended it."""
        return any(each.error is not None and each.error[0] in STOPPED for each in self.hosts)

    def told(self) -> str:
        """How it ended, in one line: on which host, by what, and which step's state all hold."""
        steps = [each.steps for each in self.hosts]
        alike = len(set(steps)) == 1
        if self.interrupted:
            own = (each.error[1] for each in self.hosts if each.error is not None and each.error[0] in OWN)
            if alike and (said := next(own, None)) is not None:
                return said
            done = f"{steps[0]:,} step{'s' * (steps[0] != 1)}"
            if not alike:
                return f"Stopped, the hosts after {', '.join(f'{n:,}' for n in steps)} steps"
            return f"Stopped after {done}, the same on all {len(steps)} hosts" if steps[0] else NOT_BEGUN
        host = self.failed
        if host is None:
            return next((each.error[1] for each in self.hosts if each.error is not None), "")
        kind, said = (self.hosts[host].error or ("",))[0], _said(self.hosts[host])
        if all(each.error == self.hosts[host].error for each in self.hosts):
            return said if kind in OURS else f"{said}, on all {len(steps)} hosts"
        whole = f"; all hosts hold the state of step {steps[0]:,}" if alike and steps[0] else ""
        return f"host {host}: {said}; the others ended with it{whole}"

    @property
    def endless(self) -> int:
        """Steps that some hosts began and another one, which had failed or ended between two meetings, did not: they
        wait for it."""
        steps = [each.steps for each in self.hosts]
        return max(steps) - min(steps)

    @property
    def failed(self) -> int | None:
        """The host whose own exception ended it, the first of them; None where there is none."""
        own = (h for h, each in enumerate(self.hosts) if each.error is not None and not each.caused)
        return next(own, None)


class Interrupts(Replaced):
    """Ctrl-C in this process while a cell goes to hosts: the `times` at which it came are noted, and each raises
    KeyboardInterrupt while `raises`. Noted because Python drops what is raised in a callback, as JAX has one at each
    garbage collection. Nothing comes where this is no main thread."""

    def __init__(self) -> None:
        super().__init__(handler(signal.SIGINT), self._came)
        self.times: list[float] = []
        self.raises = True

    def begin(self) -> None:
        if threading.current_thread() is threading.main_thread():
            super().begin()

    def _came(self, *_: Any) -> None:
        self.times.append(time.monotonic())
        if self.raises:
            raise KeyboardInterrupt

    def due(self, sent: int, begun: bool) -> bool:
        """Whether another one is to be sent to a host, of which `sent` were: the first once its cell has begun there,
        as what comes earlier is lost."""
        if len(self.times) <= sent:
            return False
        return begun or len(self.times) > 1 or time.monotonic() - self.times[0] > UNHEARD_S


def run(
    cluster: Cluster,
    text: str,
    name: str,
    number: int,
    publish: Callable[[int, dict[str, Any]], None],
    interrupts: Interrupts,
) -> Outcome:
    """Run a cell on all hosts and wait until it has ended on each. `publish` is given what hosts publish, as it comes;
    `interrupts` go to the hosts, and raise nothing meanwhile.

    Raises HostsLost where a host dies, does not end, or can't be reached any more.
    """
    start, called = time.monotonic(), f"{cluster.token}/{name}"  # engines may have run other clusters' cells
    said: queue.SimpleQueue[Message] = queue.SimpleQueue()
    ended: dict[int, engine.Ended] = {}
    begun: set[int] = set()

    def relay() -> bool:
        before = said.empty()
        with suppress(queue.Empty):
            while True:
                host, message = said.get_nowait()
                if message["header"]["msg_type"] == BEGUN:
                    begun.add(host)
                else:
                    publish(host, message)
        return not before

    look(cluster)
    with Replaced(attribute(interrupts, "raises"), False):
        try:
            asked = [_begun(cluster, host, (text, called, number), said) for host in range(len(cluster))]
        except IndexError:  # of a host that the hub has lost since
            look(cluster)
            raise
        means, first, stops = _means(cluster, ended, asked), None, 0
        while len(ended) < len(asked):
            running = [host for host in range(len(asked)) if host not in ended]
            try:
                for host in running:
                    if is_gone(cluster, host, asked[host]):
                        raise _death(cluster, host, asked, start)
                    if asked[host].ready():
                        ended[host] = _result(asked[host])
                        first = first or time.monotonic()
                if not all(map(_lives, cluster.watched()[:1])):
                    raise _lost(cluster, "the process that connects the hosts died")
            except HostsLost as lost:
                waits = [asked[host] for host in lost.survivors]
                cluster.bury(lost.survivors, str(lost), partial(_free, waits))
                raise
            relay()
            if interrupts.due(stops, running[0] in begun):
                stops = len(interrupts.times)
                if stops > MOST_STOPS:
                    cluster.kill(why := f"interrupted {stops} times", wait_s=0)
                    raise _lost(cluster, why)
                cluster.interrupt(running if stops > 1 else running[:1])
                first = time.monotonic()
            elif first is not None and len(ended) < len(asked) and time.monotonic() - first > GRACE_S:
                next(means)
                first = time.monotonic()
            if left := [host for host in running if host not in ended]:
                asked[left[0]].wait(TICK_S)
        end, stops = time.monotonic() + OUTPUT_S, len(interrupts.times)
        while time.monotonic() < end and len(interrupts.times) == stops:
            complete = all(each.wait_for_output(TICK_S) for each in asked)
            if relay():
                end = time.monotonic() + OUTPUT_S
            elif complete:
                break
    outcome = Outcome(tuple(ended[host] for host in range(len(asked))), time.monotonic() - start)
    if (steps := outcome.endless) > 0:
        every = tuple(range(len(cluster)))
        more = (
            f"{steps} step{'s' * (steps > 1)} that the others began without it never end{'s' * (steps == 1)}"
        )
        told = outcome.told() or "hosts made different numbers of steps"
        lost = HostsLost(f"{told}; {more}", every, outcome.failed)
        cluster.bury(every, str(lost), lambda: True)
        raise lost
    return outcome


def _said(ended: engine.Ended) -> str:
    """What a host's cell raised."""
    kind, message = ended.error or ("", "")
    return message if kind in OURS else f"{kind}: {message}" if message else kind


def look(cluster: Cluster) -> None:
    """Raise HostsLost where hosts have died while no cell ran."""
    if not (missing := cluster.missing()):
        return
    rest = tuple(host for host in range(len(cluster)) if host not in missing)
    lost = HostsLost(f"{_told(cluster, missing)} before the cell", rest)
    cluster.bury(rest, str(lost), lambda: True)
    raise lost


def _means(cluster: Cluster, ended: dict[int, engine.Ended], asked: list[Any]) -> Iterator[None]:
    """What is done about hosts that do not end after another one has, the next each time."""
    for host, each in ended.items():
        why = "its cell had ended" if each.error is None else "it had failed"
        cluster.client[cluster.ids[host]].apply_async(engine.leave, why)
    yield
    for _ in range(2):
        cluster.interrupt([host for host in range(len(asked)) if host not in ended])
    yield
    late = [str(host) for host in range(len(asked)) if host not in ended]
    stays = f"host{'s' * (len(late) > 1)} {', '.join(late)} did not end after"
    own = next((host for host, each in ended.items() if each.error is not None and not each.caused), None)
    why = f"{stays} the others" if own is None else f"host {own}: {_said(ended[own])}; {stays} it"
    lost = HostsLost(why, tuple(sorted(ended)), own)
    cluster.bury(lost.survivors, why, lambda: True)
    raise lost


def _free(asked: Sequence[Any]) -> bool:
    return all(each.ready() for each in asked)


def _begun(cluster: Cluster, host: int, cell: tuple[Any, ...], said: "queue.SimpleQueue[Message]") -> Any:
    """The call of `engine.run_cell` on a host, whose output goes to `said`. The client's own thread hears it, and makes
    the call as well: it sends nothing before it listens, so that no word of a short cell is missed."""
    made: Future[Any] = Future()

    def begin() -> None:
        try:
            asked = cluster.client[cluster.ids[host]].apply_async(engine.run_cell, *cell)
            for future in asked._children:
                future.iopub_callbacks.append(lambda message: said.put((host, message)))
            made.set_result(asked)
        except BaseException as error:  # handed to the thread that waits
            made.set_exception(error)

    cluster.client._io_loop.add_callback(begin)
    return made.result(ANSWER_S)


def is_gone(cluster: Cluster, host: int, asked: Any) -> bool:
    """Whether a host is gone, by its process on this machine, or by what the hub has said."""
    from ipyparallel.error import EngineError, RemoteError

    if not asked.ready():
        return not all(map(_lives, cluster.processes_of(host)))
    try:
        asked.get(0)
    except EngineError:
        return True
    except RemoteError as error:
        return error.ename == "EngineError"
    return False


def _result(asked: Any) -> engine.Ended:
    from ipyparallel.error import RemoteError

    try:
        return asked.get(0)
    except RemoteError as error:  # of our own function there: the cell's are told in its result
        return engine.Ended((str(error.ename), str(error.evalue)))


def _death(cluster: Cluster, host: int, asked: Sequence[Any], start: float) -> HostsLost:
    """The death of a host, and of those that died with it: gloo ends some whose peer is gone, and their deaths may be
    heard of first."""
    after = time.monotonic() - start
    dead = {host}
    end = time.monotonic() + TOGETHER_S
    while time.monotonic() < end:
        for other, each in enumerate(asked):
            if is_gone(cluster, other, each):
                dead.add(other)
        time.sleep(TICK_S / 2)
    survivors = tuple(other for other in range(len(cluster)) if other not in dead)
    return HostsLost(f"{_told(cluster, dead)} {after:.1f} s into the cell", survivors)


def _told(cluster: Cluster, dead: Collection[int]) -> str:
    ways = {each: how(cluster, each) for each in dead}
    first = sorted(dead, key=lambda each: (KILLED not in ways[each], each))  # no process ends itself so
    return " and ".join(f"host {each} {ways[each]}" for each in first)


def how(cluster: Cluster, host: int) -> str:
    """How it is gone, with the signal or the exit status where it ran on this machine."""
    for process in cluster.processes_of(host):
        if _lives(process):
            return "no longer answers"
        with suppress(psutil.Error):
            status = process.wait(0.2)
            if status is not None:
                return f"died ({signal.Signals(-status).name if status < 0 else f'exit status {status}'})"
    return "died"


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _lost(cluster: Cluster, why: str) -> HostsLost:
    left = "all hosts were ended" if cluster.is_ours else "its engines were left as they are"
    return HostsLost(f"{why}; {left}")
