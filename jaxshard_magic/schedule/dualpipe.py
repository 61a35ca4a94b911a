"""DualPipeV: forward and backward of two microbatches run as one, so that each hides the other's communication.

It is the half of DualPipe (DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1) that remains where its two directions
are folded into a V: rank s of p holds stages s and 2p - 1 - s. Its steps are those of deepseek-ai/DualPipe.
"""

from collections import Counter, deque

from jaxshard_magic.schedule.actions import Action, Fused, Step
from jaxshard_magic.schedule.orders import Rows


def dualpipe_v(ranks: int, microbatches: int) -> Rows:
    """Bubble (p - 1)(F&B + B - 3W) of a chunk's times, F&B that of a fused step; holds 2p + 1 chunks at most.

    Args:
        ranks: p.
        microbatches: m, from 2p.
    """
    return [_steps(ranks, microbatches, rank) for rank in range(ranks)]


def _steps(ranks: int, microbatches: int, rank: int) -> list[Step]:
    """What a rank does: fill, fused steps as long as new microbatches come, drain with split backward passes."""
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
        if number == 0 and below == 0:  # apart, the turn at the bottom of the V waits for less
            lane.run("F", down)
            lane.run("B", up)
        else:
            lane.fuse(down, up)
        lane.fuse(up, down)
    for _ in range(below):
        lane.run("B", up)
        lane.fuse(up, down)
    for number in range(rank + 1):  # the second half of these leaves its weight gradients for later
        lane.run("I" if 2 * number > rank else "B", up)
        lane.run("I" if 2 * number >= rank else "B", down)
    for _ in range(below):
        lane.weight()
        lane.run("I", down)
    while lane.waiting:
        lane.weight()
    return lane.steps


class _Lane:
    """A rank's steps so far: each stage's next microbatch of each kind, and the weight gradients left for later."""

    def __init__(self, down: int, up: int) -> None:
        self.down, self.up = down, up
        self.steps: list[Step] = []
        self.waiting: deque[Action] = deque()
        self._seen: Counter[tuple[int, bool]] = Counter()

    def run(self, kind: str, stage: int) -> None:
        action = self._next(kind, stage)
        self.steps.append(action)
        if kind == "I":
            self.waiting.append(action._replace(kind="W"))

    def fuse(self, forward: int, backward: int) -> None:
        self.steps.append(Fused((self._next("F", forward), self._next("B", backward))))

    def weight(self) -> None:
        self.steps.append(self.waiting.popleft())

    def _next(self, kind: str, stage: int) -> Action:
        seen = stage, kind == "F"
        self._seen[seen] += 1
        return Action(stage, kind, self._seen[seen] - 1)
