"""One number, one meaning: a quantity reads the same in every view that tells it, of every sample."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support.browsing import Stage
from support.figures_told import coarse, leaf_figures, of_html, of_markdown, of_payload, plain, told
from support.sample_choices import CHOICES
from support.sample_comparisons import COMPARISONS
from support.sample_explorers import EXPLORERS
from support.sample_pipelines import PIPELINES, reported
from support.sample_reports import SAMPLES, attached, measured, overlapped, profiled, trained
from support.tables_told import tabled
from support.thinned import thinned

import jaxshard_magic
from jaxshard_magic.report import Report
from jaxshard_magic.schedule import compare
from jaxshard_magic.views import explorer_payload, words
from jaxshard_magic.views.comparison.payload import payload as comparison_payload
from jaxshard_magic.views.format import UNKNOWN, byte_text
from jaxshard_magic.views.payload import payload

REPORTS: dict[str, Callable[[], Report]] = {**SAMPLES, "reported": reported}
SEEN_EVERYWHERE = ("peak", "sent", "measured step", "predicted step", "compile time", "limit")


def views_of(report: Report) -> dict[str, str]:
    return {
        "text": plain(report.to_text(100)),
        "narrow text": plain(report.to_text(60)),
        "Markdown": of_markdown(report.to_markdown()),
        "html": of_html(report.to_html()),
        "widget": of_payload(payload(report)),
    }


def differing(views: Mapping[str, Mapping[Any, set[str]]]) -> dict[Any, dict[str, set[str]]]:
    """The quantities of which several figures are told, with where."""
    places: dict[Any, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for view, figures in views.items():
        for quantity, said in figures.items():
            for figure in said:
                places[quantity][figure].add(view)
    return {quantity: dict(found) for quantity, found in places.items() if len(found) > 1}


@pytest.mark.parametrize("name", REPORTS)
def test_a_quantity_of_a_report_reads_the_same_wherever_it_stands(name: str):
    views = {view: told(text) for view, text in views_of(REPORTS[name]()).items()}
    assert differing(views) == {}


@pytest.mark.parametrize("name", REPORTS)
def test_a_row_of_a_report_reads_the_same_wherever_it_stands(name: str):
    assert differing(tabled(REPORTS[name]())) == {}


def test_the_walk_finds_rows_in_every_view():
    gathers, line = "all-gather over data", "gpt2.py:31"
    for report, of, called, views in (
        (overlapped(), gathers, "predicted", {"text", "html", "widget", "picture", "JSON"}),
        (overlapped(), gathers, "of the predicted step", {"text", "html", "widget", "JSON"}),
        (overlapped(), gathers, "on the links", {"html", "JSON"}),
        (overlapped(), line, "predicted", {"text", "html", "widget", "picture"}),
        (overlapped(), line, "sent", {"text", "html", "widget", "picture"}),
        (profiled(), gathers, "on the links, measured", {"text", "html", "widget"}),
        (profiled(), gathers, "on the links", {"text", "html", "widget", "JSON"}),
        (profiled(), "device 3", "waiting", {"text", "html", "widget"}),
        (profiled(), "backward of gpt2.py:46", "of step", {"text", "widget"}),
        (trained(), "curve time a call", "last", {"text", "html", "widget"}),
        (trained(), "curve loss", "first", {"text", "html", "widget", "JSON"}),
    ):
        assert {view for view, rows in tabled(report).items() if rows.get((of, called))} == views, (
            of,
            called,
        )


def test_the_walk_finds_a_row_that_differs():
    report = overlapped()
    longer = [replace(c, exposed=2 * c.waited) if c.kind == "all-gather" else c for c in report.collectives]
    found = differing(tabled(replace(report, collectives=tuple(longer))))
    assert ("all-gather over data", "predicted") in found


def test_a_compiled_step_has_one_time_of_each_collective_in_bar_tables_and_hints():
    def step(params, x):
        def loss(params):
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ params["first"], params["layers"])
            return jnp.square(h).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    shapes = {"first": (64, 512), "layers": (3, 512, 512)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    sharded = jaxshard_magic.shard(step, "fsdp+tp", mesh="cpu:8 data=4 model=2", on="v5e")
    sharded.prepare(params, jax.ShapeDtypeStruct((64, 64), jnp.float32))
    report = sharded.report()
    (hint,) = (a.message for a in report.advice if a.code == "communication")
    assert differing({view: told(text) for view, text in views_of(report).items()} | {"hint": told(plain(hint))}) == {}
    assert told(plain(hint))["communication"] == told(of_html(report.to_html()))["communication"] != set()
    tables = tabled(report)
    assert differing(tables) == {}
    assert sum(c.waited for c in report.collectives) == pytest.approx(report.timing.exposed_s)
    assert sum(c.seconds for c in report.collectives) == pytest.approx(report.timing.communication_s)


def test_the_walk_finds_each_quantity_in_every_view():
    views = {view: told(text) for view, text in views_of(attached()).items()}
    lacking = {(v, q) for v, found in views.items() for q in SEEN_EVERYWHERE if not found[q]}
    assert not lacking
    assert {len(found["bubble"]) for view, found in ((v, told(t)) for v, t in views_of(reported()).items())} == {1}


def test_the_walk_finds_a_figure_that_differs():
    text = plain(attached().to_text(100))
    assert differing({"a": told(text), "b": told(text.replace("Fits: 5.09", "Fits: 5.1"))}).keys() == {"peak"}
    assert coarse("Fits: 5.1 of 15.75 GiB, 32 ms, 0.976 MiB, 3.20 s") == ["5.1 GiB", "32 ms"]


@pytest.mark.parametrize("name", REPORTS)
def test_every_figure_of_a_report_has_three_digits(name: str):
    report = replace(REPORTS[name](), advice=(), sources=(), alternatives=())  # whose words are the sample's own
    assert {view: found for view, text in views_of(report).items() if (found := coarse(text))} == {}


@pytest.mark.parametrize("name", REPORTS)
def test_a_leaf_takes_as_much_in_the_table_as_in_the_tree(name: str):
    report = REPORTS[name]()
    figures = leaf_figures(payload(report))
    lines = plain(report.to_text(100, leaves="all")).splitlines()
    for path, figure in figures.items():
        rows = [line for line in lines if line.startswith(f"{path} ")]
        assert all(re.search(rf" {re.escape(figure)}(?: !)?$", row) for row in rows), (path, figure, rows)


def test_what_is_in_use_is_told_apart_from_the_peak_where_it_is_less():
    report = measured()
    assert report.memory is not None and report.memory.live is not None
    live = report.memory.live
    said = words.live_lead(report.memory)
    assert said.endswith("; the peak of 5.09\u202fGiB counts the gaps between buffers as well")
    assert words.live_text(report.memory) == "at most 4.07\u202fGiB in use, cell [7], line 15"
    full = tuple(4971298816 if n == max(live.bytes) else n for n in live.bytes)  # devices 1 to 7 hold as much
    same = replace(report.memory, live=replace(live, bytes=full))
    assert byte_text(4971298816) == "4.63\u202fGiB" and "counts" not in words.live_lead(same)


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_trial_has_one_peak_and_one_step_time_in_all_views(name: str):
    comparison = COMPARISONS[name]()
    data = comparison_payload(comparison)
    text, page = plain(comparison.to_text(100)), of_html(comparison.to_html())
    lead = plain("".join(piece for piece, _ in data["lead"]))
    figures = {plain(t[key]) for t in data["trials"] for key in ("peak_text", "seconds_text")}
    for view in (lead, " ".join(text.split()), page):
        for verdict in re.findall(r"(?:Fastest|Least memory)[^.]*?, ([\d.]+ \w+)", view):
            assert verdict in figures
    for trial in data["trials"]:
        if not trial["failed"]:
            for key in ("peak_text", "seconds_text"):
                figure = plain(trial[key])
                assert figure == UNKNOWN or (figure in page and figure in text)
    assert not coarse(text) and not coarse(page)


@pytest.mark.parametrize("name", CHOICES)
def test_the_figures_of_a_choice_are_those_of_its_trials(name: str):
    choice = CHOICES[name]()
    page, text = of_html(choice.to_html()), " ".join(plain(choice.to_text(100)).split())
    for trial in choice.comparison.trials:
        if trial.report is not None and trial.peak is not None:
            figure = plain(byte_text(trial.peak))
            assert figure in page and figure in text
    assert told(page)["limit"] == told(text)["limit"]
    assert len(told(text)["limit"]) <= 1


@pytest.mark.parametrize("name", EXPLORERS)
def test_the_arrays_of_an_explorer_are_as_many_bytes_before_and_after_a_compile(name: str):
    ex = EXPLORERS[name]()
    total = plain(byte_text(ex.bytes_per_device))
    assert total in plain(ex.to_text(100)) and total in of_html(ex.to_html())
    if name == "compiled":
        trial = explorer_payload.compiled(ex.compiled)
        rows = {row[0]: [plain(cell) for cell in row[2:]] for row in trial["rows"]}
        said = told(plain("".join(piece for piece, _ in trial["verdict"])))
        assert said["peak"] == {rows["at the peak"][1]}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_has_one_bubble_in_all_views(name: str):
    report = replace(attached(), pipeline=PIPELINES[name]())
    views = {view: told(text) for view, text in views_of(report).items()}
    found = differing(views)
    assert not {"bubble", "pipeline's actions", "measured step", "predicted step"} & found.keys(), found


def test_compared_schedules_have_the_bubbles_of_their_timelines():
    found = compare(["gpipe", "1f1b", "zb-h1"], stages=4, microbatches=8)
    text, page = (plain(view).splitlines() for view in (found.to_text(100), of_html(found.to_html())))
    for row in found.rows:
        assert row.bubble is not None and row.schedule is not None
        bubble = plain(words.percent_text(row.bubble))
        for view in (text, [" ".join(page)]):
            assert any(re.search(rf"\b{row.name}\b.* {re.escape(bubble)}", line) for line in view)
        of_timeline = told(plain(row.schedule.timeline().to_text(100)))["bubble"]
        assert bubble in of_timeline and len(of_timeline) == 1


@pytest.mark.ci
@pytest.mark.parametrize("name", thinned(REPORTS, [*REPORTS][::6]))
def test_the_widget_says_in_the_browser_what_the_other_views_say(name: str, show: Stage):
    report = REPORTS[name]()
    shown = show(report)
    seen = [shown.root.locator("header").inner_text()]
    for tab in shown.root.get_by_role("tab").all():
        tab.click()
        shown.settle()
        seen.append(shown.panel.inner_text())
    browser = told(" ".join(plain("\n".join(seen)).split()))
    views = {view: told(text) for view, text in views_of(report).items()}
    assert differing({"browser": browser, **views}) == {}
