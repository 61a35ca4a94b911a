"""One real JupyterLab: a report appears, is pointed at, tells Python, and is still there when reopened."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.browsing import expect
from support.lab_cells import AGAIN, CELLS, CHIP, COMPARE, LOOP, LOOPED, PRECISION, READ, SHARD, START, STRATEGY
from support.lab_notebook import Notebook, opened
from support.lab_server import until

pytestmark = pytest.mark.ci

if TYPE_CHECKING:
    from playwright.sync_api import Browser


WATCH = """at => {
  const cell = document.querySelectorAll(".jp-CodeCell")[at];
  globalThis.seen = []; // for each frame the height of the cell's outputs, and whether the twin is seen
  const look = () => {
    const [area, twin] = [cell.querySelector(".jp-Cell-outputArea"), cell.querySelector("[class*=jsm-static-]")];
    const shown = twin !== null && twin.checkVisibility({ visibilityProperty: true });
    seen.push([area?.getBoundingClientRect().height ?? 0, shown]);
    requestAnimationFrame(look);
  };
  look();
}"""


@pytest.fixture(scope="module")
def notebook(browser: "Browser", tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """JupyterLab with the notebook of CELLS open in it, run up to its first report."""
    with opened(browser, tmp_path_factory.mktemp("lab"), CELLS) as made:
        for cell in (START, SHARD):
            made.run(cell)
        expect(made.widget(SHARD)).to_be_visible()
        yield made


def test_a_report_is_pointed_at_and_python_sees_it(notebook: Notebook):
    widget = notebook.widget(SHARD)
    expect(widget).to_contain_text("8 simulated CPU devices")
    for name in ("Memory", "Communication", "Layout"):
        widget.get_by_role("tab", name=name).click()
        expect(widget.get_by_role("tab", name=name)).to_have_attribute("aria-selected", "true")
    widget.locator('[role=treeitem][title^="weights.down "]').click()
    widget.locator(".jsm-map").get_by_text("6", exact=True).first.click(force=True)
    widget.get_by_role("tab", name="Memory").click()

    def python_sees() -> bool:  # comm messages go over a subshell: a cell that runs at once may overtake them
        notebook.run(READ)
        return notebook.outputs(READ).inner_text().strip() == "memory weights.down 6"

    until(python_sees, "Python to see what was pointed at")


def test_a_picture_is_drawn_by_the_kernel_and_saved_by_the_browser(notebook: Notebook):
    widget = notebook.widget(SHARD)
    widget.get_by_role("tab", name="Layout").click()
    with notebook.page.expect_download() as download:
        widget.get_by_role("button", name="Save this picture as svg").click()
    assert download.value.suggested_filename == "layout.svg"
    text = Path(download.value.path()).read_text("utf-8")
    assert text.startswith("<svg ") and "weights.down" in text


def test_the_live_report_hides_its_static_twin(notebook: Notebook):
    expect(notebook.twin(SHARD)).to_have_count(1)
    expect(notebook.twin(SHARD)).to_be_hidden()


def test_jupyterlabs_own_styles_do_not_squeeze_it(notebook: Notebook):
    widget = notebook.widget(SHARD)
    widget.get_by_role("tab", name="Layout").click()
    for name in widget.locator("dt").all():
        assert name.evaluate("node => node.getBoundingClientRect().height") < 25
    wide = "root => root.scrollWidth <= root.clientWidth"
    assert widget.evaluate(wide)


def test_a_second_report_brings_no_second_module(notebook: Notebook):
    times, before = notebook.sent()
    notebook.page.evaluate(WATCH, AGAIN)
    notebook.run(AGAIN)
    expect(notebook.widget(AGAIN)).to_be_visible()
    again, after = notebook.sent()
    assert (times, again) == (1, 1)
    assert after - before < 60_000


def test_a_report_comes_without_its_twin_being_seen_and_without_a_jump_to_nothing(notebook: Notebook):
    seen = notebook.page.evaluate("seen")
    assert not any(twin for _, twin in seen), "the twin was never seen"
    heights = [height for height, _ in seen]
    came = next(i for i, height in enumerate(heights) if height >= 640)
    assert min(heights[came:]) >= 640


def test_after_a_further_loop_the_report_is_of_that_loop(notebook: Notebook):
    notebook.run(LOOP)
    notebook.run(LOOPED)
    expect(notebook.widget(LOOPED)).to_contain_text(" of 7 calls")


@pytest.mark.parametrize(
    ("cell", "offered"),
    [(STRATEGY, {"fsdp"}), (PRECISION, {"bf16", "fp16"}), (CHIP, {"v5e", "v5p"})],
)
def test_tab_offers_what_may_stand_there_alone(notebook: Notebook, cell: int, offered: set[str]):
    editor = notebook.cell(cell).locator(".cm-content")
    editor.click()
    notebook.page.keyboard.press("Control+End")
    notebook.page.keyboard.press("Tab")
    found = notebook.page.locator(".jp-Completer:visible .jp-Completer-match")
    expect(found.first).to_be_visible()
    assert offered <= set(found.all_inner_texts())
    begins = {STRATEGY: "fs", PRECISION: "", CHIP: "v5"}[cell]
    assert all(text.startswith(begins) and not text.startswith("--") for text in found.all_inner_texts())
    notebook.page.keyboard.press("Escape")


def test_a_comparison_is_stopped_by_its_button_and_keeps_what_is_done(notebook: Notebook):
    cell = notebook.page.locator(".jp-CodeCell").nth(COMPARE)
    cell.locator(".jp-InputPrompt").click()
    notebook.page.evaluate("() => void jupyterapp.commands.execute('notebook:run-cell')")  # that waits for the cell
    stop = cell.get_by_role("button", name="Stop, and keep what is done")
    expect(cell).to_contain_text(re.compile("[Ll]east memory: "), timeout=60_000)  # the table grows meanwhile
    stop.click()
    until(lambda: re.fullmatch(r"\[\d+\]:", cell.locator(".jp-InputPrompt").inner_text()), "the cell to end")
    expect(stop).to_have_count(0)
    expect(cell.locator(".jsm")).to_contain_text(re.compile("Interrupted|were not tried"))
    expect(cell).not_to_contain_text("Traceback")


def test_nothing_is_fetched_from_elsewhere(notebook: Notebook):
    assert notebook.outside == []


def test_a_report_turns_dark_with_jupyterlab(notebook: Notebook):
    for theme, said in (("JupyterLab Dark", "dark"), ("JupyterLab Light", "light")):
        notebook.do("apputils:change-theme", theme=theme)
        expect(notebook.widget(SHARD)).to_have_attribute("data-theme", said)


def test_nbconvert_keeps_the_report(notebook: Notebook):
    from nbconvert import HTMLExporter  # seconds, where these tests do not run

    html, _ = HTMLExporter().from_filename(str(notebook.saved()))
    assert "jsm-static-" in html
    assert "weights.down" in html


def test_a_reopened_notebook_shows_the_report_without_its_kernel(notebook: Notebook):
    notebook.saved()
    notebook.server.shut_down_kernels()
    notebook.open()
    expect(notebook.twin(SHARD)).to_be_visible()
    expect(notebook.twin(SHARD)).to_contain_text("weights.down")
    lost = notebook.page.locator(".jp-CodeCell").nth(SHARD).get_by_text("model not found")
    expect(lost).to_have_count(1)
    expect(lost).to_be_hidden()
