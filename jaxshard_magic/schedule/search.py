"""Search for a schedule with a small bubble at given costs, within a memory limit.

`zero_bubble` tries three kinds of orders and keeps the best:

- Greedy list scheduling in simulated time: each free rank takes the best action it can run, by the priorities of a
  rule. The best rule is changed while that helps.
- The published heuristic: for each microbatch a forward wave and a backward wave. After the warm-up each rank
  alternates between a forward action and an input gradient. Weight gradients fill idle time, and free memory when the
  limit is reached. Qi et al. 2024, arXiv 2401.10241, section 3.1.
- The orders without a search that are within the limit.

A search ends at once where an order reaches the lower bounds of every schedule.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, count, product
from math import inf, isnan
from numbers import Real
from typing import Any, NamedTuple

from jaxshard_magic.schedule.actions import Action, flatten_fused
from jaxshard_magic.schedule.costs import Costs, PerStage
from jaxshard_magic.schedule.fixed_orders import RankRows, gpipe, one_f_one_b, zb_h1, zb_h2
from jaxshard_magic.schedule.grid import Schedule
from jaxshard_magic.schedule.simulate import activations_held, simulate

# Limits of a search: actions placed by all rules together, and the least and greatest number of rules.
ACTION_BUDGET, MIN_RULES, MAX_RULES = 400_000, 6, 200


class _SearchResult(NamedTuple):
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
class _SearchTask:
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


@dataclass(frozen=True)
class _GreedyRule:
    """Priorities of a free rank: an available input gradient or forward action, or a weight gradient to fill a gap.

    Attributes:
        ahead: For each rank, the most microbatches past their forward action but not their backward action.
        fill: For each rank, the gap needed to fill it with a weight gradient, as a share of the gradient's time. With
            None, a smaller gap is also filled if it would give this rank the longest idle time of all.
        first: Priority between forward actions (F) and input gradients (I). W is like F, but a forward action without
            memory goes first too: a weight gradient makes room for it.
        expects_gradients: Estimate the earliest arrival of gradients that are not yet started on later ranks.
    """

    ahead: tuple[int, ...]
    fill: tuple[float | None, ...]
    first: str = "F"
    expects_gradients: bool = True


@dataclass(slots=True, eq=False)
class _Rank:
    """State of a rank: times of its actions, number of started actions of each kind, arrivals of its inputs.

    Attributes:
        place: Number of the rank.
        forward_takes: Time of a forward action.
        input_grad_takes: Time of an input gradient.
        weight_grad_takes: Time of a weight gradient.
        sends: Time of a transfer to another rank.
        kept: Share of activations held for the weight gradient.
        ahead: As in the rule.
        fill: As in the rule.
        forward: Number of started forward actions.
        input_grad: Number of started input gradients.
        weight_grad: Number of started weight gradients.
        clock: End of the last action.
        held: Microbatches of activations held.
        idle: Idle time since the first action.
        begun: Start of the first action.
        inputs: Arrival times of activations.
        gradients: Arrival times of gradients.
        kinds: Kinds of the actions so far.
    """

    place: int
    forward_takes: float
    input_grad_takes: float
    weight_grad_takes: float
    sends: float
    kept: float
    ahead: int
    fill: float | None
    forward: int = 0
    input_grad: int = 0
    weight_grad: int = 0
    clock: float = 0.0
    held: float = 0.0
    idle: float = 0.0
    begun: float = 0.0
    inputs: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)


def _greedy(task: _SearchTask, rule: _GreedyRule, most: float = inf) -> _SearchResult | None:
    """Return the schedule made by `rule`; None if its span exceeds `most`."""
    own = task.costs
    costs = zip(own.forward, own.input_grad, own.weight_grad, own.transfer, own.kept_for_weight_grad, strict=True)
    ranks = [_Rank(at, *each, rule.ahead[at], rule.fill[at]) for at, each in enumerate(costs)]
    ranks[0].inputs = [0.0] * task.microbatches
    longest_idle = 0.0
    waking = [(0.0, 0)]
    while waking:
        now, at = heappop(waking)
        rank = ranks[at]
        # A stale wake-up: the rank has started another action since.
        if now < rank.clock:
            continue
        kind, time = _next_action(task, rule, ranks, rank, now, longest_idle)
        if kind:
            if time > rank.clock and rank.forward:
                rank.idle += time - rank.clock
                longest_idle = max(longest_idle, rank.idle)
                # The span is at least idle time plus work, so the final span would also exceed the limit.
                if rank.idle + task.work[at] > most:
                    return None
            woken = _run(ranks, rank, kind, time)
            heappush(waking, (rank.clock, at))
            if woken:
                heappush(waking, (max(now, woken.clock), woken.place))
        elif time < inf:
            heappush(waking, (time, at))
    span = max(rank.clock - rank.begun for rank in ranks)
    return _SearchResult(span, max(rank.clock for rank in ranks), [rank.kinds for rank in ranks])


def _next_action(
    task: _SearchTask, rule: _GreedyRule, ranks: list[_Rank], rank: _Rank, now: float, longest_idle: float
) -> tuple[str, float]:
    """Return the kind of the next action of `rank`, and its start time.

    Without an action to run the kind is empty, and the time is when to ask again: infinity if other ranks must act
    first.
    """
    back = rank.input_grad
    gradient_arrival = rank.gradients[back] if back < len(rank.gradients) else inf
    input_arrival = inf
    if rank.forward < len(rank.inputs) and rank.forward - back < rank.ahead:
        input_arrival = rank.inputs[rank.forward]
    at_once = now + task.time_tolerance
    pending = rank.weight_grad < back
    # Without memory for a forward action, a weight gradient makes room for it.
    if input_arrival < inf and rank.held + 1 > task.limit_with_tolerance:
        if input_arrival <= at_once and pending and (gradient_arrival > at_once or rule.first == "W"):
            return "W", now
        input_arrival = inf
    if input_arrival <= at_once and (rule.first != "I" or gradient_arrival > at_once):
        return "F", max(now, input_arrival)
    if gradient_arrival <= at_once:
        return "I", max(now, gradient_arrival)
    later = min(input_arrival, gradient_arrival)
    if pending:
        if gradient_arrival == inf and rule.expects_gradients:
            later = min(later, _earliest_gradient(ranks, rank, now))
        gap, takes = later - now, rank.weight_grad_takes
        least = longest_idle - rank.idle if rank.fill is None else rank.fill * takes
        if gap > least or gap >= takes - task.time_tolerance:
            return "W", now
    return "", later


def _earliest_gradient(ranks: list[_Rank], rank: _Rank, now: float) -> float:
    """Return the earliest possible arrival of the next gradient; infinity for a microbatch still on its way forward."""
    microbatch, at = rank.input_grad, rank.place
    while len(ranks[at].gradients) <= microbatch < ranks[at].forward:
        at += 1
    if at == rank.place or microbatch >= ranks[at].forward:
        return inf
    time = ranks[at].gradients[microbatch]
    for other in ranks[at : rank.place : -1]:
        time = max(time, other.clock) + other.input_grad_takes + other.sends
    return time if time > now else inf


def _run(ranks: list[_Rank], rank: _Rank, kind: str, start: float) -> _Rank | None:
    """Run an action on `rank`, and return the rank that receives the result, if any."""
    rank.kinds.append(kind)
    woken = None
    if kind == "F":
        if not rank.forward:
            rank.begun = start
        rank.clock = end = start + rank.forward_takes
        rank.forward += 1
        rank.held += 1
        if rank.place + 1 < len(ranks):
            woken = ranks[rank.place + 1]
            woken.inputs.append(end + rank.sends)
        else:
            rank.gradients.append(end)
    elif kind == "I":
        rank.clock = end = start + rank.input_grad_takes
        rank.input_grad += 1
        rank.held -= 1 - rank.kept
        if rank.place:
            woken = ranks[rank.place - 1]
            woken.gradients.append(end + rank.sends)
    else:
        rank.clock = start + rank.weight_grad_takes
        rank.weight_grad += 1
        rank.held -= rank.kept
    return woken


@dataclass(frozen=True)
class _HeuristicOptions:
    """Options left open by the heuristic.

    Attributes:
        holds_back: End the warm-up before a forward action that would delay the first gradient, rather than after.
        skips: A rank two forward actions ahead of the next rank skips an action if the skip costs nothing.
        fills: Fill a gap too small for a weight gradient also on ranks other than the rank with the longest idle time.
    """

    holds_back: bool
    skips: bool
    fills: bool


def _waves(task: _SearchTask, choices: _HeuristicOptions, most: float = inf) -> _SearchResult | None:
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
    return _SearchResult(max(spans), max(ranks.clock), ranks.kinds)


class _Ranks:
    """State of all ranks: clocks, number of actions of each kind, activations held, idle times."""

    def __init__(self, task: _SearchTask, choices: _HeuristicOptions):
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


def zero_bubble(ranks: int, microbatches: int, costs: Costs, memory_limit: float | None = None) -> RankRows:
    """Return the schedule with the smallest span found by search; among equal spans, with the smallest makespan.

    The span is the time of a step when steps follow each other without a barrier, and decreases with more memory. The
    makespan at unit costs is never smaller than the makespan of ZB-H1, and may grow while the span shrinks. The span is
    at most the span of ZB-H1, ZB-H2, 1F1B and GPipe, as far as these are within the limit, and of the heuristic of Qi
    et al. 2024, arXiv 2401.10241, section 3.1.

    Args:
        ranks: Number of ranks, each with a single stage.
        microbatches: Number of microbatches.
        costs: Costs of each stage.
        memory_limit: Most microbatches of activations a rank may hold, at least 1, as counted by `simulate`. The
            default is 2p: enough for close to no bubble according to the paper (section 5.4).

    Raises:
        ShardError: The costs don't match the number of stages.
    """
    limit = 2.0 * ranks if memory_limit is None else float(memory_limit)
    return _rows_from_kinds(_best(_SearchTask(costs.per_stage(ranks), microbatches, limit), costs).kinds)


def memory_limit_error(memory_limit: Any) -> str | None:
    """Return an error for a memory limit no schedule can keep; None for a valid limit."""
    # A bool is a Real, but not a valid limit.
    number = isinstance(memory_limit, Real) and not isinstance(memory_limit, bool)
    if memory_limit is None or (number and float(memory_limit) >= 1):
        return None
    if not number or isnan(memory_limit):
        return f"memory_limit is {memory_limit!r}; it must be a number of microbatches from 1"
    return f"no schedule holds less than 1 microbatch, so none is within {memory_limit:g}; use memory_limit=1 or more"


def _best(task: _SearchTask, costs: Costs) -> _SearchResult:
    """Run the search: greedy rules, known orders, the published heuristic, then changes to the best rule while these
    help."""
    search = _Search(task)
    for rule in _rules(task):
        search.try_rule(rule)
    # A result that reaches the lower bounds of the task needs no comparison with other orders.
    if not search.is_optimal:
        for found in _known_orders(task, costs):
            search.add_result(found)
        for holds_back, skips, fills in product((True, False), repeat=3):
            search.add_result(
                _waves(task, _HeuristicOptions(holds_back, skips, fills), _with_tolerance(search.best.span))
            )
    while any(search.try_rule(rule) for rule in _neighbor_rules(search.rule)):
        pass
    return search.best


class _Search:
    """State of a search: the best schedule, the best rule with its schedule, and the number of rules left to try."""

    def __init__(self, task: _SearchTask):
        self.task = task
        self.left = max(MIN_RULES, min(MAX_RULES, ACTION_BUDGET // (3 * task.ranks * task.microbatches)))
        self.rule: _GreedyRule = _opening(task)[0]
        self.tried: set[_GreedyRule] = set()
        self.rule_result = self.best = _SearchResult(inf, inf, [])

    @property
    def is_optimal(self) -> bool:
        """Return whether the best schedule reaches the lower bounds."""
        span, makespan = self.task.lower_bounds
        return not _is_better(_SearchResult(span, makespan, []), self.best)

    def try_rule(self, rule: _GreedyRule) -> bool:
        """Try a rule and return whether it is the best so far."""
        if self.left <= 0 or rule in self.tried or self.is_optimal:
            return False
        self.left -= 1
        self.tried.add(rule)
        made = _greedy(self.task, rule, _with_tolerance(self.rule_result.span))
        self.add_result(made)
        if made is None or not _is_better(made, self.rule_result):
            return False
        self.rule, self.rule_result = rule, made
        return True

    def add_result(self, found: _SearchResult | None) -> None:
        """Replace the best schedule by `found` if better."""
        if found and _is_better(found, self.best):
            self.best = found


def _is_better(one: _SearchResult, other: _SearchResult) -> bool:
    """Return whether `one` has a smaller span than `other`; for equal spans, a smaller makespan."""
    if one.span > _with_tolerance(other.span) or other.span > _with_tolerance(one.span):
        return one.span < other.span
    return other.makespan > _with_tolerance(one.makespan)


def _with_tolerance(time: float) -> float:
    """Return the largest time still considered equal to `time`, with a tolerance for rounding in sums of times."""
    return time * (1 + 1e-9)


def _rules(task: _SearchTask) -> Iterator[_GreedyRule]:
    """Yield the greedy rules to try."""
    opening = _opening(task)
    # First the few rules that did best on many tasks, each on tasks where the others do worst.
    yield from opening
    for looks, first, fill in product((True, False), "FWI", (None, 0.0, 0.5, 1.0)):
        for ahead in dict.fromkeys(rule.ahead for rule in opening):
            yield _GreedyRule(ahead, (fill,) * task.ranks, first, looks)


def _opening(task: _SearchTask) -> list[_GreedyRule]:
    """Return the rules to try first."""
    few = tuple(min(task.ranks - rank, task.room) for rank in range(task.ranks))
    many = tuple(min(2 * (task.ranks - rank) - 1, task.room) for rank in range(task.ranks))
    past, half, short = (_until_first_gradient(task, share) for share in (0.0, 0.5, 1.0))
    settings = (
        (many, None, "W", False),
        (past, 0.0, "F", True),
        (many, 0.5, "W", True),
        (few, None, "I", True),
        (many, None, "F", True),
        (past, 0.5, "I", False),
        (half, 0.0, "W", True),
        (few, 0.5, "F", True),
        (short, 0.5, "F", False),
    )
    return [_GreedyRule(ahead, (fill,) * task.ranks, first, looks) for ahead, fill, first, looks in settings]


def _until_first_gradient(task: _SearchTask, share: float) -> tuple[int, ...]:
    """Return for each rank the number of forward actions before its first gradient arrives.

    Args:
        share: Share of the last forward action's time to finish before the arrival: 1 for the full action, 0 for its
            start alone.
    """
    costs, ahead = task.costs, [1] * task.ranks
    back = task.first_start[-1] + costs.forward[-1] + costs.input_grad[-1]
    for rank in range(task.ranks - 2, -1, -1):
        duration, arrival = costs.forward[rank], back + costs.transfer[rank + 1]
        time = task.first_start[rank] + duration
        while ahead[rank] < task.room and time + share * duration < arrival - task.time_tolerance:
            ahead[rank] += 1
            time += duration
        back = max(time, arrival) + costs.input_grad[rank]
    return tuple(ahead)


def _neighbor_rules(rule: _GreedyRule) -> Iterator[_GreedyRule]:
    """Yield rules similar to `rule`: a forward action more or less ahead, or another gap filling.

    The number ahead changes on a rank alone, or on all ranks from a rank on, or up to a rank.
    """
    ranks = len(rule.ahead)
    for rank in range(ranks):
        for more, changed in product((1, -1), ((rank, rank + 1), (rank, ranks), (0, rank + 1))):
            within = range(*changed)
            yield replace(rule, ahead=tuple(max(1, each + more * (at in within)) for at, each in enumerate(rule.ahead)))
        for fill in (None, 0.0, 0.3, 0.6, 1.0):
            yield replace(rule, fill=(*rule.fill[:rank], fill, *rule.fill[rank + 1 :]))


def _known_orders(task: _SearchTask, costs: Costs) -> Iterator[_SearchResult]:
    """Yield results for orders without a search that are within the limit, with backward actions split in halves."""
    for order in (zb_h1, zb_h2, one_f_one_b, gpipe):
        whole = ("".join([kind for _, kind, _ in flatten_fused(row)]) for row in order(task.ranks, task.microbatches))
        kinds = [row.replace("B", "IW") for row in whole]
        rows = _rows_from_kinds(kinds)
        if (
            max(max(activations_held(row, task.costs.kept_for_weight_grad)) for row in rows)
            <= task.limit_with_tolerance
        ):
            schedule = Schedule(order.__name__, task.ranks, task.microbatches, 1, tuple(map(tuple, rows)))
            placed = simulate(schedule, costs)
            yield _SearchResult(placed.span, placed.makespan, kinds)


def _rows_from_kinds(kinds: Sequence[Iterable[str]]) -> RankRows:
    """Return the actions of each rank from their kinds; microbatches of each kind are in order."""
    rows: RankRows = []
    for rank, row in enumerate(kinds):
        counts = {kind: count() for kind in "FIW"}
        rows.append([Action(rank, kind, next(counts[kind])) for kind in row])
    return rows
