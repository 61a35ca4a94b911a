"""The search for a schedule without bubbles at given costs, within a limit of memory."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count, product
from math import inf, isnan
from numbers import Real
from typing import Any

from jaxshard_magic.schedule.actions import Action, flat
from jaxshard_magic.schedule.costs import Costs
from jaxshard_magic.schedule.grid import Schedule
from jaxshard_magic.schedule.orders import Rows, gpipe, one_f_one_b
from jaxshard_magic.schedule.search_greedy import Rule, greedy
from jaxshard_magic.schedule.search_task import Found, Task
from jaxshard_magic.schedule.search_waves import Choices, waves
from jaxshard_magic.schedule.simulate import held, simulate
from jaxshard_magic.schedule.zero_bubble import zb_h1, zb_h2

# Rules are tried until so many actions are placed in time; at least and at most so many rules.
ACTIONS, FEWEST, MOST = 400_000, 6, 200


def zero_bubble(ranks: int, microbatches: int, costs: Costs, memory_limit: float | None = None) -> Rows:
    """The schedule with the smallest span that a search finds, and among those the smallest makespan.

    The span is what a step costs where steps follow each other without a barrier, and what more memory makes smaller;
    the makespan is at unit costs never smaller than ZB-H1's, and may grow where the span shrinks. The span is no larger
    than that of ZB-H1, ZB-H2, 1F1B and GPipe, where these are within the limit, and of the heuristic of Qi et al. 2024,
    arXiv 2401.10241, section 3.1.

    Args:
        ranks, microbatches: the sizes; one stage a rank.
        costs: of each stage.
        memory_limit: the most microbatches that a rank may hold the activations of, from 1, as `simulate` counts them.
            By default 2p, which the paper finds enough for close to no bubble (section 5.4).

    Raises ShardError where the costs don't fit the stages.
    """
    limit = 2.0 * ranks if memory_limit is None else float(memory_limit)
    return _rows(_best(Task(costs.per_stage(ranks), microbatches, limit), costs).kinds)


def refused(memory_limit: Any) -> str | None:
    """Why there is no schedule within this limit; None where there is one."""
    number = isinstance(memory_limit, Real) and not isinstance(memory_limit, bool)
    if memory_limit is None or (number and float(memory_limit) >= 1):
        return None
    if not number or isnan(memory_limit):
        return f"memory_limit is {memory_limit!r}; it must be a number of microbatches from 1"
    return f"no schedule holds less than 1 microbatch, so none is within {memory_limit:g}; use memory_limit=1 or more"


def _best(task: Task, costs: Costs) -> Found:
    search = _Search(task)
    for rule in _rules(task):
        search.tries(rule)
    if not search.perfect:
        for found in _known(task, costs):
            search.takes(found)
        for holds_back, skips, fills in product((True, False), repeat=3):
            search.takes(waves(task, Choices(holds_back, skips, fills), _about(search.best.span)))
    while any(search.tries(rule) for rule in _changes(search.rule)):
        pass
    return search.best


class _Search:
    """The best schedule so far; the best rule so far, with what it makes; how many more rules are tried."""

    def __init__(self, task: Task):
        self.task = task
        self.left = max(FEWEST, min(MOST, ACTIONS // (3 * task.ranks * task.microbatches)))
        self.rule: Rule = _opening(task)[0]
        self.tried: set[Rule] = set()
        self.made = self.best = Found(inf, inf, [])

    @property
    def perfect(self) -> bool:
        """Whether nothing can be better than the best."""
        span, makespan = self.task.least
        return not _better(Found(span, makespan, []), self.best)

    def tries(self, rule: Rule) -> bool:
        """Whether `rule` is the best so far."""
        if self.left <= 0 or rule in self.tried or self.perfect:
            return False
        self.left -= 1
        self.tried.add(rule)
        made = greedy(self.task, rule, _about(self.made.span))
        self.takes(made)
        if made is None or not _better(made, self.made):
            return False
        self.rule, self.made = rule, made
        return True

    def takes(self, found: Found | None) -> None:
        """Keeps `found`, where it is the best so far."""
        if found and _better(found, self.best):
            self.best = found


def _better(one: Found, other: Found) -> bool:
    if one.span > _about(other.span) or other.span > _about(one.span):
        return one.span < other.span
    return other.makespan > _about(one.makespan)


def _about(time: float) -> float:
    """The most that a time can be that is the same but for what adding up times rounds."""
    return time * (1 + 1e-9)


def _rules(task: Task) -> Iterator[Rule]:
    """The rules to try: first the few that did best on many tasks, each at what the others are worst at."""
    opening = _opening(task)
    yield from opening
    for looks, first, fill in product((True, False), "FWI", (None, 0.0, 0.5, 1.0)):
        for ahead in dict.fromkeys(rule.ahead for rule in opening):
            yield Rule(ahead, (fill,) * task.ranks, first, looks)


def _opening(task: Task) -> list[Rule]:
    few = tuple(min(task.ranks - rank, task.room) for rank in range(task.ranks))
    many = tuple(min(2 * (task.ranks - rank) - 1, task.room) for rank in range(task.ranks))
    past, half, short = (_until_first_gradient(task, share) for share in (0.0, 0.5, 1.0))
    each = (
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
    return [Rule(ahead, (fill,) * task.ranks, first, looks) for ahead, fill, first, looks in each]


def _until_first_gradient(task: Task, share: float) -> tuple[int, ...]:
    """Of each rank, the forward actions until its first gradient is there: the last one by this share of its time."""
    own, ahead = task.own, [1] * task.ranks
    back = task.first_start[-1] + own.forward[-1] + own.input_grad[-1]
    for rank in range(task.ranks - 2, -1, -1):
        takes, there = own.forward[rank], back + own.transfer[rank + 1]
        time = task.first_start[rank] + takes
        while ahead[rank] < task.room and time + share * takes < there - task.instant:
            ahead[rank] += 1
            time += takes
        back = max(time, there) + own.input_grad[rank]
    return tuple(ahead)


def _changes(rule: Rule) -> Iterator[Rule]:
    """Rules like this one: one forward action more or less ahead, on a rank or all on one side of it; other filling."""
    ranks = len(rule.ahead)
    for rank in range(ranks):
        for more, changed in product((1, -1), ((rank, rank + 1), (rank, ranks), (0, rank + 1))):
            within = range(*changed)
            yield replace(
                rule,
                ahead=tuple(max(1, each + more * (at in within)) for at, each in enumerate(rule.ahead)),
            )
        for fill in (None, 0.0, 0.3, 0.6, 1.0):
            yield replace(rule, fill=(*rule.fill[:rank], fill, *rule.fill[rank + 1 :]))


def _known(task: Task, costs: Costs) -> Iterator[Found]:
    """The orders that need no search, with the backward pass in halves, where they are within the limit."""
    for order in (zb_h1, zb_h2, one_f_one_b, gpipe):
        whole = ("".join([kind for _, kind, _ in flat(row)]) for row in order(task.ranks, task.microbatches))
        kinds = [row.replace("B", "IW") for row in whole]
        rows = _rows(kinds)
        if max(max(held(row, task.own.kept)) for row in rows) <= task.held_at_most:
            schedule = Schedule(order.__name__, task.ranks, task.microbatches, 1, tuple(map(tuple, rows)))
            placed = simulate(schedule, costs)
            yield Found(placed.span, placed.makespan, kinds)


def _rows(kinds: Sequence[Iterable[str]]) -> Rows:
    """The rows whose actions are of these kinds, with the microbatches of each kind in turn."""
    rows: Rows = []
    for rank, row in enumerate(kinds):
        counts = {kind: count() for kind in "FIW"}
        rows.append([Action(rank, kind, next(counts[kind])) for kind in row])
    return rows
