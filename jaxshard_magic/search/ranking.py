"""Order of candidates: fastest first; by predicted time, simplest first among equals."""

import math
from collections.abc import Callable, Mapping, Sequence

from ..analysis.roofline import PREDICTION_ERROR
from ..report.comparison import Comparison
from .candidates import Candidate, RefusedCandidate
from .nodes import SearchNode

ALIKE = 1.005  # ratio to the best prediction up to which steps count as equally fast
# Complexity of the parts of a strategy: data parallelism is simplest, a pipeline harder than any sum without one.
_MOVING = {"dp": 1, "pp": 7}
_ELSE = 2


def complexity(candidate: Candidate | RefusedCandidate) -> int:
    """Return a measure of complexity: how much can go wrong, needs tuning and is hard to read in a profile.

    Each part of a sum counts, and each option searched with the strategy.

    >>> from jaxshard_magic import mesh
    >>> from jaxshard_magic.search import Requests, strategy_space
    >>> requests = Requests(["pp", "fsdp+tp", "fsdp", "dp"], mesh("cpu:4 data=4"), ["data=4", "data=2 model=2"])
    >>> found = {each.strategy: complexity(each) for each in strategy_space(requests)}
    >>> sorted(found, key=found.get)
    ['dp', 'fsdp', 'fsdp+tp', 'pp']
    """
    return sum(_MOVING.get(part, _ELSE) for part in candidate.strategy.split("+")) + len(candidate.options)


def simplest_first(
    nodes: Sequence[SearchNode], seconds: Callable[[SearchNode], float | None], place: Mapping[str, int]
) -> list[SearchNode]:
    """Return the nodes, with the choice of an expert moved to the front.

    The choice is the simplest node within the error of prediction of the fastest. Among nodes equally simple the
    fastest comes first; among equally fast ones the earliest strategy.

    Args:
        nodes: Candidates, fastest first.
        seconds: Returns the step's predicted seconds; None if unknown.
        place: Position of each strategy in the search.
    """

    def near(some: Sequence[SearchNode], most: float) -> list[SearchNode]:
        best = min((t for n in some if (t := seconds(n)) is not None), default=0.0)
        return [n for n in some if (seconds(n) or math.inf) <= most * best]

    close = near(nodes, 1 + PREDICTION_ERROR)
    least = min((complexity(n.candidate) for n in close), default=0)
    alike = near([n for n in close if complexity(n.candidate) == least], ALIKE)
    first = min(alike, key=lambda n: place[n.candidate.strategy], default=None)
    return list(nodes) if first is None else [first, *(n for n in nodes if n is not first)]


def allowance(node: SearchNode, chosen: SearchNode, place: Mapping[str, int]) -> float:
    """Return the ratio to the fastest time up to which a node may still come before the chosen node.

    Args:
        node: Candidate in question.
        chosen: Best candidate so far.
        place: Position of each strategy in the search.
    """
    mine, theirs = complexity(node.candidate), complexity(chosen.candidate)
    if mine < theirs:
        return 1 + PREDICTION_ERROR
    before = place[node.candidate.strategy] < place[chosen.candidate.strategy]
    return ALIKE if mine == theirs and before else 1.0


def as_compared(
    nodes: Sequence[SearchNode], comparison: Comparison
) -> tuple[list[SearchNode], Callable[[SearchNode], float | None]]:
    """Return the usable nodes of a comparison, fastest first, and a function to their seconds.

    The function returns None for other nodes.
    """
    usable = {trial.line: trial for trial in comparison.usable}

    def seconds(node: SearchNode) -> float | None:
        trial = usable.get(node.candidate.line)
        return None if trial is None else comparison.seconds(trial)

    known = [n for n in nodes if n.candidate.line in usable]
    return sorted(known, key=lambda n: math.inf if (t := seconds(n)) is None else t), seconds
