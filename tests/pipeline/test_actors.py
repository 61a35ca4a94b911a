"""Ranks run side by side, and whatever ends one of them ends the run: soon, with its error, and ready for the next."""

import _thread
import gc
import os
import signal
import threading
import time
import weakref
from contextlib import contextmanager

import pytest

from jaxshard_magic.pipeline.actors import Actor, RunStopped, run_on_actors

INTERRUPTS = {"signal": lambda: os.kill(os.getpid(), signal.SIGINT), "another thread": _thread.interrupt_main}
FOREVER = "a key that nobody gives"


class Message:
    """Something that can be referred to weakly."""


@pytest.fixture
def ranks():
    return [Actor(rank) for rank in range(4)]


def threads():
    return {t for t in threading.enumerate() if t.name.startswith("pipeline rank")}


def until(true, seconds=5.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "this should have come true"
        gc.collect()
        time.sleep(0.005)


@contextmanager
def interrupted(*after, how="signal"):
    """Ctrl-C, so many seconds after the start each; the body must raise KeyboardInterrupt."""
    timers = [threading.Timer(s, INTERRUPTS[how]) for s in after]
    for timer in timers:
        timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        for timer in timers:
            timer.cancel()
            timer.join()


def around(ranks):
    """A number that every rank adds one to: the sum, once it has come around."""
    found = []

    def work(actor):
        n = len(ranks)
        if actor.rank == 0:
            ranks[1 % n].put(("sum", 1), 1)
            found.append(actor.take(("sum", 0)))
        else:
            x = actor.take(("sum", actor.rank))
            ranks[(actor.rank + 1) % n].put(("sum", (actor.rank + 1) % n), x + 1)

    run_on_actors(ranks, work)
    return found[0]


def test_values_go_around(ranks):
    assert [around(ranks) for _ in range(20)] == [4] * 20


def test_a_rank_takes_what_it_needs_in_any_order(ranks):
    found = []

    def work(actor):
        if actor.rank == 0:
            for key in range(5):
                ranks[1].put(key, f"message {key}")
        if actor.rank == 1:
            found.extend(actor.take(key) for key in (3, 0, 4, 1, 2))

    run_on_actors(ranks, work)
    assert found == [f"message {k}" for k in (3, 0, 4, 1, 2)]


def test_ranks_run_side_by_side(ranks):
    meeting = threading.Barrier(4, timeout=5)
    run_on_actors(ranks, lambda _: meeting.wait())


def test_no_rank_is_no_work():
    run_on_actors([], lambda _: None)


@pytest.mark.parametrize("rank", range(4))
def test_an_error_in_one_rank_ends_all_with_it(ranks, rank):
    stopped = []

    def work(actor):
        if actor.rank == rank:
            raise ZeroDivisionError("in the loss")
        try:
            actor.take(FOREVER)
        except RunStopped:
            stopped.append(actor.rank)
            raise

    for _ in range(3):
        with pytest.raises(ZeroDivisionError, match="in the loss") as caught:
            run_on_actors(ranks, work)
        assert caught.value.__notes__ == [f"in rank {rank} of the pipeline"]
        assert sorted(stopped) == [r for r in range(4) if r != rank]
        stopped.clear()
        assert around(ranks) == 4


def test_the_first_of_two_errors_is_raised(ranks):
    raised = threading.Event()

    def work(actor):
        if actor.rank == 2:
            try:
                raise ValueError("the first")
            finally:
                raised.set()
        if actor.rank == 1:
            raised.wait()
            time.sleep(0.05)
            raise KeyError("the second")
        actor.take(FOREVER)

    with pytest.raises(ValueError, match="the first"):
        run_on_actors(ranks, work)
    assert around(ranks) == 4


def test_an_error_wins_over_ranks_that_were_stopped(ranks):
    def work(actor):
        if actor.rank == 3:
            time.sleep(0.05)
            raise ValueError("late")
        actor.take(FOREVER)

    with pytest.raises(ValueError, match="late"):
        run_on_actors(ranks, work)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_what_is_no_exception_ends_all_as_well(ranks, error):
    def work(actor):
        if actor.rank == 1:
            raise error
        actor.take(FOREVER)

    with pytest.raises(error):
        run_on_actors(ranks, work)
    assert around(ranks) == 4


def test_a_rank_that_only_puts_is_stopped_too(ranks):
    put = []

    def work(actor):
        if actor.rank == 1:
            raise ValueError("at once")
        if actor.rank == 0:
            for k in range(10_000):
                ranks[1].put(k, k)
                put.append(k)
                time.sleep(0.001)

    with pytest.raises(ValueError, match="at once"):
        run_on_actors(ranks, work)
    assert len(put) < 1000


def test_a_rank_that_has_all_it_needs_is_stopped_too(ranks):
    taken = []

    def work(actor):
        if actor.rank == 0:
            for k in range(10_000):
                actor.put(k, k)
            ranks[1].put("go", None)
            for k in range(10_000):
                taken.append(actor.take(k))
                time.sleep(0.001)
        elif actor.rank == 1:
            actor.take("go")
            raise ValueError("at once")

    with pytest.raises(ValueError, match="at once"):
        run_on_actors(ranks, work)
    assert len(taken) < 1000


def test_nothing_of_a_failed_run_is_seen_by_the_next(ranks):
    def fails(actor):
        for other in ranks:
            other.put("key", "old")
        if actor.rank == 1:
            raise ValueError
        actor.take(FOREVER)

    found = []

    def works(actor):
        ranks[(actor.rank + 1) % 4].put("key", "new")
        found.append(actor.take("key"))

    for _ in range(50):
        with pytest.raises((ValueError, RunStopped)):
            run_on_actors(ranks, fails)
        run_on_actors(ranks, works)
    assert set(found) == {"new"}


@pytest.mark.parametrize("fails", [False, True], ids=["ended well", "failed"])
def test_messages_are_let_go(ranks, fails):
    gone = []

    def work(actor):
        for k in range(3):
            message = Message()
            gone.append(weakref.ref(message))
            ranks[(actor.rank + 1) % 4].put(k, message)
        del message
        actor.take(0)
        if fails:
            if actor.rank == 2:
                raise ValueError
            actor.take(FOREVER)

    try:
        run_on_actors(ranks, work)
    except ValueError:
        assert fails
    del work
    until(lambda: not any(m() is not None for m in gone))


def test_a_message_that_was_taken_is_kept_by_nobody_else(ranks):
    alone = []

    def work(actor):
        if actor.rank == 0:
            ranks[1].put("key", Message())
            ranks[1].put("next", None)
        if actor.rank == 1:
            actor.take("next")
            message = weakref.ref(actor.take("key"))
            alone.append(message() is None)

    run_on_actors(ranks, work)
    assert alone == [True]


@pytest.mark.parametrize("how", INTERRUPTS)
def test_an_interrupt_returns_at_once_and_the_next_run_works(ranks, how):
    for _ in range(3):
        with interrupted(0.1, how=how):
            run_on_actors(ranks, lambda actor: actor.take(FOREVER))
        assert around(ranks) == 4


def test_an_interrupt_waits_for_the_program_that_a_rank_is_in(ranks):
    left = []

    def work(actor):
        if actor.rank == 2:
            time.sleep(0.4)
            left.append("the program")
        actor.take(FOREVER)

    with interrupted(0.1):
        run_on_actors(ranks, work)
    assert left == ["the program"]
    assert around(ranks) == 4


def test_a_second_interrupt_leaves_and_the_next_run_waits(ranks):
    left = []

    def work(actor):
        if actor.rank == 2:
            time.sleep(0.8)
            left.append("the program")
            ranks[0].put("late", None)
            left.append("what follows it")
        actor.take(FOREVER)

    with interrupted(0.1, 0.3):
        run_on_actors(ranks, work)
    assert not left
    assert around(ranks) == 4
    assert left == ["the program"]


def test_an_interrupt_while_the_last_run_is_waited_for_harms_nothing(ranks):
    def long(actor):
        if actor.rank == 2:
            time.sleep(0.8)
        actor.take(FOREVER)

    with interrupted(0.1, 0.2):
        run_on_actors(ranks, long)
    with interrupted(0.1):
        around(ranks)
    assert [around(ranks) for _ in range(5)] == [4] * 5


@pytest.mark.ci
def test_interrupts_at_any_moment_leave_ranks_that_work(ranks):
    deadline, caught = time.monotonic() + 2, 0
    k = 0
    while time.monotonic() < deadline:
        k += 1
        timer = threading.Timer(1e-5 * (k * 37 % 200), INTERRUPTS["signal"])
        try:
            timer.start()
            while timer.is_alive():
                assert around(ranks) == 4
            timer.join()
            time.sleep(0.001)
        except KeyboardInterrupt:
            caught += 1
    assert caught
    assert around(ranks) == 4


def test_an_interrupt_of_a_run_with_an_error_is_an_interrupt(ranks):
    def work(actor):
        if actor.rank == 1:
            time.sleep(0.3)
            raise ValueError
        actor.take(FOREVER)

    with interrupted(0.1):
        run_on_actors(ranks, work)
    assert around(ranks) == 4


class Pipeline:
    """What holds actors, and is held by what they work."""

    def __init__(self):
        self.actors = [Actor(rank) for rank in range(3)]

    def __call__(self):
        run_on_actors(self.actors, lambda actor: self.actors[actor.rank].rank)


def test_threads_end_with_the_last_reference_to_their_actors():
    before = threads()
    pipeline = Pipeline()
    pipeline()
    assert len(threads() - before) == 3
    pipeline = weakref.ref(pipeline)
    until(lambda: pipeline() is None and not threads() - before)


def test_threads_end_after_an_error_and_an_interrupt_too():
    before = threads()
    actors = [Actor(rank) for rank in range(2)]
    with pytest.raises(ZeroDivisionError):
        run_on_actors(actors, lambda actor: actor.rank // 0)
    with interrupted(0.05):
        run_on_actors(actors, lambda actor: actor.take(FOREVER))
    with interrupted(0.05, 0.1):
        run_on_actors(actors, lambda _: time.sleep(0.3))
    del actors
    until(lambda: not threads() - before)


def test_a_waiting_rank_takes_no_time_of_the_processor(ranks):
    def work(actor):
        if actor.rank == 0:
            time.sleep(0.3)
            for other in ranks[1:]:
                other.put("go", None)
        else:
            actor.take("go")

    start = time.process_time()
    run_on_actors(ranks, work)
    assert time.process_time() - start < 0.15
