"""A schedule made in time: whenever a rank is free it takes the best action that it can run."""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from jaxshard_magic.schedule.search_task import Found, Task


@dataclass(frozen=True)
class Rule:
    """What a free rank takes: an input gradient or a forward action that is there, or a weight gradient to fill a gap.

    `ahead`: of each rank, the most microbatches that have run forward and not backward. `fill`: of each rank, the share
    of a weight gradient's time that a gap must have to be filled with one; where it is None, one goes also into a
    smaller gap that would make this rank's idle time the longest of all. `first`: what goes first of forward (F) and
    input gradient (I); with W, a forward action goes first as with F, and where it lacks room, what makes the room.
    `looks`: whether gradients that have yet to start on the ranks behind are expected, at the soonest.
    """

    ahead: tuple[int, ...]
    fill: tuple[float | None, ...]
    first: str = "F"
    looks: bool = True


@dataclass(slots=True, eq=False)
class _Rank:
    """A rank: what its actions take, how many of each kind have started, and what is there for it, and when."""

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


def greedy(task: Task, rule: Rule, most: float = inf) -> Found | None:
    """The schedule that `rule` makes for `task`; None where its span would be more than `most`."""
    own = task.own
    costs = zip(own.forward, own.input_grad, own.weight_grad, own.transfer, own.kept, strict=True)
    ranks = [_Rank(at, *each, rule.ahead[at], rule.fill[at]) for at, each in enumerate(costs)]
    ranks[0].inputs = [0.0] * task.microbatches
    longest_idle = 0.0
    waking = [(0.0, 0)]
    while waking:
        now, at = heappop(waking)
        rank = ranks[at]
        if now < rank.clock:
            continue
        kind, time = _choice(task, rule, ranks, rank, now, longest_idle)
        if kind:
            if time > rank.clock and rank.forward:
                rank.idle += time - rank.clock
                longest_idle = max(longest_idle, rank.idle)
                if rank.idle + task.work[at] > most:
                    return None
            woken = _run(ranks, rank, kind, time)
            heappush(waking, (rank.clock, at))
            if woken:
                heappush(waking, (max(now, woken.clock), woken.place))
        elif time < inf:
            heappush(waking, (time, at))
    span = max(rank.clock - rank.begun for rank in ranks)
    return Found(span, max(rank.clock for rank in ranks), [rank.kinds for rank in ranks])


def _choice(
    task: Task, rule: Rule, ranks: list[_Rank], rank: _Rank, now: float, longest_idle: float
) -> tuple[str, float]:
    """What `rank` runs and when it starts; or nothing, and when it looks again: never, where others must move first."""
    back = rank.input_grad
    gradient = rank.gradients[back] if back < len(rank.gradients) else inf
    given = inf
    if rank.forward < len(rank.inputs) and rank.forward - back < rank.ahead:
        given = rank.inputs[rank.forward]
    at_once = now + task.instant
    pending = rank.weight_grad < back
    if given < inf and rank.held + 1 > task.held_at_most:
        if given <= at_once and pending and (gradient > at_once or rule.first == "W"):
            return "W", now
        given = inf
    if given <= at_once and (rule.first != "I" or gradient > at_once):
        return "F", max(now, given)
    if gradient <= at_once:
        return "I", max(now, gradient)
    later = min(given, gradient)
    if pending:
        if gradient == inf and rule.looks:
            later = min(later, _expected(ranks, rank, now))
        gap, takes = later - now, rank.weight_grad_takes
        least = longest_idle - rank.idle if rank.fill is None else rank.fill * takes
        if gap > least or gap >= takes - task.instant:
            return "W", now
    return "", later


def _expected(ranks: list[_Rank], rank: _Rank, now: float) -> float:
    """When `rank`'s next gradient can be there at the soonest; infinity where the microbatch is not yet on its way."""
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
    """Runs an action on `rank`; the rank that its result goes to, if any."""
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
