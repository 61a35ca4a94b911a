"""Greedy list scheduling in simulated time: each free rank takes the best action it can run."""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from jaxshard_magic.schedule.search_task import SearchResult, SearchTask


@dataclass(frozen=True)
class GreedyRule:
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


def greedy(task: SearchTask, rule: GreedyRule, most: float = inf) -> SearchResult | None:
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
    return SearchResult(span, max(rank.clock for rank in ranks), [rank.kinds for rank in ranks])


def _next_action(
    task: SearchTask, rule: GreedyRule, ranks: list[_Rank], rank: _Rank, now: float, longest_idle: float
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
