"""Which layers would move between the stages of a pipeline to make them even."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from ...pipeline.cut import cut
from ...schedule import Costs

GROUPS = 4  # of layers that are named
Unit = tuple[str, float]  # what is never cut: its name and its cost


class Move(NamedTuple):
    """The unit at `place` among those of all stages goes from a stage to another."""

    place: int
    before: int
    after: int


def moved(units: Sequence[Sequence[Unit]], costs: Costs, losses: int = 1) -> list[Move]:
    """What moves where the stages of each loss are cut anew by what their units take: each its share of its stage's
    time."""
    places, each = list(_places(units, costs)), len(units) // losses
    starts: set[int] = set()
    for _, own in groupby(enumerate(places), key=lambda place: place[1][0] // each):
        inside = [(place, sum(takes)) for place, (_, takes) in own]
        work, first = [takes for _, takes in inside], inside[0][0]
        anew = cut(work, [0.0] * len(work), each)
        if anew is None:
            return []
        starts.update(first + start for start in (0, *anew))
    moves, after = [], -1
    for place, (before, _) in enumerate(places):
        after += place in starts
        if after != before:
            moves.append(Move(place, before, after))
    return moves


def with_moves(units: Sequence[Sequence[Unit]], costs: Costs, moves: Sequence[Move]) -> Costs:
    """The costs of stages that `moves` have changed."""
    goes = {move.place: move.after for move in moves}
    sums = [[0.0, 0.0, 0.0] for _ in units]
    for place, (before, takes) in enumerate(_places(units, costs)):
        own = sums[goes.get(place, before)]
        own[:] = [a + b for a, b in zip(own, takes, strict=True)]
    forward, input_grad, weight_grad = zip(*sums, strict=True)
    return Costs(forward, input_grad, weight_grad, costs.transfer, costs.kept_for_weight_grad)


def told(units: Sequence[Sequence[Unit]], moves: Sequence[Move]) -> str:
    """`block 3 in stage 0 instead of 1, wte to ln_1 in stage 1 instead of 2`."""
    names = [name for stage in units for name, _ in stage]
    groups = [
        (_names([names[move.place] for move in group]), before, after)
        for (before, after), group in groupby(moves, key=lambda move: (move.before, move.after))
    ]
    parts = [f"{what} in stage {after} instead of {before}" for what, before, after in groups[:GROUPS]]
    more = len(groups) - GROUPS
    return ", ".join([*parts, f"{more} more such moves"] if more > 0 else parts)


def _names(names: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(names))
    return " and ".join(distinct) if len(distinct) < 3 else f"{distinct[0]} to {distinct[-1]}"


def _places(units: Sequence[Sequence[Unit]], costs: Costs) -> Iterator[tuple[int, tuple[float, ...]]]:
    """Of each unit its stage, and what it takes of that stage's forward, input gradient and weight gradient."""
    own = costs.per_stage(len(units))
    for stage, inside in enumerate(units):
        total = sum(cost for _, cost in inside)
        for _, cost in inside:
            part = cost / total if total else 1 / len(inside)
            yield (
                stage,
                (own.forward[stage] * part, own.input_grad[stage] * part, own.weight_grad[stage] * part),
            )
