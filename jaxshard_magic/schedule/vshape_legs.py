"""Path of a microbatch through a V of stages: four legs over all ranks, alternating down and up.

Rank s of p holds stages s and 2p - 1 - s. A microbatch moves forward down the ranks (leg 0) and up (leg 1). Its
gradients return down (leg 2) and up (leg 3). A rank's order is a row of leg numbers; the microbatches of each leg are
in sequence.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from jaxshard_magic.schedule.actions import Action, ScheduleEntry
from jaxshard_magic.schedule.basic_orders import RankRows

FORWARD = (0, 1)
LEGS = range(4)
WEIGHT = {2: 4, 3: 5}  # number, in a row, of the weight gradient deferred by a leg's input gradient

_KINDS = "FFIIWW"
_UPPER = (1, 2, 4)  # numbers in a row that belong to the later one of a rank's two stages


def stage_of(leg: int, rank: int, ranks: int) -> int:
    """Return the stage of a rank on a leg."""
    return 2 * ranks - 1 - rank if leg in _UPPER else rank


def sources(ranks: int) -> list[list[tuple[int, int] | None]]:
    """Return for each leg and rank the leg and rank that produce its input; None for the first leg on the first rank.

    The source is the rank before on the same leg, or the same rank at the end of the leg before.
    """
    return [[_source(leg, rank, ranks) for rank in range(ranks)] for leg in LEGS]


def _source(leg: int, rank: int, ranks: int) -> tuple[int, int] | None:
    before = rank - 1 if leg % 2 == 0 else rank + 1
    if 0 <= before < ranks:
        return leg, before
    return (leg - 1, rank) if leg else None


def first_microbatches(row: Iterable[int], microbatches: int) -> list[int]:
    """Return a row reduced to the first `microbatches` microbatches of each leg."""
    seen: Counter[int] = Counter()
    kept = []
    for leg in row:
        seen[leg] += 1
        if seen[leg] <= microbatches:
            kept.append(leg)
    return kept


def legs_to_actions(rows: Sequence[Sequence[int]]) -> RankRows:
    """Return the actions of each rank from rows of legs and weight gradients."""
    found: RankRows = []
    for rank, row in enumerate(rows):
        seen = [0] * len(_KINDS)
        own = [(stage_of(leg, rank, len(rows)), kind) for leg, kind in enumerate(_KINDS)]
        steps: list[ScheduleEntry] = []
        for leg in row:
            stage, kind = own[leg]
            steps.append(Action(stage, kind, seen[leg]))
            seen[leg] += 1
        found.append(steps)
    return found
