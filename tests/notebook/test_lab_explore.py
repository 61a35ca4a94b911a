"""The explorer in a real JupyterLab: edited there, compiled by the kernel, and its line written into the next cell."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from support.browsing import expect
from support.lab_cells import CELLS as REPORT
from support.lab_cells import SHARD, START
from support.lab_notebook import Notebook, opened
from support.lab_server import until

pytestmark = pytest.mark.ci

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator

EXPLORE, LAST = 2, -1
RULE = "%%shard fsdp --rule \"weights.up=P('data')\""
CELLS = [REPORT[START], REPORT[SHARD], "%shard explore -o ex", "print(ex.line)"]


@pytest.fixture(scope="module")
def notebook(browser: "Browser", tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """JupyterLab with an explorer of a step that ran."""
    with opened(browser, tmp_path_factory.mktemp("lab"), CELLS) as made:
        for cell in (START, SHARD, EXPLORE):
            made.run(cell)
        expect(made.widget(EXPLORE)).to_be_visible()
        yield made


def cells(notebook: Notebook) -> list[str]:
    """The sources of the notebook's cells."""
    code = "jupyterapp.shell.currentWidget.content.model.sharedModel.cells.map(cell => cell.getSource())"
    return notebook.page.evaluate(code)


def button(notebook: Notebook, name: str) -> "Locator":
    return notebook.widget(EXPLORE).get_by_role("button", name=name, exact=True)


def edit(notebook: Notebook) -> None:
    widget = notebook.widget(EXPLORE)
    widget.get_by_role("combobox", name="array").fill("weights.up")
    widget.get_by_role("combobox", name="array").press("Enter")
    chip = widget.get_by_role("button", name="cut dim 0 over data")
    if chip.get_attribute("aria-pressed") == "false":
        chip.click()
    expect(widget.locator(".jsm-ex-line code")).to_have_text(RULE)


def test_an_edit_is_pythons_at_once_and_python_s_is_shown(notebook: Notebook):
    edit(notebook)
    for _ in range(20):  # a cell that is run at the very moment may come before the edit
        notebook.run(LAST)
        if notebook.outputs(LAST).inner_text().strip() == RULE:
            break
    expect(notebook.outputs(LAST)).to_have_text(RULE)


def test_its_button_compiles_in_the_kernel(notebook: Notebook):
    edit(notebook)
    button(notebook, "compile").click()
    table = notebook.widget(EXPLORE).get_by_role("table")
    expect(table).to_contain_text("at the peak")
    expect(notebook.widget(EXPLORE)).to_contain_text("this line, nothing has run")
    for _ in range(2):  # the same answer again
        expect(button(notebook, "compile")).to_be_visible()
        button(notebook, "compile").click()
    expect(button(notebook, "compile")).to_be_visible()


def test_the_whole_cell_is_written_below_and_runs_when_it_is_run(notebook: Notebook):
    edit(notebook)
    before = cells(notebook)
    button(notebook, "to the next cell").click()
    expect(notebook.widget(EXPLORE)).to_contain_text("written into the cell below; nothing has run")
    after = cells(notebook)
    body = REPORT[SHARD].partition("\n")[2]
    assert after == [*before[: EXPLORE + 1], f"{RULE}\n{body}", *before[EXPLORE + 1 :]]
    prompt = notebook.page.locator(".jp-CodeCell").nth(EXPLORE + 1).locator(".jp-InputPrompt")
    assert re.fullmatch(r"\[\s*\]:", prompt.inner_text())
    notebook.widget(EXPLORE).get_by_role("button", name="reset").click()
    button(notebook, "to the next cell").click()
    until(lambda: cells(notebook)[EXPLORE + 1].startswith("%%shard fsdp\n"), "the same cell")
    assert len(cells(notebook)) == len(after), "the cell that it wrote has the new line"
    notebook.run(EXPLORE + 1)
    expect(notebook.widget(EXPLORE + 1)).to_contain_text("8 simulated CPU devices")


def test_jupyterlabs_own_styles_do_not_squeeze_it(notebook: Notebook):
    widget = notebook.widget(EXPLORE)
    assert widget.evaluate("root => root.scrollWidth <= root.clientWidth")
    for chip in widget.locator(".jsm-ex-chip").all():
        assert 20 <= chip.evaluate("node => node.getBoundingClientRect().height") <= 24
