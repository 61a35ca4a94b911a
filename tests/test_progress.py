"""The line that long work shows, and what it says of a loop that trains."""

import io
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import LOOP, STEP
from flax import nnx

import jaxshard_magic
from jaxshard_magic import _progress, magics
from jaxshard_magic._progress import Progress, frontend, line, training
from jaxshard_magic._progress.training import Training, duration_text
from jaxshard_magic.program.trace import path_name
from jaxshard_magic.step import Watch


def test_long_work_is_one_line_that_is_updated_and_cleared(monkeypatch):
    monkeypatch.setattr(line, "FIRST", 0.0)
    monkeypatch.setattr(line, "TICK", 0.01)
    drawn: list[str] = []
    with Progress(drawn.append, of="train_step") as progress:
        progress("compiling for 8 devices")
        time.sleep(0.3)
    assert drawn[0] == "train_step: compiling for 8 devices, 0.0 s"
    assert "train_step: compiling for 8 devices, 0.1 s" in drawn
    assert drawn[-1] == ""


def test_short_work_and_no_work_show_nothing():
    drawn: list[str] = []
    with Progress(drawn.append) as progress:
        progress("tracing train_step")
    assert drawn == []


def test_the_page_does_not_jump_between_two_waits(monkeypatch):
    monkeypatch.setattr(line, "FIRST", 0.0)
    monkeypatch.setattr(line, "TICK", 0.01)
    drawn: list[str] = []
    with Progress(drawn.append) as progress:
        for doing in ("tracing", "", "compiling"):
            progress(doing)
            time.sleep(0.1)
    assert "" not in drawn[:-1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_the_line_written_over_and_a_pipe_gets_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert _progress.line_for(object()) is None
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    draw = _progress.line_for(object())
    assert draw is not None
    draw("tracing, 1.0 s")
    draw("")
    assert terminal.getvalue() == "\r\x1b[Ktracing, 1.0 s\r\x1b[K"


def shared_terminal(monkeypatch) -> Terminal:
    """What both of the cell's streams write to."""
    shared = Terminal()
    monkeypatch.setattr(sys, "stdout", shared)
    monkeypatch.setattr(sys, "stderr", shared)
    monkeypatch.setenv("COLUMNS", "40")
    return shared


def test_what_the_cell_prints_to_a_terminal_stands_above_the_line(monkeypatch):
    terminal = shared_terminal(monkeypatch)
    with frontend.TerminalLine(terminal) as draw:
        draw("step 1")
        print("epoch 0")
        draw("step 2")
    assert terminal.getvalue() == "\r\x1b[Kstep 1\r\x1b[Kepoch 0\n\r\x1b[Kstep 2"
    assert sys.stdout is sys.stderr is terminal


def test_a_row_that_the_cell_has_begun_is_left_to_it(monkeypatch):
    terminal = shared_terminal(monkeypatch)
    with frontend.TerminalLine(terminal) as draw:
        print("\r 10%|███", end="", file=sys.stderr)
        draw("step 1")
        sys.stderr.writelines(["\r100%|█████", "\n"])
        draw("step 2")
    assert terminal.getvalue() == "\r 10%|███\r100%|█████\n\r\x1b[Kstep 2"


def test_a_line_takes_one_row_of_the_terminal(monkeypatch):
    terminal = shared_terminal(monkeypatch)
    frontend.TerminalLine(terminal)("x" * 100)
    assert terminal.getvalue() == "\r\x1b[K" + "x" * 39


def test_a_stream_that_the_cell_puts_in_place_stays(monkeypatch):
    terminal = shared_terminal(monkeypatch)
    own = io.StringIO()
    with frontend.TerminalLine(terminal):
        sys.stdout = own
    assert sys.stdout is own and sys.stderr is terminal


class Clock:
    """A training of which so many steps have finished by now."""

    def __init__(self, total: int | None = None):
        self.now, self.steps, self.loss, self.total = 0.0, 0, None, total
        self.training = Training(lambda: (self.steps, self.loss), lambda: self.total)

    def after(self, seconds: float, steps: int, loss: float | None = None) -> str:
        self.now, self.steps, self.loss = self.now + seconds, self.steps + steps, loss
        return self.training.line(self.now).replace("\u202f", " ")


def test_a_loop_is_told_by_its_step_its_loss_its_pace_and_the_time_left():
    clock = Clock(total=1000)
    assert clock.after(1, 1) == ""
    for _ in range(9):
        said = clock.after(0.5, 41, 0.04213)
    assert said == "step 370 of 1,000, loss 0.04213, 12.2 ms a step, 8 s left"


def test_no_total_no_time_left_no_loss_none_said():
    clock = Clock()
    clock.after(1, 1)
    assert clock.after(1, 9) == "step 10, 111 ms a step"


@pytest.mark.parametrize(
    ("loss", "said"), [(np.nan, "nan"), (-np.inf, "-inf"), (1.5e-9, "1.5e-09"), (0.0, "0")]
)
def test_a_loss_that_went_astray_is_said(loss, said):
    clock = Clock()
    clock.after(1, 1)
    assert f"step 3, loss {said}, " in clock.after(1, 2, loss)


def test_more_steps_than_the_loop_was_to_have_drop_the_total():
    clock = Clock(total=10)
    clock.after(1, 1)
    assert clock.after(1, 9) == "step 10 of 10, 111 ms a step"
    assert clock.after(1, 1).startswith("step 11, ")


def test_an_evaluation_between_epochs_is_no_step_but_takes_its_time():
    clock = Clock(total=110)
    for steps in (1, 10, 10, 10, 10):
        clock.after(1, steps)
    assert clock.after(20, 10).endswith("100 ms a step, 28 s left")


def test_another_compilation_takes_none_of_the_steps_time():
    clock = Clock()
    clock.after(1, 1)
    clock.after(1, 10)
    clock.training.pause()
    clock.after(60, 10)
    assert clock.after(1, 10) == "step 31, 100 ms a step"


def test_one_call_or_a_short_loop_is_no_training():
    clock = Clock(total=5)
    assert clock.after(1, 1) == clock.after(9, 0) == ""
    short = Clock(total=5)
    assert short.after(1, 1) == short.after(0.2, 4) == ""


def test_a_line_stands_long_enough_to_be_read():
    clock = Clock()
    clock.after(1, 1)
    said = clock.after(1, 9)
    assert clock.after(0.2, 9) == said != clock.after(0.3, 9)


def test_times_to_wait_are_told_in_their_two_largest_units():
    assert [duration_text(s) for s in (0.2, 8.4, 200, 7500)] == ["1 s", "8 s", "3 min 20 s", "2 h 5 min"]


PARAMS, BATCH = {"w": jnp.ones((4, 4))}, jnp.ones((8, 4))


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] - 1) ** 2)


def gradient_step(result):
    """A step that returns `result(new params, loss, accuracy)`."""

    def step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return result(new, loss, jnp.mean(batch > 0, dtype=jnp.float32))

    return step


def aux_step(params, batch):
    (loss, aux), grads = jax.value_and_grad(lambda p: (loss_fn(p, batch), jnp.sum(batch)), has_aux=True)(
        params
    )
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (aux, loss)


def epoch(params, batches):
    return jax.lax.scan(gradient_step(lambda new, loss, accuracy: (new, loss)), params, batches)


def optax_step(state, batch):
    params, moments = state
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, moments = optax.adam(1e-3).update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


LOSSES = {
    "state and loss": (gradient_step(lambda new, loss, accuracy: (new, loss)), "return.1"),
    "loss and state": (gradient_step(lambda new, loss, accuracy: (loss, new)), "return.0"),
    "metrics by name": (
        gradient_step(lambda new, loss, acc: (new, {"acc": acc, "loss": loss})),
        "return.1.loss",
    ),
    "the total of named losses": (
        gradient_step(lambda new, loss, acc: (new, {"a_loss": acc, "total_loss": loss})),
        "return.1.total_loss",
    ),
    "what is differentiated of several": (gradient_step(lambda new, loss, acc: (new, acc, loss)), "return.2"),
    "what is made of it": (gradient_step(lambda new, loss, acc: (new, acc, jnp.exp(2 * loss))), "return.2"),
    "an auxiliary value beside it": (aux_step, "return.1.1"),
    "the only number": (lambda params, batch: (params, loss_fn(params, batch)), "return.1"),
    "an epoch's losses": (epoch, "return.1"),
    "a number that has another name": (gradient_step(lambda new, loss, acc: (new, {"accuracy": acc})), None),
    "no number": (gradient_step(lambda new, loss, acc: new), None),
}


@pytest.fixture(scope="module")
def mesh():
    return jaxshard_magic.mesh("data=2")


@pytest.mark.parametrize(("step", "path"), LOSSES.values(), ids=LOSSES)
def test_the_loss_of_a_step_that_returns(step, path, mesh):
    batch = jnp.stack([BATCH] * 3) if step is epoch else BATCH
    entry = jaxshard_magic.shard(step, "dp", mesh=mesh).prepare(PARAMS, batch)
    found = entry.plan.loss
    assert (found if found is None else path_name(entry.traced.out_paths[found])) == path


def followed(step, *args, calls: int = 3, **options):
    """A Watch of a step that was called on its own results."""
    sharded = jaxshard_magic.shard(step, "dp", **options)
    watch = Watch()
    watch.follow(sharded)
    state, *rest = args
    for _ in range(calls):
        out = sharded(state, *rest)
        state = out[0] if isinstance(out, tuple) else state if out is None else out
    return sharded, watch, out


def settled(watch: Watch, calls: int) -> float | None:
    until = time.perf_counter() + 30
    while watch.finished()[0] < calls and time.perf_counter() < until:
        time.sleep(0.01)
    finished, loss = watch.finished()
    assert finished == calls
    return loss


def test_a_watch_counts_the_calls_that_have_finished_and_reads_the_newest_loss(mesh):
    state = PARAMS, optax.adam(1e-3).init(PARAMS)
    _, watch, (_, loss) = followed(optax_step, state, BATCH, mesh=mesh)
    assert settled(watch, 3) == float(loss)


def test_a_watch_reads_the_last_loss_of_an_epoch_in_one_scan(mesh):
    _, watch, (_, losses) = followed(epoch, PARAMS, jnp.stack([BATCH] * 3), mesh=mesh)
    assert settled(watch, 3) == float(losses[-1])


def test_a_watch_reads_what_an_nnx_step_returns(mesh):
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(batch) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    sharded = jaxshard_magic.shard(step, "dp", mesh=mesh)
    watch = Watch()
    watch.follow(sharded)
    losses = [sharded(model, optimizer, BATCH) for _ in range(3)]
    assert settled(watch, 3) == float(losses[-1])


def test_a_step_that_returns_nothing_is_counted(mesh):
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def step(model, batch):
        grads = nnx.grad(lambda m: jnp.mean(m(batch) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), grads))

    _, watch, _ = followed(step, model, BATCH, mesh=mesh)
    assert settled(watch, 3) is None


def test_donated_state_is_counted_and_not_kept(mesh):
    sharded, watch, new = followed(
        gradient_step(lambda new, loss, acc: new), PARAMS, BATCH, mesh=mesh, donate=True
    )
    assert sharded.entry.donated
    assert settled(watch, 3) is None
    watch.leave()
    assert not new["w"].is_deleted()


class Result:
    """A loss whose call the device has not done yet, as jax shows it."""

    is_fully_replicated = is_fully_addressable = True

    def __init__(self, value: float):
        self.value, self.ready, self.deleted = value, False, False

    def is_ready(self) -> bool:
        if self.deleted:
            raise RuntimeError("Array has been deleted.")
        return self.ready

    def is_deleted(self) -> bool:
        return self.deleted

    def addressable_data(self, index: int) -> np.ndarray:
        self.is_ready()
        return np.float32(self.value)


@pytest.fixture
def begun() -> tuple[Watch, list[Result]]:
    """A watch of three calls that have returned, and their losses."""
    avals = [jax.core.ShapedArray((), jnp.float32)]
    entry: Any = SimpleNamespace(
        plan=SimpleNamespace(loss=0, state_pairs={}),
        traced=SimpleNamespace(closed=SimpleNamespace(out_avals=avals)),
        whole=False,
    )
    step: Any = SimpleNamespace(watch=None)
    watch, results = Watch(), [Result(n) for n in (3.0, 2.0, 1.0)]
    watch.follow(step)
    for result in results:
        step.watch(entry, [result])
    return watch, results


def test_calls_that_the_device_has_not_done_are_not_counted(begun):
    watch, results = begun
    assert watch.calls == 3 and watch.finished() == (0, None)
    results[0].ready = results[1].ready = True
    assert watch.finished() == (2, 2.0)
    results[2].ready = True
    assert watch.finished() == (3, 1.0)


def test_a_loss_that_a_later_call_took_over_is_not_read(begun):
    watch, results = begun
    results[0].ready = True
    assert watch.finished() == (1, 3.0)
    results[1].deleted = True
    assert watch.finished() == (2, 3.0)


def test_a_loss_that_goes_while_it_is_looked_at_is_not_read(begun, monkeypatch):
    watch, results = begun
    results[2].deleted = True
    monkeypatch.setattr(Result, "is_deleted", lambda self: False)
    assert watch.finished() == (3, None)


def test_a_step_that_is_not_followed_leaves_nothing(mesh):
    sharded, watch, _ = followed(gradient_step(lambda new, loss, acc: (new, loss)), PARAMS, BATCH, mesh=mesh)
    watch.leave()
    sharded(PARAMS, BATCH)
    assert watch.calls == 3 and sharded.watch is None


@pytest.fixture
def drawn(given, monkeypatch) -> list[str]:
    """What a front end would show of the notebook's cells; lines come fast."""
    lines: list[str] = []
    monkeypatch.setattr(magics, "line_for", lambda shell: lines.append)
    monkeypatch.setattr(line, "TICK", 0.02)
    monkeypatch.setattr(training, "EVIDENT", 0.0)
    monkeypatch.setattr(training, "STANDS", 0.0)
    given.run("import time")
    return lines


SLOWLY = LOOP.replace("range(3)", "range(20)") + "    time.sleep(0.02)\n"


def test_a_cell_that_trains_tells_how_far_it_has_come_and_ends_as_the_report(given, drawn):
    assert given.run("%%shard fsdp" + STEP + SLOWLY).timing.calls == 20
    told = [said for said in drawn if " of 20, loss 0." in said]
    assert told[0].startswith("train_step: step ")
    assert " a step, " in told[1] and told[1].endswith(" left")
    assert drawn[-1] == ""


def test_a_cell_that_only_defines_the_step_tells_of_no_loop(given, drawn):
    given.run("%%shard fsdp --repeat 3" + STEP)
    assert not [said for said in drawn if "step 1" in said]


def test_an_error_in_the_loop_clears_the_line(given, drawn):
    given.fails("%%shard fsdp" + STEP + SLOWLY + "1 / 0")
    assert [said for said in drawn if " of 20" in said] and drawn[-1] == ""


def test_an_interrupt_clears_the_line_and_the_step_runs_on_unwatched(given, drawn):
    error = given.fails(
        "%%shard fsdp\nkept = []" + STEP + "kept.append(1)" + SLOWLY + "raise KeyboardInterrupt"
    )
    assert isinstance(error, KeyboardInterrupt)
    assert [said for said in drawn if " of 20" in said] and drawn[-1] == ""
    assert not [t for t in threading.enumerate() if t.name == "jaxshard progress"]


def test_the_loop_of_the_next_cell_costs_and_tells_nothing(given, drawn):
    given.run("%%shard fsdp" + STEP)
    del drawn[:]
    given.run(SLOWLY)
    assert drawn == [] and given["train_step"].watch is None


def test_config_turns_it_off(given, drawn):
    given.run("%config ShardSession.progress = False")
    given.run("%%shard fsdp" + STEP + SLOWLY)
    assert drawn == []


def test_a_step_that_is_defined_anew_in_a_loop_is_counted_on(given, drawn):
    given.run(
        "%%shard fsdp\nfor rate in (0.1, 0.2):"
        + STEP.replace("\n", "\n    ").replace("0.1 *", "rate *")
        + SLOWLY.replace("\n", "\n    ")
    )
    assert [said for said in drawn if " of 40, loss" in said]


def test_a_kernel_gets_one_output_that_is_updated_and_emptied(bare_shell, monkeypatch):
    shown = []
    publisher = SimpleNamespace(publish=lambda data, metadata=None, **how: shown.append((data, how)))
    monkeypatch.setattr(bare_shell, "display_pub", publisher)
    monkeypatch.setattr(bare_shell, "kernel", object(), raising=False)
    draw = _progress.line_for(bare_shell)
    assert draw is not None
    draw("a<b: step 1")
    draw("")
    (first, made), (last, updated) = shown
    assert "a&lt;b: step 1" in first["text/html"] and set(last.values()) == {""}
    assert updated["update"] and made["transient"] == updated["transient"]
