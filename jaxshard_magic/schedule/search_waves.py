"""The published heuristic of zero-bubble schedules: microbatch by microbatch, a wave forward and a wave back.

Qi et al. 2024, arXiv 2401.10241, section 3.1. After the warm-up each rank runs one forward action and one input
gradient in turn; weight gradients fill what would be idle, and make room where the limit is reached.
"""

from dataclasses import dataclass
from math import inf

from jaxshard_magic.schedule.search_task import Found, Task


@dataclass(frozen=True)
class Choices:
    """What the heuristic leaves open.

    `holds_back`: the warm-up ends before a forward action that would delay the first gradient, rather than after it.
    `skips`: a rank two forward actions ahead of the next one passes one over where that costs nothing. `fills`: a
    weight gradient goes into a gap too small for it also where the rank is not the one that idles the longest.
    """

    holds_back: bool
    skips: bool
    fills: bool


def waves(task: Task, choices: Choices, most: float = inf) -> Found | None:
    """The schedule that the heuristic makes for `task` with these choices; None where its span is more than `most`."""
    ranks = _Ranks(task, choices)
    for microbatch in range(task.microbatches):
        if microbatch:
            wanted = ranks.wanted()
        else:
            for rank in range(task.ranks):
                ranks.run(rank, "F")
            wanted = ranks.warm_up()
        for rank, more in enumerate(wanted):
            for _ in range(more):
                ranks.run_forward(rank)
        for rank in reversed(range(task.ranks)):
            ranks.run_input_grad(rank)
        if any(idle + work > most for idle, work in zip(ranks.idle, task.work, strict=True)):
            return None
    for rank in range(task.ranks):
        ranks.run_weight_grads(rank)
    spans = (end - start for end, start in zip(ranks.clock, task.first_start, strict=True))
    return Found(max(spans), max(ranks.clock), ranks.kinds)


class _Ranks:
    """Where every rank stands: its clock, how many actions of each kind it has run, what it holds and how it idled."""

    def __init__(self, task: Task, choices: Choices):
        count = task.ranks
        self.task, self.choices, self.own = task, choices, task.own
        self.takes = {"F": task.own.forward, "I": task.own.input_grad, "W": task.own.weight_grad}
        self.forward, self.input_grad, self.weight_grad = ([0] * count for _ in range(3))
        self.clock, self.held, self.idle = ([0.0] * count for _ in range(3))
        self.longest_idle = 0.0
        self.results: list[list[float]] = [[] for _ in range(count)]  # ends of forward actions
        self.gradients = [0.0] * count  # end of the last input gradient
        self.kinds: list[list[str]] = [[] for _ in range(count)]

    def warm_up(self) -> list[int]:
        """Of each rank, how many more forward actions come before its first gradient."""
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

    def wanted(self) -> list[int]:
        """Of each rank, whether it runs a forward action in this wave: 1, or 0."""
        ranks = range(self.task.ranks)
        wanted = [
            int(self.forward[rank] < self.task.microbatches and not self._passes(rank)) for rank in ranks
        ]
        for rank in reversed(ranks[:-1]):
            if self.forward[rank] < self.task.microbatches:
                wanted[rank] = min(wanted[rank], wanted[rank + 1])
        return wanted

    def _passes(self, rank: int) -> bool:
        """Whether `rank` can pass a forward action over, since the next rank has enough to run."""
        after = rank + 1
        if not self.choices.skips or after == self.task.ranks or self.forward[rank] < self.forward[after] + 2:
            return False
        own = self.own
        needed = self.clock[after] + own.forward[after] + own.input_grad[after] + own.transfer[after]
        if self.clock[rank] >= needed:
            return True
        pending = self.input_grad[rank] - self.weight_grad[rank]
        held, time = self.held[rank] + 1, self.clock[rank] + own.forward[rank]
        while held > self.task.held_at_most and pending:
            held, time, pending = held - own.kept[rank], time + own.weight_grad[rank], pending - 1
        if time <= needed:
            return False
        return needed - self.clock[rank] <= self.longest_idle - self.idle[rank]

    def run_forward(self, rank: int) -> None:
        """Makes room, fills what would be idle, and runs the rank's next forward action."""
        while self.held[rank] + 1 > self.task.held_at_most:
            self.run(rank, "W")
        if rank:
            self._fill(rank, self.results[rank - 1][self.forward[rank]] + self.own.transfer[rank - 1])
        self.run(rank, "F")

    def run_input_grad(self, rank: int) -> None:
        """Fills what would be idle, and runs the rank's next input gradient."""
        if rank + 1 < self.task.ranks:
            self._fill(rank, self.gradients[rank + 1] + self.own.transfer[rank + 1])
        if not rank and self.forward[rank] == self.task.microbatches:
            self.run_weight_grads(rank)
        self.run(rank, "I")

    def run_weight_grads(self, rank: int) -> None:
        """Runs every weight gradient that the rank has kept back."""
        while self.weight_grad[rank] < self.input_grad[rank]:
            self.run(rank, "W")

    def _fill(self, rank: int, until: float) -> None:
        """Weight gradients up to the time `until`, at which there is something else to run."""
        takes, instant = self.own.weight_grad[rank] - self.task.instant, self.task.instant
        while self.weight_grad[rank] < self.input_grad[rank]:
            gap = until - self.clock[rank]
            others_idle = gap <= self.longest_idle - self.idle[rank]
            if gap <= instant or (gap < takes and others_idle and not self.choices.fills):
                return
            self.run(rank, "W")

    def run(self, rank: int, kind: str) -> None:
        """Runs the rank's next action of this kind, as soon as what it needs is there."""
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
            self.held[rank] -= 1 - own.kept[rank]
        else:
            self.weight_grad[rank] += 1
            self.held[rank] -= own.kept[rank]
        if not first:
            self.idle[rank] += start - self.clock[rank]
            self.longest_idle = max(self.longest_idle, self.idle[rank])
        self.clock[rank] = start + self.takes[kind][rank]
        self.kinds[rank].append(kind)
