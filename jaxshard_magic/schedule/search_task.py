"""Problem and result of a schedule search, and lower bounds for every schedule."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from jaxshard_magic.schedule.costs import PerStage


class SearchResult(NamedTuple):
    """An order with its times.

    Attributes:
        span: Longest time of a rank from its first start to its last end.
        makespan: Time from the first start to the last end of all ranks.
        kinds: For each rank, the kinds of its actions in order.
    """

    span: float
    makespan: float
    kinds: Sequence[Iterable[str]]


@dataclass(frozen=True)
class SearchTask:
    """Search for a schedule of a pipeline with one stage per rank.

    Attributes:
        costs: Costs of each stage.
        microbatches: Number of microbatches.
        limit: Most microbatches of activations a rank may hold.
    """

    costs: PerStage
    microbatches: int
    limit: float

    @cached_property
    def ranks(self) -> int:
        return len(self.costs.forward)

    @cached_property
    def room(self) -> int:
        """Most microbatches of a rank past their forward action but not their backward action."""
        return int(min(self.microbatches, self.limit_with_tolerance))

    @cached_property
    def limit_with_tolerance(self) -> float:
        """The limit, increased by a tolerance for rounding in sums of shares."""
        return self.limit * (1 + 1e-9)

    @cached_property
    def time_tolerance(self) -> float:
        """Tolerance for rounding in sums of times."""
        return 1e-9 * min((each for costs in self.costs[:3] for each in costs if each), default=0.0)

    @cached_property
    def work(self) -> list[float]:
        """Busy time of each rank."""
        own, count = self.costs, self.microbatches
        return [count * (f + b) for f, b in zip(own.forward, own.backward, strict=True)]

    @cached_property
    def first_start(self) -> list[float]:
        """Earliest start of each rank."""
        own = self.costs
        steps = (own.forward[rank] + own.transfer[rank] for rank in range(self.ranks - 1))
        return list(accumulate(steps, initial=0.0))

    @cached_property
    def round_trip(self) -> list[float]:
        """Time on each rank from the start of a microbatch to the arrival of its gradient, without waiting."""
        own = self.costs
        trips = [own.forward[-1]]
        for rank in range(self.ranks - 2, -1, -1):
            back = own.transfer[rank] + own.input_grad[rank + 1] + own.transfer[rank + 1]
            trips.append(own.forward[rank] + trips[-1] + back)
        return trips[::-1]

    @cached_property
    def lower_bounds(self) -> tuple[float, float]:
        """Lower bounds of the span and the makespan of every schedule within the limit.

        A rank works, and waits for its first gradient after as many forward actions as fit into its memory: arXiv
        2401.10241, appendix B. Memory gives a second bound: the limit caps the number of round trips at the same time.
        """
        own, spans = self.costs, []
        for rank, trip in enumerate(self.round_trip):
            waits = max(0.0, trip - self.room * own.forward[rank])
            stays = trip + own.input_grad[rank] + own.kept_for_weight_grad[rank] * own.weight_grad[rank]
            spans.append(max(self.work[rank] + waits, self.microbatches * stays / self.limit))
        ends = (start + span for start, span in zip(self.first_start, spans, strict=True))
        return max(spans), max(ends)
