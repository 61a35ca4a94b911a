"""ZB-H1, ZB-H2 and the search: closed forms, memory and figures of arXiv 2401.10241, and the best there is."""

import math
import random
from itertools import product

import pytest

from jaxshard_magic.errors import ShardError
from jaxshard_magic.schedule import Costs, Simulation, make, simulate

SIZES = [(p, m) for p in range(2, 17) for m in sorted({p, p + 1, 3 * p - 1, 8 * p})]


def run(
    name: str, stages: int, microbatches: int, costs: Costs | None = None, limit: float | None = None
) -> Simulation:
    return simulate(make(name, stages=stages, microbatches=microbatches, costs=costs, memory_limit=limit), costs)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zb_h1_takes_3m_and_p_less_1_units_and_the_memory_of_1f1b(p, m):
    found = run("zb-h1", p, m)
    assert found.makespan == 3 * m + p - 1
    assert found.bubble == pytest.approx((p - 1) / (3 * m + p - 1))
    assert found.peak_activations == (p,) * p


@pytest.mark.parametrize(("p", "m"), [(p, m) for p in (2, 5, 9, 16) for m in {1, 2, p - 1}])
def test_zb_h1_with_fewer_microbatches_than_ranks_takes_what_appendix_h_says(p, m):
    found = run("zb-h1", p, m, Costs(2, 3, 1.5))
    assert found.makespan == (m + p - 1) * (2 + 3) + 1.5
    assert max(found.peak_activations) == min(p, m)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zb_h2_never_waits_from_2p_less_1_microbatches_on(p, m):
    found = run("zb-h2", p, m)
    assert found.makespan == 3 * m + p - 1
    assert found.span == 3 * m + max(0, 2 * p - 1 - m)
    assert max(found.peak_activations) == min(2 * p - 1, m)
    if m >= 2 * p - 1:
        assert found.steady_bubble == 0
        assert [ends[-1] - starts[0] for starts, ends in zip(found.starts, found.ends, strict=True)] == [3 * m] * p


@pytest.mark.parametrize(("forward", "input_grad", "weight_grad"), [(1, 1, 0.5), (2, 2.5, 1.5), (1, 1.25, 1)])
@pytest.mark.parametrize("p", [2, 4, 7])
def test_the_bubbles_are_those_of_table_2(p, forward, input_grad, weight_grad):
    costs = Costs(forward, input_grad, weight_grad)
    work = 4 * p * (forward + input_grad + weight_grad)
    each = forward + input_grad
    assert run("zb-h1", p, 4 * p, costs).span - work == pytest.approx((p - 1) * (each - weight_grad))
    assert run("zb-h2", p, 4 * p, costs).span - work == pytest.approx((p - 1) * (each - 2 * weight_grad))


@pytest.mark.parametrize("kept", [0, 0.25, 1])
def test_each_rank_holds_what_section_2_3_says(kept):
    p, costs = 6, Costs(kept_for_weight_grad=kept)
    assert run("zb-h1", p, 24, costs).peak_activations == tuple(p - s + s * kept for s in range(p))
    assert run("zb-h2", p, 24, costs).peak_activations == tuple(2 * (p - s) - 1 + 2 * s * kept for s in range(p))


@pytest.mark.parametrize("p", [2, 3, 8, 16])
def test_the_search_is_as_good_as_zb_h1_and_zb_h2_at_their_memory_and_unit_costs(p):
    for m in (p, 2 * p - 1, 4 * p):
        assert run("zero-bubble", p, m, limit=p).span == 3 * m + p - 1
        assert run("zero-bubble", p, m, limit=2 * p - 1).span == 3 * m + max(0, 2 * p - 1 - m)


# Table 6 with table 5 for 1F1B, ZB-H1, ZB-H2, ZB-1p and ZB-2p, and what tables 1 and 3 say is kept.
PUBLISHED = [
    (8, 24, (18.522, 18.086, 9.337, 0.601, 0.3664), (0.2431, 0.1585, 0.1083, 0.1585, 0.0433)),
    (8, 32, (29.802, 29.428, 19.530, 0.577, 0.4324), (0.1898, 0.1045, 0.0559, 0.1045, 0.0022)),
    (16, 48, (11.347, 11.248, 8.132, 0.377, 0.4324), (0.2552, 0.1397, 0.0672, 0.1397, 0.0066)),
]


@pytest.mark.parametrize(("p", "m", "costs", "bubbles"), PUBLISHED)
def test_measured_costs_give_the_bubbles_of_table_5_and_the_search_no_larger_ones(p, m, costs, bubbles):
    measured = Costs(*costs)
    for name, bubble in zip(("1f1b", "zb-h1", "zb-h2"), bubbles, strict=False):
        assert run(name, p, m, measured).steady_bubble == pytest.approx(bubble, abs=5e-5)
    for limit, bubble in ((p, bubbles[3]), (2 * p, bubbles[4])):
        found = run("zero-bubble", p, m, measured, limit)
        assert found.steady_bubble <= bubble + 5e-5
        assert found.peak_microbatches <= limit


def uneven(draw: random.Random, stages: int) -> Costs:
    forward, input_grad, weight_grad = (
        [draw.choice((0.5, 0.75, 1.0, 1.5, 2.0)) for _ in range(stages)] for _ in range(3)
    )
    return Costs(forward, input_grad, weight_grad, draw.choice((0, 0.125, 1.5)), draw.choice((0, 0.5, 1.0)))


@pytest.mark.parametrize("seed", range(12))
def test_the_search_beats_any_order_within_the_limit_and_stays_within_it(seed):
    draw = random.Random(seed)
    p, m = draw.randint(1, 7), draw.randint(1, 16)
    costs, limit = uneven(draw, p), draw.choice((1, 1.5, 2, p, 2 * p - 1, 3 * p))
    found = run("zero-bubble", p, m, costs, limit)
    assert max(found.peak_activations) <= limit
    for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        other = run(name, p, m, costs)
        if max(other.peak_activations) <= limit:
            assert found.span <= other.span * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(16))
def test_the_search_is_within_5_percent_of_the_best_schedule_that_there_is(seed):
    draw = random.Random(seed)
    p, m = draw.choice(((2, 2), (2, 3), (2, 4), (3, 2), (3, 3), (3, 4)))
    costs, limit = uneven(draw, p), draw.choice((1, 2, 2.5, 3, 5))
    span = run("zero-bubble", p, m, costs, limit).span
    best = smallest_span(p, m, costs, limit, span)
    assert best <= span * (1 + 1e-9)
    assert span <= 1.05 * best


def test_one_microbatch_at_a_time_goes_down_and_up_before_the_next():
    for p, m in ((2, 3), (4, 5)):
        assert run("zero-bubble", p, m, limit=1).span == m * (2 * p + 1)


def test_more_memory_never_makes_the_span_larger_on_a_ladder_of_limits():
    costs = Costs([1, 1.25, 1, 1.5], 1.25, 0.75, 0.25)
    spans = [run("zero-bubble", 4, 12, costs, limit).span for limit in (1, 2, 3, 4, 6, 8, math.inf)]
    assert spans == sorted(spans, reverse=True)


def test_without_a_limit_a_rank_holds_at_most_two_microbatches_for_each_rank():
    found = run("zero-bubble", 3, 24, Costs(1, 3, 1, 2))
    assert max(found.peak_activations) <= 6
    assert found.span == run("zero-bubble", 3, 24, Costs(1, 3, 1, 2), 6).span


def test_the_same_sizes_give_the_same_schedule():
    costs = Costs([1, 2, 1.5], 1, 0.5, 0.1)
    assert make("zero-bubble", stages=3, microbatches=7, costs=costs) == make(
        "zero-bubble", stages=3, microbatches=7, costs=costs
    )


@pytest.mark.parametrize("free", [{"forward": 0}, {"weight_grad": 0}, {"forward": 0, "input_grad": 0}])
def test_actions_that_take_no_time_are_no_trouble(free):
    assert run("zero-bubble", 3, 6, Costs(**free), 2).schedule.actions == 3 * 3 * 6


@pytest.mark.parametrize("limit", [0.5, 0, -3, -math.inf])
def test_a_limit_below_one_microbatch_is_refused_with_the_smallest_that_goes(limit):
    with pytest.raises(ShardError, match=f"zero-bubble: .*none is within {limit:g}; use memory_limit=1 or more"):
        make("zero-bubble", stages=4, microbatches=8, memory_limit=limit)


@pytest.mark.parametrize("limit", [math.nan, "4", True])
def test_a_limit_that_is_no_number_is_refused(limit):
    with pytest.raises(ShardError, match="it must be a number of microbatches from 1"):
        make("zero-bubble", stages=4, microbatches=8, memory_limit=limit)


def test_zb_h1_and_zb_h2_take_no_limit():
    for name in ("zb-h1", "zb-h2"):
        with pytest.raises(ShardError, match=f"{name} takes no memory limit; .*zero-bubble"):
            make(name, stages=4, microbatches=8, memory_limit=4)


def test_costs_of_another_number_of_stages_are_refused():
    with pytest.raises(ShardError, match="cost forward has 3 numbers for 4 stages"):
        make("zero-bubble", stages=4, microbatches=8, costs=Costs([1, 2, 3]))


def smallest_span(p: int, m: int, costs: Costs, limit: float, known: float) -> float:
    """The smallest span of any schedule, at most `known`: every order is tried, but for those that others dominate.

    Microbatches are alike, so each rank takes those of a kind in turn. A state is what each rank has run (forward,
    input and weight gradients), its clock, and the results that are on their way; of the states that have run the
    same, those stay whose times no other is at or before in all.
    """
    own = costs.per_stage(p)
    starts = [sum(own.forward[r] + own.transfer[r] for r in range(s)) for s in range(p)]
    states: dict[tuple, set[tuple]] = {((0, 0, 0),) * p: {((0.0, (), ()),) * p}}
    for _ in range(3 * m * p):
        after: dict[tuple, set[tuple]] = {}
        for (ran, states_of), s in product(states.items(), range(p)):
            for kind, here in product(range(3), states_of):
                there = step(own, m, limit, ran, here, s, kind)
                if there:
                    counts = (*ran[:s], tuple(n + (k == kind) for k, n in enumerate(ran[s])), *ran[s + 1 :])
                    left = sum((m - n) * own[k][s] for k, n in enumerate(counts[s]))
                    if there[s][0] - starts[s] + left <= known * (1 + 1e-9):
                        after.setdefault(counts, set()).add(there)
        states = {ran: undominated(found) for ran, found in after.items()}
    return min(
        max(rank[0] - start for rank, start in zip(state, starts, strict=True)) for state in states[((m,) * 3,) * p]
    )


def step(own, m: int, limit: float, ran: tuple, here: tuple, s: int, kind: int) -> tuple | None:
    """The state after rank s runs its next action of this kind (0: F, 1: I, 2: W), or None where it cannot."""
    (forward, input_grad, weight_grad), (clock, inputs, gradients) = ran[s], here[s]
    ranks, last = [list(rank) for rank in here], len(here) - 1
    if kind == 0:
        holds = forward - input_grad + own.kept_for_weight_grad[s] * (input_grad - weight_grad) + 1
        if forward == m or holds > limit + 1e-9 or (s and not inputs):
            return None
        clock = max(clock, inputs[0] if s else 0.0) + own.forward[s]
        ranks[s][:2] = clock, inputs[1:]
        if s < last:
            ranks[s + 1][1] = (*ranks[s + 1][1], clock + own.transfer[s])
    elif kind == 1:
        if input_grad == forward or (s < last and not gradients):
            return None
        clock = max(clock, gradients[0] if s < last else 0.0) + own.input_grad[s]
        ranks[s][0], ranks[s][2] = clock, gradients[1:]
        if s:
            ranks[s - 1][2] = (*ranks[s - 1][2], clock + own.transfer[s])
    elif weight_grad == input_grad:
        return None
    else:
        ranks[s][0] = clock + own.weight_grad[s]
    return tuple(map(tuple, ranks))


def undominated(states: set[tuple]) -> set[tuple]:
    kept: list[tuple[tuple, tuple]] = []
    for state in sorted(states):
        times = tuple(time for clock, *ways in state for time in (clock, *ways[0], *ways[1]))
        if not any(all(a <= b for a, b in zip(other, times, strict=True)) for other, _ in kept):
            kept.append((times, state))
    return {state for _, state in kept}
