"""The way of a microbatch through a V of stages: four legs, each over all ranks, down and up in turn.

Rank s of p holds stages s and 2p - 1 - s. So a microbatch goes forward down the ranks and up again, and its gradients
come back down and up: legs 0, 1, 2 and 3. A row of legs says what a rank does in which order; the microbatches of each
leg follow each other.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from jaxshard_magic.schedule.actions import Action, Step
from jaxshard_magic.schedule.orders import Rows

FORWARD = (0, 1)
LEGS = range(4)
WEIGHT = {2: 4, 3: 5}  # what stands in a row for the weight gradient that the gradient of a leg leaves behind

_KINDS = "FFIIWW"
_UPPER = (1, 2, 4)  # the legs that pass the later one of a rank's two stages


def stage_of(leg: int, rank: int, ranks: int) -> int:
    """The stage that a rank runs on a leg."""
    return 2 * ranks - 1 - rank if leg in _UPPER else rank


def sources(ranks: int) -> list[list[tuple[int, int] | None]]:
    """Of each leg and rank, the leg and rank whose result it takes: the rank before on its way, or its own turn."""
    return [[_source(leg, rank, ranks) for rank in range(ranks)] for leg in LEGS]


def _source(leg: int, rank: int, ranks: int) -> tuple[int, int] | None:
    before = rank - 1 if leg % 2 == 0 else rank + 1
    if 0 <= before < ranks:
        return leg, before
    return (leg - 1, rank) if leg else None


def first(row: Iterable[int], microbatches: int) -> list[int]:
    """A row with only so many microbatches: what the later ones did on each leg is left out."""
    seen: Counter[int] = Counter()
    kept = []
    for leg in row:
        seen[leg] += 1
        if seen[leg] <= microbatches:
            kept.append(leg)
    return kept


def actions(rows: Sequence[Sequence[int]]) -> Rows:
    """Rows of legs and weight gradients as rows of actions."""
    found: Rows = []
    for rank, row in enumerate(rows):
        seen = [0] * len(_KINDS)
        own = [(stage_of(leg, rank, len(rows)), kind) for leg, kind in enumerate(_KINDS)]
        steps: list[Step] = []
        for leg in row:
            stage, kind = own[leg]
            steps.append(Action(stage, kind, seen[leg]))
            seen[leg] += 1
        found.append(steps)
    return found
