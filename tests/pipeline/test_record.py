"""What a run of a pipeline measured: a run at known costs gives those costs back, and its bubble follows by hand."""

from dataclasses import replace

import pytest
from support.sample_runs import ran

from jaxshard_magic.errors import ShardError
from jaxshard_magic.pipeline.record import ActionEvent, Handover, PipelineRun
from jaxshard_magic.schedule import Costs, make, parse, simulate

SPLIT = Costs([1, 2, 3, 4], [0, 1.5, 1, 2], [2, 1, 2, 0.5], [0.1, 0.2, 0.3, 0.4])


def near(costs: Costs, other: Costs, stages: int = 4) -> None:
    for own, wanted in zip(costs.per_stage(stages), other.per_stage(stages), strict=True):
        assert own == pytest.approx(wanted)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
def test_a_run_in_halves_at_known_costs_gives_them_back(name: str):
    near(ran(make(name, stages=4, microbatches=8), SPLIT).costs(), SPLIT)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_whole_backward_pass_is_divided_as_it_is_told(name: str):
    run = ran(make(name, stages=4, microbatches=8), SPLIT)
    # 0/2, 1.5/2.5, 1/3 and 2/2.5
    near(run.costs([0, 0.6, 1 / 3, 0.8]), SPLIT)


def test_half_a_backward_pass_is_its_input_gradient_but_on_the_first_stage():
    run = ran(make("1f1b", stages=4, microbatches=8), SPLIT)
    near(run.costs(), Costs(SPLIT.forward, [0, 1.25, 1.5, 1.25], [2, 1.25, 1.5, 1.25], SPLIT.transfer))


def test_stages_of_one_rank_hand_nothing_over():
    costs = Costs([1, 2, 3, 4], [1, 1, 1, 1], [1, 1, 1, 1], 0.25)
    run = ran(make("v-half", stages=2, microbatches=6), costs)
    # stages 0 and 3 are on rank 0, 1 and 2 on rank 1
    assert run.boundary_seconds() == (pytest.approx(0.25), None, pytest.approx(0.25))
    near(run.costs(), costs)


def test_a_stage_that_does_both_is_divided_as_its_halves_are_and_takes_the_mean():
    made = parse("0F0 0F1 0B0 0I1 0W1")
    times = {"0F0": 1.0, "0F1": 1.0, "0B0": 5.0, "0I1": 1.0, "0W1": 2.0}
    events, now = [], 0.0
    for action, seconds in times.items():
        events.append(ActionEvent(0, action, now, now + seconds))
        now += seconds
    # Once 5 and once 3 are 4 in the mean, a third of it input gradient.
    near(PipelineRun(made, tuple(events), (), (2,), 10.0).costs(), Costs(1.0, 4 / 3, 8 / 3), stages=1)


@pytest.mark.parametrize("microbatches", [2, 8])
def test_one_slow_action_does_not_count(microbatches: int):
    costs = Costs([1, 2], [1, 1], [1, 1], 0.5)
    run = ran(make("zb-h1", stages=2, microbatches=microbatches), costs)
    slow = tuple(replace(e, end=e.end + 30) if e.action in ("0F0", "1I1", "1W0") else e for e in run.events)
    near(replace(run, events=slow).costs(), costs, stages=2)


def test_stages_that_run_the_same_programs_take_the_median_of_all_their_events():
    made = make("gpipe", stages=3, microbatches=2)
    # Of each stage: two forward and two backward passes.
    seconds = {0: (9, 9, 9, 9), 1: (1.0, 1.2, 2.0, 3.0), 2: (1.4, 1.6, 2.2, 2.4)}
    events = tuple(
        ActionEvent(stage, f"{stage}{kind}{mb}", 0.0, took)
        for stage, each in seconds.items()
        for (kind, mb), took in zip((("F", 0), ("F", 1), ("B", 0), ("B", 1)), each, strict=True)
    )
    run = PipelineRun(made, events, (), (2, 2, 2), 10.0)
    alone, together = run.costs([0, 0.5, 0.5]), run.costs([0, 0.5, 0.5], ["first", "block", "block"])
    # The lower of the two in the middle: of 1.0 and 1.2 and of 1.4 and 1.6, or of all four.
    near(alone, Costs([9, 1.0, 1.4], [0, 1.0, 1.1], [9, 1.0, 1.1], 0.0), 3)
    near(together, Costs([9, 1.2, 1.2], [0, 1.1, 1.1], [9, 1.1, 1.1], 0.0), 3)


def test_a_transfer_takes_as_long_as_the_quickest_and_never_less_than_nothing():
    run = ran(make("1f1b", stages=2, microbatches=2), Costs(transfer=0.5))
    slow = tuple(replace(h, arrived=h.arrived + 7) if h.microbatch else h for h in run.handovers)
    assert replace(run, handovers=slow).costs().per_stage(2).transfer == pytest.approx([0.5, 0.5])
    early = (*run.handovers, Handover(0, 1, 0, 3.0, 2.9))
    assert replace(run, handovers=early).costs().per_stage(2).transfer[0] == 0.0


def test_a_stage_hands_over_both_ways_and_its_transfer_is_the_mean():
    run = ran(make("gpipe", stages=3, microbatches=2), Costs())
    ways = (
        Handover(0, 1, 0, 1, 1.1),
        Handover(1, 2, 0, 2, 2.2),
        Handover(2, 1, 0, 4, 4.3),
        Handover(1, 0, 0, 6, 6.6),
    )
    run = replace(run, handovers=ways)
    assert run.costs().per_stage(3).transfer == pytest.approx([0.1, 0.4, 0.3])
    assert run.boundary_seconds() == pytest.approx((0.35, 0.25))


def test_the_bubble_is_the_idle_share_between_the_first_start_and_the_last_end():
    # Rank 0 works 0-1 and 3-5, rank 1 works 1-3: 5 of 2 x 5 seconds, whenever the step itself began.
    made = parse("0F0 0B0\n1F0 1B0")
    events = (
        ActionEvent(0, "0F0", 9, 10),
        ActionEvent(1, "1F0", 10, 11),
        ActionEvent(1, "1B0", 11, 12),
        ActionEvent(0, "0B0", 12, 14),
    )
    run = PipelineRun(made, events, (), (1, 1), 20.0)
    assert (run.start, run.makespan, run.busy_seconds, run.bubble()) == (9, 5, (3, 2), 0.5)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "dualpipev"])
def test_the_bubble_of_a_run_at_known_costs_is_the_simulated_one(name: str):
    made = make(name, stages=4, microbatches=8)
    costs = Costs(1, 1.5, 0.5, 0.2)
    run = ran(made, costs)
    assert run.bubble() == pytest.approx(simulate(made, costs).bubble)
    assert run.makespan == pytest.approx(simulate(made, costs).makespan)


def test_1f1b_of_even_stages_idles_three_elevenths():
    assert ran(make("1f1b", stages=4, microbatches=8), Costs()).bubble() == pytest.approx(3 / 11)


def test_a_run_that_was_not_timed_or_did_not_end_says_so():
    made = make("1f1b", stages=2, microbatches=2)
    untimed = PipelineRun(made, (), (), (0, 0), 1.0)
    with pytest.raises(ShardError, match="no events: it was not timed"):
        untimed.bubble()
    run = ran(made, Costs())
    unfinished = replace(run, events=tuple(e for e in run.events if "1B" not in e.action))
    with pytest.raises(ShardError, match="no event of stage 1, I"):
        unfinished.costs()
    with pytest.raises(ShardError, match="split has 3 shares for 2 stages"):
        run.costs([0.5] * 3)
    with pytest.raises(ShardError, match="alike has 1 entries for 2 stages"):
        run.costs(alike=[0])
    with pytest.raises(ShardError, match="no event of stage 1, I"):
        unfinished.costs(alike=[0, 0])
