"""How a report is shown: the widget and its HTML twin, HTML, or text; and what a reader without widgets gets."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from IPython.utils.capture import capture_output
from ipywidgets import Widget
from nbclient import NotebookClient
from support.sample_choices import measured
from support.sample_reports import attached, hostile

from jaxshard_magic.report import Report
from jaxshard_magic.views.format import SPACE
from jaxshard_magic.views.widget_page import MIME, rebuild_document

WIDGET = "application/vnd.jupyter.widget-view+json"


@dataclass
class Shown:
    """The outputs of displaying a report, and what was printed beside them."""

    outputs: list[dict[str, Any]]
    metadata: list[dict[str, Any]] = field(default_factory=list)
    printed: str = ""


def shown(shell, report: Any) -> Shown:
    """What a cell sends that displays the report."""
    shell.user_ns["report"] = report
    with capture_output() as captured:
        shell.run_cell("display(report)").raise_error()
    outputs = captured.outputs
    return Shown([o.data for o in outputs], [o.metadata or {} for o in outputs], captured.stdout)


@pytest.fixture
def kernel(notebook, monkeypatch) -> Iterator[Any]:
    """A shell with the extension loaded that takes itself for a kernel's."""
    monkeypatch.delenv("JAXSHARD_VIEW", raising=False)
    notebook.shell.kernel = SimpleNamespace()
    yield notebook.shell


def test_a_notebook_gets_the_widget_and_then_its_html_twin(kernel):
    report = attached()
    widget, twin = shown(kernel, report).outputs
    assert widget[WIDGET]["model_id"] == report.view.model_id
    assert widget["text/plain"] == ""
    assert twin["text/plain"] == report.to_text()
    head, rest = twin["text/html"].split(">", 1)
    assert head == f'<div class="jss jsm-static-{report.view.model_id}"'
    assert rest.partition("<style>")[0] == report.to_html().split(">", 1)[1]


def test_a_report_shows_itself_so_without_the_magics_too(kernel):
    kernel.run_line_magic("unload_ext", "jaxshard_magic")
    assert [WIDGET in output for output in shown(kernel, attached()).outputs] == [True, False]


def test_a_terminal_gets_text_alone(notebook, capsys):
    report = attached()
    notebook.shell.user_ns["report"] = report
    capsys.readouterr()
    notebook.run("report")
    assert capsys.readouterr().out.strip().endswith(report.to_text())
    assert "view" not in report.__dict__


def test_a_choice_is_a_widget_with_the_report_of_what_was_chosen_below_it(kernel):
    choice = measured()
    widget, twin, below, under = shown(kernel, choice).outputs
    assert widget[WIDGET]["model_id"] == choice.view.model_id
    assert twin["text/plain"] == choice.to_text() and choice.to_html() in twin["text/html"]
    assert choice.report is not None
    assert below[WIDGET]["model_id"] == choice.report.view.model_id
    assert under["text/plain"] == choice.report.to_text()
    ran = attached()
    kernel.magics_manager.registry["ShardMagics"].session.went_on = (choice, ran)
    assert shown(kernel, choice).outputs[2][WIDGET]["model_id"] == ran.view.model_id


def test_a_choice_without_widgets_is_its_html_alone(kernel):
    kernel.run_line_magic("config", "ShardSession.view = 'html'")
    choice = measured()
    (page,) = shown(kernel, choice).outputs
    assert page["text/html"] == choice.to_html() and WIDGET not in page


def test_the_session_chooses_html_without_a_widget(kernel):
    kernel.run_line_magic("config", "ShardSession.view = 'html'")
    report = attached()
    (output,) = shown(kernel, report).outputs
    assert output == {"text/plain": report.to_text(), "text/html": report.to_html()}
    assert "view" not in report.__dict__


def test_the_session_chooses_text(kernel):
    kernel.run_line_magic("config", "ShardSession.view = 'text'")
    (output,) = shown(kernel, attached()).outputs
    assert output == {"text/plain": attached().to_text()}


def test_the_session_chooses_the_widget_alone(kernel):
    kernel.run_line_magic("config", "ShardSession.view = 'widget'")
    (output,) = shown(kernel, attached()).outputs
    assert set(output) == {WIDGET, "text/plain"}


def test_a_variable_sets_the_default(bare_shell, monkeypatch):
    monkeypatch.setenv("JAXSHARD_VIEW", "html")
    bare_shell.kernel = SimpleNamespace()
    (output,) = shown(bare_shell, attached()).outputs
    assert "text/html" in output
    bare_shell.run_line_magic("load_ext", "jaxshard_magic")
    assert bare_shell.magics_manager.registry["ShardMagics"].session.view == "html"
    (output,) = shown(bare_shell, attached()).outputs
    assert "text/html" in output


@pytest.mark.parametrize("made", [attached, measured])
def test_a_notebook_for_a_book_keeps_what_draws_the_widget(kernel, made):
    kernel.run_line_magic("config", "ShardSession.view = 'page'")
    report = made()
    (output,) = shown(kernel, report).outputs
    assert set(output) == {"text/plain", "text/html", MIME}
    assert output["text/html"] == report.to_html() and "<script" not in output["text/html"]
    kept = json.loads(json.dumps(output[MIME]))
    assert 'id="jsm-page"' in rebuild_document("report", output["text/html"], kept["views"])


def test_a_variable_with_a_typo_is_told_and_the_report_shown(bare_shell, monkeypatch):
    monkeypatch.setenv("JAXSHARD_VIEW", "htm")
    found = shown(bare_shell, attached())
    assert ["text/html" in output for output in found.outputs] == [True]
    assert "no view 'htm'. Did you mean 'html'? The views are auto, widget, html, page, data, text" in found.printed


def test_unloading_takes_the_choice_out_again(kernel):
    kernel.run_line_magic("config", "ShardSession.view = 'html'")
    kernel.run_line_magic("unload_ext", "jaxshard_magic")
    formatter = kernel.display_formatter.ipython_display_formatter
    assert Report not in formatter.type_printers
    assert ("jaxshard_magic.report", "Report") not in formatter.deferred_printers
    assert len(shown(kernel, attached()).outputs) == 2


def test_a_report_whose_widgets_were_closed_gets_a_new_one(kernel):
    report = attached()
    old = report.view.model_id
    Widget.close_all()
    widget, _ = shown(kernel, report).outputs
    assert widget[WIDGET]["model_id"] == report.view.model_id != old


def test_where_widgets_do_not_import_it_is_html_and_one_line_says_so(kernel, monkeypatch):
    for name in ("live_view", "widget"):
        monkeypatch.delitem(sys.modules, f"jaxshard_magic.views.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "anywidget", None)
    found = shown(kernel, attached())
    (output,) = found.outputs
    assert "text/html" in output
    assert found.printed.startswith("no widgets here, so this is HTML: ")
    assert found.printed.count("\n") == 1


def test_colab_is_told_where_its_widget_manager_lies(kernel, monkeypatch):
    colab = SimpleNamespace(
        enable_custom_widget_manager=lambda: None, _widgets=SimpleNamespace(_installed_url="https://manager")
    )
    monkeypatch.setitem(sys.modules, "google.colab.output", colab)
    widget, twin = shown(kernel, attached()).metadata
    assert widget[WIDGET] == {"colab": {"custom_widget_manager": {"url": "https://manager"}}}
    assert not twin


def test_names_cannot_break_out_of_what_is_shown(kernel):
    widget, twin = shown(kernel, hostile()).outputs
    assert "<script" not in twin["text/html"] and "<i>v5" not in twin["text/html"]
    assert "\x1b" not in twin["text/plain"]
    assert "script" not in str(widget)


def test_a_real_kernel_sends_both_and_python_reads_the_selection(tmp_path):
    (tmp_path / "report.json").write_text(attached().to_json(), encoding="utf-8")
    cells = [
        "from jaxshard_magic import Report\nreport = Report.from_json(open('report.json').read())\nreport",
        "%load_ext jaxshard_magic\n%config ShardSession.view = 'html'\nOut[1]",
        "report.view.leaf = 'rng'\nprint(Out[1].view.leaf)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(
        notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    first, second, third = (cell.outputs for cell in client.execute().cells)
    assert [output.output_type for output in (*first, *second)] == [
        "display_data",
        "display_data",
        "execute_result",
    ]
    assert WIDGET in first[0].data
    assert "jsm-static-" in first[1].data["text/html"]
    assert "5.09 of 15.75 GiB" in first[1].data["text/plain"].replace(SPACE, " ")
    assert WIDGET not in second[0].data
    assert third[0].text == "rng\n"
