"""A run of a pipeline in its report: measured beside predicted and ideal, in figures that follow by hand."""

import json
from dataclasses import replace

import pytest
from support.sample_reports import attached
from support.sample_runs import ran

from jaxshard_magic.analysis.pipeline_facts import summarize_paths
from jaxshard_magic.analysis.pipeline_timing import measured_pipeline, with_model_parts
from jaxshard_magic.report import Pipeline, Report
from jaxshard_magic.schedule import Costs, Schedule, make, parse
from jaxshard_magic.schedule.timeline import timeline
from jaxshard_magic.views import words
from jaxshard_magic.views.timeline import data

MS = 1e-3
UNEVEN = Costs([MS, MS, MS, 2 * MS], [MS, MS, MS, 2 * MS], [MS, MS, MS, 2 * MS], 0.1 * MS)


def with_ranks(p: Pipeline) -> Pipeline:
    stages = len(p.ranks)
    return with_model_parts(
        p,
        holds=[f"blocks {i}" for i in range(stages)],
        devices=[(2 * i, 2 * i + 1) for i in range(stages)],
        activation_bytes=[*(1024 * (stages - i) for i in range(stages - 1)), None],
    )


def of_run(made: Schedule, costs: Costs, split=None) -> Pipeline:
    return with_ranks(measured_pipeline(ran(made, costs), split))


def test_a_run_as_predicted_has_nothing_unexplained():
    made = make("zb-h1", stages=4, microbatches=8)
    p = of_run(made, UNEVEN)
    wanted = timeline(made, UNEVEN, "s")
    assert (p.source, p.unit) == ("measured", "s")
    assert p.bubble.measured == pytest.approx(p.bubble.predicted)
    assert p.makespan[2] == pytest.approx(p.makespan[1])
    for name in ("ideal", "uneven", "predicted"):
        assert getattr(p.bubble, name) == pytest.approx(getattr(wanted.bubble, name))
    assert [part.what for part in words.bubble_parts(p)] == ["the schedule", "uneven stages", "transfers"]


def test_the_ideal_is_of_stages_at_the_mean_of_the_measured_costs():
    p = of_run(make("1f1b", stages=4, microbatches=8), UNEVEN)
    # 3, 3, 3 and 6 ms of work are 3.75 ms in the mean: 11 slots of it.
    assert p.makespan[0] == pytest.approx(11 * 3.75 * MS)
    assert p.bubble.ideal == pytest.approx(3 / 11)
    assert max(event.end for event in p.ideal_events) == pytest.approx(11 * 3.75 * MS)


def test_each_rank_has_what_it_did_and_what_it_is():
    p = of_run(make("1f1b", stages=4, microbatches=8), UNEVEN)
    assert [rank.work for rank in p.ranks] == pytest.approx([24 * MS] * 3 + [48 * MS])
    assert [rank.bubble for rank in p.ranks] == pytest.approx(
        [1 - rank.work / p.makespan[2] for rank in p.ranks if rank.work and p.makespan[2]]
    )
    assert [rank.peak_activations for rank in p.ranks] == [4, 3, 2, 1]
    assert (p.ranks[1].holds, p.ranks[1].devices) == ("blocks 1", (2, 3))
    assert [rank.activation_bytes for rank in p.ranks] == [4096, 3072, 2048, None]


def test_a_pause_that_no_cost_tells_of_is_not_explained():
    run = ran(make("gpipe", stages=2, microbatches=2), Costs(MS, MS, MS))
    paused = tuple(replace(e, start=e.start + 9 * MS, end=e.end + 9 * MS) if "B" in e.action else e for e in run.events)
    p = measured_pipeline(replace(run, events=paused))
    # Forward and backward 3 slots of 1 and 2 ms, 12 ms of 18 busy; with the pause of 18 + 18.
    assert p.bubble.predicted == pytest.approx(1 / 3)
    assert p.bubble.measured == pytest.approx(1 - 12 / 36)
    assert words.bubble_parts(p)[-1].what == "not explained"
    assert words.bubble_parts(p)[-1].share == pytest.approx(1 / 3)


def test_events_start_with_the_first_action_and_fused_ones_are_one():
    made = parse("0F0 0F1 3F0 3B0 0F2+3F1 0B0+3B1 3F2 3B2 0B1 0B2\n1F0 2F0 1F1 2F1 1F2+2B0 2F2+1B0 2B1 1B1 2B2 1B2")
    p = of_run(made, Costs(MS, MS, MS))
    ideal = {(event.rank, event.action): event for event in p.ideal_events}
    assert min(event.start for event in p.events) == 0.0
    for event in p.events:  # even stages and nothing to wait for: the run is its own ideal
        assert (event.start, event.end) == pytest.approx(
            (ideal[event.rank, event.action].start, ideal[event.rank, event.action].end)
        )
    assert not data.has_ideal(p)


def test_what_if_is_of_the_measured_costs():
    p = of_run(make("1f1b", stages=4, microbatches=8), Costs(MS, MS, MS), split=[0.5] * 4)
    (halves,) = (w for w in p.what_if if (w.schedule, w.stages, w.microbatches, w.chunks) == ("zb-h1", 4, 8, 1))
    assert halves.makespan == pytest.approx((3 * 8 + 4 - 1) * MS)


def test_a_pipeline_that_was_only_compiled_is_predicted_in_seconds():
    made = make("1f1b", stages=4, microbatches=8)
    p = with_ranks(timeline(made, UNEVEN, "s"))
    assert (p.source, p.unit, p.bubble.measured, p.makespan[2]) == ("predicted", "s", None, None)
    assert replace(p, ranks=()) == replace(timeline(made, UNEVEN, "s"), ranks=())
    assert [rank.holds for rank in p.ranks] == ["blocks 0", "blocks 1", "blocks 2", "blocks 3"]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "dualpipev"])
def test_a_report_shows_what_was_measured_as_text_and_html_and_keeps_it_as_json(name: str):
    made = make(name, stages=4, microbatches=8)
    stages = made.stages * made.chunks
    p = of_run(made, Costs([MS] * (stages - 1) + [1.2 * MS], MS, MS, 0.1 * MS))
    report = replace(attached(), strategy="pp", pipeline=p)
    assert "% measured" in report.to_text() and "blocks 0" in report.to_html()
    assert "upper lane measured, lower lane ideal" in report.to_html()
    assert Report.from_json(report.to_json()) == report
    trace = json.loads(p.to_chrome_trace())
    ran_on = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 1]
    assert len(ran_on) == sum(map(len, made.grid))


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["\x1b[31mred", "\x1b[31mblue"], "31mred, 31mblue"),
        (["7", "31m", "8"], "p 7-8, 31m"),
        (["0:999999999", "3:1", "0:3x"], "p 0-999999998, 0:3x"),
        (["²", "🔥", "", "..."], "p"),
    ],
)
def test_parts_of_a_model_are_told_whatever_their_names_are(keys, told):
    assert summarize_paths([f"p.{key}" for key in keys], 1 if told != "p" else None).startswith(told)
