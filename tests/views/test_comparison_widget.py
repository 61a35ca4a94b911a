"""The widget of a comparison from Python's side: what travels, what is chosen, and how a notebook shows it."""

import json
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.utils.capture import capture_output
from support.refusals import refusal
from support.sample_comparisons import (
    COMPARISONS,
    alone,
    hostile,
    interrupted,
    many,
    measured_trials,
    none_ran,
    simulated,
)
from support.sample_leaves import leaf

from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.views.comparison.payload import packed_comparison, payload
from jaxshard_magic.views.comparison.widget import ComparisonView
from jaxshard_magic.views.show import show_live

WIDGET = "application/vnd.jupyter.widget-view+json"
MIB = 2**20
WHOLE, BF16, DP, FSDP, STAGED, HEADS = range(6)


@pytest.fixture
def view() -> ComparisonView:
    return ComparisonView(measured_trials())


def test_a_view_sends_its_comparison_packed():
    found = measured_trials()
    assert ComparisonView(found).get_state()["_data"] == packed_comparison(found)


@pytest.mark.parametrize("name", COMPARISONS)
def test_every_comparison_packs_and_unpacks_as_it_was(name: str):
    found = COMPARISONS[name]()
    data = packed_comparison(found)
    assert json.loads(zlib.decompress(data)) == json.loads(json.dumps(payload(found)))


def test_forty_trials_travel_in_few_bytes():
    assert len(packed_comparison(many())) < 8_000


def test_the_fastest_is_on_show_at_first_and_nothing_beside_it(view: ComparisonView):
    assert (view.chosen, view.other) == (BF16, None)
    assert ComparisonView(none_ran()).chosen is None


def test_a_trial_is_chosen_by_position_by_line_and_by_strategy(view: ComparisonView):
    view.chosen, view.other = FSDP, 'fsdp+tp --mesh "data=4 model=2"'
    assert (view.chosen, view.other) == (FSDP, WHOLE)
    view.chosen = "dp"
    assert view.chosen == DP
    view.chosen = view.other = None
    assert (view.chosen, view.other) == (None, None)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (6, "no trial 6 in this comparison; they are 0 to 5"),
        (-1, "no trial -1 in this comparison; they are 0 to 5"),
        (True, "no trial True in this comparison; they are 0 to 5"),
        (1.0, "no trial 1.0 in this comparison; they are 0 to 5"),
        ("fsdp+tp", "2 trials of 'fsdp+tp'; say which: "),
        ("zero", "no trial 'zero'; say which: "),
    ],
)
def test_a_trial_that_is_not_there_is_refused_in_one_line(view: ComparisonView, value: Any, message: str):
    for name in ("chosen", "other"):
        assert refusal(setattr, view, name, value).startswith(message)
    assert (view.chosen, view.other) == (BF16, None)


def test_no_trial_stands_beside_itself(view: ComparisonView):
    view.other = BF16
    assert view.other is None
    view.other = DP
    view.chosen = DP
    assert (view.chosen, view.other) == (DP, None)


def test_what_the_reader_clicks_is_read_in_python(view: ComparisonView):
    view.other = FSDP
    seen = []
    view.observe(lambda change: seen.append((change["name"], change["new"])), ["chosen", "other"])
    view.set_state({"chosen": FSDP, "other": BF16})
    assert (view.chosen, view.other) == (FSDP, BF16), "a pair that changes places"
    assert sorted(seen) == [("chosen", FSDP), ("other", BF16)]


@pytest.mark.parametrize("junk", ["no such", 1e9, -1, [], {}, True])
def test_a_front_end_that_sends_junk_is_told_what_holds(view: ComparisonView, junk: Any, monkeypatch):
    told = []
    monkeypatch.setattr(view, "send_state", told.append)
    view.set_state({"chosen": junk, "other": DP})
    assert (view.chosen, view.other) == (BF16, DP)
    assert told[-1] == ["chosen"]


def test_views_of_one_kernel_share_their_module_which_is_not_that_of_reports(view: ComparisonView):
    report = view.comparison.trials[0].report
    assert report is not None
    assert ComparisonView(simulated())._module is view._module is not report.view._module


def test_leaves_fold_only_where_all_trials_lay_them_out_alike():
    """Three layers; one trial cuts the last of them otherwise."""
    axes = {"data": 8}
    paths = [f"blocks.{i}.kernel" for i in range(4)]
    whole = tuple(leaf(path, (1024, 1024), (), axes) for path in paths)
    cut = (*(leaf(path, (1024, 1024), ("data",), axes) for path in paths[:3]), whole[3])
    known = payload(_with_leaves(whole, cut))["pairs"]["leaves"]
    assert (known["path"], known["count"]) == (["blocks.0-2.kernel"], [3])
    assert known["held"] == [[12 * MIB], [3 * MIB // 2]]  # three of 4 MiB, whole and over 8


def test_optimizer_leaves_that_follow_their_parameters_stand_behind_them():
    axes = {"data": 8}
    specs = [((), ()), (("data",), ("data",)), ((), ("data",))]
    trials = [(leaf("params.w", (8, 8), p, axes), leaf("opt.mu.w", (8, 8), o, axes, "optimizer")) for p, o in specs]
    known = payload(_with_leaves(*trials[:2]))["pairs"]["leaves"]
    assert (known["path"], known["follow"]) == (["params.w"], [1])
    known = payload(_with_leaves(*trials))["pairs"]["leaves"]
    assert (known["path"], known["follow"]) == (["params.w", "opt.mu.w"], [0, 0])


def _with_leaves(*leaves: tuple[Any, ...]) -> Comparison:
    trial = alone().trials[0]
    assert trial.report is not None
    made = (replace(trial, report=replace(trial.report, leaves=each)) for each in leaves)
    return Comparison("train_step", tuple(made))


def test_collectives_of_one_kind_over_the_same_axes_are_one_row():
    moved = payload(measured_trials())["pairs"]["moved"]
    kinds = [(kind, axes) for kind, axes, *_ in moved[WHOLE]]
    assert len(kinds) == len({(kind, tuple(axes or ())) for kind, axes in kinds})
    report = measured_trials().trials[WHOLE].report
    assert report is not None and report.collectives is not None
    assert sum(row[2] for row in moved[WHOLE]) == sum(c.wire_bytes for c in report.collectives)
    assert moved[HEADS] is None


def test_names_are_printable_wherever_they_travel():
    assert "\x1b" not in json.dumps(payload(hostile()), ensure_ascii=False)


@pytest.fixture
def kernel(notebook, monkeypatch) -> Iterator[Any]:
    """A shell with the extension loaded that takes itself for a kernel's."""
    monkeypatch.delenv("JAXSHARD_VIEW", raising=False)
    notebook.shell.kernel = SimpleNamespace()
    yield notebook.shell


def outputs(found: Comparison, how: str | None = None) -> tuple[list[dict[str, Any]], str]:
    with capture_output() as captured:
        show_live(found, how)
    return [output.data for output in captured.outputs], captured.stdout


def test_a_notebook_gets_the_widget_and_then_its_html_twin(kernel):
    (widget, twin), _ = outputs(interrupted())
    assert widget["text/plain"] == ""
    assert twin["text/plain"] == interrupted().to_text()
    name = f"jsm-static-{widget[WIDGET]['model_id']}"
    assert twin["text/html"].startswith(f'<div class="{name}">')
    assert interrupted().to_html() in twin["text/html"]


def test_the_magics_show_one_as_the_session_says(kernel):
    kernel.user_ns["found"] = simulated()
    for view, kinds in (("auto", [True, False]), ("html", [False]), ("widget", [True])):
        kernel.run_line_magic("config", f"ShardSession.view = {view!r}")
        assert [WIDGET in output for output in run(kernel, "display(found)")] == kinds


def test_unloading_takes_the_display_away(kernel):
    kernel.user_ns["found"] = simulated()
    kernel.run_line_magic("unload_ext", "jaxshard_magic")
    assert [WIDGET in output for output in run(kernel, "display(found)")] == [False]


def run(shell: Any, code: str) -> list[dict[str, Any]]:
    with capture_output() as captured:
        shell.run_cell(code).raise_error()
    return [output.data for output in captured.outputs]


def test_it_is_shown_as_html_as_text_or_as_the_widget_alone(kernel):
    found = simulated()
    assert outputs(found, "html")[0] == [{"text/plain": found.to_text(), "text/html": found.to_html()}]
    assert outputs(found, "text")[0] == [{"text/plain": found.to_text()}]
    (widget,), _ = outputs(found, "widget")
    assert set(widget) == {WIDGET, "text/plain"}


def test_a_terminal_gets_text_alone(bare_shell):
    assert outputs(simulated()) == ([], simulated().to_text() + "\n")


def test_where_widgets_do_not_import_it_is_html_and_one_line_says_so(kernel, monkeypatch):
    for name in ("live_view", "comparison.widget"):
        monkeypatch.delitem(sys.modules, f"jaxshard_magic.views.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "anywidget", None)
    (output,), said = outputs(simulated())
    assert "text/html" in output
    assert said.startswith("no widgets here, so this is HTML: ") and said.count("\n") == 1
