"""Simulation of a schedule: start and end of each action, idle time, and activations held."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

from jaxshard_magic.errors import ShardError
from jaxshard_magic.schedule.actions import Action, ScheduleEntry, entry_actions, flatten_fused
from jaxshard_magic.schedule.costs import Costs, PerStage
from jaxshard_magic.schedule.grid import Schedule


class Event(NamedTuple):
    """An action of a rank in time.

    Attributes:
        rank: Number of the rank.
        action: The action, or fused actions.
        start: Start, in the unit of the costs since the first start.
        end: End, in the same unit.
    """

    rank: int
    action: ScheduleEntry
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A schedule in time: each rank runs its actions in order, each as soon as its inputs are available.

    Attributes:
        schedule: The schedule.
        costs: Costs of the actions.
        starts: For each rank, the start of each entry.
        ends: For each rank, the end of each entry.
        makespan: Time from the first start to the last end.
        span: Longest time of a rank from its own first start to its own last end: the time of a step when steps follow
            each other without a barrier.
        idle: Idle time of each rank within the makespan.
        bubble: Idle share of all ranks' time within the makespan.
        steady_bubble: Idle share of all ranks' time within the span.
        peak_activations: For each rank, the most activations held at the same time, counted per microbatch and stage
            from the order of actions. An activation is held from the forward action until the end of the backward
            action, or of the weight gradient.
    """

    schedule: Schedule
    costs: Costs
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    makespan: float
    span: float
    idle: tuple[float, ...]
    bubble: float
    steady_bubble: float
    peak_activations: tuple[float, ...]

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """All actions with start and end, rank by rank."""
        return tuple(
            Event(rank, step, start, end)
            for rank, row in enumerate(self.schedule.grid)
            for step, start, end in zip(row, self.starts[rank], self.ends[rank], strict=True)
        )

    @property
    def peak_microbatches(self) -> float:
        """Most activations held by a rank, in microbatches of a whole rank; a chunk holds 1/`chunks` of each."""
        return max(self.peak_activations) / self.schedule.chunks


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Simulate a schedule.

    Args:
        schedule: The schedule.
        costs: Costs of the actions; by default the costs of the schedule, or one unit each.

    Raises:
        ShardError: The costs don't match the number of stages, or ranks wait for each other in a cycle; the message has
            the actions of the cycle.
    """
    costs = costs or schedule.costs or Costs()
    own = costs.per_stage(schedule.all_stages)
    rows = _timed_rows(schedule, own)
    starts, ends = _times(schedule, rows)
    first = min(row[0] for row in starts)
    makespan = max(row[-1] for row in ends) - first
    span = max(end[-1] - start[0] for start, end in zip(starts, ends, strict=True))
    work = [math.fsum([move[2] for move in row.moves]) for row in rows]
    ranks = schedule.stages
    return Simulation(
        schedule,
        costs,
        tuple(map(tuple, starts)),
        tuple(map(tuple, ends)),
        makespan,
        span,
        tuple(max(0.0, makespan - busy) for busy in work),
        _idle_share(sum(work), ranks * makespan),
        _idle_share(sum(work), ranks * span),
        tuple(max(activations_held(row, own.kept_for_weight_grad)) for row in schedule.grid),
    )


def _idle_share(work: float, time: float) -> float:
    """Return the idle share of `time`; 0 for no time."""
    # Rounding may put the work slightly above the time.
    return max(0.0, 1 - work / time) if time else 0.0


# Index of the result that the action waits for, delay after it, duration, index of its own result; -1 for no result.
_TimedAction = tuple[int, float, float, int]


class _Row(NamedTuple):
    """Timed actions of a rank.

    Attributes:
        moves: The timed actions, in order.
        places: For each entry of the schedule, the position of its timed action.
    """

    moves: list[_TimedAction]
    places: Sequence[int]


def _times(schedule: Schedule, rows: list[_Row]) -> tuple[list[list[float]], list[list[float]]]:
    """Return start and end of each entry of each rank.

    A rank advances until it needs a missing result of another rank, and resumes when the result appears.
    """
    done: list[float | None] = [None] * (2 * len(schedule.rank_of) * schedule.microbatches)
    # Each result has a single reader, so a dict from result to waiting rank is enough.
    sleeping: dict[int, int] = {}
    starts: list[list[float]] = [[] for _ in rows]
    ends: list[list[float]] = [[] for _ in rows]
    awake = list(range(len(rows) - 1, -1, -1))

    # A generator per rank, suspended at a missing result: each action is visited once.
    def clock(rank: int) -> Iterator[int]:
        now, begun, ended = 0.0, starts[rank], ends[rank]
        for needs, delay, seconds, gives in rows[rank].moves:
            if needs >= 0:
                ready = done[needs]
                if ready is None:
                    yield needs
                    ready = cast(float, done[needs])
                ready += delay
                if ready > now:
                    now = ready
            begun.append(now)
            now += seconds
            ended.append(now)
            if gives >= 0:
                done[gives] = now
                if gives in sleeping:
                    awake.append(sleeping.pop(gives))

    clocks = [clock(rank) for rank in range(len(rows))]
    while awake:
        rank = awake.pop()
        for needs in clocks[rank]:
            sleeping[needs] = rank
            break
    if sleeping:
        reached = [bisect_left(row.places, len(ended)) for row, ended in zip(rows, ends, strict=True)]
        raise _deadlock(schedule, reached)
    return _of_steps(rows, starts), _of_steps(rows, ends)


def _of_steps(rows: list[_Row], times: list[list[float]]) -> list[list[float]]:
    """Return the times of schedule entries from the times of timed actions."""
    return [
        own if len(own) == len(row.places) else [own[place] for place in row.places]
        for row, own in zip(rows, times, strict=True)
    ]


def _timed_rows(schedule: Schedule, own: PerStage) -> list[_Row]:
    """Return the timed actions of each rank, one per action if nothing is fused."""
    rank_of, microbatches, transfer = schedule.rank_of, schedule.microbatches, own.transfer
    last, each = len(rank_of) - 1, schedule.stages_per_loss
    first_of, last_of = range(0, last + 1, each), range(each - 1, last + 1, each)
    down = [0.0] + [transfer[s - 1] if rank_of[s - 1] != rank_of[s] else 0.0 for s in range(1, last + 1)]
    up = [transfer[s + 1] if rank_of[s + 1] != rank_of[s] else 0.0 for s in range(last)] + [0.0]
    back = (last + 1) * microbatches  # results of the backward pass are numbered after those of the forward pass

    # By kind of action: time by stage, offset from its own result to the result that it needs, stages that need none,
    # delay by stage, number of its first result.
    by_kind = {
        "F": (own.forward, -microbatches, first_of, down, 0),
        "B": (own.backward, microbatches, last_of, up, back),
        "I": (own.input_grad, microbatches, last_of, up, back),
    }
    rows: list[_Row] = []
    for row in schedule.grid:
        moves: list[_TimedAction] = []
        for stage, kind, microbatch in flatten_fused(row):
            if kind == "W":
                moves.append((-1, 0.0, own.weight_grad[stage], -1))
            else:
                # A single wait is enough: an action depends on at most one other stage. Its dependencies on its own
                # stage come earlier on the same rank, as `Schedule` has validated.
                seconds, offset, independent_stages, delay, base = by_kind[kind]
                index = base + stage * microbatches + microbatch
                moves.append(
                    (-1 if stage in independent_stages else index + offset, delay[stage], seconds[stage], index)
                )
        rows.append(_Row(moves, range(len(moves))) if len(moves) == len(row) else _fuse_timed_actions(row, moves))
    return rows


def _fuse_timed_actions(row: Sequence[ScheduleEntry], moves: list[_TimedAction]) -> _Row:
    """Return the timed actions of a row with fused entries.

    A fused entry becomes a wait for each part but the first, the first part with the time of all parts, and a result
    for each part but the first.
    """
    fused: list[_TimedAction] = []
    places: list[int] = []
    place = 0
    for step in row:
        if type(step) is Action:
            places.append(len(fused))
            fused.append(moves[place])
            place += 1
            continue
        count = len(entry_actions(step))
        (needs, delay, seconds, gives), *others = moves[place : place + count]
        place += count
        for other in others:
            fused.append((other[0], other[1], 0.0, -1))
            seconds += other[2]
        places.append(len(fused))
        fused.append((needs, delay, seconds, gives))
        for other in others:
            fused.append((-1, 0.0, 0.0, other[3]))
    return _Row(fused, places)


def activations_held(row: Sequence[ScheduleEntry], kept: Sequence[float]) -> list[float]:
    """Return the activations held by a rank during each entry, and the number held after the last entry.

    A forward action holds its activations from its start. Activations freed by a backward action or a weight gradient
    are free after its end.

    Args:
        row: Entries of the rank.
        kept: For each stage, the share of a microbatch's activations still needed by its weight gradient.
    """
    freed = {"F": [0.0] * len(kept), "B": [1.0] * len(kept), "I": [1 - share for share in kept], "W": kept}
    counts, now = [], 0.0
    for step in row:
        if type(step) is Action:
            stage, kind, _ = step
            now += kind == "F"
            counts.append(now)
            now -= freed[kind][stage]
        else:
            let_go = 0.0
            for stage, kind, _ in entry_actions(step):
                now += kind == "F"
                let_go += freed[kind][stage]
            counts.append(now)
            now -= let_go
    return [*counts, now]


def _deadlock(schedule: Schedule, places: list[int]) -> ShardError:
    """Return an error with the cycle of waiting ranks.

    Args:
        schedule: The schedule.
        places: For each rank, the position of the entry it waits at.
    """
    ran = {
        part
        for row, place in zip(schedule.grid, places, strict=True)
        for step in row[:place]
        for part in entry_actions(step)
    }
    circle: dict[int, str] = {}
    rank = next(r for r, place in enumerate(places) if place < len(schedule.grid[r]))
    while rank not in circle:
        step = schedule.grid[rank][places[rank]]
        needed, holder = next(
            (f"{need.stage}{need.kind}{need.microbatch}", schedule.rank_of[need.stage])
            for part in entry_actions(step)
            if (need := _need(schedule, part)) and not ran & _producers(need)
        )
        circle[rank] = f"rank {rank} stands at action {places[rank]}, {step}, until rank {holder} has run {needed}"
        rank = holder
    ranks = list(circle)
    cycle = "; ".join(circle[each] for each in ranks[ranks.index(rank) :])
    return ShardError(f"schedule {schedule.name} never ends: {cycle}. Move one of them behind the other")


def _need(schedule: Schedule, action: Action) -> Action | None:
    """Return the action of another stage on which `action` depends; None if there is none."""
    stage, kind, microbatch = action
    each = schedule.stages_per_loss
    if kind == "F":
        return Action(stage - 1, "F", microbatch) if stage % each else None
    return Action(stage + 1, "B", microbatch) if kind != "W" and (stage + 1) % each else None


def _producers(action: Action) -> set[Action]:
    """Return the actions that produce the result of `action`."""
    # The gradient of a stage's input comes from a full backward action or from an input gradient.
    return {action, action._replace(kind="I")} if action.kind == "B" else {action}
