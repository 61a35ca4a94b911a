"""Published heuristic for zero-bubble schedules: for each microbatch a forward wave and a backward wave.

Qi et al. 2024, arXiv 2401.10241, section 3.1. After the warm-up each rank alternates between a forward action and an
input gradient. Weight gradients fill idle time, and free memory when the limit is reached.
"""

from dataclasses import dataclass
from math import inf

from jaxshard_magic.schedule.search_task import SearchResult, SearchTask


@dataclass(frozen=True)
class HeuristicOptions:
    """Options left open by the heuristic.

    Attributes:
        holds_back: End the warm-up before a forward action that would delay the first gradient, rather than after.
        skips: A rank two forward actions ahead of the next rank skips an action if the skip costs nothing.
        fills: Fill a gap too small for a weight gradient also on ranks other than the rank with the longest idle time.
    """

    holds_back: bool
    skips: bool
    fills: bool


def waves(task: SearchTask, choices: HeuristicOptions, most: float = inf) -> SearchResult | None:
    """Return the heuristic's schedule with these options; None if its span exceeds `most`."""
    ranks = _Ranks(task, choices)
    for microbatch in range(task.microbatches):
        if microbatch:
            wanted = ranks.wave_forwards()
        else:
            for rank in range(task.ranks):
                ranks.run(rank, "F")
            wanted = ranks.warm_up()
        for rank, more in enumerate(wanted):
            for _ in range(more):
                ranks.run_forward(rank)
        for rank in reversed(range(task.ranks)):
            ranks.run_input_grad(rank)
        # The span is at least idle time plus work, so the final span would also exceed the limit.
        if any(idle + work > most for idle, work in zip(ranks.idle, task.work, strict=True)):
            return None
    for rank in range(task.ranks):
        ranks.run_weight_grads(rank)
    spans = (end - start for end, start in zip(ranks.clock, task.first_start, strict=True))
    return SearchResult(max(spans), max(ranks.clock), ranks.kinds)


class _Ranks:
    """State of all ranks: clocks, number of actions of each kind, activations held, idle times."""

    def __init__(self, task: SearchTask, choices: HeuristicOptions):
        count = task.ranks
        self.task, self.choices, self.own = task, choices, task.costs
        self.takes = {"F": task.costs.forward, "I": task.costs.input_grad, "W": task.costs.weight_grad}
        self.forward, self.input_grad, self.weight_grad = ([0] * count for _ in range(3))
        self.clock, self.held, self.idle = ([0.0] * count for _ in range(3))
        self.longest_idle = 0.0
        self.results: list[list[float]] = [[] for _ in range(count)]  # ends of each rank's forward actions
        self.gradients = [0.0] * count  # end of each rank's last input gradient
        self.kinds: list[list[str]] = [[] for _ in range(count)]

    def warm_up(self) -> list[int]:
        """Return for each rank the number of further forward actions before its first gradient."""
        task, own = self.task, self.own
        wanted = [0] * task.ranks
        back = self.clock[-1] + own.input_grad[-1]
        for rank in range(task.ranks - 2, -1, -1):
            there, time, takes = back + own.transfer[rank + 1], self.clock[rank], own.forward[rank]
            while wanted[rank] + 1 < task.room:
                if (time + takes > there) if self.choices.holds_back else (time >= there):
                    break
                time += takes
                wanted[rank] += 1
            back = max(time, there) + own.input_grad[rank]
        most = task.microbatches - 1
        for rank in range(1, task.ranks):
            before = wanted[rank - 1]
            wanted[rank] = min(wanted[rank], before if before == most else max(0, before - 1))
        return wanted

    def wave_forwards(self) -> list[int]:
        """Return for each rank the number of forward actions in this wave, 1 or 0."""
        ranks = range(self.task.ranks)
        wanted = [int(self.forward[rank] < self.task.microbatches and not self._skips_forward(rank)) for rank in ranks]
        for rank in reversed(ranks[:-1]):
            if self.forward[rank] < self.task.microbatches:
                wanted[rank] = min(wanted[rank], wanted[rank + 1])
        return wanted

    def _skips_forward(self, rank: int) -> bool:
        """Return whether `rank` may skip a forward action because the next rank has enough to run."""
        after = rank + 1
        if not self.choices.skips or after == self.task.ranks or self.forward[rank] < self.forward[after] + 2:
            return False
        own = self.own
        needed = self.clock[after] + own.forward[after] + own.input_grad[after] + own.transfer[after]
        if self.clock[rank] >= needed:
            return True
        pending = self.input_grad[rank] - self.weight_grad[rank]
        held, time = self.held[rank] + 1, self.clock[rank] + own.forward[rank]
        while held > self.task.limit_with_tolerance and pending:
            held, time, pending = (held - own.kept_for_weight_grad[rank], time + own.weight_grad[rank], pending - 1)
        if time <= needed:
            return False
        return needed - self.clock[rank] <= self.longest_idle - self.idle[rank]

    def run_forward(self, rank: int) -> None:
        """Free memory, fill idle time, and run the next forward action of the rank."""
        while self.held[rank] + 1 > self.task.limit_with_tolerance:
            self.run(rank, "W")
        if rank:
            self._fill(rank, self.results[rank - 1][self.forward[rank]] + self.own.transfer[rank - 1])
        self.run(rank, "F")

    def run_input_grad(self, rank: int) -> None:
        """Fill idle time and run the next input gradient of the rank."""
        if rank + 1 < self.task.ranks:
            self._fill(rank, self.gradients[rank + 1] + self.own.transfer[rank + 1])
        if not rank and self.forward[rank] == self.task.microbatches:
            self.run_weight_grads(rank)
        self.run(rank, "I")

    def run_weight_grads(self, rank: int) -> None:
        """Run all weight gradients deferred by the rank."""
        while self.weight_grad[rank] < self.input_grad[rank]:
            self.run(rank, "W")

    def _fill(self, rank: int, until: float) -> None:
        """Run weight gradients in the gap before `until`, the time of the next other action."""
        takes, instant = self.own.weight_grad[rank] - self.task.time_tolerance, self.task.time_tolerance
        while self.weight_grad[rank] < self.input_grad[rank]:
            gap = until - self.clock[rank]
            others_idle = gap <= self.longest_idle - self.idle[rank]
            if gap <= instant or (gap < takes and others_idle and not self.choices.fills):
                return
            self.run(rank, "W")

    def run(self, rank: int, kind: str) -> None:
        """Run the next action of this kind on the rank, as soon as its inputs are available."""
        own, start, first = self.own, self.clock[rank], not self.forward[rank]
        if kind == "F":
            if rank:
                start = max(start, self.results[rank - 1][self.forward[rank]] + own.transfer[rank - 1])
            self.results[rank].append(start + own.forward[rank])
            self.forward[rank] += 1
            self.held[rank] += 1
        elif kind == "I":
            if rank + 1 < self.task.ranks:
                start = max(start, self.gradients[rank + 1] + own.transfer[rank + 1])
            self.gradients[rank] = start + own.input_grad[rank]
            self.input_grad[rank] += 1
            self.held[rank] -= 1 - own.kept_for_weight_grad[rank]
        else:
            self.weight_grad[rank] += 1
            self.held[rank] -= own.kept_for_weight_grad[rank]
        if not first:
            self.idle[rank] += start - self.clock[rank]
            self.longest_idle = max(self.longest_idle, self.idle[rank])
        self.clock[rank] = start + self.takes[kind][rank]
        self.kinds[rank].append(kind)
