"""The zero bubble schedule in a V: a fixed order of legs, and a search for the places of the weight gradients.

The order is that of the hand-made schedule; where a rank would wait, a weight gradient fills the gap, or some of the
gap stays open where the rank has idle time to spare. Qi et al. 2024, arXiv 2405.15362, and 2401.10241, section 3.1.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxshard_magic.schedule.costs import PerStage
from jaxshard_magic.schedule.vshape_legs import FORWARD, LEGS, WEIGHT, first, sources, stage_of

_Order = list[tuple[int, int]]  # legs and ranks, in an order in which they can run
_ALL, _HALVINGS = (True, True, True, True), 5
_SAME = 1e-9  # times and shares closer than this are the same
# On which legs a rank may put a weight gradient into a gap that is too short for it.
_LATE_ON = (_ALL, (False, False, True, True), (True, True, False, True), (False, False, False, True))


class Filled(NamedTuple):
    """Rows with their weight gradients placed: the longest rank's time, the last end, and idle time by rank."""

    span: float
    makespan: float
    rows: list[list[int]]
    idle: list[float]

    @property
    def merit(self) -> tuple[float, float]:
        return self.span, self.makespan


def zero_rows(ranks: int, microbatches: int) -> list[list[int]]:
    """The legs of every rank such that none waits where all actions take the same time: p microbatches are held."""
    full = max(microbatches, 2 * ranks - 1)
    rows = []
    for rank in range(ranks):
        up = ranks - rank
        filling = [0] * (2 * up - 1) + [1, 0] * rank + [1, 2] * up
        steady = [0, 3, 1, 2] * (full - 2 * ranks + 1 + rank) + [3, 1, 2] * (up - 1)
        rows.append(first(filling + steady + [3, 2] * rank + [3] * up, microbatches))
    return rows


def in_turns(rows: Sequence[Sequence[int]]) -> _Order:
    """The legs of all ranks in one order: forward as far as it goes, then of each rank a gradient and a forward leg."""
    ranks = len(rows)
    given = sources(ranks)
    ran = [[0] * ranks for _ in LEGS]
    left = [iter(row) for row in rows]
    heads = [next(row, None) for row in left]
    order: _Order = []

    def go(turn: Iterable[int], legs: Sequence[int]) -> None:
        for rank in turn:
            leg = heads[rank]
            if leg is not None and leg in legs:
                source = given[leg][rank]
                if source is None or ran[source[0]][source[1]] > ran[leg][rank]:
                    ran[leg][rank] += 1
                    order.append((leg, rank))
                    heads[rank] = next(left[rank], None)

    before = -1
    while len(order) > before:
        before = len(order)
        go(range(ranks), FORWARD)
    while any(leg is not None for leg in heads):
        gradients = list(heads)
        go((rank for rank in reversed(range(ranks)) if gradients[rank] == 3), (3,))
        go((rank for rank in range(ranks) if gradients[rank] == 2), (2,))
        go(range(ranks), FORWARD)
    return order


def searched(orders: Sequence[Sequence[Sequence[int]]], own: PerStage, limit: float) -> Filled:
    """The best of the rows of legs in `orders`, with the best places found for its weight gradients.

    Best is the shortest time of the longest rank, then the earliest end.

    Args:
        orders: rows of legs, each of them in an order that holds no more than `limit` without weight gradients.
        own: the costs of every stage.
        limit: chunks that a rank may hold.
    """
    ranks = len(orders[0])
    none = [0.0] * ranks
    turns = [in_turns(rows) for rows in orders]
    order = min(turns, key=lambda each: filled(each, ranks, own, limit, _ALL, none).merit)
    best: Filled | None = None
    for late_on in _LATE_ON:
        spare, last = none, math.inf
        while True:
            found = filled(order, ranks, own, limit, late_on, spare)
            best = found if best is None else min(best, found, key=lambda each: each.merit)
            most = max(found.idle)
            if most <= _SAME:
                return found
            if found.span >= last:
                break
            last, spare = found.span, [most - idle for idle in found.idle]
    assert best is not None
    low, high = 0.0, max(best.idle)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = filled(order, ranks, own, limit, _ALL, [middle] * ranks, shared=False)
        best = min(best, found, key=lambda each: each.merit)
        low, high = (low, min(middle, max(found.idle))) if max(found.idle) <= middle else (middle, high)
    return best


def filled(
    order: _Order,
    ranks: int,
    own: PerStage,
    limit: float,
    late_on: Sequence[bool],
    spare: Sequence[float],
    *,
    shared: bool = True,
) -> Filled:
    """The weight gradients put where a rank would wait, or must make room, and what is left of them at the end.

    A gap too short for one stays open as long as the rank's idle time stays within what it has to spare.

    Args:
        order: the legs of all ranks, in an order in which they can run.
        ranks: how many there are.
        own: the costs of every stage.
        limit: chunks that a rank may hold.
        late_on: of each leg, whether a weight gradient may make it late where the gap would be too much idle time.
        spare: of each rank, idle time that it may have.
        shared: whether each rank may idle as long as any other has so far, too.
    """
    lanes = _lanes(ranks, own, spare, len(order) // (4 * ranks))
    given = [[source and lanes[source[1]].ends[source[0]] for source in row] for row in sources(ranks)]
    delays = _delays(ranks, own)
    most = 0.0
    for leg, rank in order:
        lane = lanes[rank]
        ends, source = lane.ends[leg], given[leg][rank]
        ready = source[len(ends)] + delays[leg][rank] if source is not None else 0.0
        room = limit - 1 if leg in FORWARD else math.inf
        while lane.weights < len(lane.waiting):
            wait = ready - lane.now
            allowed = max(most, lane.spare) if shared else lane.spare
            must = lane.held > room + _SAME or lane.takes[lane.waiting[lane.weights]] <= wait + _SAME
            if not must and (wait <= 0 or not late_on[leg] or lane.idle + wait <= allowed + _SAME):
                break
            lane.weight()
        most = max(most, lane.run(leg, ready))
    for lane in lanes:
        while lane.weights < len(lane.waiting):
            lane.weight()
    return Filled(
        max(lane.now - lane.start for lane in lanes),
        max(lane.now for lane in lanes),
        [lane.row for lane in lanes],
        [lane.idle for lane in lanes],
    )


class _Lane:
    """A rank on its way through its legs."""

    def __init__(self, rank: int, ranks: int, own: PerStage, spare: float) -> None:
        stages = [stage_of(leg, rank, ranks) for leg in (*LEGS, *WEIGHT.values())]
        kinds = (own.forward, own.forward, own.input_grad, own.input_grad, own.weight_grad, own.weight_grad)
        self.takes = [kind[stage] for kind, stage in zip(kinds, stages, strict=True)]
        kept = [own.kept[stage] for stage in stages]
        self.holds = [1.0, 1.0, kept[2] - 1, kept[3] - 1, -kept[4], -kept[5]]
        self.spare = spare
        self.now = self.start = self.idle = self.held = 0.0
        self.row: list[int] = []
        self.waiting: list[int] = []  # weight gradients, and how many of them are done
        self.weights = 0
        self.ends: list[list[float]] = [[] for _ in LEGS]

    def run(self, leg: int, ready: float) -> float:
        """Runs a leg once it may, and gives the rank's idle time so far."""
        if ready > self.now:
            if self.row:
                self.idle += ready - self.now
            else:
                self.start = ready
            self.now = ready
        self.now += self.takes[leg]
        self.held += self.holds[leg]
        self.row.append(leg)
        self.ends[leg].append(self.now)
        if leg in WEIGHT:
            self.waiting.append(WEIGHT[leg])
        return self.idle

    def weight(self) -> None:
        """Runs the weight gradient that has waited longest."""
        leg = self.waiting[self.weights]
        self.weights += 1
        self.now += self.takes[leg]
        self.held += self.holds[leg]
        self.row.append(leg)


def _lanes(ranks: int, own: PerStage, spare: Sequence[float], microbatches: int) -> list[_Lane]:
    """The ranks; one with less work than the longest starts with idle time to make up for it."""
    lanes = [_Lane(rank, ranks, own, each) for rank, each in enumerate(spare)]
    longest = max(sum(lane.takes) for lane in lanes)
    for lane in lanes:
        lane.idle = (sum(lane.takes) - longest) * microbatches
    return lanes


def _delays(ranks: int, own: PerStage) -> list[list[float]]:
    """Of each leg and rank, the time that its input takes from the rank that gives it."""
    return [
        [
            own.transfer[stage_of(*source, ranks)] if source and source[1] != rank else 0.0
            for rank, source in enumerate(row)
        ]
        for row in sources(ranks)
    ]
