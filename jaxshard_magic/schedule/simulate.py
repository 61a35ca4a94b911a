"""The simulator: when each action of a schedule runs, what idles, and how many activations are held."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from jaxshard_magic.errors import ShardError
from jaxshard_magic.schedule.actions import Action, Fused, Step, flat, parts
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
    own = costs.per_stage(schedule.stages * schedule.chunks)
    starts, ends = _times(schedule, own)
    first = min(row[0] for row in starts)
    makespan = max(row[-1] for row in ends) - first
    span = max(end[-1] - start[0] for start, end in zip(starts, ends, strict=True))
    work = [_work(row, own) for row in schedule.grid]
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


def _times(schedule: Schedule, own: PerStage) -> tuple[list[list[float]], list[list[float]]]:
    """Starts and ends of each rank's steps.

    A rank goes on until it waits for a result of another rank, which wakes it; each result has one reader.
    """
    rows = _moves(schedule, own)
    done: list[float | None] = [None] * (2 * len(schedule.rank_of) * schedule.microbatches)
    sleeping: dict[int, int] = {}
    starts: list[list[float]] = [[] for _ in rows]
    ends: list[list[float]] = [[] for _ in rows]
    awake = list(range(len(rows) - 1, -1, -1))
    while awake:
        rank = awake.pop()
        begun, ended = starts[rank], ends[rank]
        now = ended[-1] if ended else 0.0
        for needs, delay, seconds, gives in islice(rows[rank], len(ended), None):
            if needs >= 0:
                ready = done[needs]
                if ready is None:
                    sleeping[needs] = rank
                    break
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
    if sleeping:
        raise _deadlock(schedule, [len(ended) for ended in ends])
    return _of_steps(schedule, starts, ends)


def _moves(schedule: Schedule, own: PerStage) -> list[list[_Move]]:
    """Each rank's moves, one an action where none is fused.

    An action waits for another rank's at most once, since what it needs of its own stage stands before it on its rank.
    """
    rank_of, microbatches, transfer = schedule.rank_of, schedule.microbatches, own.transfer
    last = len(rank_of) - 1
    down = [0.0] + [transfer[s - 1] if rank_of[s - 1] != rank_of[s] else 0.0 for s in range(1, last + 1)]
    up = [transfer[s + 1] if rank_of[s + 1] != rank_of[s] else 0.0 for s in range(last)] + [0.0]
    taken = _taken(own)
    back = (last + 1) * microbatches  # results of the backward pass stand behind those of the forward pass

    # Of each kind: time by stage, how far the result stands that it needs (0: none), its delay by stage, its own base.
    forward = taken["F"], -microbatches, 0, down, 0
    ways = {"F": forward} | {kind: (taken[kind], microbatches, last, up, back) for kind in "BI"}
    rows: list[list[_Move]] = []
    for row in schedule.grid:
        moves: list[_Move] = []
        for stage, kind, microbatch in flat(row):
            if kind == "W":
                moves.append((-1, 0.0, taken[kind][stage], -1))
            else:
                seconds, away, first, delay, base = ways[kind]
                index = base + stage * microbatches + microbatch
                moves.append((-1 if stage == first else index + away, delay[stage], seconds[stage], index))
        rows.append(_together(row, moves))
    return rows


def _together(row: Sequence[Step], moves: list[_Move]) -> list[_Move]:
    """The moves of a row with those of each fused step made one: n waits, then n results with the time in the first."""
    if len(moves) == len(row):
        return moves
    found: list[_Move] = []
    each = iter(moves)
    for step in row:
        own = list(islice(each, len(parts(step))))
        if len(own) > 1:
            waits: list[_Move] = [(needs, delay, 0.0, -1) for needs, delay, _, _ in own]
            seconds = sum(move[2] for move in own)
            own = waits + [(-1, 0.0, 0.0 if i else seconds, move[3]) for i, move in enumerate(own)]
        found += own
    return found


def _of_steps(
    schedule: Schedule, starts: list[list[float]], ends: list[list[float]]
) -> tuple[list[list[float]], list[list[float]]]:
    """The times of moves as times of steps."""
    for rank, row in enumerate(schedule.grid):
        if any(type(step) is Fused for step in row):
            begun, ended = iter(starts[rank]), iter(ends[rank])
            starts[rank], ends[rank] = [], []
            for step in row:
                waits = len(step.parts) if isinstance(step, Fused) else 0
                own_starts = list(islice(begun, 2 * waits or 1))
                own_ends = list(islice(ended, 2 * waits or 1))
                starts[rank].append(own_starts[waits])
                ends[rank].append(own_ends[-1])
    return starts, ends


def _taken(own: PerStage) -> dict[str, list[float]]:
    return {"F": own.forward, "B": own.backward, "I": own.input_grad, "W": own.weight_grad}


def _work(row: Sequence[Step], own: PerStage) -> float:
    taken = _taken(own)
    return math.fsum([taken[kind][stage] for stage, kind, _ in flat(row)])


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
            now += sum(part.kind == "F" for part in parts(step))
            counts.append(now)
            now -= sum(freed[part.kind][part.stage] for part in parts(step))
    return [*counts, now]


def _deadlock(schedule: Schedule, moved: list[int]) -> ShardError:
    """The circle in which ranks wait for each other, after so many moves of each."""
    places = [_place(row, count) for row, count in zip(schedule.grid, moved, strict=True)]
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


def _place(row: Sequence[Step], moved: int) -> int:
    """The place of the step that a rank stands at after `moved` moves."""
    for place, step in enumerate(row):
        moved -= 2 * len(step.parts) if isinstance(step, Fused) else 1
        if moved < 0:
            return place
    return len(row)


def _need(schedule: Schedule, action: Action) -> Action | None:
    """What `action` waits for of another stage."""
    stage, kind, microbatch = action
    if kind == "F":
        return Action(stage - 1, "F", microbatch) if stage else None
    last = len(schedule.rank_of) - 1
    return Action(stage + 1, "B", microbatch) if kind != "W" and stage < last else None


def _either(action: Action) -> set[Action]:
    """The actions that give the result of `action`: an input's gradient comes from a whole backward pass, too."""
    return {action, action._replace(kind="I")} if action.kind == "B" else {action}
