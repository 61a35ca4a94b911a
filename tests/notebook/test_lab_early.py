"""JupyterLab's stop button, and a cell that raises: what ran is shown and kept, and nothing of ours is in between."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from support.browsing import expect
from support.lab_cells import CELLS as REPORT
from support.lab_notebook import Notebook, opened
from support.lab_server import until

pytestmark = pytest.mark.ci

if TYPE_CHECKING:
    from playwright.sync_api import Browser

START, TRAIN, LAST, COMPILE, RAISE, BEHIND, COMPARE, PAST = range(8)
STEP = """
@jax.jit
def train_step(weights, batch):
    def loss_fn(weights):
        x = batch
        for i in range({}):
            x = jnp.tanh(x @ weights["up"] @ weights["down"] + jnp.sin(x * i))
        return jnp.mean(x ** 2)
    loss, grads = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - g, weights, grads), loss
"""
CELLS = [
    REPORT[0] + "\nimport time",
    "%%shard fsdp"
    + STEP.format(1)
    + "for i in range(3000):\n    weights, loss = train_step(weights, batch)\n    time.sleep(0.02)",
    "print(len(weights), train_step.report().ended)",
    "%%shard tp" + STEP.format(400) + "weights, loss = train_step(weights, batch)",
    "%%shard dp" + STEP.format(1) + "weights, loss = train_step(weights, batch)\nweights['gone']",
    "print('behind')",
    "%%shard dp,tp --repeat 100000 -o compared" + STEP.format(1) + "weights, loss = train_step(weights, batch)",
    "%shard history --limit 9",
]


@pytest.fixture(scope="module")
def notebook(browser: "Browser", tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with opened(browser, tmp_path_factory.mktemp("lab"), CELLS) as made:
        made.run(START)
        yield made


def stop(notebook: Notebook, cell: int, when: str, bar: int = 0) -> str:
    """Run a cell, press the stop button once the line says `when`, with so many bars, and give what stands below the
    cell at its end, which has none."""
    notebook.begin(cell)
    expect(notebook.cell(cell)).to_contain_text(when, timeout=60_000)
    bars = notebook.cell(cell).get_by_role("progressbar", name="steps done")
    expect(bars).to_have_count(bar)
    notebook.page.get_by_role("button", name="Interrupt the kernel").click()
    notebook.ended(cell)
    expect(bars).to_have_count(0)
    return notebook.cell(cell).locator(".jp-OutputArea").first.inner_text()


def test_a_training_that_is_stopped_says_where_and_shows_what_ran(notebook: Notebook):
    said = stop(notebook, TRAIN, "a call", bar=1)
    assert "Stopped at step " in said and " of 3,000, loss " in said
    assert "Traceback" not in said and "jaxshard_magic/" not in said
    widget = notebook.widget(TRAIN)
    expect(widget).to_be_visible()
    expect(widget).to_contain_text("Stopped at step ")
    notebook.run(LAST)
    expect(notebook.outputs(LAST)).to_contain_text("2 EarlyEnd(calls=")


def test_a_compile_that_is_stopped_is_one_line(notebook: Notebook):
    said = stop(notebook, COMPILE, "compiling for")
    assert said.strip() == "Stopped before train_step had run; your arrays are as they were."


def test_a_comparison_that_is_stopped_shows_and_keeps_what_is_done(notebook: Notebook):
    notebook.begin(COMPARE)
    notebook.begin(BEHIND)
    cell = notebook.cell(COMPARE)
    expect(cell).to_contain_text("running ", timeout=60_000)
    notebook.page.get_by_role("button", name="Interrupt the kernel").click()
    notebook.ended(COMPARE)
    said = cell.locator(".jp-OutputArea").first.inner_text()
    assert re.search(r"Stopped: \d of 2 strategies compiled, \d ran\.", said)
    assert "Traceback" not in said
    expect(cell.locator(".jsm")).to_contain_text("least memory: tp")
    expect(notebook.cell(BEHIND).locator(".jp-OutputArea-output")).to_have_count(0)


def test_what_was_stopped_or_raised_is_in_the_history(notebook: Notebook):
    notebook.run(PAST)
    for strategy in ("fsdp", "dp"):
        expect(notebook.outputs(PAST)).to_contain_text(strategy)


def test_a_cell_that_raises_shows_its_traceback_and_below_it_the_report(notebook: Notebook):
    notebook.begin(RAISE)
    notebook.ended(RAISE)
    cell = notebook.cell(RAISE)
    raised = re.compile(r"The cell raised KeyError: 'gone' at cell \[\d+\], line 12, after step 1")
    expect(notebook.widget(RAISE)).to_contain_text(raised)
    shown = cell.locator(".jp-OutputArea-output").all_inner_texts()
    traceback = next(text for text in shown if "KeyError" in text)
    assert "weights['gone']" in traceback
    assert "jaxshard_magic/" not in traceback
    places = [i for i, text in enumerate(shown) if "KeyError" in text]
    assert places[0] < places[-1], "the report is below"


def test_cells_that_wait_behind_one_that_is_stopped_do_not_run(notebook: Notebook):
    notebook.begin(TRAIN)
    notebook.begin(BEHIND)
    expect(notebook.cell(TRAIN)).to_contain_text("a call", timeout=60_000)
    notebook.page.get_by_role("button", name="Interrupt the kernel").click()
    until(lambda: "[*]" not in notebook.cell(BEHIND).locator(".jp-InputPrompt").inner_text(), "the cell behind")
    expect(notebook.cell(BEHIND).locator(".jp-OutputArea-output")).to_have_count(0)
