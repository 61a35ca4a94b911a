"""Zero-bubble schedule in a V: a fixed order of legs, and a search for the positions of weight gradients.

The order is the hand-made order of the paper. A weight gradient fills a gap of a waiting rank, or part of the gap stays
open on a rank with idle time to spare. Qi et al. 2024, arXiv 2405.15362, and 2401.10241, section 3.1.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxshard_magic.schedule.costs import PerStage
from jaxshard_magic.schedule.vshape_legs import FORWARD, LEGS, WEIGHT, first_microbatches, sources, stage_of

_Order = list[tuple[int, int]]  # legs and ranks, in an order in which they can run
_ALL, _HALVINGS = (True, True, True, True), 5
_SAME = 1e-9  # times and shares closer than this are the same
# For each leg, whether a weight gradient may fill a gap that is too short for it. All four choices are tried.
_LATE_ON = (_ALL, (False, False, True, True), (True, True, False, True), (False, False, False, True))


class PlacedRows(NamedTuple):
    """Rows with weight gradients in place.

    Attributes:
        span: Time of the longest rank.
        makespan: The last end.
        rows: For each rank, its legs and weight gradients.
        idle: Idle time of each rank.
    """

    span: float
    makespan: float
    rows: list[list[int]]
    idle: list[float]

    @property
    def merit(self) -> tuple[float, float]:
        """Sort key: smaller is better."""
        return self.span, self.makespan


def zero_rows(ranks: int, microbatches: int) -> list[list[int]]:
    """Return each rank's legs, in an order without waiting if all actions take equal time; p microbatches held."""
    # The pattern needs 2p - 1 microbatches. The order for fewer is the same pattern without the later microbatches.
    full = max(microbatches, 2 * ranks - 1)
    rows = []
    for rank in range(ranks):
        up = ranks - rank
        filling = [0] * (2 * up - 1) + [1, 0] * rank + [1, 2] * up
        steady = [0, 3, 1, 2] * (full - 2 * ranks + 1 + rank) + [3, 1, 2] * (up - 1)
        rows.append(first_microbatches(filling + steady + [3, 2] * rank + [3] * up, microbatches))
    return rows


def interleave_ranks(rows: Sequence[Sequence[int]]) -> _Order:
    """Merge the legs of all ranks into a single executable order.

    Forward legs come first, as many as can run. Then gradients and forward legs alternate on each rank.
    """
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


def search_weight_grads(orders: Sequence[Sequence[Sequence[int]]], own: PerStage, limit: float) -> PlacedRows:
    """Return the best rows: the shortest time of the longest rank, then the earliest end.

    Args:
        orders: Alternative rows of legs, each in an order within `limit` if weight gradients are ignored.
        own: Costs of each stage.
        limit: Most chunks a rank may hold.
    """
    ranks = len(orders[0])
    none = [0.0] * ranks
    turns = [interleave_ranks(rows) for rows in orders]
    order = min(turns, key=lambda each: place_weight_grads(each, ranks, own, limit, _ALL, none).merit)
    best: PlacedRows | None = None
    for late_on in _LATE_ON:
        spare, last = none, math.inf
        while True:
            placed = place_weight_grads(order, ranks, own, limit, late_on, spare)
            best = placed if best is None else min(best, placed, key=lambda each: each.merit)
            most = max(placed.idle)
            # No rank is idle, so no other placement is better.
            if most <= _SAME:
                return placed
            if placed.span >= last:
                break
            last, spare = placed.span, [most - idle for idle in placed.idle]
    assert best is not None
    # Bisection over the idle time allowed to every rank.
    low, high = 0.0, max(best.idle)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        placed = place_weight_grads(order, ranks, own, limit, _ALL, [middle] * ranks, shared=False)
        best = min(best, placed, key=lambda each: each.merit)
        low, high = (low, min(middle, max(placed.idle))) if max(placed.idle) <= middle else (middle, high)
    return best


def place_weight_grads(
    order: _Order,
    ranks: int,
    own: PerStage,
    limit: float,
    late_on: Sequence[bool],
    spare: Sequence[float],
    *,
    shared: bool = True,
) -> PlacedRows:
    """Place weight gradients in waiting time or to make room, and the remaining ones at the end.

    A gap too short for a weight gradient stays open as long as the rank's idle time is within its allowance.

    Args:
        order: Legs of all ranks, in an executable order.
        ranks: Number of ranks.
        own: Costs of each stage.
        limit: Most chunks a rank may hold.
        late_on: For each leg, whether a weight gradient may delay the leg if the gap would be too much idle time.
        spare: Idle time allowed for each rank.
        shared: Also allow each rank as much idle time as any other rank has had so far.
    """
    lanes = _lanes(ranks, own, spare, len(order) // (4 * ranks))
    input_ends = [[source and lanes[source[1]].ends[source[0]] for source in row] for row in sources(ranks)]
    delays = _delays(ranks, own)
    most = 0.0
    for leg, rank in order:
        lane = lanes[rank]
        ends, source = lane.ends[leg], input_ends[leg][rank]
        ready = source[len(ends)] + delays[leg][rank] if source is not None else 0.0
        room = limit - 1 if leg in FORWARD else math.inf
        while lane.weights < len(lane.waiting):
            wait = ready - lane.now
            allowed = max(most, lane.spare) if shared else lane.spare
            must_run = lane.held > room + _SAME or lane.takes[lane.waiting[lane.weights]] <= wait + _SAME
            if not must_run and (wait <= 0 or not late_on[leg] or lane.idle + wait <= allowed + _SAME):
                break
            lane.weight()
        most = max(most, lane.run(leg, ready))
    for lane in lanes:
        while lane.weights < len(lane.waiting):
            lane.weight()
    return PlacedRows(
        max(lane.now - lane.start for lane in lanes),
        max(lane.now for lane in lanes),
        [lane.row for lane in lanes],
        [lane.idle for lane in lanes],
    )


class _Lane:
    """A rank's progress through its legs: clock, idle time, chunks held and pending weight gradients."""

    def __init__(self, rank: int, ranks: int, own: PerStage, spare: float) -> None:
        stages = [stage_of(leg, rank, ranks) for leg in (*LEGS, *WEIGHT.values())]
        kinds = (own.forward, own.forward, own.input_grad, own.input_grad, own.weight_grad, own.weight_grad)
        self.takes = [kind[stage] for kind, stage in zip(kinds, stages, strict=True)]
        kept = [own.kept_for_weight_grad[stage] for stage in stages]
        self.holds = [1.0, 1.0, kept[2] - 1, kept[3] - 1, -kept[4], -kept[5]]
        self.spare = spare
        self.now = self.start = self.idle = self.held = 0.0
        self.row: list[int] = []
        self.waiting: list[int] = []  # weight gradients so far; the first `weights` of them are done
        self.weights = 0
        self.ends: list[list[float]] = [[] for _ in LEGS]

    def run(self, leg: int, ready: float) -> float:
        """Run a leg at `ready` or later, and return the rank's idle time so far."""
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
        """Run the oldest pending weight gradient."""
        leg = self.waiting[self.weights]
        self.weights += 1
        self.now += self.takes[leg]
        self.held += self.holds[leg]
        self.row.append(leg)


def _lanes(ranks: int, own: PerStage, spare: Sequence[float], microbatches: int) -> list[_Lane]:
    """Return the state of each rank."""
    lanes = [_Lane(rank, ranks, own, each) for rank, each in enumerate(spare)]
    longest = max(sum(lane.takes) for lane in lanes)
    for lane in lanes:
        # A rank with less work than the longest rank starts with idle time to spare.
        lane.idle = (sum(lane.takes) - longest) * microbatches
    return lanes


def _delays(ranks: int, own: PerStage) -> list[list[float]]:
    """Return for each leg and rank the transfer time of its input; 0 for an input from the same rank."""
    return [
        [
            own.transfer[stage_of(*source, ranks)] if source and source[1] != rank else 0.0
            for rank, source in enumerate(row)
        ]
        for row in sources(ranks)
    ]
