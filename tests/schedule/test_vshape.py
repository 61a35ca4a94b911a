"""Schedules in a V: what their papers say of bubble and memory, and zb-v beside the published heuristic."""

import pytest

from jaxshard_magic.errors import ShardError
from jaxshard_magic.schedule import Costs, make, simulate

V_NAMES = ("zb-v", "v-half", "v-min")
STAGES = range(1, 17)
HELD = {"zb-v": lambda p: p, "v-half": lambda p: (p + 2) // 2, "v-min": lambda p: (p + 4) // 3}


def shown(name, stages, microbatches, costs=None, **limit):
    return simulate(make(name, stages=stages, microbatches=microbatches, costs=costs, **limit))


@pytest.mark.parametrize("name", [*V_NAMES, "dualpipev"])
def test_a_rank_holds_a_stage_and_its_mirror_image(name):
    assert make(name, stages=4, microbatches=8).stages_of == ((0, 7), (1, 6), (2, 5), (3, 4))


# arXiv 2405.15362: bubble rates 0, p / 2m and 2p / 3m at equal costs, as the longest rank's own time counts them


@pytest.mark.parametrize("p", STAGES)
def test_zb_v_idles_nowhere_between_a_ranks_first_and_last_action(p):
    for m in (2 * p - 1, 2 * p, 3 * p + 1, 5 * p):
        assert shown("zb-v", p, m).span == 6 * m


@pytest.mark.parametrize("p", STAGES)
def test_v_half_has_half_of_the_bubble_of_1f1b_and_v_min_two_thirds(p):
    for m in (2 * p, 3 * p + 1, 5 * p):
        idle_of_1f1b = 6 * p  # p microbatches of both chunks, three actions each
        assert shown("v-half", p, m).span - 6 * m <= idle_of_1f1b / 2
        assert shown("v-min", p, m).span - 6 * m <= idle_of_1f1b * 2 / 3


@pytest.mark.parametrize("p", STAGES)
@pytest.mark.parametrize("name", V_NAMES)
def test_they_hold_as_much_as_the_paper_says_at_any_number_of_microbatches(name, p):
    for m in {1, max(1, p // 2), p, p + 1, 2 * p, 3 * p + 1}:
        assert shown(name, p, m).peak_microbatches <= min(m, HELD[name](p))


@pytest.mark.parametrize(("name", "held"), [("zb-v", 8), ("v-half", 5), ("v-min", 4), ("1f1b", 8)])
def test_what_8_ranks_hold(name, held):
    assert shown(name, 8, 24).peak_microbatches == held


def test_all_ranks_of_zb_v_hold_the_same():
    assert set(shown("zb-v", 8, 24).peak_activations) == {16}


# sail-sg/zero-bubble-pipeline-parallelism, zbv.py: idle time of its longest rank, its best of four settings
PUBLISHED = [
    (3, 6, (10, 12, 12, 4), 40),
    (4, 4, (18, 17, 19, 1), 60),
    (4, 12, (16, 14, 20, 2), 24),
    (4, 16, (10, 5, 17, 2), 12),
    (5, 10, (5, 9, 16, 4), 54),
    (5, 15, (4, 9, 8, 1), 34),
    (6, 12, (15, 11, 9, 2), 91),
    (6, 13, (10, 20, 15, 2), 99),
    (8, 8, (16, 15, 19, 2), 140),
    (8, 17, (10, 15, 18, 0), 42),
    (8, 24, (11, 16, 11, 0), 60),
    (8, 32, (13, 20, 17, 2), 119),
    (16, 48, (10, 12, 7, 1), 231),
]


@pytest.mark.parametrize(("p", "m", "costs", "published"), PUBLISHED)
def test_zb_v_is_no_worse_than_the_published_heuristic_at_uneven_costs(p, m, costs, published):
    result = shown("zb-v", p, m, Costs(*costs))
    assert result.span - 2 * m * sum(costs[:3]) <= published
    assert result.peak_microbatches <= p


def test_zb_v_is_better_than_the_published_heuristic_somewhere():
    assert shown("zb-v", 4, 12, Costs(16, 14, 20, 2)).span - 2 * 12 * 50 < 24


def test_zb_v_takes_costs_of_each_stage():
    heavy_head = Costs([1.0] * 7 + [2.0], [1.0] * 7 + [2.0], [1.0] * 7 + [2.0], 0.1)
    result = shown("zb-v", 4, 16, heavy_head)
    longest = 16 * 3 * 3.0  # rank 0 has stages 0 and 7
    assert longest <= result.span <= 1.1 * longest


def test_activations_let_go_with_the_input_gradient_leave_room():
    kept, freed = (Costs(5, 6, 9, kept_for_weight_grad=share) for share in (1.0, 0.25))
    assert shown("zb-v", 6, 24, freed).span <= shown("zb-v", 6, 24, kept).span
    assert shown("zb-v", 6, 24, freed).peak_microbatches <= 6


# Memory limits


@pytest.mark.parametrize("costs", [Costs(), Costs(10, 13, 7, 1), Costs(5, 6, 9)])
def test_a_memory_limit_is_kept_and_paid_for_with_idle_time(costs):
    limits = (8, 7, 6, 5, 4, 3, 2, 1)
    results = [shown("zb-v", 8, 16, costs, memory_limit=limit) for limit in limits]
    assert all(r.peak_microbatches <= limit for r, limit in zip(results, limits, strict=True))
    spans = [r.span for r in results]
    assert spans[0] == min(spans)
    assert spans[4:] == sorted(spans[4:])


@pytest.mark.parametrize("name", ["v-half", "v-min"])
@pytest.mark.parametrize("costs", [(1, 1, 1, 0), (10, 13, 7, 1), (5, 6, 9, 0), (12, 9, 6, 2)])
def test_zb_v_with_the_memory_of_another_is_about_as_fast_or_faster(name, costs):
    for p in (4, 6, 8):
        own = shown(name, p, 3 * p, Costs(*costs))
        limited = shown("zb-v", p, 3 * p, Costs(*costs), memory_limit=HELD[name](p))
        assert limited.span <= 1.05 * own.span


def test_too_small_a_limit_is_refused_with_the_smallest_that_can_be_met():
    with pytest.raises(ShardError, match=r"zb-v: .* within 0\.5; use memory_limit=1 or more"):
        make("zb-v", stages=4, microbatches=8, memory_limit=0.5)


def test_more_memory_than_zb_v_needs_changes_nothing_at_equal_costs():
    assert shown("zb-v", 4, 12, memory_limit=100).span == 72


# deepseek-ai/DualPipe, README: bubble (PP/2 - 1)(F&B + B - 3W) and PP + 1 activations, on PP / 2 ranks


@pytest.mark.parametrize("p", STAGES)
@pytest.mark.parametrize("weight_grad", [0.5, 1.0])
def test_dualpipev_has_the_bubble_that_its_readme_gives(p, weight_grad):
    for m in (2 * p, 2 * p + 1, 4 * p):
        result = shown("dualpipev", p, m, Costs(1, 1, weight_grad))
        backward = 1 + weight_grad
        bubble = (p - 1) * ((1 + backward) + backward - 3 * weight_grad)
        assert result.makespan == pytest.approx(2 * m * (1 + backward) + bubble)
        assert result.idle == pytest.approx([bubble] * p)
        assert max(result.peak_activations) == 2 * p + 1


def test_dualpipev_runs_forward_and_backward_as_one():
    schedule = make("dualpipev", stages=2, microbatches=5)
    assert "0F3+3B1" in str(schedule)


@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 7), (8, 1)])
def test_dualpipev_needs_twice_as_many_microbatches_as_ranks(p, m):
    with pytest.raises(ShardError, match=f"use {2 * p} or more"):
        make("dualpipev", stages=p, microbatches=m)


def test_dualpipev_on_one_rank_by_hand():
    grid = str(make("dualpipev", stages=1, microbatches=2)).splitlines()[1]
    assert grid == "0F0 1F0 0F1 1B0 1F1+0B0 1B1 0I1 0W1"


# What they are made for


@pytest.mark.parametrize("name", [*V_NAMES, "dualpipev"])
def test_2_chunks_a_rank_and_no_other_number(name):
    with pytest.raises(ShardError, match="2 chunks"):
        make(name, stages=2, microbatches=4, chunks=1)


@pytest.mark.parametrize("name", ["v-half", "v-min", "dualpipev"])
def test_those_that_search_nothing_take_no_memory_limit(name):
    with pytest.raises(ShardError, match=r"takes no memory limit; .*zb-v"):
        make(name, stages=2, microbatches=4, memory_limit=2)
