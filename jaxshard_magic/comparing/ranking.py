"""The order of candidates: the fastest first as they were compared, and where a prediction tells the time the simplest
before others that are hardly faster."""

import math
from collections.abc import Callable, Mapping, Sequence

from ..analysis.roofline import ERROR
from ..report.comparison import Comparison
from .candidates import Candidate, Refused
from .nodes import Node

ALIKE = 1.005  # times the best prediction: a step as fast as that, as it is told
_MOVING = {
    "dp": 1,
    "pp": 7,
}  # data parallelism has the fewest, stages with a schedule more than any sum without
_ELSE = 2


def moving_parts(candidate: Candidate | Refused) -> int:
    """How much a strategy sets in motion: what can go wrong, has to be tuned and is hard to read in a profile. Each
    part of a sum counts, and each option that is searched with it.

    >>> from jaxshard_magic import mesh
    >>> from jaxshard_magic.comparing import Requests, space
    >>> requests = Requests(["pp", "fsdp+tp", "fsdp", "dp"], mesh("cpu:4 data=4"), ["data=4", "data=2 model=2"])
    >>> found = {each.strategy: moving_parts(each) for each in space(requests)}
    >>> sorted(found, key=found.get)
    ['dp', 'fsdp', 'fsdp+tp', 'pp']
    """
    return sum(_MOVING.get(part, _ELSE) for part in candidate.strategy.split("+")) + len(candidate.options)


def simplest_first(
    nodes: Sequence[Node], seconds: Callable[[Node], float | None], place: Mapping[str, int]
) -> list[Node]:
    """`nodes`, which stand the fastest first, with the one before them that an expert would take: the simplest of those
    that a prediction can't tell from the fastest; of several as simple the fastest, of those that are as fast the one
    whose strategy has the first `place`."""

    def near(some: Sequence[Node], most: float) -> list[Node]:
        best = min((t for n in some if (t := seconds(n)) is not None), default=0.0)
        return [n for n in some if (seconds(n) or math.inf) <= most * best]

    close = near(nodes, 1 + ERROR)
    least = min((moving_parts(n.candidate) for n in close), default=0)
    alike = near([n for n in close if moving_parts(n.candidate) == least], ALIKE)
    first = min(alike, key=lambda n: place[n.candidate.strategy], default=None)
    return list(nodes) if first is None else [first, *(n for n in nodes if n is not first)]


def allowance(node: Node, chosen: Node, place: Mapping[str, int]) -> float:
    """How many times as long as the fastest a candidate may take and still come before the one that is `chosen` so
    far."""
    mine, theirs = moving_parts(node.candidate), moving_parts(chosen.candidate)
    if mine < theirs:
        return 1 + ERROR
    before = place[node.candidate.strategy] < place[chosen.candidate.strategy]
    return ALIKE if mine == theirs and before else 1.0


def as_compared(
    nodes: Sequence[Node], comparison: Comparison
) -> tuple[list[Node], Callable[[Node], float | None]]:
    """Those of `nodes` that the comparison has as usable, the fastest first, and the seconds that it tells of each;
    None of another."""
    usable = {trial.line: trial for trial in comparison.usable}

    def seconds(node: Node) -> float | None:
        trial = usable.get(node.candidate.line)
        return None if trial is None else comparison.seconds(trial)

    known = [n for n in nodes if n.candidate.line in usable]
    return sorted(known, key=lambda n: math.inf if (t := seconds(n)) is None else t), seconds
