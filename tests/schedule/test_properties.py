"""What holds for every schedule at every size and cost: each action once, in order, and memory as counted."""

import random
from collections import Counter
from graphlib import CycleError, TopologicalSorter

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from jaxshard_magic.errors import ShardError
from jaxshard_magic.schedule import NAMES, Action, Costs, Schedule, Simulation, make, parse, simulate
from jaxshard_magic.schedule.actions import entry_actions

SOME = settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
# Numbers that add up exactly, so that equal times are equal.
TIMES = st.integers(1, 9)
SHARES = st.sampled_from([0.0, 0.25, 0.5, 1.0])


@st.composite
def costs(draw, stages: int) -> Costs:
    """Random ones, each for all stages or one per stage."""

    def each(numbers):
        return draw(numbers | st.lists(numbers, min_size=stages, max_size=stages))

    return Costs(each(TIMES), each(TIMES), each(TIMES), each(st.integers(0, 4)), each(SHARES))


@st.composite
def schedules(draw, name: str) -> tuple[Schedule, Costs]:
    """One called `name`, at sizes that it has a form for, and costs."""
    p = draw(st.integers(1, 5))
    m = draw(st.integers(1, 12) | st.integers(1, 4).map(lambda k: k * p) | st.integers(1, 3).map(lambda k: 2 * k * p))
    v = NAMES[name].chunks or draw(st.integers(1, 3))
    given = draw(costs(p * v))
    try:
        return make(name, stages=p, microbatches=m, chunks=v, costs=given), given
    except ShardError:
        assume(False)
        raise


def every_name(test):
    """`test(schedule, costs)` for each name, on some of its sizes and costs."""

    @pytest.mark.parametrize("name", NAMES)
    @SOME
    @given(data=st.data())
    def run(name, data):
        test(*data.draw(schedules(name)))

    run.__name__ = test.__name__
    return run


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_has_a_form_for_common_sizes(name):
    for p in (2, 3, 4):
        assert make(name, stages=p, microbatches=4 * p).actions


@every_name
def test_every_stage_runs_each_microbatch_forward_and_backward_once(schedule, costs):
    count = Counter(action for row in schedule.grid for step in row for action in entry_actions(step))
    assert set(count.values()) == {1}
    stages = schedule.stages * schedule.chunks
    for stage in range(stages):
        for microbatch in range(schedule.microbatches):
            kinds = "".join(kind for kind in "FBIW" if Action(stage, kind, microbatch) in count)
            assert kinds in ("FB", "FIW")
    assert all(a.stage < stages and a.microbatch < schedule.microbatches for a in count)


@every_name
def test_it_reads_back_from_its_text(schedule, costs):
    assert parse(str(schedule)) == schedule


@every_name
def test_each_action_starts_as_soon_as_its_rank_and_what_it_needs_allow(schedule, costs):
    found = simulate(schedule, costs)
    ends = {part: event.end for event in found.events for part in entry_actions(event.action)}
    free = [0.0] * schedule.stages
    for event in found.events:
        needed = [ready(schedule, costs, ends, part) for part in entry_actions(event.action)]
        mates = entry_actions(event.action)
        outside = [time for times in needed for need, time in times if need not in mates]
        assert event.start == max([free[event.rank], *outside])
        assert event.end == event.start + sum(taken(schedule, costs, part) for part in mates)
        free[event.rank] = event.end


def ready(schedule: Schedule, costs: Costs, ends: dict, action: Action) -> list[tuple[Action, float]]:
    """What an action needs, and when that is there."""
    stage, kind, microbatch = action
    stages = schedule.stages * schedule.chunks
    if kind == "F":
        needs = [Action(stage - 1, "F", microbatch)] if stage else []
    elif kind == "W":
        needs = [Action(stage, "I", microbatch)]
    else:
        needs = [Action(stage, "F", microbatch)]
        above = [Action(stage + 1, gives, microbatch) for gives in "BI"]
        needs += [action for action in above if action in ends] if stage < stages - 1 else []
    transfer = costs.per_stage(stages).transfer
    ranks = schedule.rank_of
    return [(need, ends[need] + (transfer[need.stage] if ranks[need.stage] != ranks[stage] else 0)) for need in needs]


def taken(schedule: Schedule, costs: Costs, action: Action) -> float:
    own = costs.per_stage(schedule.stages * schedule.chunks)
    times = {"F": own.forward, "I": own.input_grad, "W": own.weight_grad}
    kinds = "IW" if action.kind == "B" else action.kind
    return sum(times[kind][action.stage] for kind in kinds)


@every_name
def test_memory_counted_from_actions_is_memory_replayed_in_time(schedule, costs):
    found = simulate(schedule, costs)
    assert found.peak_activations == pytest.approx([replayed(found, rank) for rank in range(schedule.stages)])


def replayed(found: Simulation, rank: int) -> float:
    """The most that a rank holds, from when each microbatch of each stage comes and goes."""
    schedule = found.schedule
    kept = found.costs.per_stage(schedule.stages * schedule.chunks).kept_for_weight_grad
    changes = []
    for event in found.events:
        for stage, kind, _ in entry_actions(event.action):
            if event.rank == rank and kind == "F":
                changes.append((event.start, 1, 1.0))
            elif event.rank == rank:
                gone = {"B": 1.0, "I": 1 - kept[stage], "W": kept[stage]}[kind]
                changes.append((event.end, 0, -gone))
    now, most = 0.0, 0.0
    for _, _, change in sorted(changes):  # what goes at an instant makes room for what comes
        now += change
        most = max(most, now)
    assert now == pytest.approx(0)
    return most


@pytest.mark.parametrize("name", [name for name, named in NAMES.items() if named.uses_search])
@SOME
@given(data=st.data())
def test_a_memory_limit_is_kept_or_refused_with_the_smallest_that_can_be(name, data):
    p, m, limit = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 8), st.integers(1, 8)))
    given = data.draw(costs(p * (NAMES[name].chunks or 1)))
    try:
        made = make(name, stages=p, microbatches=m, costs=given, memory_limit=limit)
    except ShardError as refused:
        assert "smallest" in str(refused)
    else:
        assert simulate(made).peak_microbatches <= limit + 1e-9


@every_name
def test_work_and_idle_time_are_the_whole_of_it(schedule, costs):
    found = simulate(schedule, costs)
    for rank, row in enumerate(schedule.grid):
        work = sum(taken(schedule, costs, part) for step in row for part in entry_actions(step))
        assert found.idle[rank] == found.makespan - work
    assert found.bubble == pytest.approx(sum(found.idle) / (schedule.stages * found.makespan))
    assert 0 <= found.steady_bubble <= found.bubble + 1e-12 and found.span <= found.makespan


@every_name
def test_a_transfer_makes_no_schedule_shorter(schedule, costs):
    assert simulate(schedule, costs.without_transfer()).makespan <= simulate(schedule, costs).makespan


@SOME
@given(p=st.integers(1, 4), m=st.integers(1, 4), split=st.booleans(), seed=st.integers(0, 10**6))
def test_any_order_runs_or_is_refused_exactly_where_ranks_wait_in_a_circle(p, m, split, seed):
    chance = random.Random(seed)
    schedule = Schedule("any", p, m, 1, tuple(tuple(any_order(chance, rank, m, split)) for rank in range(p)))
    needs: dict[Action, set[Action]] = {}
    for rank, row in enumerate(schedule.grid):
        actions = [step for step in row if isinstance(step, Action)]
        for before, step in zip((None, *actions), actions, strict=False):
            kind = step.kind if step.kind != "I" else "B"
            above = [Action(rank + 1, step.kind, step.microbatch)] if kind == "B" and rank < p - 1 else []
            below = [Action(rank - 1, "F", step.microbatch)] if kind == "F" and rank else []
            needs[step] = {*above, *below, *([before] if before else [])}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError:
        with pytest.raises(ShardError, match="schedule any never ends: rank"):
            simulate(schedule)
    else:
        assert len(simulate(schedule).events) == schedule.actions


def any_order(chance: random.Random, stage: int, microbatches: int, split: bool) -> list[Action]:
    """A rank's actions in any order that is one of the rank itself."""
    left = [list("FIW" if split else "FB") for _ in range(microbatches)]
    row = []
    while any(left):
        microbatch = chance.choice([i for i, kinds in enumerate(left) if kinds])
        row.append(Action(stage, left[microbatch].pop(0), microbatch))
    return row
