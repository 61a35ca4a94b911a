"""Which values of the rest of the step each rank sends to which others, worked out beforehand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..program.ir import Value
from .homes import Homes
from .transfer import Route


@dataclass(frozen=True)
class Sending:
    """Values that a rank has at one time, and of each other rank that reads some of them: which, and how they get
    there."""

    values: tuple[Value, ...]
    to: Mapping[int, tuple[list[int], Route]]


def sending(rank: int, values: Sequence[Value], wants: Sequence[set[Value]], homes: Homes) -> Sending:
    """What of `values` goes from `rank` to which other, where `wants[r]` are the values that rank r reads."""
    to = {}
    for other, wanted in enumerate(wants):
        places = [k for k, v in enumerate(values) if v in wanted]
        if other != rank and places:
            to[other] = places, Route([homes.sharding(values[k], other) for k in places])
    return Sending(tuple(values), to)
