"""V-shaped schedules: rank s of p holds stages s and 2p - 1 - s, so the first and the last stage share a rank.

A V balances memory among ranks: the more the first stage of a rank holds, the less the second. Qi et al. 2024,
"Pipeline Parallelism with Controllable Memory", arXiv 2405.15362.
"""

from itertools import count

from jaxshard_magic.schedule.basic_orders import RankRows
from jaxshard_magic.schedule.costs import Costs
from jaxshard_magic.schedule.vshape_blocks import (
    INTERVAL,
    Block,
    half_block,
    lifespan,
    min_block,
    peak_chunks,
    repeat_block,
    squeeze_rows,
)
from jaxshard_magic.schedule.vshape_legs import LEGS, legs_to_actions
from jaxshard_magic.schedule.vshape_zero import search_weight_grads, zero_rows


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
    orders = [zero_rows(ranks, microbatches)] if fits else _within(ranks, microbatches, whole)
    return legs_to_actions(search_weight_grads(orders, costs.per_stage(2 * ranks), chunks).rows)


def v_half(ranks: int, microbatches: int) -> RankRows:
    """Return the V-Half order: (p + 2) // 2 microbatches held, about half of 1F1B; half its bubble at equal costs."""
    return legs_to_actions(_squeezed(half_block, ranks, microbatches, 2 * ((ranks + 2) // 2)))


def v_min(ranks: int, microbatches: int) -> RankRows:
    """Return the V-Min order: (p + 4) // 3 microbatches held, about a third of 1F1B; two thirds of its bubble at equal
    costs."""
    return legs_to_actions(_squeezed(min_block, ranks, microbatches, 2 * ((ranks + 4) // 3)))


def _within(ranks: int, microbatches: int, chunks: int) -> list[list[list[int]]]:
    """Return orders of legs within `chunks` chunks, from each suitable block, as repeated and with the remaining memory
    filled."""
    near = [block for block in (half_block, min_block) if peak_chunks(block, ranks, 2 * INTERVAL) <= chunks]
    found = []
    for block in near or [min_block]:
        for limit in sorted({peak_chunks(block, ranks, _interval(block, ranks, chunks)), chunks}):
            rows = _squeezed(block, ranks, microbatches, limit)
            found.append([[leg for leg in row if leg in LEGS] for row in rows])
    return found


def _squeezed(block: Block, ranks: int, microbatches: int, chunks: int) -> list[list[int]]:
    """Return the rows of a block repeated as often as the memory of `chunks` chunks allows."""
    return squeeze_rows(repeat_block(block, ranks, microbatches, _interval(block, ranks, chunks)), chunks)


def _interval(block: Block, ranks: int, chunks: int) -> int:
    """Return the smallest interval between blocks, in ticks, within `chunks` chunks."""
    least = max(INTERVAL, lifespan(block, ranks) // chunks)
    return next(each for each in count(least) if peak_chunks(block, ranks, each) <= chunks)
