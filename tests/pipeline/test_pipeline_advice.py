"""Advice on pipelines: each fires where it should, with figures that follow by hand, and is silent elsewhere."""

from dataclasses import replace

import pytest
from support.sample_runs import ran

from jaxshard_magic.analysis.advice.pipeline import (
    PipelineCase,
    describe_moves,
    moves_to_even,
    pipeline_advice,
    with_moves,
)
from jaxshard_magic.analysis.pipeline_timing import measured_pipeline
from jaxshard_magic.report import Advice, Pipeline
from jaxshard_magic.schedule import Costs, make, parse
from jaxshard_magic.schedule.timeline import timeline
from jaxshard_magic.views.words import first_clause

MS = 1e-3
MIB = 2**20


def compiled(name: str, stages: int, microbatches: int, costs: Costs, chunks: int | None = None) -> Pipeline:
    return timeline(make(name, stages=stages, microbatches=microbatches, chunks=chunks), costs, "s")


def ran_as(name: str, stages: int, microbatches: int, costs: Costs, alike=None) -> Pipeline:
    run = ran(make(name, stages=stages, microbatches=microbatches), costs)
    return measured_pipeline(run, [0.5] * stages, alike)


def advise(p: Pipeline, code: str | None = None, **more) -> list[Advice]:
    given = {"examples": None, "shards": 1, "crossing": (), "units": (), "balanced": False} | more
    return [a for a in pipeline_advice(PipelineCase(p, **given)) if code in (None, a.code)]


EVEN = Costs(MS, MS, MS)


def test_a_pipeline_in_which_nothing_is_off_gets_no_advice():
    # (p - 1) / (3m + p - 1) of 4 x 16: 5.9%; and nothing of the same memory is clearly better.
    units = [[("block", 1.0)]] * 4
    p = compiled("zb-h1", 4, 16, EVEN)
    assert advise(p, examples=64, crossing=[MIB] * 3, units=units, transfers=[0.0] * 3) == []


def test_a_pipeline_of_one_stage_gets_no_advice():
    assert advise(compiled("gpipe", 1, 1, EVEN), examples=64) == []


# 1F1B idles (p-1)/(m+p-1) of the time.


def test_few_microbatches_are_told_with_both_bubbles_and_a_number_that_fits():
    (told,) = advise(compiled("1f1b", 4, 4, EVEN), "few-microbatches", examples=64)
    # 3/7 and 3/19
    assert told == Advice(
        "few-microbatches",
        "warning",
        "4 microbatches are few for 4 stages: the bubble is 42.9%, as predicted; with 16 it would be 15.8%, where a "
        "microbatch takes as much less time as it is smaller.",
        "--microbatches 16",
        pytest.approx(1 - 14.25 / 21),  # 19 x 3/4 ms in the place of 7 x 3 ms
    )


@pytest.mark.parametrize(("sent", "advised"), [(0.0, True), (0.2 * MS, True), (1.2 * MS, False)])
def test_more_microbatches_are_not_advised_where_their_gathers_cost_more(sent, advised):
    # 7 x 3 ms with 4 microbatches, 19 x 3/4 ms with 16: 6.75 ms less, and 12 times more to gather.
    told = advise(compiled("1f1b", 4, 4, EVEN), "few-microbatches", examples=64, weights=[sent] * 4)
    assert bool(told) == advised


@pytest.mark.parametrize(
    ("examples", "shards", "fix"),
    [
        (64, 4, "--microbatches 16"),  # one example a microbatch and shard
        (40, 1, "--microbatches 20"),  # 16 does not divide 40
        (12, 1, "--microbatches 12"),  # no more than there are examples
        (64, 8, "--microbatches 8"),
        (None, 1, None),
    ],
)
def test_microbatches_divide_the_examples_of_every_shard(examples, shards, fix):
    (told,) = advise(compiled("1f1b", 4, 4, EVEN), "few-microbatches", examples=examples, shards=shards)
    assert told.fix == fix


@pytest.mark.parametrize("examples", [16, 10])
def test_a_batch_too_small_for_more_microbatches_is_told_the_next_that_does(examples):
    (told,) = advise(compiled("1f1b", 4, 4, EVEN), "few-microbatches", examples=examples, shards=4)
    assert told.fix is None
    assert f"{examples} examples over 4 groups of devices don't divide so; 64 would." in told.message


def test_microbatches_are_of_a_number_that_the_schedule_has_a_form_for():
    p = compiled("interleaved", 4, 4, EVEN, chunks=2)
    (told,) = advise(p, "few-microbatches", examples=36)
    assert told.fix == "--microbatches 12"  # 18 divides 36 but not by 4 stages, 36 is more than twice 16
    # 3/(2m+3) of two chunks: 3/11 and 3/27
    assert "27.3%, as predicted; with 12 it would be 11.1%" in told.message


def test_enough_microbatches_and_those_that_would_change_little_are_not_told():
    assert advise(compiled("1f1b", 4, 16, EVEN), "few-microbatches", examples=256) == []
    assert advise(compiled("1f1b", 4, 15, EVEN), "few-microbatches", examples=256) == []  # 16.7% and 15.8%
    by_hand = timeline(parse("0F0 0B0\n1F0 1B0", "by hand"), EVEN, "s")
    assert advise(by_hand, "few-microbatches", examples=64) == []


def test_one_microbatch_is_told_as_one():
    (told,) = advise(compiled("gpipe", 2, 1, EVEN), "few-microbatches", examples=64)
    assert told.message.startswith("1 microbatch is few for 2 stages: the bubble is 50.0%")


# GPipe of 2 x 4, forward and backward 3 ms in stage 0 and 1 ms in stage 1: forward ends at 13, the first stage goes
# back from 14 to 26, 32 of 52 ms busy. With a layer moved both take 2 and 2: 20 ms, 32 of 40 busy.
LOPSIDED = Costs([3 * MS, MS], [1.5 * MS, 0.5 * MS], [1.5 * MS, 0.5 * MS])
UNITS = [[("wte", 1.0), ("block_0", 1.0), ("block_1", 1.0)], [("block_2", 1.0)]]


def test_uneven_stages_are_told_with_the_layer_to_move_and_the_new_bubble():
    (told,) = advise(ran_as("gpipe", 2, 4, LOPSIDED), "uneven-stages", units=UNITS)
    assert told == Advice(
        "uneven-stages",
        "warning",
        "Stage 0 is the slowest: it takes 6.00\u202fms for a microbatch, 50.0% above the mean of "
        "4.00\u202fms. With block_1 in stage 1 instead of 0 all would be even, and the bubble 20.0% instead of 38.5%, "
        "as predicted.",
        "--balance measured",
        pytest.approx(1 - 5 / 6.5),  # 4 ms of each microbatch on each rank are work: 5 x 4 ms, where 26 ms are taken
    )


def test_what_stays_uneven_is_told():
    # 9 layers of a millisecond on 2 stages of 8 and 1: 5 and 4 are 4.5 in the mean.
    units = [[(f"block_{i}", 1.0) for i in range(8)], [("block_8", 1.0)]]
    p = compiled("gpipe", 2, 4, Costs([8 * MS, MS], [0.0] * 2, [0.0] * 2))
    (told,) = advise(p, "uneven-stages", units=units)
    assert "block_7 in stage 1 instead of 0 the slowest would be 11.1% above it, and the bubble 25.0%" in told.message


def test_only_a_run_can_be_balanced_by_measured_time_and_only_once():
    (told,) = advise(compiled("gpipe", 2, 4, LOPSIDED), "uneven-stages", units=UNITS)
    assert told.fix is None and "block_1 in stage 1" in told.message
    (told,) = advise(ran_as("gpipe", 2, 4, LOPSIDED), "uneven-stages", units=UNITS, balanced=True)
    assert told.fix is None


def test_where_no_layer_can_move_the_one_that_is_too_large_is_named():
    units = [[("logits", 1.0)], [("loss", 1.0)]]
    (told,) = advise(ran_as("gpipe", 2, 4, LOPSIDED), "uneven-stages", units=units)
    assert told.message.endswith("No cut between other layers is clearly better: logits alone takes 6.00\u202fms.")
    assert (told.level, told.fix) == ("info", None)


def test_without_layers_the_slowest_stage_is_told_alone():
    (told,) = advise(ran_as("gpipe", 2, 4, LOPSIDED), "uneven-stages")
    assert (
        told.message
        == "Stage 0 is the slowest: it takes 6.00\u202fms for a microbatch, 50.0% above the mean of 4.00\u202fms."
    )
    assert told.fix == "--balance measured"


def test_stages_within_a_tenth_of_the_mean_are_even():
    assert advise(compiled("gpipe", 2, 8, Costs([1.08 * MS, MS], [MS, MS], [MS, MS])), "uneven-stages") == []


@pytest.mark.ci
def test_stages_that_run_the_same_programs_are_even_however_long_one_of_them_took():
    slow = [MS, 1.25 * MS, MS, MS]
    costs = Costs(slow, slow, slow)
    (told,) = advise(ran_as("1f1b", 4, 16, costs), "uneven-stages")
    assert told.message.startswith(
        "Stage 1 is the slowest: it takes 3.75\u202fms for a microbatch, 17.6% above the mean"
    )
    p = ran_as("1f1b", 4, 16, costs, alike=[0, 1, 1, 3])
    assert advise(p, "uneven-stages") == []
    assert p.events == ran_as("1f1b", 4, 16, costs).events


def test_uneven_stages_of_one_rank_are_even_together():
    costs = Costs([MS, 2 * MS, MS, 2 * MS], MS, MS)
    assert advise(compiled("v-half", 2, 8, costs), "uneven-stages") == []  # 0 and 3, 1 and 2
    (told,) = advise(compiled("interleaved", 2, 8, Costs([MS, 3 * MS, MS, 3 * MS], MS, MS), 2), "uneven-stages")
    assert told.message.startswith(
        "Rank 1 is the slowest: it takes 10.0\u202fms for a microbatch, 25.0% above the mean of 8.00\u202fms."
    )


def test_layers_move_by_the_time_that_they_take_where_they_are_now():
    # Stage 0 does its 4 units of FLOPs in 2 ms, stage 1 its 4 in 6 ms.
    costs = Costs([2.0, 6.0], [0.0, 0.0], [0.0, 0.0])
    units = [[("a", 2.0), ("b", 2.0)], [("c", 4 / 3), ("d", 4 / 3), ("e", 4 / 3)]]
    moves = moves_to_even(units, costs)
    assert describe_moves(units, moves) == "c in stage 0 instead of 1"
    assert with_moves(units, costs, moves).forward == pytest.approx((4.0, 4.0))


def test_layers_may_move_on_past_a_stage():
    units = [[(f"block_{i}", 1.0) for i in range(5)], [("block_5", 1.0)], [("ln", 0.0), ("loss", 0.0)]]
    costs = Costs([5.0, 1.0, 0.0], [0.0] * 3, [0.0] * 3)
    moves = moves_to_even(units, costs)
    assert with_moves(units, costs, moves).forward == pytest.approx((2.0, 2.0, 2.0))
    assert describe_moves(units, moves) == (
        "block_2 and block_3 in stage 1 instead of 0, block_4 in stage 2 instead of 0, block_5 in stage 2 instead of 1"
    )


def test_of_many_layers_that_move_the_first_are_named():
    counts = (3, 2, 2, 2, 2, 2, 1)
    units = [[(f"block_{s}{i}", 1.0) for i in range(n)] for s, n in enumerate(counts)]
    moves = moves_to_even(units, Costs(counts, [0.0] * 7, [0.0] * 7))
    said = describe_moves(units, moves)
    assert said.startswith("block_02 in stage 1 instead of 0, block_11 in stage 2 instead of 1, ")
    assert said.endswith("block_31 in stage 4 instead of 3, 2 more such moves")


THREE = [MIB, 6 * MIB, MIB]


def test_a_boundary_that_carries_much_more_than_the_others_is_told():
    p = compiled("1f1b", 4, 16, Costs(MS, MS, MS, 0.15 * MS))
    lost = p.bubble.predicted - p.bubble.uneven
    (told,) = advise(p, "heavy-boundary", crossing=THREE, transfers=[0.1 * MS, 0.19 * MS, 0.1 * MS])
    assert told.message == (
        "Much goes from stage 1 to stage 2: 6.00\u202fMiB of each microbatch, 6 times what goes between the others "
        "(1.00\u202fMiB), in 190\u202fus. "
        f"Transfers add {100 * lost:.1f}% to the bubble, as predicted."
    )
    assert told.fix is None


def test_a_boundary_that_is_slow_beside_a_forward_action_is_told():
    p = compiled("1f1b", 2, 8, Costs(MS, MS, MS, 0.4 * MS))
    (told,) = advise(p, "heavy-boundary", crossing=[MIB], transfers=[0.4 * MS])
    assert told.message.startswith(
        "Much goes from stage 0 to stage 1: 1.00\u202fMiB of each microbatch, in 400\u202fus, where a forward action "
        "takes 1.00\u202fms. Transfers"
    )


@pytest.mark.ci
def test_boundaries_that_are_quick_or_alike_are_not_told():
    quick = compiled("1f1b", 4, 16, Costs(MS, MS, MS, 0.001 * MS))
    assert advise(quick, "heavy-boundary", crossing=THREE, transfers=[0.001 * MS] * 3) == []
    assert advise(quick, "heavy-boundary", crossing=[MIB] * 3) == []
    assert advise(quick, "heavy-boundary") == []


def test_bytes_alone_tell_of_a_boundary_whose_time_is_not_known():
    p = compiled("1f1b", 4, 16, EVEN)
    (told,) = advise(p, "heavy-boundary", crossing=THREE)
    assert told == Advice(
        "heavy-boundary",
        "info",
        "Much goes from stage 1 to stage 2: 6.00\u202fMiB of each microbatch, 6 times what goes between the others "
        "(1.00\u202fMiB).",
    )


def test_what_stays_on_a_rank_crosses_nothing():
    # In a V of two ranks stages 1 and 2 are on one.
    assert advise(compiled("v-half", 2, 8, EVEN), "heavy-boundary", crossing=THREE) == []


def test_a_schedule_that_holds_no_more_and_is_quicker_is_told():
    (told,) = advise(ran_as("1f1b", 4, 8, EVEN), "better-schedule")
    # 3(m + p - 1) = 33 and 3m + p - 1 = 27, of which 24 are work.
    assert told == Advice(
        "better-schedule",
        "warning",
        "zb-h1 would take less time: its actions 27.0\u202fms where those of 1f1b take 33.0\u202fms, both as "
        "predicted, and it holds no more; its bubble is 11.1% instead of 27.3%.",
        "--schedule zb-h1",
        pytest.approx(6 / 33),
    )


def test_a_schedule_that_holds_more_or_is_cut_otherwise_is_not_told():
    p = compiled("1f1b", 4, 16, EVEN)
    (told,) = advise(p, "better-schedule")
    assert told.fix == "--schedule zb-h1"
    held = [w for w in p.what_if if (w.stages, w.microbatches, w.chunks) == (4, 16, 1) and w.peak <= 4]
    assert min(w.makespan for w in held) == pytest.approx((3 * 16 + 3) * MS)
    others = tuple(w for w in p.what_if if w not in held or w.schedule == "1f1b")
    assert advise(replace(p, what_if=others), "better-schedule") == []


def test_each_hint_opens_with_a_short_clause():
    """Which the header prints bold."""
    slow = Costs([MS, MS, MS, 1.5 * MS], MS, MS, 0.5 * MS)
    more = {"crossing": [MIB, MIB, 6 * MIB], "transfers": [0.5 * MS] * 3, "examples": 64}
    found = advise(compiled("1f1b", 4, 4, slow), **more)
    assert {each.code for each in found} >= {"few-microbatches", "uneven-stages", "heavy-boundary"}
    assert [each.message for each in found if not first_clause(each.message)[0]] == []


def test_costs_without_a_unit_are_told_in_units():
    (told,) = advise(timeline(make("1f1b", stages=4, microbatches=8)), "better-schedule")
    assert told.message.startswith("zb-h1 would take less time: its actions 27 units where those of 1f1b take 33 units")
