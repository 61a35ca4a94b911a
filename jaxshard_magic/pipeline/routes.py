"""Which values of the rest of the step each rank sends to which others, worked out beforehand."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..program.ir import Value
from .homes import Homes
from .transfer import Route


@dataclass(frozen=True)
class Sending:
    """Values that a rank has at one time, by name, and of each other rank that reads some of them: which, and how they
    get there."""

    name: str
    values: tuple[Value, ...]
    to: dict[int, tuple[list[int], Route]] = field(default_factory=dict)


def sending(
    name: str, rank: int, values: Sequence[Value], wants: Sequence[set[Value]], homes: Homes
) -> Sending:
    """What of `values` goes from `rank` to which other, where `wants[r]` are the values that rank r reads."""
    found = Sending(name, tuple(values))
    for other, wanted in enumerate(wants):
        places = [k for k, v in enumerate(values) if v in wanted]
        if other != rank and places:
            found.to[other] = places, Route([homes.sharding(values[k], other) for k in places])
    return found
