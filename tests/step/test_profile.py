"""A step recorded and read back: every second of it has a line, and what sleeps is seen where it sleeps."""

import gc
import os
import time
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.profiled import adds_up, ran, transformer_like

import jaxshard_magic
from jaxshard_magic.analysis import time_breakdown
from jaxshard_magic.analysis.program_texts import program_texts
from jaxshard_magic.errors import ShardError
from jaxshard_magic.report import Report
from jaxshard_magic.report.measured import DeviceTime


@pytest.mark.parametrize(
    ("strategy", "options", "scan", "remat"),
    [
        ("fsdp", {}, True, True),
        ("fsdp+tp", {"microbatches": 2}, False, False),
    ],
)
def test_all_measured_time_has_a_line_and_adds_up_to_the_step(strategy, options, scan, remat):
    function, state, batch = transformer_like(scan, remat)
    mesh = "cpu:8 data=4 model=2" if "tp" in strategy else "cpu:8 data=8"
    step = ran(jaxshard_magic.shard(function, strategy, mesh=mesh, **options), state, batch)
    found = step.profile(2)
    adds_up(found)
    assert {row.phase for row in found.lines} >= {"forward", "backward", "update"}
    assert ("recomputed" in {row.phase for row in found.lines}) == remat
    assert {row.file for row in found.lines} == {"profiled.py"}
    assert (found.read, found.of_devices, len(found.lanes)) == (2, 8, 8)
    assert {moved.kind for moved in found.collectives} == {c.kind for c in step.report().collectives or ()}


SLEEPS = 0.1  # seconds
slept: list[float] = []  # as a machine with much to do sleeps longer


def nap(x):
    start = time.perf_counter()
    time.sleep(SLEEPS)
    slept.append(time.perf_counter() - start)
    return np.asarray(x)


def sleeping(params, x):
    def loss_of(params):
        y = x @ params
        y = jax.pure_callback(nap, jax.ShapeDtypeStruct(y.shape, y.dtype), jax.lax.stop_gradient(y)) + y
        return jnp.mean(y**2)

    return params - 0.1 * jax.grad(loss_of)(params)


def test_a_host_callback_that_sleeps_is_on_its_line_for_as_long_as_it_sleeps():
    step = ran(jaxshard_magic.shard(sleeping, "dp", mesh="cpu:1 data=1"), jnp.ones((8, 8)), jnp.ones((8, 8)))
    found = step.profile(3)
    line = 1 + next(n for n, text in enumerate(Path(__file__).read_text().splitlines()) if "pure_callback(nap" in text)
    (row,) = [row for row in found.lines if row.line == line and (row.waiting or 0) > 0.01]
    assert len(slept) == 1 + 1 + 3  # called, warmed up, recorded
    assert row.waiting == pytest.approx(sum(slept[-3:]) / 3, rel=0.03)
    assert found.host == row.waiting
    adds_up(found)


def test_a_callbacks_broadcast_to_devices_is_on_the_callbacks_line():
    def asks(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        loss = jax.pure_callback(slept, jax.ShapeDtypeStruct((), jnp.float32), loss)
        return w - grad, loss

    def slept(loss):
        time.sleep(0.02)
        return np.asarray(loss)

    step = ran(jaxshard_magic.shard(asks, "dp", mesh="cpu:4 data=4"), jnp.ones((16, 4)), jnp.ones((64, 16)))
    found = step.profile(2)
    line = asks.__code__.co_firstlineno + 2
    assert found.unknown is None
    assert sum(row.waiting or 0.0 for row in found.lines if row.line == line) >= 0.019  # of all four devices
    assert all(each.line is not None for each in step.report().collectives or ())


def test_a_report_keeps_what_was_measured_in_json_and_in_little_room():
    function, state, batch = transformer_like(scan=False, remat=True)
    step = ran(jaxshard_magic.shard(function, "fsdp", mesh="cpu:8 data=8", on="v5e"), state, batch)
    before = step.report().to_json()
    step.profile(2)
    report = step.report()
    assert Report.from_json(report.to_json()) == report
    assert len(report.to_json()) - len(before) <= 20_000
    assert report.measured is not None
    assert any(row.predicted for row in report.measured.lines)  # beside what is predicted for the chip


@pytest.mark.parametrize(
    ("strategy", "mesh"), [("fsdp", "cpu:2 data=2"), pytest.param("pp", "cpu:2 pipe=2", marks=pytest.mark.ci)]
)
def test_the_text_of_each_program_is_taken_and_read_once(strategy, mesh, monkeypatch):
    """By the report of its first call, by the recording, and by the reports that have what it measured."""
    from jaxshard_magic.analysis import program_texts

    read: list[str] = []

    def reading(text: str):
        read.append(text)
        return parsed(text)

    parsed = program_texts.parse_module
    monkeypatch.setattr(program_texts, "parse_module", reading)
    function, state, batch = transformer_like(scan=False, remat=False)
    step = ran(jaxshard_magic.shard(function, strategy, mesh=mesh, on="v5e"), state, batch)
    step.report()
    first = len(read)
    step.profile(1)
    assert step.report().measured is not None
    assert len(read) == len({*read}) == first > 0


def test_texts_of_one_step_are_kept_at_a_time_and_go_with_the_step():
    first, second = (ran(jaxshard_magic.shard(halved, "dp", mesh="cpu:1 data=1"), jnp.ones(4)) for _ in range(2))
    assert first.entry is not None and second.entry is not None
    texts = program_texts(first.entry)
    assert program_texts(first.entry) is texts
    known = weakref.ref(program_texts(second.entry))
    assert program_texts(second.entry) is known() and program_texts(first.entry) is not texts
    assert known() is None
    known = weakref.ref(program_texts(first.entry))
    del first
    gc.collect()
    assert known() is None


def test_nothing_is_updated_and_donated_arguments_are_copied():
    function, state, batch = transformer_like(scan=False, remat=False)
    step = jaxshard_magic.shard(function, "fsdp", mesh="cpu:8 data=8", donate=True)
    step.keep_arguments = True
    new, _ = step(state, batch)
    new, _ = step(new, batch)  # whose own results are donated
    kept = jax.tree.map(np.asarray, new)
    calls, timed = step.calls, step.report().timing
    step.profile(1)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, new), kept)
    assert step.calls == calls and step.report().timing == timed
    again, _ = step(new, batch)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(again))


def test_arguments_can_be_given_to_a_step_that_kept_none():
    function, state, batch = transformer_like(scan=False, remat=False)
    step = jaxshard_magic.shard(function, "dp", mesh="cpu:2 data=2")
    step(state, batch)
    with pytest.raises(ShardError, match="were not kept: set keep_arguments"):
        step.profile(1)
    adds_up(step.profile(1, args=(state, batch)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def halved(x):
    return x / 2


def test_where_a_trace_of_the_users_own_runs_one_line_says_so(tmp_path):
    step = ran(jaxshard_magic.shard(halved, "dp", mesh="cpu:1 data=1"), jnp.ones(4))
    with jax.profiler.trace(str(tmp_path)), pytest.raises(ShardError, match="a trace is running already"):
        step.profile(1)
    assert step.profile(1).read == 1  # and the next one begins


def test_a_step_that_fails_while_it_is_recorded_ends_the_recording():
    def fails(x):
        def check(x):
            if failing:
                raise ValueError("no")
            return np.asarray(x)

        return jax.pure_callback(check, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    failing = False
    step = ran(jaxshard_magic.shard(fails, "dp", mesh="cpu:1 data=1"), jnp.ones(4))
    failing = True
    with pytest.raises(Exception, match="no"):
        step.profile(1)
    failing = False
    assert step.profile(1).read == 1


def test_the_files_that_other_tools_read_are_kept_where_they_can_be_written(tmp_path):
    step = ran(jaxshard_magic.shard(halved, "dp", mesh="cpu:1 data=1"), jnp.ones(4))
    step.profile(1, trace=tmp_path / "kept")
    assert list((tmp_path / "kept").rglob("*.xplane.pb"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ShardError, match=r"the trace can't be kept in .*file: .*; name another folder"):
        step.profile(1, trace=tmp_path / "file")


def test_no_steps_are_no_recording():
    step = ran(jaxshard_magic.shard(halved, "dp", mesh="cpu:1 data=1"), jnp.ones(4))
    with pytest.raises(ShardError, match="profile records 1 to 100 steps, not 0"):
        step.profile(0)


@pytest.mark.ci
def test_of_a_step_of_very_many_operations_no_more_is_recorded_than_is_read(monkeypatch):
    from jaxshard_magic.analysis import profile_analysis
    from jaxshard_magic.views.words import measured_about

    function, state, batch = transformer_like(scan=True, remat=False)
    step = ran(jaxshard_magic.shard(function, "fsdp", mesh="cpu:8 data=8"), state, batch)
    every = step.profile(5)
    assert (every.asked, every.recorded, every.read) == (5, 5, 5)
    # The rounds of its loop count, or all 5 would be few enough; the text has a few operations that CPU does not run.
    monkeypatch.setattr(profile_analysis, "WORTH", round(2.5 * 8 * every.operations))
    fewer = step.profile(5)
    assert (fewer.asked, fewer.recorded, fewer.read) == (5, 2, 2)
    assert measured_about(fewer).startswith("2 of 5 steps were recorded, as a step has so many operations, ")
    monkeypatch.setattr(profile_analysis, "WORTH", 8 * every.operations // 2)
    assert step.profile(5).recorded == 1  # at least


def test_what_the_profiler_of_a_missing_tpu_complains_of_is_no_output(monkeypatch, capfd):
    from jaxshard_magic.step import profiler_recording

    class Complains:
        def __init__(self, options):
            self.session = session(options)

        def stop(self):
            os.write(2, b"Failed to find host bounds for accelerator type: WARNING: could not determine TPU type\n")
            return self.session.stop()

    session = profiler_recording._memory_session_class()
    step = ran(jaxshard_magic.shard(halved, "dp", mesh="cpu:1 data=1"), jnp.ones(4))
    monkeypatch.setattr(profiler_recording, "_memory_session_class", lambda: Complains)
    assert step.profile(1).read == 1
    assert "TPU" not in capfd.readouterr().err


@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
def test_only_the_profiler_of_a_missing_tpu_is_told_to_count_seldom(platform, monkeypatch):
    from jaxshard_magic.step import profiler_recording

    begun: list[dict] = []

    class Session:
        def __init__(self, options):
            begun.append(dict(options.advanced_configuration))

        def stop(self):
            return b""

    monkeypatch.setattr(profiler_recording, "_memory_session_class", lambda: Session)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    profiler_recording.record([], "a step")
    told = [{"tpu_cpu_perf_counter_interval_ms": 3_600_000}] if platform == "cpu" else [{}]
    assert begun == 2 * told  # once to see whether a trace can begin


def test_without_the_private_session_the_recording_goes_through_a_folder(monkeypatch):
    from jaxshard_magic.step import profiler_recording

    step = ran(jaxshard_magic.shard(halved, "dp", mesh="cpu:1 data=1"), jnp.ones(4))
    monkeypatch.setattr(profiler_recording, "_memory_session_class", lambda: None)
    assert step.profile(1).read == 1


def test_an_unknown_slowest_device_leaves_the_sample_of_devices_as_it_is():
    busy = [DeviceTime(d, 1.0, 0.0, None, 0.0, 0.0) for d in range(3 * time_breakdown.MOST_DEVICES)]
    listed = time_breakdown._listed(busy, None)
    assert len(listed) == time_breakdown.MOST_DEVICES and listed[0].device == 0 and listed[-1].device == busy[-1].device
    assert 1 in [each.device for each in time_breakdown._listed(busy, 1)]
