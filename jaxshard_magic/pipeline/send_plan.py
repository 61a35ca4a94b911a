"""Precomputed sends of outer-program values from each rank to the ranks that read them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..program.ir import Value
from .shardings import StepShardings
from .transfer import ArrayTransfer


@dataclass(frozen=True)
class SendPlan:
    """Values that become available on a rank at one time, and their readers on other ranks.

    Attributes:
        values: The values.
        by_rank: For each reading rank, the positions in `values` to send and the transfer to use.
    """

    values: tuple[Value, ...]
    by_rank: Mapping[int, tuple[list[int], ArrayTransfer]]


def plan_sends(rank: int, values: Sequence[Value], values_read: Sequence[set[Value]], homes: StepShardings) -> SendPlan:
    """Plan the sends of `values` from `rank`, where `values_read[r]` holds the values that rank r reads."""
    to = {}
    for other, wanted in enumerate(values_read):
        places = [k for k, v in enumerate(values) if v in wanted]
        if other != rank and places:
            to[other] = places, ArrayTransfer([homes.sharding(values[k], other) for k in places])
    return SendPlan(tuple(values), to)
