"""Run one cell on all hosts, watched from the kernel, so that a cell always ends.

Every 20 ms the kernel looks for each host's result, for hosts lost by the hub, and for the hub's process.

After a failure or an early end on one host, `StepBarrier` on the hosts normally ends the cell everywhere. Otherwise the
kernel acts, 3 s apart:
1. A host with an ended cell leaves the step barrier, and so lets the others out.
2. Running hosts are interrupted.
3. Running hosts are given up; hosts with an ended cell stay alive, so that their values can be read.

After the death of a host collectives never end: the survivors leave them by interrupts, and stay alive as well.
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

from ..temporary import Replaced, attribute, signal_handler
from . import engine
from .cluster import ANSWER_S, Cluster
from .reaper import is_alive

TICK_S = 0.02
OUTPUT_S = 5.0  # to wait for the next message of output after the end of a cell
TOGETHER_S = 0.15  # between deaths of hosts by one cause
KILLED = "SIGKILL"
GRACE_S = 3.0  # from the first end of a host, or the last measure against the others, to the next measure
OURS = ("ShardError", "UsageError")  # shown without the class name
OWN = ("Interrupted",)  # with a message that tells the progress already
STOPPED = ("KeyboardInterrupt", *OWN)
MOST_STOPS = 3  # interrupts; one more ends the hosts
UNHEARD_S = 10.0  # after which an interrupt goes to a host even if its cell has not reported its beginning
NOT_BEGUN = "Stopped before a step"
BEGUN = "data_message"  # message of a cell once its SIGINT handler is set: an earlier interrupt would be lost
Message = tuple[int, dict[str, Any]]  # host, and a message of the Jupyter protocol


class HostsLost(RuntimeError):
    """Hosts died, were ended, or wait forever.

    Args:
        why: Message, in a line.
        survivors: Hosts still answering.
        failed: Host with the exception that caused the loss; None for other causes.
    """

    def __init__(self, why: str, survivors: tuple[int, ...] = (), failed: int | None = None):
        super().__init__(why)
        self.survivors, self.failed = survivors, failed


@dataclass(frozen=True)
class CellOutcome:
    """End of a cell on all hosts.

    Attributes:
        hosts: End on each host, in order.
        seconds: Duration of the cell.
    """

    hosts: tuple[engine.CellEnd, ...]
    seconds: float

    @property
    def interrupted(self) -> bool:
        """Return whether Ctrl-C ended the cell."""
        return any(each.error is not None and each.error[0] in STOPPED for each in self.hosts)

    def summary(self) -> str:
        """Return the end of the cell in one line: the host, the error, and the step whose state all hosts have."""
        steps = [each.steps for each in self.hosts]
        is_same_step = len(set(steps)) == 1
        if self.interrupted:
            messages = (each.error[1] for each in self.hosts if each.error is not None and each.error[0] in OWN)
            if is_same_step and (message := next(messages, None)) is not None:
                return message
            done = f"{steps[0]:,} step{'s' * (steps[0] != 1)}"
            if not is_same_step:
                return f"Stopped, the hosts after {', '.join(f'{n:,}' for n in steps)} steps"
            return f"Stopped after {done}, the same on all {len(steps)} hosts" if steps[0] else NOT_BEGUN
        host = self.failed
        if host is None:
            return next((each.error[1] for each in self.hosts if each.error is not None), "")
        kind, message = (self.hosts[host].error or ("",))[0], _said(self.hosts[host])
        if all(each.error == self.hosts[host].error for each in self.hosts):
            return message if kind in OURS else f"{message}, on all {len(steps)} hosts"
        whole = f"; all hosts hold the state of step {steps[0]:,}" if is_same_step and steps[0] else ""
        return f"host {host}: {message}; the others ended with it{whole}"

    @property
    def unfinished_steps(self) -> int:
        """Number of steps begun by some hosts and never by another one, which failed or ended between two barriers.
        Their collectives wait forever."""
        steps = [each.steps for each in self.hosts]
        return max(steps) - min(steps)

    @property
    def failed(self) -> int | None:
        """First host with an exception of its own; None without one."""
        own = (h for h, each in enumerate(self.hosts) if each.error is not None and not each.caused)
        return next(own, None)


class Interrupts(Replaced):
    """Record of Ctrl-C in this process while a cell runs on hosts.

    Nothing is recorded outside the main thread, the only one with signal handlers.

    Attributes:
        times: Time of each interrupt, by `time.monotonic`.
        raises: Whether an interrupt also raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        super().__init__(signal_handler(signal.SIGINT), self._came)
        self.times: list[float] = []
        self.raises = True

    def apply(self) -> None:
        # Python sets signal handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            super().apply()

    def _came(self, *_: Any) -> None:
        # Python drops an exception raised in a callback of the garbage collector, and JAX has one there. The recorded
        # time is not lost.
        self.times.append(time.monotonic())
        if self.raises:
            raise KeyboardInterrupt

    def due(self, sent: int, begun: bool) -> bool:
        """Return whether another interrupt should go to a host.

        Args:
            sent: Number of interrupts sent so far.
            begun: Whether the host's cell has begun. An earlier interrupt is lost there, so the first one waits: at
                most `UNHEARD_S`, or until a second Ctrl-C.
        """
        if len(self.times) <= sent:
            return False
        return begun or len(self.times) > 1 or time.monotonic() - self.times[0] > UNHEARD_S


def run_on_hosts(
    cluster: Cluster,
    text: str,
    name: str,
    number: int,
    publish: Callable[[int, dict[str, Any]], None],
    interrupts: Interrupts,
) -> CellOutcome:
    """Run a cell on all hosts and wait for its end on each.

    Args:
        cluster: Hosts.
        text: Source of the cell.
        name: Name of the run, new for each run of the cluster.
        number: Execution count shown on the hosts.
        publish: Called with a host and a message for all output, in order of arrival.
        interrupts: Ctrl-C of the kernel, passed on to the hosts; raises nothing meanwhile.

    Returns:
        The end on each host; exceptions of the cell are part of the result.

    Raises:
        HostsLost: A host died, does not end, or can't be reached, or some hosts began steps that never end.
    """
    # The token keeps names unique: engines of `cluster:` may have run cells of an earlier cluster.
    start, run_name = (time.monotonic(), f"{cluster.token}/{name}")
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    ended: dict[int, engine.CellEnd] = {}
    begun: set[int] = set()

    def relay() -> bool:
        """Publish the messages received so far, and return whether there were some."""
        before = messages.empty()
        with suppress(queue.Empty):
            while True:
                host, message = messages.get_nowait()
                if message["header"]["msg_type"] == BEGUN:
                    begun.add(host)
                else:
                    publish(host, message)
        return not before

    check_alive(cluster)
    with Replaced(attribute(interrupts, "raises"), False):
        try:
            results = [_start_cell(cluster, host, (text, run_name, number), messages) for host in range(len(cluster))]
        except IndexError:  # from the client, for a host that the hub has lost since the check
            check_alive(cluster)
            raise
        measures, last_action, interrupts_sent = _escalate(cluster, ended, results), None, 0
        while len(ended) < len(results):
            running = [host for host in range(len(results)) if host not in ended]
            try:
                for host in running:
                    if is_gone(cluster, host, results[host]):
                        raise _death(cluster, host, results, start)
                    if results[host].ready():
                        ended[host] = _result(results[host])
                        last_action = last_action or time.monotonic()
                if not all(map(is_alive, cluster.hub_processes()[:1])):
                    raise _lost(cluster, "the process that connects the hosts died")
            except HostsLost as lost:
                waits = [results[host] for host in lost.survivors]
                cluster.record_loss(lost.survivors, str(lost), partial(_free, waits))
                raise
            relay()
            if interrupts.due(interrupts_sent, running[0] in begun):
                interrupts_sent = len(interrupts.times)
                if interrupts_sent > MOST_STOPS:
                    cluster.kill(why := f"interrupted {interrupts_sent} times", wait_s=0)
                    raise _lost(cluster, why)
                # One interrupted host stops all at the next step barrier. A second Ctrl-C goes to each, and raises at
                # once.
                cluster.interrupt(running if interrupts_sent > 1 else running[:1])
                last_action = time.monotonic()
            elif last_action is not None and len(ended) < len(results) and time.monotonic() - last_action > GRACE_S:
                next(measures)
                last_action = time.monotonic()
            if left := [host for host in running if host not in ended]:
                results[left[0]].wait(TICK_S)
        # Output comes through another socket than results, and may arrive later.
        end, interrupts_sent = time.monotonic() + OUTPUT_S, len(interrupts.times)
        while time.monotonic() < end and len(interrupts.times) == interrupts_sent:
            complete = all(each.wait_for_output(TICK_S) for each in results)
            if relay():
                end = time.monotonic() + OUTPUT_S
            elif complete:
                break
    outcome = CellOutcome(tuple(ended[host] for host in range(len(results))), time.monotonic() - start)
    if (steps := outcome.unfinished_steps) > 0:
        every = tuple(range(len(cluster)))
        more = f"{steps} step{'s' * (steps > 1)} that the others began without it never end{'s' * (steps == 1)}"
        summary = outcome.summary() or "hosts made different numbers of steps"
        lost = HostsLost(f"{summary}; {more}", every, outcome.failed)
        cluster.record_loss(every, str(lost), lambda: True)
        raise lost
    return outcome


def _said(ended: engine.CellEnd) -> str:
    """Return the text of a host's exception; messages of this package have no class name."""
    kind, message = ended.error or ("", "")
    return message if kind in OURS else f"{kind}: {message}" if message else kind


def check_alive(cluster: Cluster) -> None:
    """Check that all hosts are alive before a cell.

    Raises:
        HostsLost: Hosts have died since the last cell; their survivors stay.
    """
    if not (missing := cluster.lost_hosts()):
        return
    rest = tuple(host for host in range(len(cluster)) if host not in missing)
    lost = HostsLost(f"{_describe_deaths(cluster, missing)} before the cell", rest)
    cluster.record_loss(rest, str(lost), lambda: True)
    raise lost


def _escalate(cluster: Cluster, ended: dict[int, engine.CellEnd], asked: list[Any]) -> Iterator[None]:
    """Act on hosts that do not end after another one has; each `next` takes a stronger measure, the last raises
    HostsLost."""
    # Releases hosts that wait for an ended one at their next barrier.
    for host, each in ended.items():
        why = "its cell had ended" if each.error is None else "it had failed"
        cluster.client[cluster.ids[host]].apply_async(engine.leave_cell, why)
    yield
    # The first interrupt waits for the next step barrier; the second raises at once.
    for _ in range(2):
        cluster.interrupt([host for host in range(len(asked)) if host not in ended])
    yield
    late = [str(host) for host in range(len(asked)) if host not in ended]
    stays = f"host{'s' * (len(late) > 1)} {', '.join(late)} did not end after"
    own = next((host for host, each in ended.items() if each.error is not None and not each.caused), None)
    why = f"{stays} the others" if own is None else f"host {own}: {_said(ended[own])}; {stays} it"
    lost = HostsLost(why, tuple(sorted(ended)), own)
    cluster.record_loss(lost.survivors, why, lambda: True)
    raise lost


def _free(asked: Sequence[Any]) -> bool:
    """Return whether all calls have a result."""
    return all(each.ready() for each in asked)


def _start_cell(cluster: Cluster, host: int, cell: tuple[Any, ...], said: "queue.SimpleQueue[Message]") -> Any:
    """Start `engine.run_cell` on a host, with all output put into `said`.

    Args:
        cluster: Hosts.
        host: Index of the host.
        cell: Arguments of `engine.run_cell`.
        said: Queue of hosts and messages.

    Returns:
        The `AsyncResult` of the call.
    """
    started: Future[Any] = Future()

    def begin() -> None:
        try:
            asked = cluster.client[cluster.ids[host]].apply_async(engine.run_cell, *cell)
            for future in asked._children:
                future.iopub_callbacks.append(lambda message: said.put((host, message)))
            started.set_result(asked)
        except BaseException as error:  # raised in the waiting thread
            started.set_exception(error)

    # The call is made in the client's own thread, which also receives messages. It receives nothing before the callback
    # is attached, so no output of a short cell is missed.
    cluster.client._io_loop.add_callback(begin)
    return started.result(ANSWER_S)


def is_gone(cluster: Cluster, host: int, asked: Any) -> bool:
    """Return whether a host is dead.

    Args:
        cluster: Hosts.
        host: Index of the host.
        asked: `AsyncResult` of a call on the host; ready with an EngineError once the hub has lost the host.
    """
    from ipyparallel.error import EngineError, RemoteError

    # A local host's process is checked directly: the hub takes seconds to notice a death.
    if not asked.ready():
        return not all(map(is_alive, cluster.processes_of(host)))
    try:
        asked.get(0)
    except EngineError:
        return True
    except RemoteError as error:  # from the called function; exceptions of a cell are in its result
        return error.ename == "EngineError"
    return False


def _result(asked: Any) -> engine.CellEnd:
    """Return the end of a cell on a host."""
    from ipyparallel.error import RemoteError

    try:
        return asked.get(0)
    except RemoteError as error:  # raised by `run_cell` itself; exceptions of the cell are in its result
        return engine.CellEnd((str(error.ename), str(error.evalue)))


def _death(cluster: Cluster, host: int, asked: Sequence[Any], start: float) -> HostsLost:
    """Return the error for the death of a host, including hosts that died with it."""
    after = time.monotonic() - start
    dead = {host}
    # jaxlib's gloo may end a process without a message if its peer dies in the middle of a transfer. The second death
    # may be noticed first, so a short wait collects all of them.
    end = time.monotonic() + TOGETHER_S
    while time.monotonic() < end:
        for other, each in enumerate(asked):
            if is_gone(cluster, other, each):
                dead.add(other)
        time.sleep(TICK_S / 2)
    survivors = tuple(other for other in range(len(cluster)) if other not in dead)
    return HostsLost(f"{_describe_deaths(cluster, dead)} {after:.1f} s into the cell", survivors)


def _describe_deaths(cluster: Cluster, dead: Collection[int]) -> str:
    """Return the deaths in a line, the likely cause first."""
    ways = {each: describe_loss(cluster, each) for each in dead}
    # SIGKILL comes from outside, and other deaths may follow from it.
    first = sorted(dead, key=lambda each: (KILLED not in ways[each], each))
    return " and ".join(f"host {each} {ways[each]}" for each in first)


def describe_loss(cluster: Cluster, host: int) -> str:
    """Return the fate of a lost host, with its signal or exit status for a process of this machine."""
    for process in cluster.processes_of(host):
        if is_alive(process):
            return "no longer answers"
        with suppress(psutil.Error):
            status = process.wait(0.2)
            if status is not None:
                return f"died ({signal.Signals(-status).name if status < 0 else f'exit status {status}'})"
    return "died"


def _lost(cluster: Cluster, why: str) -> HostsLost:
    """Return the error for a cluster without reachable hosts."""
    left = "all hosts were ended" if cluster.is_ours else "its engines were left as they are"
    return HostsLost(f"{why}; {left}")
