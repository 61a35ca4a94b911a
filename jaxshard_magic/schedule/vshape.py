"""The schedules whose stages lie in a V: rank s of p holds stages s and 2p - 1 - s, the first and the last together.

What ranks hold evens out in a V: where the first of its stages holds much, the second holds little. Qi et al. 2024,
"Pipeline Parallelism with Controllable Memory", arXiv 2405.15362.
"""

from itertools import count

from jaxshard_magic.schedule.costs import Costs
from jaxshard_magic.schedule.orders import Rows
from jaxshard_magic.schedule.vshape_blocks import (
    INTERVAL,
    Block,
    half_block,
    held,
    lifespan,
    min_block,
    repeated,
    squeezed,
)
from jaxshard_magic.schedule.vshape_legs import LEGS, actions
from jaxshard_magic.schedule.vshape_zero import searched, zero_rows


def zb_v(ranks: int, microbatches: int, costs: Costs, memory_limit: float | None = None) -> Rows:
    """No idle time between a rank's first and last action at equal costs, with the activations of 1F1B.

    At other costs the weight gradients are placed in several ways and the shortest is kept, as the paper does; with
    less than p microbatches to hold, the order of a building block with a shorter lifespan is taken.

    Args:
        ranks: p.
        microbatches: m; without idle time from 2p - 1 on.
        costs: what the weight gradients are placed for.
        memory_limit: microbatches that a rank may hold, from 1; p by default.
    """
    chunks = 2 * min(ranks if memory_limit is None else memory_limit, microbatches)
    whole = int(chunks + 1e-9)
    fits = whole >= 2 * min(ranks, microbatches)
    orders = [zero_rows(ranks, microbatches)] if fits else _within(ranks, microbatches, whole)
    return actions(searched(orders, costs.per_stage(2 * ranks), chunks).rows)


def v_half(ranks: int, microbatches: int) -> Rows:
    """About half of 1F1B's activations, (p + 2) // 2 microbatches, and half of its bubble at equal costs."""
    return actions(_squeezed(half_block, ranks, microbatches, 2 * ((ranks + 2) // 2)))


def v_min(ranks: int, microbatches: int) -> Rows:
    """About a third of 1F1B's activations, (p + 4) // 3 microbatches, and two thirds of its bubble at equal costs."""
    return actions(_squeezed(min_block, ranks, microbatches, 2 * ((ranks + 4) // 3)))


def _within(ranks: int, microbatches: int, chunks: int) -> list[list[list[int]]]:
    """Orders of legs that hold so many chunks: of each block that comes near, as it is and with what room is left."""
    near = [block for block in (half_block, min_block) if held(block, ranks, 2 * INTERVAL) <= chunks]
    found = []
    for block in near or [min_block]:
        for limit in sorted({held(block, ranks, _interval(block, ranks, chunks)), chunks}):
            rows = _squeezed(block, ranks, microbatches, limit)
            found.append([[leg for leg in row if leg in LEGS] for row in rows])
    return found


def _squeezed(block: Block, ranks: int, microbatches: int, chunks: int) -> list[list[int]]:
    """The rows of a block that starts as often as the chunks that may be held allow."""
    return squeezed(repeated(block, ranks, microbatches, _interval(block, ranks, chunks)), chunks)


def _interval(block: Block, ranks: int, chunks: int) -> int:
    least = max(INTERVAL, lifespan(block, ranks) // chunks)
    return next(each for each in count(least) if held(block, ranks, each) <= chunks)
