"""What a plan says of a step while its compiler works."""

import threading
from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Notebook
from IPython.utils.capture import capture_output
from support.cells import GIVEN, LOOP, STEP

import jaxshard_magic
from jaxshard_magic import compile_wait
from jaxshard_magic.analysis.plan_prediction import differences
from jaxshard_magic.analysis.program_reading import program_reading
from jaxshard_magic.analysis.summary import summarize
from jaxshard_magic.compilation import single_program
from jaxshard_magic.notebook import shard_cell
from jaxshard_magic.notebook.shard_cell import ShardCell
from jaxshard_magic.program import compiling
from jaxshard_magic.step import ShardedStep
from jaxshard_magic.views import show

WEIGHTS, ROWS = np.ones((64, 32), np.float32), np.ones((16, 64), np.float32)


def train_step(weights, rows):
    value, grads = jax.value_and_grad(lambda w: jnp.mean((rows @ w) ** 2))(weights)
    return weights - 0.1 * grads, value


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A compiler that ends once this is set."""
    told = threading.Event()
    compile_lowered = compiling.compile_lowered

    def compiled(lowered):
        assert told.wait(60)
        return compile_lowered(lowered)

    monkeypatch.setattr(compiling, "compile_lowered", compiled)
    monkeypatch.setattr(single_program, "EARLY_S", 0.0)
    return told


def sharded(early: Callable) -> ShardedStep:
    step = jaxshard_magic.shard(train_step, "dp", mesh="cpu:8 data=8")
    step.programs.on_planned = early
    return step


def test_the_plan_is_told_once_in_the_thread_that_waits_for_the_compiler(slow):
    told = []

    def early(plan):
        told.append((plan, threading.current_thread()))
        slow.set()

    step = sharded(early)
    plain, (weights, _) = train_step(WEIGHTS, ROWS), step(WEIGHTS, ROWS)
    step(weights, ROWS)
    np.testing.assert_allclose(weights, plain[0], rtol=1e-6)
    ((plan, thread),) = told
    assert plan.compiled is None and thread is threading.current_thread()
    assert step.entry.early_plan is plan


def test_a_compiler_that_is_soon_done_is_not_kept_waiting():
    told = []
    step = sharded(told.append)
    step(WEIGHTS, ROWS)
    assert not told and step.entry.early_plan is None


def test_an_interrupt_while_the_plan_is_shown_leaves_a_step_that_runs(slow):
    def early(_):
        slow.set()
        raise KeyboardInterrupt

    step = sharded(early)
    with pytest.raises(KeyboardInterrupt):
        step(WEIGHTS, ROWS)
    step.programs.on_planned = None
    step(WEIGHTS, ROWS)
    assert step.calls == 1


def test_what_is_due_is_of_one_thread_and_ends_with_its_context():
    done = []
    with compile_wait.while_compiling(lambda: done.append("within"), 0.0):
        other = threading.Thread(target=compile_wait.tick)
        other.start()
        other.join()
        assert not done
        compile_wait.tick()
        compile_wait.tick()
    compile_wait.tick()
    assert done == ["within"]


def read(peak: int, **sent: int) -> SimpleNamespace:
    """A reading whose fullest device holds `peak` bytes at most, and what each kind of collective sends."""
    collectives = [SimpleNamespace(kind=kind.replace("_", "-"), wire_bytes=each) for kind, each in sent.items()]
    return SimpleNamespace(memory=SimpleNamespace(per_device=[SimpleNamespace(peak=peak)]), collectives=collectives)


def test_what_a_compiled_program_has_otherwise_is_told_in_one_line():
    planned = read(1 << 20, all_reduce=4096, all_gather=1024)
    assert differences(planned, read((1 << 20) + 100, all_reduce=4100, all_gather=1024)) is None
    found = differences(planned, read(2 << 20, all_reduce=4096, reduce_scatter=512))
    assert found is not None and found.level == "info"
    assert found.message.replace("\u202f", " ") == (
        "Compiled, it is not all as planned: peak memory is 2.00 MiB, not 1.00 MiB; all-gather sends 0 B, "
        "not 1.00 KiB; reduce-scatter sends 512 B, not 0 B."
    )


def test_a_step_that_sends_what_was_planned_has_no_line_of_it(slow):
    step = sharded(lambda _: slow.set())
    step(WEIGHTS, ROWS)
    entry = step.entry
    found = differences(program_reading(entry.early_plan), program_reading(entry))
    assert found is None or "sends" not in found.message


def test_a_cell_shows_the_plan_while_it_compiles_and_then_its_report_alone(notebook: Notebook, slow, monkeypatch):
    monkeypatch.setattr(ShardCell, "shows_early_results", True)
    monkeypatch.setattr(show, "_in_notebook", lambda _: True)
    summarized = shard_cell.show_plan

    def planned_first(*given):
        summarized(*given)
        slow.set()

    monkeypatch.setattr("jaxshard_magic.notebook.cell_magic.show_plan", planned_first)
    notebook.run(GIVEN)
    with capture_output() as said:
        notebook.run(f"%%shard dp\n{STEP}")
    shown = [output for output in said.outputs if "text/plain" in output.data]
    first = next(i for i, o in enumerate(shown) if "predicted from the plan" in o.data["text/plain"])
    assert "Not run: planned only" in shown[first].data["text/html"]
    later = shown[first + 1 :]
    assert any(o.data["text/plain"] == o.data.get("text/html") == "" for o in later), "it was taken away"
    assert not any("predicted from the plan" in o.data["text/plain"] for o in later)


def test_a_plan_that_has_no_report_is_one_line_and_the_step_goes_on(notebook: Notebook, slow, monkeypatch):
    monkeypatch.setattr(ShardCell, "shows_early_results", True)
    monkeypatch.setattr(show, "_in_notebook", lambda _: True)

    def broken(step, entry):
        slow.set()
        if entry.compiled is None:
            raise ZeroDivisionError("of a test")
        return summarize(step, entry)

    monkeypatch.setattr("jaxshard_magic.step.sharded_step.summarize", broken)
    notebook.run(GIVEN)
    with capture_output() as said:
        notebook.run(f"%%shard dp\n{STEP}{LOOP}")
    assert "has no report of its plan: ZeroDivisionError: of a test" in said.stdout + said.stderr
    assert np.isfinite(float(notebook["loss"]))
