"""Cells after that of a step which call it: each loop's numbers are in the report, and other cells change nothing."""

import textwrap
import threading

import pytest
from support.cells import LOOP, STEP
from support.drawn import SLOWLY, Drawn

from jaxshard_magic.notebook import loop_progress, progress
from jaxshard_magic.report import Curve, Metrics

FIVE = LOOP.replace("range(3)", "range(5)") + "    losses.append(float(loss))\n"


def metrics(notebook) -> Metrics:
    found = notebook.run("%shard").metrics
    assert found is not None
    return found


def loss(notebook) -> Curve:
    return next(curve for curve in metrics(notebook).curves if curve.source == "step")


@pytest.fixture
def first(given):
    """A notebook whose `%%shard` cell has called its step three times."""
    given.run("%%shard fsdp" + STEP + LOOP)
    assert metrics(given).steps == 3
    return given


def test_the_report_has_the_metrics_of_a_later_cells_loop_and_of_the_last_one(first):
    for _ in range(2):
        first.run("losses = []" + FIVE)
        assert metrics(first).steps == 5
        assert loss(first).last == pytest.approx(first["losses"], rel=1e-5)


def test_cells_that_train_no_further_leave_the_metrics_of_the_last_loop(first):
    first.run("losses = []" + FIVE)
    first.run("1 + 1")
    first.run("_ = train_step(state, batch)")
    assert loss(first).last == pytest.approx(first["losses"], rel=1e-5)
    assert first["train_step"].watch is None


def test_a_later_loop_that_fails_has_its_metrics_and_the_step_runs_on(first):
    first.fails("losses = []" + FIVE + "    1 / (len(losses) - 4)")
    assert first["train_step"].watch is None
    assert loss(first).last == pytest.approx(first["losses"], rel=1e-5) and len(first["losses"]) == 4


def test_a_writer_that_a_later_cell_sets_takes_the_rows_of_all_cells_from_there(first):
    first.run("rows = []\ntrain_step.on_metrics(rows.append)")
    for _ in range(2):
        first.run("losses = []" + FIVE)
    metrics(first)
    assert [row.step for row in first["rows"]] == [*range(1, 11)]


def test_a_step_that_a_function_makes_is_followed_where_a_later_cell_calls_that(given):
    given.run(
        "%%shard fsdp\ndef train(state, steps):\n"
        + textwrap.indent(STEP, "    ")
        + "    losses = []\n    for _ in range(steps):\n        state, loss = train_step(state, batch)\n"
        "        losses.append(float(loss))\n    return losses"
    )
    given.run("losses = train(state, 4)")
    assert loss(given).last == pytest.approx(given["losses"], rel=1e-5) and len(given["losses"]) == 4
    given.run("losses = train(state, 6)")
    assert metrics(given).steps == 6 and given["losses"][3] == pytest.approx(loss(given).last[3], rel=1e-5)


def test_a_notebook_shows_how_a_later_loop_goes_and_nothing_of_other_cells(first, monkeypatch):
    lines = Drawn()
    monkeypatch.setattr(first.shell, "kernel", object(), raising=False)
    monkeypatch.setattr(progress, "line_for", lambda shell: lines)
    monkeypatch.setattr(progress, "TICK", 0.02)
    monkeypatch.setattr(loop_progress, "EVIDENT", 0.0)
    monkeypatch.setattr(loop_progress, "STANDS", 0.0)
    first.run("import time")
    first.run(
        "import threading\ntime.sleep(0.3)\n"
        "drawing = [t for t in threading.enumerate() if t.name == 'jaxshard progress']"
    )
    assert lines == [] and first["drawing"] == []
    first.run(SLOWLY)
    assert any(told.startswith("train_step: step ") for told in lines) and lines[-1] == ""
    assert not [t for t in threading.enumerate() if t.name == "jaxshard progress"]
