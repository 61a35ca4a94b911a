"""Hosts that meet before every so many steps stop after the same one: threads with clients of a real coordination
service, and two real hosts."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.hosts_notebook import LOOP, STEP, Hosts, later, opened
from support.several_hosts import free_port

from jaxshard_magic.hosts import step_barrier as guards
from jaxshard_magic.hosts.step_barrier import StepBarrier

HOSTS = 4


class Service:
    """A coordination service of jax in this process, with a client for each of HOSTS threads."""

    def __init__(self) -> None:
        from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

        at = f"127.0.0.1:{free_port()}"
        self._service = _jax.get_distributed_runtime_service(at, HOSTS, heartbeat_timeout=100, shutdown_timeout=10)
        self._clients = [
            _jax.get_distributed_runtime_client(at, host, init_timeout=60, heartbeat_timeout=100)
            for host in range(HOSTS)
        ]
        self._own = threading.local()
        self.each(lambda host: self._own.client.connect())

    def each(self, do: Callable[[int], Any]) -> list[Any]:
        """What `do(host)` gives or raises on the thread of each host."""
        found: list[Any] = [None] * HOSTS

        def run(host: int) -> None:
            self._own.client = self._clients[host]
            try:
                found[host] = do(host)
            except (KeyboardInterrupt, guards.HostFailed, ValueError) as error:
                found[host] = error

        threads = [threading.Thread(target=run, args=(host,)) for host in range(HOSTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found

    def barrier(self, name: str, seconds: float) -> None:
        self._own.client.wait_at_barrier(name, int(seconds * 1000))

    def set_key(self, key: str, text: str, over: bool = False) -> None:
        self._own.client.key_value_set(key, text, allow_overwrite=True)

    def get_key(self, key: str) -> str | None:
        try:
            return self._own.client.key_value_try_get(key)
        except Exception as error:
            assert "NOT_FOUND" in str(error)
            return None

    def end(self) -> None:
        self.each(lambda host: self._own.client.shutdown())
        self._service.shutdown()


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.end()


@pytest.fixture
def clients(service: Service, monkeypatch: pytest.MonkeyPatch) -> Service:
    for name in ("barrier", "set_key", "get_key"):
        monkeypatch.setattr(guards, name, getattr(service, name))
    return service


def all_trained(clients: Service, made: list[StepBarrier], steps: int, seconds: Callable[[], float]) -> list[Any]:
    return clients.each(lambda host: trained(made[host], steps, seconds))


def trained(guard: StepBarrier, steps: int, seconds: Callable[[], float], fails_at: int | None = None) -> None:
    """A cell's loop under a guard; its exception is told as `Guard.runs` does."""
    for step in range(steps):
        if step == fails_at:
            guard.leave("ValueError: no")
            raise ValueError("no")
        guard.before_step()
        time.sleep(seconds())


@pytest.mark.parametrize("every", [1, 4])
def test_an_interrupt_of_any_host_at_any_time_stops_all_after_the_same_step(clients: Service, every: int):
    draw = random.Random(every)
    for turn in range(12):
        made = [StepBarrier(f"stop {every} {turn}", host, HOSTS, every) for host in range(HOSTS)]
        stopped = draw.choice(made)
        at = later(0.005 + draw.random() / 20, stopped.interrupt)
        ends = all_trained(clients, made, 400, lambda: draw.random() / 500)
        assert at and all(isinstance(end, KeyboardInterrupt) for end in ends), ends
        assert len({guard.steps for guard in made}) == 1 and made[0].steps % every == 0


def test_a_host_that_fails_between_meetings_is_told_at_the_next(clients: Service):
    made = [StepBarrier("fails", host, HOSTS, 4) for host in range(HOSTS)]
    ends = clients.each(lambda host: trained(made[host], 40, lambda: 0, 6 if host == 2 else None))
    assert [guard.steps for guard in made] == [8, 8, 6, 8]
    assert isinstance(ends[2], ValueError)
    assert all(str(end) == "host 2: ValueError: no" for end in ends if end is not ends[2])


def test_many_hosts_agree_on_how_often_they_meet_by_what_it_costs(clients: Service):
    made = [StepBarrier("many", host, guards.MAX_HOSTS_EVERY_STEP + 1) for host in range(HOSTS)]
    all_trained(clients, made, 60, lambda: 0.002)
    assert len({guard.interval for guard in made}) == 1 and len({guard.steps for guard in made}) == 1
    assert made[0].interval > 1, "a meeting takes some 1 ms, a step 2 ms"
    few = StepBarrier("few", 0, guards.MAX_HOSTS_EVERY_STEP)
    assert few.interval == 1


class Kind:
    """A call of a kind, and what hosts say of theirs where they are asked."""

    def __init__(self, kind: str, is_new: bool, told: list[str]):
        self.kind, self.is_new, self._told = kind, is_new, told

    def compare(self) -> None:
        self._told.append(self.kind)


def test_all_hosts_tell_their_calls_only_where_one_calls_something_else(clients: Service):
    made = [StepBarrier("kinds", host, HOSTS) for host in range(HOSTS)]
    told: list[list[str]] = [[] for _ in range(HOSTS)]
    draw = random.Random(0)
    new = {(step, draw.randrange(HOSTS)) for step in draw.sample(range(60), 12)}

    def calls(host: int) -> None:
        for step in range(60):
            made[host].before_step(Kind(str(step), (step, host) in new, told[host]))
            time.sleep(draw.random() / 500)

    assert clients.each(calls) == [None] * HOSTS
    assert told == [sorted({str(step) for step, _ in new}, key=int)] * HOSTS


def test_a_host_that_fails_as_another_one_calls_something_else_is_told(clients: Service):
    made = [StepBarrier("both", host, HOSTS) for host in range(HOSTS)]

    def calls(host: int) -> None:
        for step in range(9):
            if (step, host) == (5, 2):
                made[host].leave("ValueError: no")
                raise ValueError("no")
            made[host].before_step(Kind("", (step, host) == (5, 1), []))

    ends = clients.each(calls)
    assert {guard.steps for guard in made} == {5} and isinstance(ends[2], ValueError)
    assert all(str(end) == "host 2: ValueError: no" for end in ends if end is not ends[2])


@pytest.mark.parametrize(
    ("meeting", "step", "steps"),
    [
        (0.0047, 0.2, 3),
        (0.0024, 0.2, 2),
        (0.0007, 0.2, 1),
        (0.0047, 0.01, 47),
        (1.0, 0.001, guards.MAX_INTERVAL),
    ],
)
def test_meetings_take_one_hundredth_of_the_steps(meeting: float, step: float, steps: int):
    assert guards.steps_between(meeting, step) == steps


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two hosts that meet before every fourth step."""
    with opened(tmp_path_factory.mktemp("hosts")) as found:
        found.cell("%config ShardSession.meet_every = 4")
        found.cell(f"%%shard dp\n{STEP}")
        yield found


@pytest.mark.ci
def test_two_hosts_stop_after_the_same_step_and_go_on(hosts: Hosts):
    draw = random.Random(4)
    for _ in range(6):
        hosts.cell("n = 0")  # for an interrupt that comes before the loop begins
        later(0.1 + draw.random() / 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        line, _ = hosts.fails(LOOP)
        assert line.startswith("Stopped ") and "hosts after" not in line
        (n,) = {*hosts.everywhere("n")}
        assert n % 4 == 0
    hosts.cell("state, loss = train_step(state, batch)\nassert np.isfinite(float(loss))")


@pytest.mark.ci
def test_steps_that_never_end_are_told_and_what_was_before_them_is_rescued(hosts: Hosts):
    hosts.cell("for n in range(4):\n    state, loss = train_step(state, batch)\nkept = jax.tree.map(np.asarray, state)")
    line, _ = hosts.fails(
        "for n in range(9):\n"
        "    if n == 2 and jax.process_index() == 1:\n        raise ValueError('no')\n"
        "    state, loss = train_step(state, batch)\n    if n == 1:\n        kept = jax.tree.map(np.asarray, state)"
    )
    assert line.startswith("host 1: ValueError: no; ") and "%shard rescue" in line
    assert "2 steps that the others began without it never end" in line or "host 0 did not end after it" in line
    hosts.cell("%shard rescue state kept")
    state, kept = hosts.notebook["state"], hosts.notebook["kept"]
    assert {name: (value == kept[name]).all() for name, value in state.items()} == {"up": True, "down": True}
