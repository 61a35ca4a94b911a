"""V-shaped schedules from a building block: the legs of a microbatch at fixed ticks, repeated, then squeezed.

The lifespan of a block is the time from its forward actions to its weight gradients. It determines the number of blocks
open at the same time, and so the memory. A tick is the time of any of the three kinds of action. Qi et al. 2024, arXiv
2405.15362, sections 2 and 3.
"""

from collections.abc import Callable

from jaxshard_magic.schedule.vshape_legs import FORWARD, LEGS, WEIGHT, sources

Block = Callable[[int, int], tuple[int, ...]]  # (ranks, rank) -> tick of each leg
INTERVAL = 6  # ticks from block to block: two forward actions, two input and two weight gradients


def half_block(ranks: int, rank: int) -> tuple[int, ...]:
    """Return the tick of each leg on a rank in the V-Half block: about half of the activations of 1F1B.

    Legs down the ranks run at half the speed of legs up the ranks.
    """
    apart = 0 if ranks % 2 else 3  # so that legs of two blocks never fall on one tick
    return 2 * rank, 3 * ranks - rank - 2, 3 * ranks + apart + 2 * rank - 1, 6 * ranks + apart - rank - 2


def min_block(ranks: int, rank: int) -> tuple[int, ...]:
    """Return the tick of each leg on a rank in the V-Min block: full speed, the shortest lifespan, about a third of
    1F1B."""
    apart = 0 if ranks % 3 else 2
    return rank, 2 * ranks - rank - 1, 2 * ranks + apart + rank, 4 * ranks + apart - rank - 1


def lifespan(block: Block, ranks: int) -> int:
    """Return the ticks for which a block's two chunks are held, summed, on the rank with the largest sum."""
    ticks = [block(ranks, rank) for rank in range(ranks)]
    return max(back_up - up + back_down - down for down, up, back_up, back_down in ticks)


def peak_chunks(block: Block, ranks: int, interval: int = INTERVAL) -> int:
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


def repeat_block(block: Block, ranks: int, microbatches: int, interval: int = INTERVAL) -> list[list[int]]:
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


def squeeze_rows(rows: list[list[int]], limit: int) -> list[list[int]]:
    """Add weight gradients to rows of legs, and fill idle ticks as far as `limit` chunks of memory allow.

    Each rank walks through its row. A rank without the input of its next leg runs a later leg with an available input,
    provided that all legs skipped still fit into memory afterwards, else a weight gradient. Weight gradients also make
    room for a forward action.

    Args:
        rows: For each rank, its legs, in an order within `limit` if weight gradients are ignored.
        limit: Most chunks a rank may hold.
    """
    lanes = [_Lane(row, limit) for row in rows]
    for leg, given in enumerate(sources(len(rows))):
        for lane, source in zip(lanes, given, strict=True):
            # The lists are shared: what one lane appends is an input of the other at once.
            lane.inputs[leg] = lanes[source[1]].ended[source[0]] if source else None
    working, tick = lanes, 0
    while working:
        working = [lane for lane in working if lane.goes_on(tick)]
        tick += 1
    return [lane.done for lane in lanes]


class _Lane:
    """A rank's progress through its row, tick by tick."""

    def __init__(self, row: list[int], limit: int) -> None:
        self.row, self.limit, self.microbatches = row, limit, row.count(0)
        self.taken = bytearray(len(row))
        self.place = 0
        self.held = 0
        self.waiting: list[int] = []  # weight gradients so far; the first `weights` of them are done
        self.weights = 0
        self.done: list[int] = []
        self.ended: list[list[int]] = [[] for _ in LEGS]  # for each leg, the tick after each of its microbatches
        self.inputs: list[list[int] | None] = [None] * len(LEGS)

    def goes_on(self, tick: int) -> bool:
        """Run the action of this tick; return False after the last action."""
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
        """Return whether the input of the leg's next microbatch is available."""
        number, given = len(self.ended[leg]), self.inputs[leg]
        if given is None:
            return number < self.microbatches
        return number < len(given) and given[number] <= tick

    def _run(self, leg: int, tick: int) -> None:
        """Run a leg."""
        self.done.append(leg)
        self.ended[leg].append(tick + 1)
        if leg in FORWARD:
            self.held += 1
        else:
            self.waiting.append(WEIGHT[leg])

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
