"""What a search for a schedule works on, what it finds, and what no schedule can be better than."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from jaxshard_magic.schedule.costs import PerStage


class Found(NamedTuple):
    """An order that was found: its span and makespan, and of each rank the kinds of its actions, each in turn."""

    span: float
    makespan: float
    kinds: Sequence[Iterable[str]]


@dataclass(frozen=True)
class Task:
    """A pipeline of one stage a rank to make a schedule for: its costs, and the microbatches that a rank may hold."""

    own: PerStage
    microbatches: int
    limit: float

    @cached_property
    def ranks(self) -> int:
        return len(self.own.forward)

    @cached_property
    def room(self) -> int:
        """The most microbatches that a rank can have run forward and not yet backward."""
        return int(min(self.microbatches, self.held_at_most))

    @cached_property
    def held_at_most(self) -> float:
        """The limit, with room for what adding up shares of a microbatch rounds."""
        return self.limit * (1 + 1e-9)

    @cached_property
    def instant(self) -> float:
        """A time that is only what adding up times rounds."""
        return 1e-9 * min((each for costs in self.own[:3] for each in costs if each), default=0.0)

    @cached_property
    def work(self) -> list[float]:
        """How long each rank works."""
        own, count = self.own, self.microbatches
        return [count * (f + b) for f, b in zip(own.forward, own.backward, strict=True)]

    @cached_property
    def first_start(self) -> list[float]:
        """When each rank starts at the soonest."""
        own = self.own
        steps = (own.forward[rank] + own.transfer[rank] for rank in range(self.ranks - 1))
        return list(accumulate(steps, initial=0.0))

    @cached_property
    def round_trip(self) -> list[float]:
        """Of each rank, the time from the start of a microbatch to its gradient's arrival, with no waiting."""
        own = self.own
        trips = [own.forward[-1]]
        for rank in range(self.ranks - 2, -1, -1):
            back = own.transfer[rank] + own.input_grad[rank + 1] + own.transfer[rank + 1]
            trips.append(own.forward[rank] + trips[-1] + back)
        return trips[::-1]

    @cached_property
    def least(self) -> tuple[float, float]:
        """A span and a makespan that no schedule within the limit is better than.

        A rank works, and waits for its first gradient with no more forward actions to run than it has room for: arXiv
        2401.10241, appendix B. And the limit holds the trips of all microbatches: no more of them at once.
        """
        own, spans = self.own, []
        for rank, trip in enumerate(self.round_trip):
            waits = max(0.0, trip - self.room * own.forward[rank])
            stays = trip + own.input_grad[rank] + own.kept[rank] * own.weight_grad[rank]
            spans.append(max(self.work[rank] + waits, self.microbatches * stays / self.limit))
        ends = (start + span for start, span in zip(self.first_start, spans, strict=True))
        return max(spans), max(ends)
