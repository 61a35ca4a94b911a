"""Advice on a pipeline: number of microbatches, uneven stages, transfers between stages, and a better schedule.

Uneven stages are evened out by moves of layers between them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from statistics import fmean, median
from typing import NamedTuple

from ...errors import ShardError
from ...pipeline.balance import partition
from ...report import Advice, Pipeline, WhatIf
from ...schedule import NAMES, Costs, Schedule, simulate
from ...schedule.actions import parse_entry
from ...schedule.grid import from_rows
from ...schedule.timeline import simulate_choice
from ...units import byte_text, time_text
from ...units import percent_text as _share

ENOUGH = 4  # microbatches per stage
SMALLER = 0.02  # share of all devices' time; a smaller gain in the bubble is not worth advice
MUCH = 0.05  # share of all devices' time; a larger gain in the bubble is a warning
UNEVEN = 0.1  # excess of the slowest rank over the mean
QUICKER = 0.97  # share of the step's time; an alternative that takes longer is not clearly better
SEEN = 0.0005  # excess over the mean, shown as 0.1%; with less the ranks count as even
LONG = 0.2  # share of the time of a forward action; longer transfers are worth advice
TIMES = 3  # multiple of the bytes at the other boundaries

GROUPS = 4  # groups of moves named in the text; further groups are counted
Unit = tuple[str, float]  # name and cost of an indivisible part of the model


@dataclass(frozen=True)
class PipelineCase:
    """Facts about a pipeline.

    Attributes:
        pipeline: The pipeline as run, or as compiled.
        examples: Batch size; None where unknown.
        shards: Groups of devices over which the examples of a microbatch are divided.
        crossing: Per stage, forward bytes of one microbatch to the next stage; empty where unknown.
        units: Per stage, in order, name and cost (any unit) of each indivisible unit; empty where unknown.
        balanced: Whether the stages were cut by measured costs, or by the user.
        transfers: Per stage, time of one microbatch to the next stage, in the pipeline's unit; None where unknown, and
            empty where none is known.
        weights: Per stage, time of communication for weights in one microbatch, the same for smaller ones; empty where
            unknown.
        whole: Whether the number of microbatches is fixed: the batch is taken whole, or more of them train on another
            loss.
        usable_fix: Returns a possible line unless already in effect, else None.
        basis: Source of figures that differ from those of the report: "by FLOPs" where simulated devices have no real
            times.
    """

    pipeline: Pipeline
    examples: int | None
    shards: int
    crossing: Sequence[int]
    units: Sequence[Sequence[Unit]]
    balanced: bool
    transfers: Sequence[float | None] = ()
    weights: Sequence[float] = ()
    whole: bool = False
    usable_fix: Callable[[str], str | None] = lambda line: line
    basis: str = "as predicted"

    @cached_property
    def schedule(self) -> Schedule:
        rows = [[parse_entry(word) for word in row] for row in self.pipeline.grid]
        return from_rows(self.pipeline.schedule, rows, self.pipeline.losses)

    @cached_property
    def costs(self) -> Costs:
        forward, input_grad, weight_grad, transfer = zip(*self.pipeline.costs, strict=True)
        return Costs(forward, input_grad, weight_grad, transfer, self.pipeline.kept or 1.0)

    @cached_property
    def rank_of(self) -> Mapping[int, int]:
        return {stage: rank for rank, each in enumerate(self.pipeline.ranks) for stage in each.stages}

    def time(self, value: float) -> str:
        return time_text(value, self.pipeline.unit)


def pipeline_advice(case: PipelineCase) -> list[Advice]:
    """Return advice on a pipeline, with improvements as simulated at the pipeline's costs; [] for one stage."""
    return [] if case.pipeline.stages < 2 else [advice for rule in RULES for advice in rule(case)]


def few_microbatches(case: PipelineCase) -> Iterator[Advice]:
    """Advise on fewer than `ENOUGH` microbatches per stage."""
    p = case.pipeline
    wanted = ENOUGH * p.stages
    if p.microbatches >= wanted or p.schedule not in NAMES or case.whole:
        return
    numbers = [n for n in _dividing(case, 2 * wanted) if n > p.microbatches]
    more = sorted(numbers, key=lambda n: (n < wanted, abs(n - wanted)))
    able = next(filter(None, (_with(case, n) for n in more)), None)
    then = able or _with(case, wanted)
    if then is None or p.bubble.predicted - then.bubble < SMALLER or _slower(case, then):
        return
    message = (
        f"{p.microbatches} microbatch{'es are' if p.microbatches > 1 else ' is'} few for {p.stages} stages: the bubble "
        f"is {_share(p.bubble.predicted)}, {case.basis}; with {then.microbatches} it would be {_share(then.bubble)}, "
        "where a microbatch takes as much less time as it is smaller."
    )
    fix = case.usable_fix(f"--microbatches {then.microbatches}") if able else None
    if able is None and case.examples:
        divides = -(-case.examples // (wanted * case.shards)) * wanted * case.shards
        message += f" {case.examples:,} examples{_over(case)} don't divide so; {divides:,} would."
    level = "warning" if p.bubble.predicted - then.bubble >= MUCH else "info"
    yield Advice("few-microbatches", level, message, fix, _saved(p.bubble.predicted, then.bubble))


def _slower(case: PipelineCase, then: WhatIf) -> bool:
    """Return whether additional communication for weights costs more than the smaller bubble saves."""
    # Weights are gathered for each microbatch, whatever its size; the simulation scales this time with the microbatch.
    of_ranks = [sum(case.weights[s] for s in rank.stages) for rank in case.pipeline.ranks if case.weights]
    more = (then.microbatches - case.pipeline.microbatches) * max(of_ranks, default=0.0)
    return then.makespan + more > case.pipeline.makespan[1]


def _dividing(case: PipelineCase, most: int) -> list[int]:
    """Return the numbers of microbatches, at most `most`, that divide the examples of every shard."""
    if not case.examples or case.examples % case.shards:
        return []
    each = case.examples // case.shards
    return [n for n in range(1, min(each, most) + 1) if each % n == 0]


def _with(case: PipelineCase, microbatches: int) -> WhatIf | None:
    """Return the same work in other microbatches; None where the schedule does not exist for them."""
    p = case.pipeline
    try:
        return simulate_choice(case.schedule, case.costs, p.schedule, p.stages, microbatches, p.chunks)
    except ShardError:
        return None


def _over(case: PipelineCase) -> str:
    return f" over {case.shards} groups of devices" if case.shards > 1 else ""


def uneven_stages(case: PipelineCase) -> Iterator[Advice]:
    """Advise on a rank with clearly more work than the mean, with the layers to move."""
    p = case.pipeline
    work = _rank_work(case, case.costs)
    mean, most = fmean(work), max(work)
    if most <= (1 + UNEVEN) * mean:
        return
    slowest = work.index(most)
    what = "Rank" if p.chunks > 1 else "Stage"
    message = (
        f"{what} {slowest} is the slowest: it takes {case.time(most)} for a microbatch, "
        f"{_share(most / mean - 1)} above the mean of {case.time(mean)}."
    )
    fix = case.usable_fix("--balance measured") if p.source == "measured" and not case.balanced else None
    level = "warning" if p.bubble.uneven - p.bubble.ideal >= MUCH else "info"
    if len(case.units) == len(p.costs) and all(case.units):
        if (better := _more_even(case, mean)) is None:
            message += f" No cut between other layers is clearly better{_largest(case, slowest)}."
            fix, level = None, "info"
        else:
            message += f" {better}"
    yield Advice("uneven-stages", level, message, fix, _saved(p.bubble.uneven, p.bubble.ideal))


def _more_even(case: PipelineCase, mean: float) -> str | None:
    """Return the moves and their effect in words; None where they are not clearly better."""
    p, moves = case.pipeline, moves_to_even(case.units, case.costs, case.pipeline.losses)
    costs = with_moves(case.units, case.costs, moves)
    then = simulate(case.schedule, costs)
    if not moves or then.makespan > QUICKER * p.makespan[1]:
        return None
    above = max(_rank_work(case, costs)) / mean - 1
    even = f"the slowest would be {_share(above)} above it" if above >= SEEN else "all would be even"
    return (
        f"With {describe_moves(case.units, moves)} {even}, and the bubble {_share(then.bubble)} instead of "
        f"{_share(p.bubble.predicted)}, {case.basis}."
    )


def _rank_work(case: PipelineCase, costs: Costs) -> list[float]:
    """Return each rank's time for one microbatch."""
    own = costs.per_stage(len(case.pipeline.costs))
    return [sum(own.forward[s] + own.backward[s] for s in rank.stages) for rank in case.pipeline.ranks]


def _largest(case: PipelineCase, rank: int) -> str:
    """Return `: logits alone takes 3.2 ms`, for a unit with most of a rank's work; else ""."""
    own = case.costs.per_stage(len(case.pipeline.costs))
    for stage in case.pipeline.ranks[rank].stages:
        name, cost = max(case.units[stage], key=lambda unit: unit[1])
        total = sum(cost for _, cost in case.units[stage])
        if 2 * cost > total:
            return f": {name} alone takes {case.time(cost / total * (own.forward[stage] + own.backward[stage]))}"
    return ""


class _Boundary(NamedTuple):
    """Transfer between a stage and the next one on another rank.

    Attributes:
        stage: The stage before the boundary.
        bytes: Bytes of one microbatch; None where unknown.
        others: Median bytes of the other boundaries.
        seconds: Time of one microbatch; None where unknown.
    """

    stage: int
    bytes: int | None
    others: float
    seconds: float | None

    @property
    def times(self) -> float:
        return (self.bytes or 0) / self.others if self.others else 0.0


def heavy_boundary(case: PipelineCase) -> Iterator[Advice]:
    """Advise on a boundary with far more bytes than others, or long transfers compared with a forward action."""
    p = case.pipeline
    forward, lost = fmean(forward for forward, *_ in p.costs), p.bubble.predicted - p.bubble.uneven
    seen = lost >= SMALLER / 2

    def slow(b: _Boundary) -> bool:
        return b.seconds is not None and b.seconds > LONG * forward

    heavy = [b for b in _boundaries(case) if slow(b) or (b.times >= TIMES and (seen or b.seconds is None))]
    if not heavy:
        return
    b = max(heavy, key=lambda b: (b.seconds or 0.0, b.bytes or 0))
    what = "each microbatch" if b.bytes is None else f"{byte_text(b.bytes)} of each microbatch"
    message = f"Much goes from stage {b.stage} to stage {b.stage + 1}: {what}"
    if b.times >= TIMES:
        message += f", {b.times:.2g} times what goes between the others ({byte_text(b.others)})"
    if b.seconds is not None:
        message += f", in {case.time(b.seconds)}"
        message += f", where a forward action takes {case.time(forward)}" if slow(b) else ""
    message += f". Transfers add {_share(lost)} to the bubble, {case.basis}." if seen else "."
    saves = _saved(p.bubble.predicted, p.bubble.predicted - lost) if seen else None
    yield Advice("heavy-boundary", "warning" if lost >= MUCH else "info", message, saves=saves)


def _boundaries(case: PipelineCase) -> Iterator[_Boundary]:
    costs = case.pipeline.costs
    ends, each = len(costs) - 1, len(costs) // case.pipeline.losses
    # The last stage of a loss sends nothing to the first stage of the next loss.
    between = [s for s in range(ends) if case.rank_of[s] != case.rank_of[s + 1] and (s + 1) % each]
    for s in between:
        others = [case.crossing[o] for o in between if o != s] if case.crossing else []
        yield _Boundary(
            s,
            case.crossing[s] if case.crossing else None,
            median(others) if others else 0.0,
            case.transfers[s] if case.transfers else None,
        )


def better_schedule(case: PipelineCase) -> Iterator[Advice]:
    """Advise on another schedule of equal sizes and no more memory that is clearly faster."""
    p = case.pipeline
    # Simulated like the alternatives: a measured time can't be compared with a simulated one.
    now = simulate(case.schedule, case.costs)
    better = [
        each
        for each in p.what_if
        if (each.stages, each.microbatches, each.chunks) == (p.stages, p.microbatches, p.chunks)
        and each.schedule != p.schedule
        and each.makespan < QUICKER * now.makespan
        # The tolerance is for float rounding.
        and each.peak <= now.peak_microbatches * (1 + 1e-9)
    ]
    # Rounded, so that of equally fast schedules the one with less memory is chosen.
    best = min(better, key=lambda each: (round(each.makespan / now.makespan, 6), each.peak), default=None)
    line = None if best is None else case.usable_fix(f"--schedule {best.schedule}")
    if best is not None and line is not None:
        message = (
            f"{best.schedule} would take less time: its actions {case.time(best.makespan)} where those of {p.schedule} "
            f"take {case.time(now.makespan)}, both {case.basis}, and it holds no more; its bubble is "
            f"{_share(best.bubble)} instead of {_share(now.bubble)}."
        )
        level = "warning" if now.bubble - best.bubble >= MUCH else "info"
        saves = 1 - best.makespan / now.makespan
        yield Advice("better-schedule", level, message, line, saves)


RULES = (few_microbatches, uneven_stages, heavy_boundary, better_schedule)


def _saved(now: float, then: float) -> float:
    """Return the share of a step's time saved by another bubble, at equal work."""
    return 1 - (1 - now) / (1 - then)


class UnitMove(NamedTuple):
    """Move of one unit to another stage.

    Attributes:
        unit: Index of the unit among those of all stages.
        from_stage: Current stage.
        to_stage: New stage.
    """

    unit: int
    from_stage: int
    to_stage: int


def moves_to_even(units: Sequence[Sequence[Unit]], costs: Costs, losses: int = 1) -> list[UnitMove]:
    """Return the moves that result from cutting each loss into stages again by cost.

    Args:
        units: Per stage, name and cost of each indivisible unit. Each takes its share of the stage's time.
        costs: Costs of the stages.
        losses: Number of losses.

    Returns:
        The moves; empty where no cut exists.
    """
    places, each = list(_places(units, costs)), len(units) // losses
    starts: set[int] = set()
    # Each loss is cut into stages by itself.
    for _, own in groupby(enumerate(places), key=lambda place: place[1][0] // each):
        inside = [(place, sum(takes)) for place, (_, takes) in own]
        work, first = [takes for _, takes in inside], inside[0][0]
        anew = partition(work, [0.0] * len(work), each)
        if anew is None:
            return []
        starts.update(first + start for start in (0, *anew))
    moves, after = [], -1
    for place, (before, _) in enumerate(places):
        after += place in starts
        if after != before:
            moves.append(UnitMove(place, before, after))
    return moves


def with_moves(units: Sequence[Sequence[Unit]], costs: Costs, moves: Sequence[UnitMove]) -> Costs:
    """Return the costs of the stages after `moves`."""
    goes = {move.unit: move.to_stage for move in moves}
    sums = [[0.0, 0.0, 0.0] for _ in units]
    for place, (before, takes) in enumerate(_places(units, costs)):
        own = sums[goes.get(place, before)]
        own[:] = [a + b for a, b in zip(own, takes, strict=True)]
    forward, input_grad, weight_grad = zip(*sums, strict=True)
    return Costs(forward, input_grad, weight_grad, costs.transfer, costs.kept_for_weight_grad)


def describe_moves(units: Sequence[Sequence[Unit]], moves: Sequence[UnitMove]) -> str:
    """Return moves in words: `block 3 in stage 0 instead of 1, wte to ln_1 in stage 1 instead of 2`."""
    names = [name for stage in units for name, _ in stage]
    groups = [
        (_names([names[move.unit] for move in group]), before, after)
        for (before, after), group in groupby(moves, key=lambda move: (move.from_stage, move.to_stage))
    ]
    parts = [f"{what} in stage {after} instead of {before}" for what, before, after in groups[:GROUPS]]
    more = len(groups) - GROUPS
    return ", ".join([*parts, f"{more} more such moves"] if more > 0 else parts)


def _names(names: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(names))
    return " and ".join(distinct) if len(distinct) < 3 else f"{distinct[0]} to {distinct[-1]}"


def _places(units: Sequence[Sequence[Unit]], costs: Costs) -> Iterator[tuple[int, tuple[float, ...]]]:
    """Yield the stage of each unit, and its part of that stage's forward, input gradient and weight gradient times."""
    own = costs.per_stage(len(units))
    for stage, inside in enumerate(units):
        total = sum(cost for _, cost in inside)
        for _, cost in inside:
            part = cost / total if total else 1 / len(inside)
            yield (stage, (own.forward[stage] * part, own.input_grad[stage] * part, own.weight_grad[stage] * part))
