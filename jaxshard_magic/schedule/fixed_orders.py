"""Orders without a search: GPipe, 1F1B, interleaved 1F1B, looped breadth-first, ZB-H1, ZB-H2 and DualPipeV.

ZB-H1 and ZB-H2 are hand-made orders with a split backward pass, so that weight gradients fill bubbles (Qi et al. 2024,
arXiv 2401.10241, section 2).

DualPipeV fuses the forward action of a microbatch with the backward action of another, to hide communication. DualPipe
(DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1) has two directions. DualPipeV is the half that remains after folding
them into a V: rank s of p holds stages s and 2p - 1 - s. The steps are those of deepseek-ai/DualPipe.
"""

from collections import Counter, deque
from collections.abc import Iterator

from jaxshard_magic.schedule.actions import Action, Fused, ScheduleEntry

RankRows = list[list[ScheduleEntry]]


def gpipe(ranks: int, microbatches: int) -> RankRows:
    """Return the GPipe order: all forward actions, then all backward actions. All microbatches are held.

    Huang et al. 2019, arXiv 1811.06965.
    """
    return [[Action(rank, kind, mb) for kind in "FB" for mb in range(microbatches)] for rank in range(ranks)]


def one_f_one_b(ranks: int, microbatches: int) -> RankRows:
    """Return the 1F1B order: forward until the first gradient arrives, then backward and forward in alternation.

    Rank s of p holds min(p - s, m) of m microbatches. PipeDream-Flush, Narayanan et al. 2021, arXiv 2006.09503.
    """
    rows = []
    for rank in range(ranks):
        forward = [Action(rank, "F", mb) for mb in range(microbatches)]
        backward = [Action(rank, "B", mb) for mb in range(microbatches)]
        rows.append(_alternate(forward, backward, ranks - rank - 1))
    return rows


def interleaved(ranks: int, microbatches: int, chunks: int) -> RankRows:
    """Return the order of 1F1B over `chunks` passes through the ranks, in groups of p microbatches.

    Stage c p + s is on rank s. The bubble is 1/`chunks` of the bubble of 1F1B; more is held. Narayanan et al. 2021,
    arXiv 2104.04473, section 2.2.
    """
    rows = []
    for rank in range(ranks):
        forward, backward = (
            [
                Action(chunk * ranks + rank, kind, mb)
                for first in range(0, microbatches, ranks)
                for chunk in order
                for mb in range(first, first + ranks)
            ]
            for kind, order in (("F", range(chunks)), ("B", range(chunks - 1, -1, -1)))
        )
        rows.append(_alternate(forward, backward, 2 * (ranks - rank - 1) + (chunks - 1) * ranks))
    return rows


def looped_breadth_first(ranks: int, microbatches: int, chunks: int) -> RankRows:
    """Return the looped breadth-first order: every microbatch through a chunk before the next chunk, then backward
    likewise.

    Messages are few and long. All microbatches are held. Lamy-Poirier 2022, arXiv 2211.05953.
    """
    return [
        [
            Action(chunk * ranks + rank, kind, mb)
            for kind, order in (("F", range(chunks)), ("B", range(chunks - 1, -1, -1)))
            for chunk in order
            for mb in range(microbatches)
        ]
        for rank in range(ranks)
    ]


def _alternate(forward: list[Action], backward: list[Action], ahead: int) -> list[ScheduleEntry]:
    """Return the first `ahead` forward actions, then forward and backward in alternation, then the remaining backward
    actions."""
    ahead = min(ahead, len(forward))
    steps: list[ScheduleEntry] = [*forward[:ahead]]
    rest: Iterator[Action] = iter(backward)
    for action in forward[ahead:]:
        steps += [action, next(rest)]
    return [*steps, *rest]


def zb_h1(ranks: int, microbatches: int) -> RankRows:
    """Return the ZB-H1 order: 1F1B with split backward actions, and s weight gradients of rank s deferred to the end.

    Deferred weight gradients let input gradients advance earlier. With unit costs and m >= p the makespan is 3m + p -
    1. Rank s holds p - s microbatches before their input gradient and s more before their weight gradient, as many as
    the first rank of 1F1B. Section 2.1.

    >>> print(*zb_h1(2, 3)[1])
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    return [_split_order(rank, microbatches, ranks - rank, rank) for rank in range(ranks)]


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
        _split_order(rank, microbatches, ranks - rank + min(more, ranks - rank - 1), rank + min(more, rank))
        for rank in range(ranks)
    ]


def _split_order(rank: int, microbatches: int, ahead: int, back: int) -> list[ScheduleEntry]:
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


def dualpipe_v(ranks: int, microbatches: int) -> RankRows:
    """Return the DualPipeV order of each rank.

    With a chunk's times F, B and W, and F&B for a fused pair, the bubble is (p - 1)(F&B + B - 3W). A rank holds at most
    2p + 1 chunks.

    Args:
        ranks: Number of ranks p.
        microbatches: Number of microbatches m, at least 2p.
    """
    return [_steps(ranks, microbatches, rank) for rank in range(ranks)]


def _steps(ranks: int, microbatches: int, rank: int) -> list[ScheduleEntry]:
    """Return a rank's entries: fill, fused pairs while new microbatches arrive, drain with split backward actions."""
    lane = _Lane(rank, 2 * ranks - 1 - rank)
    below = ranks - 1 - rank  # ranks further down the V
    down, up = lane.down, lane.up
    for _ in range(2 * below):
        lane.run("F", down)
    for _ in range(rank + 1):
        lane.run("F", down)
        lane.run("F", up)
    for _ in range(below):
        lane.run("I", up)
        lane.weight()
        lane.run("F", up)
    for number in range(microbatches - 2 * ranks + rank + 1):
        # A fused pair starts when both parts may start. At the bottom of the V the first pair stays unfused, so that
        # neither action waits for the other's input.
        if number == 0 and below == 0:
            lane.run("F", down)
            lane.run("B", up)
        else:
            lane.fuse(down, up)
        lane.fuse(up, down)
    for _ in range(below):
        lane.run("B", up)
        lane.fuse(up, down)
    for number in range(rank + 1):  # from half of these rounds on, weight gradients are queued
        lane.run("I" if 2 * number > rank else "B", up)
        lane.run("I" if 2 * number >= rank else "B", down)
    for _ in range(below):
        lane.weight()
        lane.run("I", down)
    while lane.waiting:
        lane.weight()
    return lane.steps


class _Lane:
    """Builder of a rank's entries.

    Args:
        down: The stage passed first in the forward direction.
        up: The stage passed second.

    Counts the next microbatch of each stage and direction, and queues weight gradients for later.
    """

    def __init__(self, down: int, up: int) -> None:
        self.down, self.up = down, up
        self.steps: list[ScheduleEntry] = []
        self.waiting: deque[Action] = deque()
        self._seen: Counter[tuple[int, bool]] = Counter()

    def run(self, kind: str, stage: int) -> None:
        """Append the next action of this kind on `stage`; an input gradient queues its weight gradient."""
        action = self._next(kind, stage)
        self.steps.append(action)
        if kind == "I":
            self.waiting.append(action._replace(kind="W"))

    def fuse(self, forward: int, backward: int) -> None:
        """Append a fused pair: the next forward action of a stage and the next backward action of another."""
        self.steps.append(Fused((self._next("F", forward), self._next("B", backward))))

    def weight(self) -> None:
        """Append the oldest queued weight gradient."""
        self.steps.append(self.waiting.popleft())

    def _next(self, kind: str, stage: int) -> Action:
        seen = stage, kind == "F"
        self._seen[seen] += 1
        return Action(stage, kind, self._seen[seen] - 1)
