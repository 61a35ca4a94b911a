"""Schedules in a V from a building block: the legs of one microbatch at fixed ticks, repeated, then squeezed.

The lifespan of a block, from its forward actions to its weight gradients, sets how much is held: the number of blocks
that are open at once. Qi et al. 2024, arXiv 2405.15362, sections 2 and 3. A tick is any of the three kinds of action.
"""

from collections.abc import Callable

from jaxshard_magic.schedule.vshape_legs import FORWARD, LEGS, WEIGHT, sources

Block = Callable[[int, int], tuple[int, ...]]  # ranks, rank -> the tick of each leg
INTERVAL = 6  # ticks from block to block: two forward actions, two input and two weight gradients


def half_block(ranks: int, rank: int) -> tuple[int, ...]:
    """Legs that run down at half the speed of those that run up: about half of 1F1B's activations."""
    apart = 0 if ranks % 2 else 3  # keeps the legs of other blocks off the same ticks
    return 2 * rank, 3 * ranks - rank - 2, 3 * ranks + apart + 2 * rank - 1, 6 * ranks + apart - rank - 2


def min_block(ranks: int, rank: int) -> tuple[int, ...]:
    """Legs at full speed, the shortest lifespan: about a third of 1F1B's activations."""
    apart = 0 if ranks % 3 else 2
    return rank, 2 * ranks - rank - 1, 2 * ranks + apart + rank, 4 * ranks + apart - rank - 1


def lifespan(block: Block, ranks: int) -> int:
    """The ticks that a block's two chunks are held for, on the rank that holds them longest."""
    ticks = [block(ranks, rank) for rank in range(ranks)]
    return max(back_up - up + back_down - down for down, up, back_up, back_down in ticks)


def held(block: Block, ranks: int, interval: int = INTERVAL) -> int:
    """The most chunks that a rank holds where a block starts every so many ticks, their weight gradients left aside."""
    most = 0
    for rank in range(ranks):
        down, up, back_up, back_down = block(ranks, rank)
        for tick in range(interval):
            open_chunks = sum(
                (tick - start) // interval - (tick - 1 - end) // interval
                for start, end in ((down, back_down), (up, back_up))
            )
            most = max(most, open_chunks)
    return most


def repeated(block: Block, ranks: int, microbatches: int, interval: int = INTERVAL) -> list[list[int]]:
    """The legs of every rank in the order of their ticks, a block for each microbatch."""
    rows = []
    for rank in range(ranks):
        ticks = [
            (start + interval * microbatch, leg)
            for leg, start in enumerate(block(ranks, rank))
            for microbatch in range(microbatches)
        ]
        rows.append([leg for _, leg in sorted(ticks)])
    return rows


def squeezed(rows: list[list[int]], limit: int) -> list[list[int]]:
    """Rows of legs with their weight gradients, idle ticks filled as far as `limit` chunks held allow.

    Each rank goes through its row. Where it would wait, it takes a later leg whose input is there, if all that stands
    before that leg can still be held; else a weight gradient. Weight gradients also make room for a forward action.

    Args:
        rows: of each rank, in an order that holds no more than `limit` without weight gradients.
        limit: chunks that a rank may hold.
    """
    lanes = [_Lane(row, limit) for row in rows]
    for leg, given in enumerate(sources(len(rows))):
        for lane, source in zip(lanes, given, strict=True):
            lane.inputs[leg] = lanes[source[1]].ended[source[0]] if source else None
    working, tick = lanes, 0
    while working:
        working = [lane for lane in working if lane.goes_on(tick)]
        tick += 1
    return [lane.done for lane in lanes]


class _Lane:
    """A rank on its way through its row, tick by tick."""

    def __init__(self, row: list[int], limit: int) -> None:
        self.row, self.limit, self.microbatches = row, limit, row.count(0)
        self.taken = bytearray(len(row))
        self.place = 0
        self.held = 0
        self.waiting: list[int] = []  # weight gradients, and how many of them are done
        self.weights = 0
        self.done: list[int] = []
        self.ended: list[list[int]] = [[] for _ in LEGS]  # of each leg, the tick after each microbatch
        self.inputs: list[list[int] | None] = [None] * len(LEGS)

    def goes_on(self, tick: int) -> bool:
        """Runs what this tick is for; False once everything has run."""
        row, place = self.row, self.place
        while place < len(row) and self.taken[place]:
            place += 1
        self.place = place
        if place == len(row):
            return self._weight() and self.weights < len(self.waiting)
        leg = row[place]
        if leg in FORWARD and self.held >= self.limit:
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
        number, given = len(self.ended[leg]), self.inputs[leg]
        if given is None:
            return number < self.microbatches
        return number < len(given) and given[number] <= tick

    def _run(self, leg: int, tick: int) -> None:
        self.done.append(leg)
        self.ended[leg].append(tick + 1)
        if leg in FORWARD:
            self.held += 1
        else:
            self.waiting.append(WEIGHT[leg])

    def _weight(self) -> bool:
        if self.weights == len(self.waiting):
            return False
        self.done.append(self.waiting[self.weights])
        self.weights += 1
        self.held -= 1
        return True

    def _ahead(self, tick: int) -> int | None:
        """The place of the next leg that may run before those in front of it, or None."""
        ready = [leg for leg in LEGS if self._ready(leg, tick) and (leg > 1 or self.held < self.limit)]
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
