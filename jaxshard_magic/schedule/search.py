"""Search for a schedule with a small bubble at given costs, within a memory limit."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count, product
from math import inf, isnan
from numbers import Real
from typing import Any

from jaxshard_magic.schedule.actions import Action, flatten_fused
from jaxshard_magic.schedule.basic_orders import RankRows, gpipe, one_f_one_b
from jaxshard_magic.schedule.costs import Costs
from jaxshard_magic.schedule.grid import Schedule
from jaxshard_magic.schedule.search_greedy import GreedyRule, greedy
from jaxshard_magic.schedule.search_task import SearchResult, SearchTask
from jaxshard_magic.schedule.search_waves import HeuristicOptions, waves
from jaxshard_magic.schedule.simulate import activations_held, simulate
from jaxshard_magic.schedule.zero_bubble import zb_h1, zb_h2

# Limits of a search: actions placed by all rules together, and the least and greatest number of rules.
ACTION_BUDGET, MIN_RULES, MAX_RULES = 400_000, 6, 200


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
    return _rows_from_kinds(_best(SearchTask(costs.per_stage(ranks), microbatches, limit), costs).kinds)


def memory_limit_error(memory_limit: Any) -> str | None:
    """Return an error for a memory limit no schedule can keep; None for a valid limit."""
    # A bool is a Real, but not a valid limit.
    number = isinstance(memory_limit, Real) and not isinstance(memory_limit, bool)
    if memory_limit is None or (number and float(memory_limit) >= 1):
        return None
    if not number or isnan(memory_limit):
        return f"memory_limit is {memory_limit!r}; it must be a number of microbatches from 1"
    return f"no schedule holds less than 1 microbatch, so none is within {memory_limit:g}; use memory_limit=1 or more"


def _best(task: SearchTask, costs: Costs) -> SearchResult:
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
                waves(task, HeuristicOptions(holds_back, skips, fills), _with_tolerance(search.best.span))
            )
    while any(search.try_rule(rule) for rule in _neighbor_rules(search.rule)):
        pass
    return search.best


class _Search:
    """State of a search: the best schedule, the best rule with its schedule, and the number of rules left to try."""

    def __init__(self, task: SearchTask):
        self.task = task
        self.left = max(MIN_RULES, min(MAX_RULES, ACTION_BUDGET // (3 * task.ranks * task.microbatches)))
        self.rule: GreedyRule = _opening(task)[0]
        self.tried: set[GreedyRule] = set()
        self.rule_result = self.best = SearchResult(inf, inf, [])

    @property
    def is_optimal(self) -> bool:
        """Return whether the best schedule reaches the lower bounds."""
        span, makespan = self.task.lower_bounds
        return not _is_better(SearchResult(span, makespan, []), self.best)

    def try_rule(self, rule: GreedyRule) -> bool:
        """Try a rule and return whether it is the best so far."""
        if self.left <= 0 or rule in self.tried or self.is_optimal:
            return False
        self.left -= 1
        self.tried.add(rule)
        made = greedy(self.task, rule, _with_tolerance(self.rule_result.span))
        self.add_result(made)
        if made is None or not _is_better(made, self.rule_result):
            return False
        self.rule, self.rule_result = rule, made
        return True

    def add_result(self, found: SearchResult | None) -> None:
        """Replace the best schedule by `found` if better."""
        if found and _is_better(found, self.best):
            self.best = found


def _is_better(one: SearchResult, other: SearchResult) -> bool:
    """Return whether `one` has a smaller span than `other`; for equal spans, a smaller makespan."""
    if one.span > _with_tolerance(other.span) or other.span > _with_tolerance(one.span):
        return one.span < other.span
    return other.makespan > _with_tolerance(one.makespan)


def _with_tolerance(time: float) -> float:
    """Return the largest time still considered equal to `time`, with a tolerance for rounding in sums of times."""
    return time * (1 + 1e-9)


def _rules(task: SearchTask) -> Iterator[GreedyRule]:
    """Yield the greedy rules to try."""
    opening = _opening(task)
    # First the few rules that did best on many tasks, each on tasks where the others do worst.
    yield from opening
    for looks, first, fill in product((True, False), "FWI", (None, 0.0, 0.5, 1.0)):
        for ahead in dict.fromkeys(rule.ahead for rule in opening):
            yield GreedyRule(ahead, (fill,) * task.ranks, first, looks)


def _opening(task: SearchTask) -> list[GreedyRule]:
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
    return [GreedyRule(ahead, (fill,) * task.ranks, first, looks) for ahead, fill, first, looks in settings]


def _until_first_gradient(task: SearchTask, share: float) -> tuple[int, ...]:
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


def _neighbor_rules(rule: GreedyRule) -> Iterator[GreedyRule]:
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


def _known_orders(task: SearchTask, costs: Costs) -> Iterator[SearchResult]:
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
            yield SearchResult(placed.span, placed.makespan, kinds)


def _rows_from_kinds(kinds: Sequence[Iterable[str]]) -> RankRows:
    """Return the actions of each rank from their kinds; microbatches of each kind are in order."""
    rows: RankRows = []
    for rank, row in enumerate(kinds):
        counts = {kind: count() for kind in "FIW"}
        rows.append([Action(rank, kind, next(counts[kind])) for kind in row])
    return rows
