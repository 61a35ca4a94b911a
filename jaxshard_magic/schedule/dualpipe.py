"""DualPipeV: the forward action of a microbatch and the backward action of another, fused to hide communication.

DualPipe (DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1) has two directions. DualPipeV is the half that remains
after folding them into a V: rank s of p holds stages s and 2p - 1 - s. The steps are those of deepseek-ai/DualPipe.
"""

from collections import Counter, deque

from jaxshard_magic.schedule.actions import Action, Fused, ScheduleEntry
from jaxshard_magic.schedule.basic_orders import RankRows


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
