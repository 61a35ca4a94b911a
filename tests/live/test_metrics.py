"""The numbers of a run: bounded series that stay exact, a queue that never waits, rates, and the table of a report."""

import sys
import time
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from support.sample_reports import attached

from jaxshard_magic.errors import ShardError
from jaxshard_magic.live import (
    CallSequence,
    CallWork,
    LiveRun,
    MetricsRow,
    PendingCalls,
    RateMeter,
    Series,
    WorkDone,
)
from jaxshard_magic.live.calls import ALWAYS_READ, MAX_READ_SECONDS
from jaxshard_magic.live.run import MAX_NAMES
from jaxshard_magic.report import Report
from jaxshard_magic.report.metrics import COLUMNS, Metrics


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000, 4097])
def test_buckets_hold_what_numpy_finds_of_their_steps(count):
    values = np.random.default_rng(count).normal(size=count)
    series = Series(max_buckets=8)
    for step, value in enumerate(values, 1):
        series.add(step, step / 2, float(value))
    ends = [bucket.step for bucket in series]
    assert ends[-1] == count and all(b - a == series.width for a, b in pairwise([0, *ends[:-1]]))
    for bucket, part in zip(series, np.split(values, ends[:-1]), strict=True):
        assert (bucket.low, bucket.high, bucket.last) == (part.min(), part.max(), part[-1])
        assert bucket.mean == pytest.approx(part.mean()) and bucket.time == bucket.step / 2


def test_a_million_values_take_128_buckets_and_no_more_time_each_than_the_first():
    series, seconds = Series(), []
    for part in range(4):
        start = time.process_time()
        for step in range(part * 250_000, (part + 1) * 250_000):
            series.add(step, 0.0, 1.0)
        seconds.append(time.process_time() - start)
    assert len(series) <= 128 and series.count == 1_000_000
    assert seconds[-1] < 2 * seconds[0]


def test_what_is_not_finite_is_in_no_mean_and_its_first_step_is_known():
    series = Series(max_buckets=2)
    for step, value in enumerate([1.0, 3.0, np.nan, np.inf, 5.0], 1):
        series.add(step, 0.0, value)
    first, second = series
    assert (first.low, first.mean, first.high, first.step) == (1.0, 2.0, 3.0, 4)
    assert (second.mean, second.last) == (5.0, 5.0)
    assert (series.first_nonfinite, series.last_finite) == (3, 2)


class Number:
    """What a call will give once the device has done it, as jax shows it; reading it before fails the test."""

    is_fully_replicated = is_fully_addressable = True
    sharding = SimpleNamespace(num_devices=1)

    def __init__(self, value: float, ready: bool = True):
        self.value, self.ready, self.deleted, self.gone, self.reads = value, ready, False, False, 0

    def is_ready(self) -> bool:
        if self.deleted:
            raise RuntimeError("Array has been deleted.")
        return self.ready

    def __array__(self, *how: object, **more: object) -> np.ndarray:
        assert self.ready, "read before it was there, which waits for the device"
        if self.gone:
            raise RuntimeError("Array has been deleted.")
        self.reads += 1
        return np.asarray(self.value, np.float32)


def queue_of(numbers, **how) -> PendingCalls:
    queue = PendingCalls(lambda sign: sign.deleted or sign.ready, **how)
    for n, number in enumerate(numbers, 1):
        queue.put((n, CallSequence(value_names=("loss",)), number, (number,)))
    return queue


def read(queue: PendingCalls, **how) -> list[tuple[int, float | None]]:
    found: list[tuple[int, float | None]] = []
    queue.read_finished(lambda number, values: found.append((number, values.get("loss"))), **how)
    return found


def test_calls_are_read_in_order_and_none_that_the_device_has_not_done():
    numbers = [Number(3.0, False), Number(2.0, False), Number(1.0, False)]
    queue = queue_of(numbers)
    assert read(queue) == [] and not queue.is_idle
    numbers[0].ready = numbers[1].ready = True
    assert read(queue) == [(1, 3.0), (2, 2.0)] and not queue.is_idle and queue.done.calls == 2
    numbers[2].ready = True
    assert queue.is_idle and read(queue) == [(3, 1.0)] and len(queue) == 0


def test_a_number_that_a_later_call_took_over_is_left_out():
    numbers = [Number(3.0), Number(2.0), Number(1.0)]
    queue = queue_of(numbers)
    numbers[1].deleted = True
    assert read(queue) == [(1, 3.0), (2, None), (3, 1.0)]
    gone = Number(4.0)
    gone.gone = True  # it goes while it is looked at
    assert read(queue_of([gone])) == [(1, None)]


def test_calls_without_end_take_no_memory_without_end():
    queue = queue_of([Number(1.0, False) for _ in range(1000)], max_calls=16)
    assert len(queue) <= 16 and queue.skipped + len(queue) == 1000


def test_reading_takes_its_share_of_the_time_and_the_newest_is_always_read(monkeypatch):
    numbers = [Number(float(n)) for n in range(100)]
    queue = queue_of(numbers)
    queue._cost = 1e9  # reading is very dear
    assert read(queue) == [(100, 99.0)] and (queue.done.calls, queue.skipped) == (100, 99)
    again = queue_of(numbers)
    again._cost = 1e9
    assert [value for _, value in read(again, read_all=True)] == [float(n) for n in range(100)]


def test_what_is_done_with_the_numbers_counts_as_time_of_reading():
    queue = queue_of([Number(1.0)])
    queue.read_finished(lambda number, values: busy_for(MAX_READ_SECONDS / 2))
    assert queue._read_budget < 0.6 * MAX_READ_SECONDS and queue._cost > 0.4 * MAX_READ_SECONDS


def busy_for(seconds: float) -> None:
    start = time.thread_time()
    while time.thread_time() - start < seconds:
        pass


def test_a_short_loop_is_read_whole_however_dear_its_first_read_was():
    numbers = [Number(float(n), n == 0) for n in range(ALWAYS_READ)]
    queue = queue_of(numbers)
    queue.read_finished(
        lambda number, values: busy_for(1.5 * MAX_READ_SECONDS)
    )  # what is loaded when the first is read
    for number in numbers:
        number.ready = True
    assert queue._read_budget < queue._cost and [number for number, _ in read(queue)] == [*range(2, ALWAYS_READ + 1)]
    assert queue.skipped == 0


def test_a_burst_may_take_what_was_saved_and_no_more(monkeypatch):
    monkeypatch.setattr("jaxshard_magic.live.calls.ALWAYS_READ", 0)
    for saved, whole in ((MAX_READ_SECONDS, 20), (0.25 * MAX_READ_SECONDS, 5)):
        queue = queue_of([Number(float(n)) for n in range(20)])
        queue._cost, queue._read_budget = (
            MAX_READ_SECONDS / 20,
            saved,
        )  # seconds a read, and those that it may take
        assert len(read(queue)) == whole
        assert queue.skipped == 20 - whole and queue._read_budget < saved


def test_the_first_number_astray_is_found_among_those_that_would_go_unread():
    values = [1.0] * 40 + [np.nan] * 60
    queue = queue_of([Number(value) for value in values])
    queue._cost = 1e9
    run = LiveRun()
    queue.read_finished(lambda number, found: run.add_row(MetricsRow(number, 0.0, found)))
    assert (run.returned["loss"].first_nonfinite, run.returned["loss"].last_finite) == (41, 40)


def test_rates_are_of_what_finished_between_two_looks():
    rates, done = RateMeter(), WorkDone()
    call = CallWork(examples=32, tokens=1024, flops=5e9, ideal_s=0.002)
    assert rates.update(10.0, done) == {}
    done = done.plus(50, call)
    assert rates.update(10.1, done) == {}, "too short a time for a clock"
    assert rates.update(12.0, done) == pytest.approx(
        {"step_s": 0.04, "examples_per_s": 800, "tokens_per_s": 25_600, "flops_per_s": 125e9, "mfu": 0.05}
    )
    rates.skip_interval()
    assert rates.update(99.0, done.plus(1, call)) == {}, "a compile is no step's time"


def test_what_is_not_known_of_one_call_is_not_known_of_all():
    done = WorkDone().plus(1, CallWork(examples=8)).plus(1, CallWork(examples=None))
    assert done.calls == 2 and done.amounts == (None, None, None, None)


def metrics(steps: int = 300) -> Metrics:
    run = LiveRun(total=lambda: 500)
    run.work = CallWork(examples=32, examples_rule="32 a step, of batch[32,64]")
    for step in range(1, steps + 1):
        run.add_row(MetricsRow(step, step / 100, {"loss": 1 / step, "acc": step / 1000}))
        if step % 50 == 0:
            run.steps = step
            run.add_loop_metrics(step, step / 100, {"step_s": 0.01, "examples_per_s": 3200.0, "busy": 1.0})
    made = run.metrics()
    assert made is not None
    return made


def test_a_report_keeps_its_metrics_through_json():
    report = replace(attached(), metrics=metrics())
    assert Report.from_json(report.to_json()) == report
    assert attached().metrics is None


def test_values_that_are_not_finite_come_back_from_json():
    run = LiveRun()
    run.add_row(MetricsRow(1, 0.1, {"loss": 2.0}))
    run.add_row(MetricsRow(2, 0.2, {"loss": float("nan")}))
    back = Report.from_json(replace(attached(), metrics=run.metrics()).to_json()).metrics
    assert back is not None and (back["loss"].astray, back["loss"].before) == (2, 1)
    assert back["loss"].mean == (2.0, None) and np.isnan(back["loss"].last[-1])


def test_the_table_has_a_row_for_each_bucket_of_each_number():
    made = metrics()
    rows = list(made.rows())
    assert tuple(rows[0]) == COLUMNS and len(rows) == sum(len(curve) for curve in made.curves)
    assert [c.name for c in made.curves] == ["loss", "acc", "step_s", "examples_per_s", "busy"]
    assert made["examples_per_s"].rule == "32 a step, of batch[32,64]"
    assert (made.steps, made.of, made["loss"].count, made["loss"].last[-1]) == (300, 500, 300, 0.00333333)
    with pytest.raises(ShardError, match=r"no metric 'los'\. Did you mean 'loss'\? The metrics are loss, acc"):
        made["los"]


def test_the_table_is_small_however_long_the_run():
    short, long = (len(replace(attached(), metrics=metrics(n)).to_json()) for n in (300, 30_000))
    assert long - len(attached().to_json()) < 40_000 and long < 2 * short


def test_more_numbers_than_anybody_looks_at_are_counted_and_not_kept():
    run = LiveRun()
    run.add_row(MetricsRow(1, 0.0, {f"n{i}": 0.0 for i in range(MAX_NAMES + 5)}))
    made = run.metrics()
    assert made is not None and len(made.curves) == MAX_NAMES and made.left_out == 5


def test_pandas_gets_the_rows():
    pytest.importorskip("pandas")
    table = metrics().to_pandas()
    assert tuple(table.columns) == COLUMNS and set(table["name"]) == {c.name for c in metrics().curves}


def test_without_pandas_one_line_says_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ShardError, match="to_pandas needs pandas, which is not installed: pip install pandas"):
        metrics().to_pandas()
