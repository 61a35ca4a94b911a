"""The line that long work shows, and what it says of a loop that trains."""

import io
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from support.cells import STEP
from support.drawn import SLOWLY, Drawn

from jaxshard_magic.notebook import cell_magic, loop_progress, progress, shard_cell
from jaxshard_magic.notebook.loop_progress import LoopProgress, duration_text
from jaxshard_magic.notebook.progress import Progress


def test_long_work_is_one_line_that_is_updated_and_cleared(monkeypatch):
    monkeypatch.setattr(progress, "FIRST", 0.0)
    monkeypatch.setattr(progress, "TICK", 0.01)
    drawn = Drawn()
    with Progress(drawn, label="train_step") as tell:
        tell("compiling for 8 devices")
        time.sleep(0.3)
    assert drawn[0] == "train_step: compiling for 8 devices, 0.0 s"
    assert "train_step: compiling for 8 devices, 0.1 s" in drawn
    assert drawn[-1] == ""


def test_a_long_compile_says_what_it_took_last_time_and_that_it_may_be_stopped(monkeypatch):
    monkeypatch.setattr(progress, "FIRST", 0.0)
    monkeypatch.setattr(progress, "LONG", 0.1)
    monkeypatch.setattr(progress, "TICK", 0.01)
    drawn = Drawn()
    with Progress(drawn, label="train_step", last_compile_s=6.84) as tell:
        tell("compiling for 8 devices")
        time.sleep(0.3)
        tell("first run")
        time.sleep(0.3)
    more = "; the last compile of this step took 6.84\u202fs; interrupting stops it, and your variables stay as they "
    more += "are"
    assert f"train_step: compiling for 8 devices, 0.2 s{more}" in drawn
    assert "train_step: first run, 0.2 s" in drawn


def test_a_last_compile_that_was_no_wait_is_none_of_a_wait(monkeypatch):
    monkeypatch.setattr(progress, "FIRST", 0.0)
    monkeypatch.setattr(progress, "LONG", 0.1)
    monkeypatch.setattr(progress, "TICK", 0.01)
    drawn = Drawn()
    with Progress(drawn, last_compile_s=0.05) as tell:
        tell("compiling for 8 devices")
        time.sleep(0.3)
    assert "the last compile" not in "".join(drawn)


EDITED = STEP.replace("0.1", "0.2")
OTHER = STEP.replace("loss_fn", "lambda p, b: jnp.sum(p['w'])").replace("0.1 * g", "g")


@pytest.mark.parametrize(
    ("cell", "known"),
    [
        ("dp" + STEP, True),
        ("dp -o kept" + EDITED, True),
        ("fsdp" + STEP, False),
        ("dp --remat full" + STEP, False),
        ("dp --mesh data=4" + STEP, False),
        ("dp --rule \"w=P('data')\"" + STEP, False),
        ("dp" + OTHER, False),
        ("dp" + STEP.replace("train_step", "evaluate"), False),
    ],
)
def test_the_last_compile_is_that_of_the_same_step_asked_for_alike(given, monkeypatch, cell, known):
    told = []
    monkeypatch.setattr(cell_magic, "last_compile_s", lambda this: told.append(shard_cell.last_compile_s(this)))
    given.run("%%shard dp;" + STEP)
    last = given.shell.magics_manager.registry["ShardMagics"].session.step.entry.compile_s
    given.run("%%shard " + cell)
    assert told == [None, last if known else None]


def test_short_work_and_no_work_show_nothing():
    drawn = Drawn()
    with Progress(drawn) as tell:
        tell("tracing train_step")
    assert drawn == []


def test_the_page_does_not_jump_between_two_waits(monkeypatch):
    monkeypatch.setattr(progress, "FIRST", 0.0)
    monkeypatch.setattr(progress, "TICK", 0.01)
    drawn = Drawn()
    with Progress(drawn) as tell:
        for doing in ("tracing", "", "compiling"):
            tell(doing)
            time.sleep(0.1)
    assert "" not in drawn[:-1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_the_line_written_over_and_a_pipe_gets_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert progress.line_for(object()) is None
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    draw = progress.line_for(object())
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
    with progress.TerminalLine(terminal) as draw:
        draw("step 1")
        print("epoch 0")
        draw("step 2")
    assert terminal.getvalue() == "\r\x1b[Kstep 1\r\x1b[Kepoch 0\n\r\x1b[Kstep 2"
    assert sys.stdout is sys.stderr is terminal


def test_a_row_that_the_cell_has_begun_is_left_to_it(monkeypatch):
    terminal = shared_terminal(monkeypatch)
    with progress.TerminalLine(terminal) as draw:
        print("\r 10%|███", end="", file=sys.stderr)
        draw("step 1")
        sys.stderr.writelines(["\r100%|█████", "\n"])
        draw("step 2")
    assert terminal.getvalue() == "\r 10%|███\r100%|█████\n\r\x1b[Kstep 2"


def test_a_line_takes_one_row_of_the_terminal(monkeypatch):
    terminal = shared_terminal(monkeypatch)
    progress.TerminalLine(terminal)("x" * 100)
    assert terminal.getvalue() == "\r\x1b[K" + "x" * 39


def test_a_stream_that_the_cell_puts_in_place_stays(monkeypatch):
    terminal = shared_terminal(monkeypatch)
    own = io.StringIO()
    with progress.TerminalLine(terminal):
        sys.stdout = own
    assert sys.stdout is own and sys.stderr is terminal


class Clock:
    """A training of which so many steps have finished by now."""

    def __init__(self, total: int | None = None):
        self.now, self.steps, self.loss, self.total = 0.0, 0, None, total
        self.training = LoopProgress(lambda: (self.steps, self.loss), lambda: self.total)

    def after(self, seconds: float, steps: int, loss: float | None = None) -> str:
        self.now, self.steps, self.loss = self.now + seconds, self.steps + steps, loss
        return self.training.line(self.now).replace("\u202f", " ")


def test_a_loop_is_told_by_its_step_its_loss_its_pace_and_the_time_left():
    clock = Clock(total=1000)
    assert clock.after(1, 1) == ""
    for _ in range(9):
        said = clock.after(0.5, 41, 0.04213)
    assert said == "step 370 of 1,000, loss 0.04213, 12.2 ms a call, 8 s left"


def test_a_resumed_loop_says_from_where_and_paces_by_the_steps_since():
    clock, resumed = Clock(total=1000), None
    clock.training = LoopProgress(lambda: (clock.steps, clock.loss), lambda: clock.total, resumed=lambda: resumed)
    clock.after(1, 300)
    assert "resumed" not in clock.after(1, 300)
    resumed = 600
    for _ in range(4):
        said = clock.after(0.5, 5)
    assert said == "step 620 of 1,000, 100 ms a call, 38 s left, resumed at step 600"


def test_the_share_of_a_loop_is_told_where_its_length_is_known():
    clock = Clock(total=100)
    clock.after(1, 1)
    clock.after(1, 24)
    assert clock.training.share == 0.25
    clock.total = None
    clock.after(1, 1)
    assert clock.training.share is None


def test_no_total_no_time_left_no_loss_none_said():
    clock = Clock()
    clock.after(1, 1)
    assert clock.after(1, 9) == "step 10, 111 ms a call"


@pytest.mark.parametrize(
    ("loss", "said"), [(np.nan, "NaN"), (-np.inf, "\u2212infinity"), (1.5e-9, "1.5e\u221209"), (0.0, "0")]
)
def test_a_loss_that_went_astray_is_said(loss, said):
    clock = Clock()
    clock.after(1, 1)
    assert f"step 3, loss {said}, " in clock.after(1, 2, loss)


def test_more_steps_than_the_loop_was_to_have_drop_the_total():
    clock = Clock(total=10)
    clock.after(1, 1)
    assert clock.after(1, 9) == "step 10 of 10, 111 ms a call"
    assert clock.after(1, 1).startswith("step 11, ")


def test_an_evaluation_between_epochs_is_no_step_but_takes_its_time():
    clock = Clock(total=110)
    for steps in (1, 10, 10, 10, 10):
        clock.after(1, steps)
    assert clock.after(20, 10).endswith("100 ms a call, 28 s left")


def test_another_compilation_takes_none_of_the_steps_time():
    clock = Clock()
    clock.after(1, 1)
    clock.after(1, 10)
    clock.training.pause()
    clock.after(60, 10)
    assert clock.after(1, 10) == "step 31, 100 ms a call"


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


@pytest.fixture
def drawn(given, monkeypatch) -> "Drawn":
    """What a front end would show of the notebook's cells; lines come fast."""
    lines = Drawn()
    monkeypatch.setattr(shard_cell, "line_for", lambda shell: lines)
    monkeypatch.setattr(progress, "TICK", 0.02)
    monkeypatch.setattr(loop_progress, "EVIDENT", 0.0)
    monkeypatch.setattr(loop_progress, "STANDS", 0.0)
    given.run("import time")
    return lines


def test_a_cell_that_trains_tells_how_far_it_has_come_and_ends_as_the_report(given, drawn):
    assert given.run("%%shard fsdp" + STEP + SLOWLY).timing.calls == 20
    told = [said for said in drawn if " of 20, loss 0." in said]
    assert told[0].startswith("train_step: step ")
    shares = [drawn.shares[drawn.index(said)] for said in told]
    assert shares == sorted(shares) and 0 < shares[0] < shares[-1] <= 1 and drawn.shares[-1] is None
    assert " a call, " in told[1] and told[1].endswith(" left")
    assert drawn[-1] == ""


def test_a_view_that_is_shown_says_it_in_the_place_of_the_line_at_once(monkeypatch):
    monkeypatch.setattr(progress, "TICK", 0.01)
    monkeypatch.setattr(loop_progress, "EVIDENT", 0.0)
    monkeypatch.setattr(loop_progress, "STANDS", 0.0)
    drawn, said = Drawn(), []

    class View:
        shown = False

        def __call__(self, told: str, share: float | None) -> None:
            said.append((told, share))
            self.shown = len(said) > 20

    steps = iter(range(1, 10**6))
    with (
        Progress(drawn) as tell,
        tell.following(LoopProgress(lambda: (next(steps), 0.5), lambda: None), View()),
    ):
        end = time.monotonic() + 20
        while len(said) <= 25 and time.monotonic() < end:
            time.sleep(0.05)
    assert drawn[-1] == "" and 0 < len([told for told in drawn if told]) <= 20
    told = [told for told, _ in said if told]  # nothing before the first steps, and where a look falls after the last
    assert len(told) > 20 and all(each.startswith("step ") for each in told)


def test_a_cell_that_only_defines_the_step_tells_of_no_loop(given, drawn):
    given.run("%%shard fsdp --repeat 3" + STEP)
    assert not [said for said in drawn if "step 1" in said]


def test_an_error_in_the_loop_clears_the_line(given, drawn):
    given.fails("%%shard fsdp" + STEP + SLOWLY + "1 / 0")
    assert [said for said in drawn if " of 20" in said] and drawn[-1] == ""


def test_an_interrupt_clears_the_line_and_the_step_runs_on_unwatched(given, drawn):
    error = given.fails("%%shard fsdp\nkept = []" + STEP + "kept.append(1)" + SLOWLY + "raise KeyboardInterrupt")
    assert isinstance(error, KeyboardInterrupt)
    assert [said for said in drawn if " of 20" in said] and drawn[-1] == ""
    assert not [t for t in threading.enumerate() if t.name == "jaxshard progress"]


def test_a_terminal_is_told_nothing_of_the_next_cells_loop(given, drawn):
    given.run("%%shard fsdp" + STEP)
    del drawn[:]
    given.run(SLOWLY)
    assert drawn == [] and given["train_step"].watch is None


def test_config_turns_it_off(given, drawn):
    given.run("%config ShardSession.progress = False")
    given.run("%%shard fsdp" + STEP + SLOWLY)
    assert drawn == []


@pytest.mark.ci
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
    draw = progress.line_for(bare_shell)
    assert draw is not None
    draw("a<b: step 1", 0.25)
    draw("")
    (first, made), (last, updated) = shown
    assert "a&lt;b: step 1" in first["text/html"] and set(last.values()) == {""}
    assert 'role="progressbar"' in first["text/html"] and 'width: 25.0%"' in first["text/html"]
    assert first["text/plain"] == "a<b: step 1"
    assert updated["update"] and made["transient"] == updated["transient"]
