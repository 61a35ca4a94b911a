"""A pipeline in words, text, HTML, a payload, a figure and a trace: numbers that follow from the schedule by hand."""

import json
import re
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.utils.capture import capture_output
from support.sample_pipelines import PIPELINES, interleaved, measured, one_f_one_b, reported, split
from support.sample_reports import attached

from jaxshard_magic import schedule
from jaxshard_magic.errors import ShardError
from jaxshard_magic.report import Pipeline, Report
from jaxshard_magic.schedule import Costs
from jaxshard_magic.schedule.timeline import timeline
from jaxshard_magic.views import words
from jaxshard_magic.views.format import SPACE
from jaxshard_magic.views.payload import payload
from jaxshard_magic.views.timeline import data
from jaxshard_magic.views.timeline.data import ticks
from jaxshard_magic.views.timeline.payload import packed_pipeline, pipeline_payload

VOID = {"br", "wbr"}
SVG_BYTES = 300_000


@pytest.fixture(scope="module")
def made() -> dict[str, Pipeline]:
    return {name: make() for name, make in PIPELINES.items()}


class Reader(HTMLParser):
    """Tags, texts and attribute names; every tag is closed in its order."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[str] = []
        self.names: list[str] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.names += [name for name, _ in attrs]
        assert len({name for name, _ in attrs}) == len(attrs), "an attribute stands twice"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.names += [name for name, _ in attrs]
        assert len({name for name, _ in attrs}) == len(attrs), "an attribute stands twice"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def plain(text: str) -> str:
    return text.replace(SPACE, " ").replace("\u00a0", " ")


def read(html: str) -> str:
    """What an HTML text says where drawings are dropped."""
    return plain(" ".join("".join(Reader(re.sub(r"<svg.*?</svg>", "", html, flags=re.DOTALL)).texts).split()))


def lead(p: Pipeline) -> str:
    return "".join(span.text for span in words.pipeline_lead(p))


# 1F1B and gpipe idle (p-1)/(m+p-1) of the time: 3/11. In halves, each as long as a forward action, a rank is busy 3m of
# 3m+p-1 units: 3/27.


def test_1f1b_of_4_stages_and_8_microbatches_has_a_bubble_of_27_percent():
    p = one_f_one_b()
    assert lead(p) == "Bubble 27.3% predicted, 27.3% ideal."
    assert plain(words.pipeline_about(p)) == "1f1b, 4 stages × 8 microbatches; 33 units predicted, 33 units ideal."
    assert [words.held_text(rank) for rank in p.ranks] == ["holds 4", "holds 3", "holds 2", "holds 1"]


def test_a_backward_pass_in_halves_has_a_bubble_of_11_percent():
    assert lead(timeline(split(4, 8))) == "Bubble 11.1% predicted, 11.1% ideal."


def test_a_bubble_is_the_sum_of_what_it_is_told_to_be_made_of():
    p = measured()
    parts = words.bubble_parts(p)
    assert [part.what for part in parts] == ["the schedule", "uneven stages", "transfers", "not explained"]
    assert sum(part.share for part in parts) == pytest.approx(p.bubble.measured)
    # 3 x 3.15 ms and 3.54 ms: the mean is 3.2475 ms, and 3.54 is 9.0% more
    assert parts[1].more == "stage 3 is 9.0% above the mean"
    assert plain(parts[2].more or "") == "220 us each"


@pytest.mark.parametrize("measured_bubble", [0.4189, 0.4194, 0.4235, 0.42285])
def test_the_parts_of_a_bubble_and_the_work_add_up_as_they_are_told(measured_bubble: float):
    p = measured()
    p = replace(p, bubble=replace(p.bubble, ideal=0.2004, uneven=0.2867, predicted=0.3342, measured=measured_bubble))
    told = [words.part_text(part, True) for part in words.bubble_parts(p)]
    thousandths = [round(10 * float(text.rstrip("%"))) for text in (*told, words.work_text(p))]
    assert sum(thousandths) == 1000
    assert sum(thousandths[:-1]) == round(10 * float(words.percent_text(measured_bubble).rstrip("%")))


def test_a_first_stage_that_keeps_nothing_holds_examples_of_its_batch_only():
    rank = replace(measured().ranks[0], activation_bytes=0)
    assert words.held_bytes(rank) == "batch only"
    assert words.held_bytes(replace(rank, activation_bytes=None)) is None
    assert words.held_bytes(replace(rank, activation_bytes=2048, stages=(1,))) == "2.00\u202fKiB"


def test_a_run_shorter_than_predicted_says_so_with_a_minus():
    p = measured()
    p = replace(p, bubble=replace(p.bubble, measured=p.bubble.predicted - 0.02))
    assert words.part_text(words.bubble_parts(p)[-1], False) == "\u22122.0%"


@pytest.mark.parametrize("name", PIPELINES)
def test_what_is_held_is_counted_as_the_simulator_counts_it(name: str, made: dict[str, Pipeline]):
    p = made[name]
    for rank, lane in zip(p.ranks, data.lanes(p, p.events), strict=True):
        steps = data.held_activations(p, lane)
        assert steps[-1][1] == pytest.approx(0)
        if rank.peak_activations is not None:
            assert max(count for _, count in steps) == pytest.approx(rank.peak_activations)


def test_half_of_the_activations_may_go_with_the_input_gradient():
    p = replace(timeline(schedule.parse("0F0 0I0 0W0")), kept=(0.5,))
    assert data.held_activations(p, data.lanes(p, p.events)[0]) == [(0.0, 1.0), (2.0, 0.5), (3.0, 0.0)]


def test_text_is_a_grid_in_time_that_a_reader_can_check():
    lines = one_f_one_b().to_text(100).splitlines()
    # One unit a column twice over: F takes 2 columns, B 4; stage 3 starts after 3 forward actions.
    assert "  stage 0  F0F1F2F3············B0──F4B1──F5B2──F6B3──F7B4──··B5──··B6──··B7──   27.3%     4" in lines
    assert "  stage 3  ······F0B0──F1B1──F2B2──F3B3──F4B4──F5B5──F6B6──F7B7──············   27.3%     1" in lines
    assert lines[-1].endswith("1 column = 0.5 units")


@pytest.mark.parametrize("width", [60, 72, 100])
@pytest.mark.parametrize("name", PIPELINES)
def test_no_line_of_the_text_is_wider_than_asked(name: str, width: int, made: dict[str, Pipeline]):
    text = made[name].to_text(width)
    if name != "hostile":  # whose names are one long word
        assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text


def test_of_many_ranks_the_text_has_some_and_says_how_many(made: dict[str, Pipeline]):
    text = made["wide"].to_text(80)
    assert "32 of 64 ranks" in text
    assert "stage 0" in text and "stage 63" in text


def test_key_numbers_stand_as_text_where_drawings_are_dropped():
    text = read(measured().to_html())
    p = measured()
    for said in (
        lead(p),
        plain(words.pipeline_about(p)),
        "12.1% the schedule",
        "220 us each",
        "wte, blocks 0-3",
    ):
        assert said in text
    assert "1.54 GiB" in text


@pytest.mark.parametrize("name", PIPELINES)
def test_html_is_well_formed_small_and_without_script(name: str, made: dict[str, Pipeline]):
    html = made[name].to_html()
    found = Reader(html)
    assert not {"script", "style", "link", "img", "iframe"} & set(found.tags)
    assert not any(each.startswith("on") or each in ("src", "href") for each in found.names)
    assert len(html.encode()) < SVG_BYTES


def test_names_cannot_break_out_of_the_markup(made: dict[str, Pipeline]):
    html = made["hostile"].to_html()
    assert "<script" not in html and "&lt;script&gt;" in html and "\x1b" not in html


def test_every_action_of_a_drawing_has_a_box_and_its_number():
    html = one_f_one_b().to_html()
    kinds = dict(re.findall(r'<path d="([^"]*)" class="jss-k-(.)"', html))
    assert {kind: path.count("M") for path, kind in kinds.items()} == {"F": 32, "B": 32}
    assert len(re.findall(r"<text [^>]*>\d</text>", html)) >= 64


def test_the_payload_gives_back_every_action_with_its_times():
    p = measured()
    sent = json.loads(zlib.decompress(packed_pipeline(p)))["pipeline"]
    for rank, columns in enumerate(sent["events"]):
        at, found = 0, []
        stages = columns["stage"] if isinstance(columns["stage"], list) else [columns["stage"]] * 24
        for letter, stage, mb, wait, take in zip(
            columns["kinds"], stages, columns["mb"], columns["wait"], columns["take"], strict=True
        ):
            start = (at + wait) * sent["tick"]
            at += wait + take
            found.append((f"{stage}{letter}{mb}", pytest.approx(start), pytest.approx(at * sent["tick"])))
        assert found == [(e.action, e.start, e.end) for e in p.events if e.rank == rank]


@pytest.mark.parametrize("name", PIPELINES)
def test_the_payload_is_strict_json_and_small(name: str, made: dict[str, Pipeline]):
    json.dumps(pipeline_payload(made[name]), allow_nan=False)
    assert len(packed_pipeline(made[name])) < 60_000


def test_the_ideal_is_left_out_where_it_is_what_is_shown():
    assert pipeline_payload(one_f_one_b())["ideal"] is None
    assert pipeline_payload(interleaved())["ideal"] is not None


def test_a_report_has_a_tab_for_its_pipeline_and_else_none():
    tabs = {tab["id"]: tab["number"] for tab in payload(reported())["tabs"]}
    assert tabs["pipeline"] == f"bubble {words.percent_text(measured().bubble.measured)}"
    assert "pipeline" not in {tab["id"] for tab in payload(attached())["tabs"]}
    assert payload(attached())["pipeline"] is None


def test_a_report_with_a_pipeline_is_the_same_after_json():
    report = reported()
    assert Report.from_json(report.to_json()) == report
    assert Report.from_dict(report.to_dict()).pipeline == measured()


def test_words_say_where_the_profiler_recorded_the_times():
    p = replace(measured(), recorded=True)
    for told in (p.to_text(), plain(p.to_html())):
        assert "recorded by the profiler" in told and "upper lane measured" not in told
    assert pipeline_payload(p)["source"] == "recorded"
    assert "recorded by the profiler" not in measured().to_text()


def test_a_report_tells_of_its_pipeline_in_text_and_html():
    report = reported()
    assert "Pipeline: bubble" in report.to_text(80)
    assert "Pipeline: bubble" in read(report.to_html())
    assert "Pipeline" not in attached().to_text(80)


def test_a_trace_has_a_thread_for_each_rank_and_times_in_microseconds(tmp_path):
    p = measured()
    written = p.to_chrome_trace(tmp_path / "trace.json")
    trace = json.loads(written.read_text("utf-8"))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 1]
    ideal = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 2]
    assert len(events) == len(ideal) == 96
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(1e6 * (p.makespan[2] or 0), abs=0.01)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names[1, 0] == "stage 0: wte, blocks 0-3" and (2, 3) in names
    first = min(events, key=lambda event: (event["tid"], event["ts"]))
    assert (first["name"], first["cat"], first["args"]["microbatch"]) == ("F0", "forward", 0)


def test_actions_of_a_rank_do_not_overlap_in_a_trace(made: dict[str, Pipeline]):
    for event, after in _neighbours(json.loads(made["fused"].to_chrome_trace())["traceEvents"]):
        assert event["ts"] + event["dur"] <= after["ts"] + 0.01


def _neighbours(events: list[dict[str, Any]]):
    boxes = sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["pid"], e["tid"], e["ts"]))
    return [(a, b) for a, b in pairwise(boxes) if (a["pid"], a["tid"]) == (b["pid"], b["tid"])]


def test_costs_without_a_unit_are_milliseconds_in_a_trace():
    trace = json.loads(one_f_one_b().to_chrome_trace())
    assert trace["otherData"]["unit"] == "1 unit = 1 ms"
    assert {event["dur"] for event in trace["traceEvents"] if event["ph"] == "X"} == {1000.0, 2000.0}


def test_held_activations_are_a_counter_in_a_trace():
    counted = [e for e in json.loads(one_f_one_b().to_chrome_trace())["traceEvents"] if e["ph"] == "C"]
    assert max(e["args"]["held"] for e in counted if e["name"].endswith("stage 0")) == 4


@pytest.mark.parametrize(
    ("end", "most", "unit", "said"),
    [
        (0.0353, 8, "s", ["0 ms", "5", "10", "15", "20", "25", "30", "35"]),
        (33, 4, "", ["0", "10", "20", "30"]),
        (2.5e-5, 6, "s", ["0 us", "5", "10", "15", "20", "25"]),
        (0.9, 3, "", ["0", "0.5"]),
        (0, 3, "s", ["0 us"]),
    ],
)
def test_ticks_are_round_and_in_one_unit(end: float, most: int, unit: str, said: list[str]):
    assert [label for _, label in ticks(end, most, unit)] == said


def test_the_figure_has_a_bar_for_each_action_and_its_ideal():
    figure: Any = reported().figure("timeline")
    assert [(bar.name, len(bar.x), bar.showlegend) for bar in figure.data] == [
        ("F forward", 32, True),
        ("I input gradient", 32, True),
        ("W weight gradient", 32, True),
        ("F forward", 32, False),
        ("I input gradient", 32, False),
        ("W weight gradient", 32, False),
    ]
    with pytest.raises(ShardError, match="without a pipeline, so it has no timeline figure"):
        attached().figure("timeline")


@pytest.fixture
def kernel(bare_shell, monkeypatch):
    monkeypatch.delenv("JAXSHARD_VIEW", raising=False)
    bare_shell.kernel = SimpleNamespace()
    return bare_shell


def shown(shell, p: Pipeline) -> list[dict[str, Any]]:
    shell.user_ns["p"] = p
    with capture_output() as captured:
        shell.run_cell("display(p)").raise_error()
    return [output.data for output in captured.outputs]


def test_a_notebook_gets_the_widget_and_then_its_html_twin(kernel):
    p = one_f_one_b()
    widget, twin = shown(kernel, p)
    assert "application/vnd.jupyter.widget-view+json" in widget and widget["text/plain"] == ""
    assert twin["text/plain"] == p.to_text()
    head, rest = twin["text/html"].split(">", 1)
    assert head.startswith('<div class="jss jsm-static-')
    assert rest.partition("<style>")[0] == p.to_html().split(">", 1)[1]


@pytest.mark.parametrize(("how", "kinds"), [("html", {"text/plain", "text/html"}), ("text", {"text/plain"})])
def test_a_variable_chooses_what_is_shown(kernel, monkeypatch, how: str, kinds: set[str]):
    monkeypatch.setenv("JAXSHARD_VIEW", how)
    (output,) = shown(kernel, one_f_one_b())
    assert set(output) == kinds


def test_a_terminal_gets_text_alone(bare_shell, capsys):
    bare_shell.user_ns["p"] = one_f_one_b()
    bare_shell.run_cell("p").raise_error()
    assert capsys.readouterr().out.strip().endswith(one_f_one_b().to_text())


def test_costs_of_stages_that_hold_nothing_are_no_error():
    p = timeline(schedule.make("1f1b", stages=2, microbatches=2), Costs(0, 0, 0))
    for drawn in (p.to_text(80), p.to_html(), p.to_chrome_trace(), packed_pipeline(p)):
        assert drawn
