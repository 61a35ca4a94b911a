"""The simulator: when each action of a schedule runs, what idles, and how many activations are held."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

from jaxshard_magic.errors import ShardError
from jaxshard_magic.schedule.actions import Action, Step, flat, parts
from jaxshard_magic.schedule.costs import Costs, PerStage
from jaxshard_magic.schedule.grid import Schedule


class Event(NamedTuple):
    """One action of a rank in time, in the costs' unit from the first start."""

    rank: int
    action: Step
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A schedule placed in time: each rank runs its actions in order, each as soon as what it waits for is there.

    `makespan`: from the first start to the last end. `span`: of the longest rank, from its own first start to its
    own last end, which is what a step costs where steps follow each other without a barrier. `idle`: of each rank,
    within the makespan. `bubble`, `steady_bubble`: the share of all ranks' time that is idle, in makespan and span.
    `peak_activations`: of each rank, the most activations that it holds at once, one for each microbatch of each
    stage, counted from its actions: held from the forward action until the backward one, or the weight gradient, ends.
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
        """Every action with its start and end, rank by rank."""
        return tuple(
            Event(rank, step, start, end)
            for rank, row in enumerate(self.schedule.grid)
            for step, start, end in zip(row, self.starts[rank], self.ends[rank], strict=True)
        )

    @property
    def peak_microbatches(self) -> float:
        """The most that a rank holds, in microbatches of the whole rank: a chunk's activations are a share of them."""
        return max(self.peak_activations) / self.schedule.chunks


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """`schedule` in time at `costs`: by default those that it was made for, or one unit each.

    Raises ShardError where the costs don't fit the stages, and where ranks wait for each other for ever: it names the
    actions that do.
    """
    costs = costs or schedule.costs or Costs()
    own = costs.per_stage(schedule.all_stages)
    rows = _moves(schedule, own)
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
        tuple(max(held(row, own.kept)) for row in schedule.grid),
    )


def _idle_share(work: float, time: float) -> float:
    return max(0.0, 1 - work / time) if time else 0.0


# What a rank's clock does: wait for a result and a delay, run for some time, give a result; -1 is no result.
_Move = tuple[int, float, float, int]


class _Row(NamedTuple):
    """A rank's moves, and of each of its steps the place of the move that runs it."""

    moves: list[_Move]
    places: Sequence[int]


def _times(schedule: Schedule, rows: list[_Row]) -> tuple[list[list[float]], list[list[float]]]:
    """Starts and ends of each rank's steps.

    A rank goes on until it waits for a result of another rank, which wakes it; each result has one reader.
    """
    done: list[float | None] = [None] * (2 * len(schedule.rank_of) * schedule.microbatches)
    sleeping: dict[int, int] = {}
    starts: list[list[float]] = [[] for _ in rows]
    ends: list[list[float]] = [[] for _ in rows]
    awake = list(range(len(rows) - 1, -1, -1))

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
    """The times of moves as times of steps."""
    return [
        own if len(own) == len(row.places) else [own[place] for place in row.places]
        for row, own in zip(rows, times, strict=True)
    ]


def _moves(schedule: Schedule, own: PerStage) -> list[_Row]:
    """Each rank's moves, one an action where none is fused.

    An action waits for another rank's at most once, since what it needs of its own stage stands before it on its rank.
    """
    rank_of, microbatches, transfer = schedule.rank_of, schedule.microbatches, own.transfer
    last, each = len(rank_of) - 1, schedule.stages_of_loss
    first_of, last_of = range(0, last + 1, each), range(each - 1, last + 1, each)
    down = [0.0] + [transfer[s - 1] if rank_of[s - 1] != rank_of[s] else 0.0 for s in range(1, last + 1)]
    up = [transfer[s + 1] if rank_of[s + 1] != rank_of[s] else 0.0 for s in range(last)] + [0.0]
    back = (last + 1) * microbatches  # results of the backward pass stand behind those of the forward pass

    # Of each kind: time by stage, how far the result stands that it needs, the stages that need none, delays, own base.
    ways = {
        "F": (own.forward, -microbatches, first_of, down, 0),
        "B": (own.backward, microbatches, last_of, up, back),
        "I": (own.input_grad, microbatches, last_of, up, back),
    }
    rows: list[_Row] = []
    for row in schedule.grid:
        moves: list[_Move] = []
        for stage, kind, microbatch in flat(row):
            if kind == "W":
                moves.append((-1, 0.0, own.weight_grad[stage], -1))
            else:
                seconds, away, ends, delay, base = ways[kind]
                index = base + stage * microbatches + microbatch
                moves.append((-1 if stage in ends else index + away, delay[stage], seconds[stage], index))
        rows.append(_Row(moves, range(len(moves))) if len(moves) == len(row) else _together(row, moves))
    return rows


def _together(row: Sequence[Step], moves: list[_Move]) -> _Row:
    """The moves of a row with fused steps: of each, all but one wait, one runs, and all but one give their results."""
    found: list[_Move] = []
    places: list[int] = []
    place = 0
    for step in row:
        if type(step) is Action:
            places.append(len(found))
            found.append(moves[place])
            place += 1
            continue
        count = len(parts(step))
        (needs, delay, seconds, gives), *others = moves[place : place + count]
        place += count
        for other in others:
            found.append((other[0], other[1], 0.0, -1))
            seconds += other[2]
        places.append(len(found))
        found.append((needs, delay, seconds, gives))
        for other in others:
            found.append((-1, 0.0, 0.0, other[3]))
    return _Row(found, places)


def held(row: Sequence[Step], kept: Sequence[float]) -> list[float]:
    """Activations that a rank holds while each of its steps runs, and the last number after all of them.

    A forward action holds its own from its start; what a backward one, or a weight gradient, lets go is free after it.

    Args:
        row: a rank's steps.
        kept: of each stage, the share of a microbatch's activations that its weight gradient still needs.
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
            for stage, kind, _ in parts(step):
                now += kind == "F"
                let_go += freed[kind][stage]
            counts.append(now)
            now -= let_go
    return [*counts, now]


def _deadlock(schedule: Schedule, places: list[int]) -> ShardError:
    """The circle in which ranks wait for each other, each at this place in its row."""
    ran = {
        part
        for row, place in zip(schedule.grid, places, strict=True)
        for step in row[:place]
        for part in parts(step)
    }
    circle: dict[int, str] = {}
    rank = next(r for r, place in enumerate(places) if place < len(schedule.grid[r]))
    while rank not in circle:
        step = schedule.grid[rank][places[rank]]
        needed, holder = next(
            (f"{need.stage}{need.kind}{need.microbatch}", schedule.rank_of[need.stage])
            for part in parts(step)
            if (need := _need(schedule, part)) and not ran & _either(need)
        )
        circle[rank] = (
            f"rank {rank} stands at action {places[rank]}, {step}, until rank {holder} has run {needed}"
        )
        rank = holder
    told = list(circle)
    inside = "; ".join(circle[each] for each in told[told.index(rank) :])
    return ShardError(f"schedule {schedule.name} never ends: {inside}. Move one of them behind the other")


def _need(schedule: Schedule, action: Action) -> Action | None:
    """What `action` waits for of another stage."""
    stage, kind, microbatch = action
    each = schedule.stages_of_loss
    if kind == "F":
        return Action(stage - 1, "F", microbatch) if stage % each else None
    return Action(stage + 1, "B", microbatch) if kind != "W" and (stage + 1) % each else None


def _either(action: Action) -> set[Action]:
    """The actions that give the result of `action`: an input's gradient comes from a whole backward pass, too."""
    return {action, action._replace(kind="I")} if action.kind == "B" else {action}
