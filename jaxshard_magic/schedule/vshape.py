"""V-shaped schedules: rank s of p holds stages s and 2p - 1 - s, so the first and the last stage share a rank.

A V balances memory among ranks: the more the first stage of a rank holds, the less the second. Qi et al. 2024,
"Pipeline Parallelism with Controllable Memory", arXiv 2405.15362.

A microbatch moves forward down the ranks (leg 0) and up (leg 1). Its gradients return down (leg 2) and up (leg 3). A
rank's order is a row of leg numbers; the microbatches of each leg are in sequence. Rows are made in two ways:

- From a building block (sections 2 and 3): the legs of a microbatch at fixed ticks, repeated, then squeezed. The
  lifespan of a block is the time from its forward actions to its weight gradients. It determines the number of blocks
  open at the same time, and so the memory. A tick is the time of any of the three kinds of action.
- Without bubbles: the paper's hand-made order of legs, and a search for the positions of weight gradients (arXiv
  2401.10241, section 3.1). A weight gradient fills a gap of a waiting rank, or part of the gap stays open on a rank
  with idle time to spare.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import NamedTuple

from jaxshard_magic.schedule.actions import Action, ScheduleEntry
from jaxshard_magic.schedule.costs import Costs, PerStage
from jaxshard_magic.schedule.fixed_orders import RankRows

_Order = list[tuple[int, int]]  # legs and ranks, in an order in which they can run
_ALL, _HALVINGS = (True, True, True, True), 5
_SAME = 1e-9  # times and shares closer than this are the same
# For each leg, whether a weight gradient may fill a gap that is too short for it. All four choices are tried.
_LATE_ON = (_ALL, (False, False, True, True), (True, True, False, True), (False, False, False, True))
_Block = Callable[[int, int], tuple[int, ...]]  # (ranks, rank) -> tick of each leg
_INTERVAL = 6  # ticks from block to block: two forward actions, two input and two weight gradients
_FORWARD = (0, 1)
_LEGS = range(4)
_WEIGHT = {2: 4, 3: 5}  # number, in a row, of the weight gradient deferred by a leg's input gradient

_KINDS = "FFIIWW"
_UPPER = (1, 2, 4)  # numbers in a row that belong to the later one of a rank's two stages


def zb_v(ranks: int, microbatches: int, costs: Costs, memory_limit: float | None = None) -> RankRows:
    """Return the ZB-V order: the activations of 1F1B, and at equal costs no idle time between a rank's first and last
    action.

    At other costs, weight gradients are placed in several ways and the shortest schedule is used, as in the paper. With
    a memory limit below p microbatches, the order comes from a building block with a shorter lifespan.

    Args:
        ranks: Number of ranks p.
        microbatches: Number of microbatches m; no idle time from 2p - 1 on.
        costs: Costs for the placement of weight gradients.
        memory_limit: Most microbatches a rank may hold, at least 1; p by default.
    """
    chunks = 2 * min(ranks if memory_limit is None else memory_limit, microbatches)
    # Tolerates rounding in a fractional limit.
    whole = int(chunks + 1e-9)
    fits = whole >= 2 * min(ranks, microbatches)
    orders = [_zero_rows(ranks, microbatches)] if fits else _within(ranks, microbatches, whole)
    return _legs_to_actions(_search_weight_grads(orders, costs.per_stage(2 * ranks), chunks).rows)


def v_half(ranks: int, microbatches: int) -> RankRows:
    """Return the V-Half order: (p + 2) // 2 microbatches held, about half of 1F1B; half its bubble at equal costs."""
    return _legs_to_actions(_squeezed(_half_block, ranks, microbatches, 2 * ((ranks + 2) // 2)))


def v_min(ranks: int, microbatches: int) -> RankRows:
    """Return the V-Min order: (p + 4) // 3 microbatches held, about a third of 1F1B; two thirds of its bubble at equal
    costs."""
    return _legs_to_actions(_squeezed(_min_block, ranks, microbatches, 2 * ((ranks + 4) // 3)))


def _within(ranks: int, microbatches: int, chunks: int) -> list[list[list[int]]]:
    """Return orders of legs within `chunks` chunks, from each suitable block, as repeated and with the remaining memory
    filled."""
    near = [block for block in (_half_block, _min_block) if _peak_chunks(block, ranks, 2 * _INTERVAL) <= chunks]
    found = []
    for block in near or [_min_block]:
        for limit in sorted({_peak_chunks(block, ranks, _interval(block, ranks, chunks)), chunks}):
            rows = _squeezed(block, ranks, microbatches, limit)
            found.append([[leg for leg in row if leg in _LEGS] for row in rows])
    return found


def _squeezed(block: _Block, ranks: int, microbatches: int, chunks: int) -> list[list[int]]:
    """Return the rows of a block repeated as often as the memory of `chunks` chunks allows."""
    return _squeeze_rows(_repeat_block(block, ranks, microbatches, _interval(block, ranks, chunks)), chunks)


def _interval(block: _Block, ranks: int, chunks: int) -> int:
    """Return the smallest interval between blocks, in ticks, within `chunks` chunks."""
    least = max(_INTERVAL, _lifespan(block, ranks) // chunks)
    return next(each for each in count(least) if _peak_chunks(block, ranks, each) <= chunks)


class _PlacedRows(NamedTuple):
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


def _zero_rows(ranks: int, microbatches: int) -> list[list[int]]:
    """Return each rank's legs, in an order without waiting if all actions take equal time; p microbatches held."""
    # The pattern needs 2p - 1 microbatches. The order for fewer is the same pattern without the later microbatches.
    full = max(microbatches, 2 * ranks - 1)
    rows = []
    for rank in range(ranks):
        up = ranks - rank
        filling = [0] * (2 * up - 1) + [1, 0] * rank + [1, 2] * up
        steady = [0, 3, 1, 2] * (full - 2 * ranks + 1 + rank) + [3, 1, 2] * (up - 1)
        rows.append(_first_microbatches(filling + steady + [3, 2] * rank + [3] * up, microbatches))
    return rows


def _interleave_ranks(rows: Sequence[Sequence[int]]) -> _Order:
    """Merge the legs of all ranks into a single executable order.

    Forward legs come first, as many as can run. Then gradients and forward legs alternate on each rank.
    """
    ranks = len(rows)
    given = _sources(ranks)
    ran = [[0] * ranks for _ in _LEGS]
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
        go(range(ranks), _FORWARD)
    while any(leg is not None for leg in heads):
        gradients = list(heads)
        go((rank for rank in reversed(range(ranks)) if gradients[rank] == 3), (3,))
        go((rank for rank in range(ranks) if gradients[rank] == 2), (2,))
        go(range(ranks), _FORWARD)
    return order


def _search_weight_grads(orders: Sequence[Sequence[Sequence[int]]], own: PerStage, limit: float) -> _PlacedRows:
    """Return the best rows: the shortest time of the longest rank, then the earliest end.

    Args:
        orders: Alternative rows of legs, each in an order within `limit` if weight gradients are ignored.
        own: Costs of each stage.
        limit: Most chunks a rank may hold.
    """
    ranks = len(orders[0])
    none = [0.0] * ranks
    turns = [_interleave_ranks(rows) for rows in orders]
    order = min(turns, key=lambda each: _place_weight_grads(each, ranks, own, limit, _ALL, none).merit)
    best: _PlacedRows | None = None
    for late_on in _LATE_ON:
        spare, last = none, math.inf
        while True:
            placed = _place_weight_grads(order, ranks, own, limit, late_on, spare)
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
        placed = _place_weight_grads(order, ranks, own, limit, _ALL, [middle] * ranks, shared=False)
        best = min(best, placed, key=lambda each: each.merit)
        low, high = (low, min(middle, max(placed.idle))) if max(placed.idle) <= middle else (middle, high)
    return best


def _place_weight_grads(
    order: _Order,
    ranks: int,
    own: PerStage,
    limit: float,
    late_on: Sequence[bool],
    spare: Sequence[float],
    *,
    shared: bool = True,
) -> _PlacedRows:
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
    input_ends = [[source and lanes[source[1]].ends[source[0]] for source in row] for row in _sources(ranks)]
    delays = _delays(ranks, own)
    most = 0.0
    for leg, rank in order:
        lane = lanes[rank]
        ends, source = lane.ends[leg], input_ends[leg][rank]
        ready = source[len(ends)] + delays[leg][rank] if source is not None else 0.0
        room = limit - 1 if leg in _FORWARD else math.inf
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
    return _PlacedRows(
        max(lane.now - lane.start for lane in lanes),
        max(lane.now for lane in lanes),
        [lane.row for lane in lanes],
        [lane.idle for lane in lanes],
    )


class _GapFillingRank:
    """A rank's progress through its legs: clock, idle time, chunks held and pending weight gradients."""

    def __init__(self, rank: int, ranks: int, own: PerStage, spare: float) -> None:
        stages = [_stage_of(leg, rank, ranks) for leg in (*_LEGS, *_WEIGHT.values())]
        kinds = (own.forward, own.forward, own.input_grad, own.input_grad, own.weight_grad, own.weight_grad)
        self.takes = [kind[stage] for kind, stage in zip(kinds, stages, strict=True)]
        kept = [own.kept_for_weight_grad[stage] for stage in stages]
        self.holds = [1.0, 1.0, kept[2] - 1, kept[3] - 1, -kept[4], -kept[5]]
        self.spare = spare
        self.now = self.start = self.idle = self.held = 0.0
        self.row: list[int] = []
        self.waiting: list[int] = []  # weight gradients so far; the first `weights` of them are done
        self.weights = 0
        self.ends: list[list[float]] = [[] for _ in _LEGS]

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
        if leg in _WEIGHT:
            self.waiting.append(_WEIGHT[leg])
        return self.idle

    def weight(self) -> None:
        """Run the oldest pending weight gradient."""
        leg = self.waiting[self.weights]
        self.weights += 1
        self.now += self.takes[leg]
        self.held += self.holds[leg]
        self.row.append(leg)


def _lanes(ranks: int, own: PerStage, spare: Sequence[float], microbatches: int) -> list[_GapFillingRank]:
    """Return the state of each rank."""
    lanes = [_GapFillingRank(rank, ranks, own, each) for rank, each in enumerate(spare)]
    longest = max(sum(lane.takes) for lane in lanes)
    for lane in lanes:
        # A rank with less work than the longest rank starts with idle time to spare.
        lane.idle = (sum(lane.takes) - longest) * microbatches
    return lanes


def _delays(ranks: int, own: PerStage) -> list[list[float]]:
    """Return for each leg and rank the transfer time of its input; 0 for an input from the same rank."""
    return [
        [
            own.transfer[_stage_of(*source, ranks)] if source and source[1] != rank else 0.0
            for rank, source in enumerate(row)
        ]
        for row in _sources(ranks)
    ]


def _half_block(ranks: int, rank: int) -> tuple[int, ...]:
    """Return the tick of each leg on a rank in the V-Half block: about half of the activations of 1F1B.

    Legs down the ranks run at half the speed of legs up the ranks.
    """
    apart = 0 if ranks % 2 else 3  # so that legs of two blocks never fall on one tick
    return 2 * rank, 3 * ranks - rank - 2, 3 * ranks + apart + 2 * rank - 1, 6 * ranks + apart - rank - 2


def _min_block(ranks: int, rank: int) -> tuple[int, ...]:
    """Return the tick of each leg on a rank in the V-Min block: full speed, the shortest lifespan, about a third of
    1F1B."""
    apart = 0 if ranks % 3 else 2
    return rank, 2 * ranks - rank - 1, 2 * ranks + apart + rank, 4 * ranks + apart - rank - 1


def _lifespan(block: _Block, ranks: int) -> int:
    """Return the ticks for which a block's two chunks are held, summed, on the rank with the largest sum."""
    ticks = [block(ranks, rank) for rank in range(ranks)]
    return max(back_up - up + back_down - down for down, up, back_up, back_down in ticks)


def _peak_chunks(block: _Block, ranks: int, interval: int = _INTERVAL) -> int:
    """Return the most chunks held by a rank if a block starts every `interval` ticks, without memory for weight
    gradients."""
    most = 0
    for rank in range(ranks):
        down, up, back_up, back_down = block(ranks, rank)
        for tick in range(interval):
            # Chunks open at `tick`: begun by then, and not ended before. Blocks repeat without beginning or end.
            open_chunks = sum(
                (tick - start) // interval - (tick - 1 - end) // interval
                for start, end in ((down, back_down), (up, back_up))
            )
            most = max(most, open_chunks)
    return most


def _repeat_block(block: _Block, ranks: int, microbatches: int, interval: int = _INTERVAL) -> list[list[int]]:
    """Return the legs of every rank in the order of their ticks, with a block for each microbatch.

    Args:
        block: The building block.
        ranks: Number of ranks.
        microbatches: Number of blocks.
        interval: Ticks from block to block.
    """
    rows = []
    for rank in range(ranks):
        ticks = [
            (start + interval * microbatch, leg)
            for leg, start in enumerate(block(ranks, rank))
            for microbatch in range(microbatches)
        ]
        rows.append([leg for _, leg in sorted(ticks)])
    return rows


def _squeeze_rows(rows: list[list[int]], limit: int) -> list[list[int]]:
    """Add weight gradients to rows of legs, and fill idle ticks as far as `limit` chunks of memory allow.

    Each rank walks through its row. A rank without the input of its next leg runs a later leg with an available input,
    provided that all legs skipped still fit into memory afterwards, else a weight gradient. Weight gradients also make
    room for a forward action.

    Args:
        rows: For each rank, its legs, in an order within `limit` if weight gradients are ignored.
        limit: Most chunks a rank may hold.
    """
    lanes = [_SqueezedRank(row, limit) for row in rows]
    for leg, given in enumerate(_sources(len(rows))):
        for lane, source in zip(lanes, given, strict=True):
            # The lists are shared: what one lane appends is an input of the other at once.
            lane.inputs[leg] = lanes[source[1]].ended[source[0]] if source else None
    working, tick = lanes, 0
    while working:
        working = [lane for lane in working if lane.goes_on(tick)]
        tick += 1
    return [lane.done for lane in lanes]


class _SqueezedRank:
    """A rank's progress through its row, tick by tick."""

    def __init__(self, row: list[int], limit: int) -> None:
        self.row, self.limit, self.microbatches = row, limit, row.count(0)
        self.taken = bytearray(len(row))
        self.place = 0
        self.held = 0
        self.waiting: list[int] = []  # weight gradients so far; the first `weights` of them are done
        self.weights = 0
        self.done: list[int] = []
        self.ended: list[list[int]] = [[] for _ in _LEGS]  # for each leg, the tick after each of its microbatches
        self.inputs: list[list[int] | None] = [None] * len(_LEGS)

    def goes_on(self, tick: int) -> bool:
        """Run the action of this tick; return False after the last action."""
        row, place = self.row, self.place
        while place < len(row) and self.taken[place]:
            place += 1
        self.place = place
        if place == len(row):
            return self._weight() and self.weights < len(self.waiting)
        leg = row[place]
        if leg in _FORWARD and self.held >= self.limit:
            self._weight()
        elif self._ready(leg, tick):
            self.place += 1
            self._run(leg, tick)
        elif (ahead := self._ahead(tick)) is not None:
            self.taken[ahead] = 1
            self._run(row[ahead], tick)
        else:
            self._weight()
        return True

    def _ready(self, leg: int, tick: int) -> bool:
        """Return whether the input of the leg's next microbatch is available."""
        number, given = len(self.ended[leg]), self.inputs[leg]
        if given is None:
            return number < self.microbatches
        return number < len(given) and given[number] <= tick

    def _run(self, leg: int, tick: int) -> None:
        """Run a leg."""
        self.done.append(leg)
        self.ended[leg].append(tick + 1)
        if leg in _FORWARD:
            self.held += 1
        else:
            self.waiting.append(_WEIGHT[leg])

    def _weight(self) -> bool:
        """Run the oldest weight gradient; return False if there is none."""
        if self.weights == len(self.waiting):
            return False
        self.done.append(self.waiting[self.weights])
        self.weights += 1
        self.held -= 1
        return True

    def _ahead(self, tick: int) -> int | None:
        """Return the position of the first later leg allowed to run before the legs in front of it; None if there is
        none."""
        ready = [leg for leg in _LEGS if self._ready(leg, tick) and (leg > 1 or self.held < self.limit)]
        open_chunks = most = self.held - (len(self.waiting) - self.weights)
        for place in range(self.place, len(self.row) if ready else 0):
            if self.taken[place]:
                continue
            leg = self.row[place]
            if leg in ready:
                if leg > 1 or most < self.limit:
                    return place
                ready.remove(leg)
                if not ready:
                    return None
            open_chunks += 1 if leg < 2 else -1
            most = max(most, open_chunks)
        return None


def _stage_of(leg: int, rank: int, ranks: int) -> int:
    """Return the stage of a rank on a leg."""
    return 2 * ranks - 1 - rank if leg in _UPPER else rank


def _sources(ranks: int) -> list[list[tuple[int, int] | None]]:
    """Return for each leg and rank the leg and rank that produce its input; None for the first leg on the first rank.

    The source is the rank before on the same leg, or the same rank at the end of the leg before.
    """
    return [[_source(leg, rank, ranks) for rank in range(ranks)] for leg in _LEGS]


def _source(leg: int, rank: int, ranks: int) -> tuple[int, int] | None:
    before = rank - 1 if leg % 2 == 0 else rank + 1
    if 0 <= before < ranks:
        return leg, before
    return (leg - 1, rank) if leg else None


def _first_microbatches(row: Iterable[int], microbatches: int) -> list[int]:
    """Return a row reduced to the first `microbatches` microbatches of each leg."""
    seen: Counter[int] = Counter()
    kept = []
    for leg in row:
        seen[leg] += 1
        if seen[leg] <= microbatches:
            kept.append(leg)
    return kept


def _legs_to_actions(rows: Sequence[Sequence[int]]) -> RankRows:
    """Return the actions of each rank from rows of legs and weight gradients."""
    found: RankRows = []
    for rank, row in enumerate(rows):
        seen = [0] * len(_KINDS)
        own = [(_stage_of(leg, rank, len(rows)), kind) for leg, kind in enumerate(_KINDS)]
        steps: list[ScheduleEntry] = []
        for leg in row:
            stage, kind = own[leg]
            steps.append(Action(stage, kind, seen[leg]))
            seen[leg] += 1
        found.append(steps)
    return found
