"""Nothing is lost where a cell ends early, stopped by the user or by an error of its own."""

import gc
import signal
import threading

import pytest
from IPython.utils.capture import capture_output
from support.cells import LOOP, STEP

from jaxshard_magic.compilation.compiled_step import CompiledStep
from jaxshard_magic.program.compiling import compile_lowered
from jaxshard_magic.report import Report
from jaxshard_magic.step import ShardedStep

STOPS = """
for i in range(30):
    state, loss = train_step(state, batch)
    if i == 11:
        {}
"""
INTERRUPT = "loss.block_until_ready(); raise KeyboardInterrupt"


def interrupt():
    """As Ctrl-C or the stop button does it, from any thread."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def ended(notebook, cell):
    """What the cell raised, and what it wrote."""
    with capture_output() as seen:
        error = notebook.fails(cell)
    return error, seen


def test_stopped_in_its_loop_a_cell_says_how_far_it_came_and_keeps_the_run(given):
    error, seen = ended(given, "%%shard fsdp -o kept" + STEP + STOPS.format(INTERRUPT))
    assert isinstance(error, KeyboardInterrupt)
    number = given.shell.execution_count - 1
    assert str(error) == f"Stopped at step 12 of 30, loss {float(given['loss']):.4g}: cell [{number}], line 9"
    written = seen.stdout + seen.stderr
    assert "Traceback" not in written and "jaxshard_magic" not in written
    report = given["kept"]
    assert isinstance(report, Report) and report.ended is not None
    assert (report.ended.calls, report.ended.of, report.ended.error) == (12, 30, None)
    assert report.ended.loss == pytest.approx(float(given["loss"]))
    assert report.timing is not None and report.timing.calls == 12
    assert seen.outputs, "the report is shown"
    assert given.run("%shard") == report
    assert report.to_text().splitlines()[1].startswith("Stopped at step 12 of 30, loss ")
    assert Report.from_json(report.to_json()) == report


def test_a_step_that_was_stopped_goes_on_where_it_was(given, trained):
    ended(given, "%%shard fsdp" + STEP + LOOP + INTERRUPT)
    assert isinstance(given["train_step"], ShardedStep)
    given.run(LOOP + LOOP)
    assert given.run("%shard").ended is None  # it went on
    assert given.run("%shard").timing.calls == 6


LARGE = """
def large():
    gc.collect()
    return sum(x.nbytes >= 2**20 for x in jax.live_arrays())
w, x = jnp.ones((512, 512)), jnp.ones((8, 512))
before = large()
"""
OF_LARGE = """
@jax.jit
def train_step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 1e-6 * grad, loss
for i in range(6):
    w, loss = train_step(w, x)
"""


@pytest.mark.parametrize(
    "end",
    [
        "    if i == 4: raise KeyboardInterrupt",
        pytest.param("    if i == 4: raise ValueError('mine')", marks=pytest.mark.full),
        pytest.param("train_step(w, x[:, :3])", marks=pytest.mark.full),
        "train_step(w)",
        pytest.param("stopped_inside()\ntrain_step(w, x)", marks=pytest.mark.full),
    ],
)
def test_a_cell_that_ended_early_keeps_no_old_state_on_the_devices(given, monkeypatch, end):
    def stopped_inside():
        def stopped(*args):
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(CompiledStep, "run", stopped)

    given.shell.user_ns.update(gc=gc, stopped_inside=stopped_inside)
    given.run(LARGE)
    given.run("%%shard fsdp" + OF_LARGE)
    ended(given, "%%shard fsdp" + OF_LARGE + end)
    given.run("for i in range(3): w, loss = train_step(w, x)")
    given.run("after = large()")
    assert given["after"] == given["before"]


def test_the_calls_that_a_stopped_cell_made_are_one_number(given):
    first = "\ntrain_step(state, jax.tree.map(lambda x: x[:4], batch))"  # of another shape
    ended(given, "%%shard dp --mesh data=2 -o kept" + STEP + first + STOPS.format(INTERRUPT))
    report = given["kept"]
    assert report.ended.calls == report.timing.calls == 13
    assert report.timing.others == 1 and 0 < report.timing.timed < 12
    text = " ".join(report.to_text().split())
    assert "Stopped at step 13 of 31" in text and " of 13 calls, 1 of another program" in text


def test_a_cell_that_raises_after_its_step_shows_traceback_and_report(given):
    error, seen = ended(given, "%%shard dp -o kept" + STEP + STOPS.format("{}['wte']"))
    assert isinstance(error, KeyError)
    number = given.shell.execution_count - 1
    frames, at = [], error.__traceback__
    while at is not None:
        frames.append(at.tb_frame.f_code.co_filename)
        at = at.tb_next
    assert not [file for file in frames[1:] if "jaxshard_magic/" in file]  # the first is IPython's call of the magic
    drawn = seen.stdout + seen.stderr
    assert "----> 9" in drawn.replace("---> 9", "----> 9") and "KeyError: 'wte'" in drawn
    assert "run_cell_magic" not in drawn
    assert "_render_traceback_" not in vars(error)
    report = given["kept"]
    assert report.ended.error == "KeyError: 'wte'"
    assert (report.ended.calls, report.ended.line) == (12, 9)
    said = report.to_text()
    assert f"The cell raised KeyError: 'wte' at cell [{number}], line 9, after step 12" in " ".join(said.split())
    assert seen.outputs
    assert isinstance(given["train_step"], ShardedStep)  # the name is the cell's step, as plain execution leaves it
    assert given.run("%shard").ended == report.ended


def test_an_early_end_is_in_the_history_and_in_comparisons(given):
    ended(given, "%%shard dp -o one" + STEP + STOPS.format(INTERRUPT))
    ended(given, "%%shard fsdp -o other" + STEP + STOPS.format("1 / 0"))
    compared = given.run(f"%shard compare {given['one'].number} {given['other'].number}")
    assert [t.report.timing.calls for t in compared.trials] == [12, 12]
    assert "fsdp" in given.run("%shard history").to_text()


def test_a_quiet_cell_keeps_its_report_and_shows_none(given):
    _, seen = ended(given, "%%shard dp -o kept" + STEP + STOPS.format(INTERRUPT) + "\nloss;")
    assert given["kept"].ended.calls == 12
    assert not seen.outputs


def test_stopped_while_it_compiles_a_cell_says_so_in_one_line(given, monkeypatch):
    from jaxshard_magic.step import step_programs

    def interrupted(*_args, **_how):
        raise KeyboardInterrupt

    monkeypatch.setattr(step_programs, "compile_step", interrupted)
    for line in ("fsdp", "auto"):
        error, seen = ended(given, f"%%shard {line}" + STEP + LOOP)
        assert str(error) == "Stopped before train_step had run; your arrays are as they were."
        assert "Traceback" not in seen.stdout + seen.stderr
        assert not isinstance(given["train_step"], ShardedStep) if "train_step" in given.shell.user_ns else True
    error, seen = ended(given, "%%shard dp,fsdp" + STEP + LOOP)
    assert str(error) == "Stopped before any of 2 strategies had compiled."
    assert "Traceback" not in seen.stdout + seen.stderr


COMPILES = "jaxshard_magic.program.compiling.compile_lowered"
ALONE = "Stopped before train_step had run; your arrays are as they were."
SEVERAL = "Stopped before any of 2 strategies had compiled."


@pytest.mark.parametrize(
    ("line", "called", "said"),
    [
        ("fsdp", COMPILES, ALONE),
        ("pp --mesh pipe=2", "jaxshard_magic.pipeline.jobs.compile_lowered", ALONE),
        ("auto --among dp,fsdp", COMPILES, ALONE),
        ("dp,fsdp", COMPILES, SEVERAL),
    ],
)
def test_it_is_stopped_while_a_compiler_is_still_at_work(given, monkeypatch, line, called, said):
    begun, released = threading.Event(), threading.Event()

    def compiling(_lowered):
        begun.set()
        assert released.wait(60), "the interrupt waits for the compiler"
        raise RuntimeError("nobody asks for it any more")

    def stop():
        begun.wait(60)
        interrupt()

    monkeypatch.setattr(called, compiling)
    threading.Thread(target=stop).start()
    error, _ = ended(given, f"%%shard {line}" + STEP + LOOP)
    assert not released.is_set()
    released.set()
    assert str(error) == said


def test_a_comparison_that_is_stopped_is_kept_and_ends_its_cell(given, monkeypatch):
    begun, released = iter(range(9)), threading.Event()

    def compiling(lowered):
        if next(begun):  # the second
            interrupt()
            assert released.wait(60), "the interrupt waits for the compiler"
        return compile_lowered(lowered)

    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr(COMPILES, compiling)
    error, seen = ended(given, "%%shard dp,fsdp,tp -o kept" + STEP + LOOP)
    released.set()
    assert str(error) == "Stopped: 1 of 3 strategies compiled, 0 ran."
    assert [trial.strategy for trial in given["kept"].trials] == ["dp"]
    assert given["kept"].left == ('fsdp --mesh "data=8"', 'tp --mesh "model=8"')
    assert "Two were not tried." in seen.stdout and "Traceback" not in seen.stdout + seen.stderr
    assert given.run("%shard") == given["kept"]


def test_stopped_before_its_step_a_cell_is_as_any_other(given):
    error, _ = ended(given, "%%shard dp" + STEP + "raise KeyboardInterrupt")
    assert type(error) is KeyboardInterrupt


def test_stopped_in_the_loop_of_a_searched_cell_the_choice_stays(given):
    error, _ = ended(given, "%%shard auto --among dp,fsdp" + STEP + STOPS.format(INTERRUPT))
    assert str(error).startswith("Stopped at step 12 of 30")
    assert isinstance(given["train_step"], ShardedStep)
    assert given.run("%shard").ended.calls == 12
