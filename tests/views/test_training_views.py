"""A run's metrics as they are shown: in a report, two runs over each other, and under the cell while it trains."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.browsing import Stage, expect
from support.sample_comparisons import of_runs
from support.sample_metrics import metrics, run
from support.sample_reports import attached

from jaxshard_magic.notebook import training_view
from jaxshard_magic.notebook.training_view import TrainingOutput
from jaxshard_magic.views import show as shows
from jaxshard_magic.views.training import chart, payload

HOSTILE = "<script>alert('x')</script>\n\u202eacc"


def trained(**how):
    return replace(attached(), metrics=metrics(**how))


def test_a_report_tells_its_metrics_as_text_and_html():
    report = trained()
    for said in (report.to_text(100), report.to_html()):
        assert "Training: loss 0.025 after 400 steps, from 10, in 4.80" in said.replace("\u202f", " ")
        assert "64 a step, of batch.x[64,16]" in said
    text = report.to_text(100)
    assert re.search(r"  loss +10 +0\.025 +10 +0\.025  [▁▂▃▄▅▆▇█]+▁\n", text)
    assert re.search(r"  devices at work +97% +97% +97% +97% +█+", text)
    assert attached().to_html().count("Training:") == attached().to_text(100).count("Training:") == 0


@pytest.mark.parametrize("width", [60, 80, 100])
def test_text_keeps_to_its_columns(width):
    text = trained(own={"a" * 90: 1e-30, "b": -1e30}).to_text(width)
    part = text[text.index("Training:") :].split("\n\n")[0]
    assert max(map(len, part.splitlines())) <= width


def test_names_are_text_and_never_markup():
    html = trained(own={HOSTILE: 1.0}).to_html()
    assert "<script>" not in html and "\u202e" not in html and "&lt;script&gt;" in html


def test_a_loss_that_is_no_number_leaves_a_gap_and_is_told_by_its_step():
    report = trained(astray=301)
    assert "loss is not finite from step 301 on; at step 300 it was." in report.to_text(100)
    assert "loss NaN after 400 steps, from 10" in report.to_html()
    curve = metrics(astray=301)["loss"]
    assert [len(part) for part in chart.parts_of(curve)] == [sum(m is not None for m in curve.mean)]
    assert len(chart.parts_of(curve)[0]) == 300 / 4


def test_two_runs_lie_over_each_other_each_with_its_dash():
    both = of_runs(metrics(), metrics(300), None)
    html, text = both.to_html(), both.to_text(100)
    section = html[html.index("<b>Curves</b>") :].partition("</details>")[0]
    assert "fsdp+tp #3" in section and "fsdp+tp #5" in section and "fsdp+tp #7" not in section
    drawing = section[section.index("<b>loss</b>") :]
    lines = re.findall(r'<path d="M[^"]*" fill="none" stroke="currentColor"[^>]*>', drawing.partition("</svg>")[0])
    assert ["stroke-dasharray" in line for line in lines] == [False, True]
    assert re.search(r"Curves\n  loss +first +last  over the steps\n  fsdp\+tp #3 +10 +0\.025  [▁-█]", text)
    assert "Curves" not in of_runs(metrics(), None).to_html() + of_runs(metrics(), None).to_text()


def test_a_chart_is_small_however_long_the_run():
    made = metrics(40_000)
    assert len(chart.chart([made["loss"]])) < 8_000
    assert len(replace(attached(), metrics=made).to_html()) - len(attached().to_html()) < 40_000


class Page:
    """What a front end keeps of a training: it takes what a widget is told."""

    def __init__(self, update: dict, text: str, static: str, how: str):
        self.told, self.static, self.curves = [], [static], {}
        self._take(update)

    def _take(self, update: dict) -> None:
        json.dumps(update, allow_nan=False)
        self.told.append(update)
        for curve in update["curves"]:
            buckets = self.curves.get(curve["name"], [])[: curve["start"]]
            self.curves[curve["name"]] = buckets + curve["buckets"]

    def tell(self, update: dict) -> None:
        self._take(update)

    def keep(self, update: dict, text: str, static: str) -> None:
        self.curves = {}
        self._take(update)
        self.static.append(static)


@pytest.fixture
def page(monkeypatch):
    """`page(run)` is the view of a run in a notebook, whose clock is `page.now`, and what its page keeps."""
    made = SimpleNamespace(now=100.0, pages=[])

    def growing(*given):
        made.pages.append(Page(*given))
        return made.pages[-1]

    monkeypatch.setattr(shows, "shows_growing", lambda how: how != "text")
    monkeypatch.setattr(shows, "Growing", growing)
    monkeypatch.setattr(training_view, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


def test_a_view_appears_once_training_is_evident_and_takes_the_lines_place(page):
    view = TrainingOutput(run(400), "auto")
    view("step 1", None)
    assert not view.shown
    page.now += training_view.EVIDENT
    view("", None)
    assert not view.shown
    view("step 400 of 800", 0.5)
    assert view.shown and page.pages[0].told[0]["line"] == "step 400 of 800"
    assert "<b>step 400 of 800</b>" in page.pages[0].static[0] and "<svg" in page.pages[0].static[0]


def test_a_short_run_and_a_reader_of_text_have_no_view(page):
    for view in (
        TrainingOutput(run(4), "auto"),
        TrainingOutput(run(400), "text"),
        TrainingOutput(run(9), "auto", False),
    ):
        with view:
            view("step 1", None)
            page.now += 10
            view("step 4", None)
        assert not view.shown


def test_what_is_new_adds_up_to_all_there_is(page):
    made = run(10)
    view = TrainingOutput(made, "auto")
    with view:
        for part in range(60):  # long enough for buckets to merge twice
            for step in range(made.steps + 1, made.steps + 11):
                made.add_row(training_row(step))
                made.steps = step
            page.now += 0.6
            view(f"step {made.steps}", None)
            if view.shown:
                whole = payload.update_payload(0, made.tails({}), "", None)["curves"]
                assert page.pages[0].curves == {curve["name"]: curve["buckets"] for curve in whole}, part
    shown = page.pages[0]
    assert [update["number"] for update in shown.told] == list(range(1, len(shown.told) + 1))
    assert shown.static[-1] == "" and shown.told[-1]["line"].startswith("loss ")
    deltas = [len(json.dumps(update)) for update in shown.told[1:-1]]
    assert sorted(deltas)[len(deltas) // 2] < len(json.dumps(shown.told[-1])) / 4


def training_row(step: int):
    from jaxshard_magic.live import MetricsRow

    return MetricsRow(step, step / 100, {"loss": 10 / step, "acc": step / 600})


@pytest.mark.ci
def test_hours_of_training_tell_their_page_seldom(page):
    made, hours = run(400), 6 * 3600
    with TrainingOutput(made, "auto") as view:
        for _ in range(2 * hours):
            page.now += 0.5
            made.steps += 1
            view(f"step {made.steps}", None)
    assert hours / training_view.MAX_UPDATE_S / 2 < len(page.pages[0].told) < hours / training_view.MAX_UPDATE_S + 2_500
    assert len(page.pages[0].static) < 200


@pytest.mark.ci
def test_a_report_has_a_tab_for_its_training(show: Stage):
    shown = show(trained(astray=301), ["training"])
    expect(shown.panel.locator(".jsm-lead")).to_contain_text("loss NaN after 400 steps, from 10")
    assert shown.panel.locator("figure").count() == 5
    expect(shown.panel.locator("figure").first.locator(".jsm-curve-astray")).to_have_count(1)
    rows = shown.panel.locator("tbody tr").all_inner_texts()
    assert rows[0].split() == ["loss", "10", "0.03333", "10", "NaN"], "10 / 300 is the least that is finite"
    assert show(attached()).root.get_by_role("tab", name="Training").count() == 0
    picture = trained().drawn("training", "dark")
    assert picture.startswith("<svg") and picture.count("<svg") == 6 and "loss" in picture


def test_the_widget_of_a_comparison_draws_two_runs_over_each_other(show: Stage):
    shown = show(of_runs(metrics(), metrics(300), None))
    part = shown.root.get_by_role("region", name="Curves")
    expect(part.locator(".jsm-curve-legend")).to_contain_text("fsdp+tp #5")
    lines = part.locator("figure").first.locator(".jsm-curve-mean")
    assert [line.get_attribute("stroke-dasharray") for line in lines.all()] == [None, "5 3"]
    assert shown.violations(part) == [] and shown.overflowing() == []
    assert show(of_runs(metrics(), None)).root.get_by_role("region", name="Curves").count() == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_widget_draws_what_it_is_told_in_both_themes(show: Stage, theme):
    made = run(100)
    tails = made.tails({})
    whole = payload.update_payload(1, tails, "step 100 of 800, loss 0.1", 0.125)
    for width in (900, 620):
        shown = show(payload.packed_training(whole), width=width, theme=theme, bundle="live")
        shown.settle()
        assert shown.overflowing() == [] and shown.violations() == []
    charts = shown.root.locator("figure")
    expect(shown.root.locator(".jsm-lead")).to_have_text("step 100 of 800, loss 0.1")
    expect(shown.root.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "12.5")
    assert [text.split(" ")[0] for text in charts.locator("div").all_text_contents()][:2] == ["loss", "acc"]
    before = charts.first.locator(".jsm-curve-mean").get_attribute("d")

    later = run(200, astray=150)
    more = payload.update_payload(2, later.tails(payload.bucket_counts(tails)), "step 200 of 800, loss NaN", 0.25)
    shown.page.evaluate("update => model.tell('msg:custom', {kind: 'update', update})", more)
    shown.settle()
    expect(shown.root.locator(".jsm-lead")).to_have_text("step 200 of 800, loss NaN")
    assert charts.first.locator(".jsm-curve-mean").get_attribute("d") != before
    expect(charts.first.locator(".jsm-curve-astray")).to_have_count(1)

    missed = payload.update_payload(9, later.tails({}), "step 999", 0.5)
    shown.page.evaluate("update => model.tell('msg:custom', {kind: 'update', update})", missed)
    shown.settle()
    expect(shown.root.locator(".jsm-lead")).to_have_text("step 200 of 800, loss NaN")


def test_the_widget_leaves_nothing_behind_and_takes_names_as_text(show: Stage):
    made = run(50, own={HOSTILE: 1.0})
    shown = show(payload.packed_training(payload.update_payload(1, made.tails({}), HOSTILE, None)), bundle="live")
    shown.settle()
    assert shown.root.locator("script").count() == 0 and "<script>" in shown.root.inner_text()
    expect(shown.root.get_by_role("progressbar")).to_be_hidden()
    assert show.remove() == 0
