"""What a step takes, told of loops that wait for it in different ways, on a device whose times are known."""

import time
from collections.abc import Callable
from threading import Lock
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jaxshard_magic
from jaxshard_magic.compilation import compiled_step, loop_clock
from jaxshard_magic.compilation.compiled_step import CompiledStep
from jaxshard_magic.compilation.loop_clock import COPIES, GAP, START_TO_END, STEP_TO_STEP, LoopClock, StepTime

STEP, DISPATCH, AHEAD = 10e-3, 0.2e-3, 32  # seconds, seconds, calls that run ahead of the device


class Device:
    """Runs calls one after the other, while the host goes on; both in seconds of `now`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now, self.ends = 0.0, [0.0]
        here = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(loop_clock, "time", here)
        monkeypatch.setattr(compiled_step, "time", here)

    def call(self, *_: object) -> "Output":
        self.now += DISPATCH
        self.now = max([self.now, *self.ends[:-AHEAD][-1:]])
        self.ends.append(max(self.now, self.ends[-1]) + STEP)
        return Output(self, self.ends[-1])


class Output:
    """What a call returns before the device has done it, as jax shows it."""

    def __init__(self, device: Device, end: float):
        self._device, self._end = device, end

    def is_ready(self) -> bool:
        return self._device.now >= self._end

    def is_deleted(self) -> bool:
        return False

    def block_until_ready(self) -> "Output":
        self._device.now = max(self._device.now, self._end)
        return self


@pytest.fixture
def device(monkeypatch) -> Device:
    return Device(monkeypatch)


def program(device: Device, first: int = 2) -> CompiledStep:
    made = object.__new__(CompiledStep)
    made.calls, made.clock, made._lock = 0, LoopClock(first), Lock()
    made.call, made._probe = device.call, lambda outs: outs
    return made


Rest = Callable[[Device, Output, int], None]


def never(device: Device, out: Output, i: int) -> None:
    """Leaves the results to themselves."""


def each(device: Device, out: Output, i: int) -> None:
    out.block_until_ready()


def every_tenth(device: Device, out: Output, i: int) -> None:
    if i % 10 == 9:
        out.block_until_ready()


def loads(device: Device, out: Output, i: int) -> None:
    """The next batch, while the device works."""
    device.now += 0.9 * STEP


def waits_and_loads(device: Device, out: Output, i: int) -> None:
    out.block_until_ready()
    device.now += 3 * STEP


def evaluates_once(device: Device, out: Output, i: int) -> None:
    if i == 700:
        device.now += 2.0


def looped(device: Device, rest: Rest, calls: int) -> StepTime:
    made = program(device)
    for i in range(calls):
        rest(device, made._run(()), i)
    made.clock.settle()
    assert made.clock.calls == calls
    pace = made.clock.step_time()
    assert pace is not None
    return pace


@pytest.mark.parametrize("calls", [3, 20, 51, 1000])
@pytest.mark.parametrize("rest", [never, each, every_tenth, loads])
def test_a_step_takes_the_same_however_its_loop_waits_for_it(device, rest, calls):
    pace = looped(device, rest, calls)
    assert pace.median == pytest.approx(STEP, rel=0.03)
    assert pace.calls == calls - 1 and pace.call_interval is None  # the first, which may load the program, is not timed
    assert pace.method == (STEP_TO_STEP if calls > loop_clock.WAIT_FOR_FIRST else START_TO_END)
    assert pace.shortest >= STEP * (1 - 1e-9) and pace.longest <= 1.1 * STEP


def test_what_a_loop_does_between_its_steps_is_no_part_of_them_and_told_apart(device):
    pace = looped(device, waits_and_loads, 1000)
    assert pace.method == START_TO_END and 20 < pace.calls < 40
    assert pace.median == pytest.approx(STEP + DISPATCH)
    assert pace.call_interval == pytest.approx(4 * STEP + DISPATCH, rel=0.05)


def test_an_evaluation_is_no_step(device):
    pace = looped(device, evaluates_once, 1000)
    assert pace.longest < 1.1 * STEP and 999 - GAP <= pace.calls < 999


def test_waiting_costs_a_loop_less_than_its_steps_from_one_wait_to_the_next(device):
    made = program(device)
    for _ in range(3000):
        made._run(())
    made.clock.settle()
    waits = 9 + 3 + 3000 / GAP
    assert device.now < 3000 * STEP + 2 * waits * DISPATCH < 1.001 * 3000 * STEP


def test_of_calls_that_ended_long_ago_it_is_not_known_when(device):
    made = program(device)
    for _ in range(30):
        made._run(())
    device.now += 60
    made.clock.settle()
    pace = made.clock.step_time()
    assert pace is not None and pace.calls == 16 and pace.longest < 1.1 * STEP


def test_a_loop_goes_on_after_a_report(device):
    made = program(device)
    for _ in range(3):
        for _ in range(20):
            made._run(())
        made.clock.settle()
    pace = made.clock.step_time()
    assert pace is not None and pace.calls == 59


def test_another_program_in_between_takes_none_of_the_time(device):
    made = program(device)
    for i in range(200):
        if i == 100:
            made.clock.discard_interval()
            device.now += 5
        made._run(())
    made.clock.settle()
    pace = made.clock.step_time()
    assert pace is not None and pace.median == pytest.approx(STEP, rel=0.03) and pace.longest < 1.1 * STEP


def test_calls_on_copies_are_told_where_they_are_more_than_the_loops(device):
    made = program(device)
    made._run(())
    for _ in range(3):
        made.run_timed((), made.clock.repeated_s)
    assert made.clock.step_time() == StepTime(*[pytest.approx(STEP + DISPATCH)] * 3, 3, COPIES)


def descend(params, batch):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch @ p) ** 2))(params)
    return params - 0.1 * grads, loss


@pytest.fixture(scope="module")
def step():
    return jaxshard_magic.shard(descend, "dp", mesh=jaxshard_magic.mesh("cpu:2 data=2"))


def run(step, calls: int, rows: int = 4):
    params = jnp.ones((4, 4))
    for _ in range(calls):
        params, _ = step(params, jnp.ones((rows, 4)))


def test_a_report_tells_of_the_last_loop_and_a_single_call_is_none(step):
    step.restart()
    seen = []
    for calls in (1, 1, 20, 1, 0, 3):
        step.loops.start_loop()
        run(step, calls)
        timing = step.report().timing
        seen.append((timing.calls, timing.others))
    assert seen == [(1, 0), (1, 0), (20, 0), (20, 0), (20, 0), (3, 0)]
    assert step.calls == 26


def test_calls_of_other_shapes_are_counted_and_not_timed(step):
    step.restart()
    step.loops.start_loop()
    run(step, 1, rows=8)
    run(step, 12)
    timing = step.report().timing
    assert (timing.calls, timing.others) == (13, 1) and 0 < timing.timed <= 12


def test_nothing_is_held_once_a_loop_is_reported(step):
    run(step, 2)
    assert step.entry.clock.probe is not None
    step.report()
    assert step.entry.clock.probe is None


def test_a_step_that_fails_on_the_device_is_no_failure_of_its_clock():
    class Failed(Output):
        def block_until_ready(self) -> "Output":
            raise RuntimeError("out of memory")

    made = LoopClock()
    made.probe = Failed(SimpleNamespace(now=0.0), 1.0)  # type: ignore[arg-type]
    made.settle()
    assert made.step_time() is None


def test_the_clock_of_the_machine_is_its_own():
    assert loop_clock.time is time and compiled_step.time is time
