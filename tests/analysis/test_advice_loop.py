"""Advice on the loop around a step: each rule where it should fire, with its line and its fix, and silent elsewhere."""

import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.advised import case, told
from support.sample_metrics import metrics

import jaxshard_magic
from jaxshard_magic.analysis.advice import TrainingLoop
from jaxshard_magic.analysis.advice.loop import FEED
from jaxshard_magic.live import LiveRun
from jaxshard_magic.report import TimeSpread, Timing

FITS = {"data": 8}


def train_step(w, batch, rate=0.1):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(w)
    return w - rate * grads, loss


def advice(step, code):
    found = [a for a in step.report().advice if a.code == code]
    assert len(found) <= 1
    return found[0] if found else None


def test_a_smaller_last_batch_is_told_with_its_shape_its_call_and_its_line():
    step = jaxshard_magic.shard(train_step, "dp", mesh="data=2")
    w = jnp.ones((4, 4))
    for rows in (8, 8, 8, 6):
        w, _ = step(w, {"x": jnp.ones((rows, 4))})
    found = advice(step, "recompiled")
    assert found is not None and found.level in ("info", "warning")
    line = train_step.__code__.co_firstlineno
    assert re.search(r"Call 4 compiled the step anew, .*, at test_advice_loop\.py, line (\d+): ", found.message)
    assert "batch.x was float32[8,4], now float32[6,4]. Drop what is left over" in found.message
    assert found.fix is not None
    batches = [{"x": np.ones((rows, 4))} for rows in (8, 8, 6)]
    names = {"jax": jax, "batches": batches}
    exec(found.fix, names)
    assert [*names["batches"]] == batches[:2]
    assert int(re.findall(r"line (\d+)", found.message)[0]) > line


def pmapped_step(w, batch):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(w)
    loss, grads = jax.lax.pmean((loss, grads), "batch")
    return w - 0.1 * grads, loss


@pytest.mark.parametrize(
    ("step", "strategy", "options", "extra"),
    [
        (train_step, "dp", {"pad": True}, {}),
        (train_step, "dp", {"pad": True, "microbatches": 2}, {}),
        (train_step, "fsdp", {"pad": True}, {"epoch": np.int32(3)}),
        (pmapped_step, "pmap", {}, {}),
    ],
)
def test_a_line_that_drops_the_last_batch_keeps_the_others(step, strategy, options, extra):
    rows = (60, 60, 40) if options.get("pad") else (64, 64, 40)
    batches = [{"x": np.ones((n, 4), np.float32), **extra} for n in rows]
    sharded = jaxshard_magic.shard(step, strategy, mesh="data=8", **options)
    w = jnp.ones((4, 4))
    for batch in batches:
        w, _ = sharded(w, batch)
    found = advice(sharded, "recompiled")
    assert f"batch.x was float32[{rows[0]},4], now float32[40,4]." in found.message
    names = {"jax": jax, "batches": batches}
    exec(found.fix, names)
    assert [*names["batches"]] == batches[:2]


def test_what_another_kind_of_batch_has_otherwise_is_what_is_to_be_mended():
    step = jaxshard_magic.shard(train_step, "dp", mesh="data=8")
    w, x = jnp.ones((4, 4)), np.ones((16, 4), np.float32)
    for batch, same in (
        ({"x": x}, None),
        ({"x": x.astype(np.float16)}, "dtypes"),
        ({"x": x, "i": np.arange(16)}, "entries and dtypes"),
        ({"x": x[:8], "i": np.arange(8, dtype=np.int32)[:, None]}, "shapes"),
        ({"x": x.astype(np.float16)}, None),
    ):
        step(w, batch)
        found = advice(step, "recompiled")
        if same == "shapes":
            assert found.message.endswith("Pad the batches to one shape: each is compiled for once.")
        elif same:
            assert found.message.endswith(f"the same {same}: each kind of batch is compiled for once.")
        assert found is None or found.fix is None


def test_rows_that_pad_adds_are_no_examples_of_a_grown_batch():
    def run(rows):
        step = jaxshard_magic.shard(train_step, "dp", mesh="data=8", pad=True)
        step.previous_run = None if last is None else last.ran
        step(jnp.ones((4, 4)), {"x": jnp.ones((rows, 4))})
        return step

    last = None
    for rows, said in ((33, None), (33, None), (60, "from 33 to 60 examples")):
        last = run(rows)
        found = advice(last, "learning-rate")
        assert (found is None) if said is None else said in found.message


def test_a_changed_type_is_told_and_the_batch_is_not_blamed():
    step = jaxshard_magic.shard(train_step, "dp", mesh="data=2")
    batch = {"x": jnp.ones((8, 4), jnp.bfloat16)}
    step(jnp.ones((4, 4)), batch)
    step(jnp.ones((4, 4), jnp.bfloat16), batch)
    found = advice(step, "recompiled")
    assert found is not None and "w was float32[4,4], now bfloat16[4,4]." in found.message
    assert "Drop what" not in found.message and found.fix is None


def test_longer_rows_are_to_be_padded_and_none_is_dropped():
    step = jaxshard_magic.shard(train_step, "dp", mesh="data=2")
    for length in (2, 3):
        step(jnp.ones((4, 4)), {"x": jnp.ones((8, length, 4))})
    found = advice(step, "recompiled")
    assert found is not None and found.fix is None and "Pad the batches to one shape" in found.message


def test_calls_of_one_kind_and_a_compile_before_the_loop_are_no_recompile():
    step = jaxshard_magic.shard(train_step, "dp", mesh="data=2")
    step.prepare(jnp.ones((4, 4)), {"x": jnp.ones((4, 4))})
    for _ in range(3):
        step(jnp.ones((4, 4)), {"x": jnp.ones((8, 4))})
    assert advice(step, "recompiled") is None


def test_a_nan_loss_is_told_with_its_first_step_and_the_setting_to_find_it():
    step = jaxshard_magic.shard(train_step, "dp", mesh="data=2")
    step.on_metrics()
    w = jnp.ones((4, 4))
    for n in range(1, 8):
        w, _ = step(w, {"x": jnp.full((8, 4), np.nan if n == 5 else 1.0)})
    found = advice(step, "loss-astray")
    assert found is not None and found.level == "error"
    assert found.message.startswith("The loss is not finite from step 5 on; at step 4 it was finite.")
    assert found.fix is not None
    exec(found.fix, {"jax": jax})
    try:
        with pytest.raises(FloatingPointError, match="nan"):
            step(jnp.ones((4, 4)), {"x": jnp.full((8, 4), np.nan)})
    finally:
        jax.config.update("jax_debug_nans", False)
    assert told(case(FITS, loop=TrainingLoop(metrics=metrics(), loss="loss")), "loss-astray") is None
    assert told(case(FITS, loop=TrainingLoop(metrics=metrics(astray=9), loss=None)), "loss-astray") is None


def test_a_loop_that_makes_its_batch_while_the_devices_wait_is_told_with_the_line():
    step = jaxshard_magic.shard(train_step, "dp", mesh="data=2")
    step.on_metrics()
    watch, ended = step.watch, threading.Event()
    assert watch is not None

    def look():
        while not ended.wait(0.005):
            watch.sample_activity()

    looking = threading.Thread(target=look)
    looking.start()
    w = jnp.ones((4, 4))
    for _ in range(40):
        w, _ = step(w, {"x": jnp.ones((8, 4))})
        time.sleep(0.01)  # a slow reader
    ended.set()
    looking.join()
    slow = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# a slow reader" in text)
    found = advice(step, "input-bound")
    assert found is not None and found.level == "info"  # of simulated devices
    assert f"It was at test_advice_loop.py, line {slow} at " in found.message
    assert found.fix == FEED


def test_the_text_to_paste_is_a_loop_over_a_feed_and_fed_loops_get_none():
    names: dict = {"batches": range(4), "seen": []}
    exec(FEED.replace("# ", "") + "\n    seen.append(batch)", names)
    assert names["seen"] == [0, 1, 2, 3]
    slow = timed(0.010, 0.040)
    assert slow.timing is not None
    fed = told(case(FITS, loop=replace(slow, timing=replace(slow.timing, data_share=0.7))), "input-bound")
    assert fed is not None and fed.fix is None and "Batches are taken ahead already" in fed.message


def timed(step_s: float, apart_s: float | None) -> TrainingLoop:
    return TrainingLoop(Timing(1.0, 100, 50, TimeSpread(step_s, step_s, step_s), apart_s=apart_s))


def test_a_loop_that_is_as_fast_as_its_step_waits_for_nothing():
    assert told(case(FITS, loop=timed(0.010, None)), "input-bound") is None
    assert told(case(FITS, loop=timed(0.010, 0.012)), "input-bound") is None
    found = told(case(FITS, loop=timed(0.010, 0.040)), "input-bound")
    assert found is not None and found.message.startswith("The step waits for its loop 75% of the time: ")


def paces(*seconds: float):
    run = LiveRun()
    for n, each in enumerate(seconds, 1):
        run.add_loop_metrics(n * 10, float(n), {"step_s": each})
    return TrainingLoop(metrics=run.metrics())


def test_steps_that_get_slower_are_told_and_a_warm_up_or_one_pause_is_not():
    found = told(case(FITS, loop=paces(*[0.01] * 10, *[0.02] * 6)), "slower")
    assert found is not None
    assert found.message.replace("\u202f", " ").startswith(
        "Steps got slower: 10.0 ms up to step 50, 20.0 ms at the end."
    )
    for quiet in ([0.5, *[0.01] * 15], [*[0.01] * 15, 0.5], [*[0.02] * 8, *[0.01] * 8], [0.01, 0.01, 0.03]):
        assert told(case(FITS, loop=paces(*quiet)), "slower") is None


def test_a_single_call_has_none_of_this_advice():
    step = jaxshard_magic.shard(train_step, "dp", mesh="data=2")
    step(jnp.ones((4, 4)), {"x": jnp.ones((8, 4))})
    codes = {a.code for a in step.report().advice}
    assert not codes & {"recompiled", "loss-astray", "input-bound", "slower"}
