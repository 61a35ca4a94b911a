"""ZB-H1 and ZB-H2: hand-made orders with a split backward pass, so that weight gradients fill bubbles.

Qi et al. 2024, arXiv 2401.10241, section 2.
"""

from jaxshard_magic.schedule.actions import Action, ScheduleEntry
from jaxshard_magic.schedule.basic_orders import RankRows


def zb_h1(ranks: int, microbatches: int) -> RankRows:
    """Return the ZB-H1 order: 1F1B with split backward actions, and s weight gradients of rank s deferred to the end.

    Deferred weight gradients let input gradients advance earlier. With unit costs and m >= p the makespan is 3m + p -
    1. Rank s holds p - s microbatches before their input gradient and s more before their weight gradient, as many as
    the first rank of 1F1B. Section 2.1.

    >>> print(*zb_h1(2, 3)[1])
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    return [_order(rank, microbatches, ranks - rank, rank) for rank in range(ranks)]


def zb_h2(ranks: int, microbatches: int) -> RankRows:
    """Return the ZB-H2 order: ZB-H1 with more forward actions before the first gradient.

    With unit costs and m >= 2p - 1 no rank waits. Each rank works for 3m without a pause, starting one unit after the
    rank before, so the makespan is still 3m + p - 1. The gain shows where the next step starts without a barrier. Rank
    s holds 2(p - s) - 1 microbatches before their input gradient and 2s more before their weight gradient. Section 2.2.
    Fewer microbatches leave a bubble of 2p - 1 - m. With p or fewer microbatches, the order equals ZB-H1.

    >>> print(*zb_h2(2, 3)[1])
    1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
    """
    more = max(0, min(microbatches, 2 * ranks - 1) - ranks)
    return [
        _order(rank, microbatches, ranks - rank + min(more, ranks - rank - 1), rank + min(more, rank))
        for rank in range(ranks)
    ]


def _order(rank: int, microbatches: int, ahead: int, back: int) -> list[ScheduleEntry]:
    """Return a rank's order: `ahead` forward actions, then input gradients and forward actions in alternation.

    At most `back` weight gradients are deferred.
    """
    forward, weights = ([Action(rank, kind, mb) for mb in range(microbatches)] for kind in "FW")
    steps: list[ScheduleEntry] = []
    for mb in range(microbatches):
        steps += forward[ahead + mb - 1 : ahead + mb] if mb else forward[:ahead]
        steps.append(Action(rank, "I", mb))
        steps += weights[mb - back : mb - back + 1] if mb >= back else []
    return steps + weights[max(0, microbatches - back) :]
