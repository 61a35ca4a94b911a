"""Moves of layers between the stages of a pipeline that even out the stages."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from ...pipeline.balance import partition
from ...schedule import Costs

GROUPS = 4  # groups of moves named in the text; further groups are counted
Unit = tuple[str, float]  # name and cost of an indivisible part of the model


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
