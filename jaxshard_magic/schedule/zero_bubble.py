"""ZB-H1 and ZB-H2: orders made by hand, with the backward pass in two halves so that weight gradients fill bubbles.

Qi et al. 2024, arXiv 2401.10241, section 2.
"""

from jaxshard_magic.schedule.actions import Action, Step
from jaxshard_magic.schedule.orders import Rows


def zb_h1(ranks: int, microbatches: int) -> Rows:
    """1F1B in halves: rank s keeps s weight gradients back, for the end, so that input gradients move on sooner.

    With unit costs and m >= p the makespan is 3m + p - 1. Rank s holds p - s microbatches before their input gradient,
    and s more before their weight gradient, as 1F1B's first rank does. Section 2.1.

    >>> print(*zb_h1(2, 3)[1])
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    return [_order(rank, microbatches, ranks - rank, rank) for rank in range(ranks)]


def zb_h2(ranks: int, microbatches: int) -> Rows:
    """ZB-H1 with more forward before the first gradient is back: with unit costs and m >= 2p - 1 no rank ever waits.

    Each rank works 3m without a pause, one unit after the rank before it, so the makespan is still 3m + p - 1: what is
    gained shows where the next step starts without a barrier. Rank s holds 2(p - s) - 1 microbatches before their input
    gradient, and 2s more before their weight gradient. Section 2.2. Fewer microbatches leave 2p - 1 - m of a bubble;
    from p of them on down this is ZB-H1.

    >>> print(*zb_h2(2, 3)[1])
    1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
    """
    more = max(0, min(microbatches, 2 * ranks - 1) - ranks)
    return [
        _order(rank, microbatches, ranks - rank + min(more, ranks - rank - 1), rank + min(more, rank))
        for rank in range(ranks)
    ]


def _order(rank: int, microbatches: int, ahead: int, back: int) -> list[Step]:
    """`ahead` forward actions, then an input gradient for each, with at most `back` weight gradients left for later."""
    forward, weights = ([Action(rank, kind, mb) for mb in range(microbatches)] for kind in "FW")
    steps: list[Step] = []
    for mb in range(microbatches):
        steps += forward[ahead + mb - 1 : ahead + mb] if mb else forward[:ahead]
        steps.append(Action(rank, "I", mb))
        steps += weights[mb - back : mb - back + 1] if mb >= back else []
    return steps + weights[max(0, microbatches - back) :]
