"""Nodes of a strategy search: their order, and their rows and notes in the report.

Fastest first; by predicted time, simplest first among equals.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..analysis.roofline import PREDICTION_ERROR
from ..errors import ShardError
from ..hardware import Chip
from ..report.choice import LEFT, SearchCandidate
from ..report.comparison import Comparison, Trial
from .candidates import Candidate, RefusedCandidate
from .plan_estimate import PlanEstimate

ALIKE = 1.005  # ratio to the best prediction up to which steps count as equally fast
# Complexity of the parts of a strategy: data parallelism is simplest, a pipeline harder than any sum without one.
_MOVING = {"dp": 1, "pp": 7}
_ELSE = 2


@dataclass(eq=False)
class SearchNode:
    """Candidate of the search, with the knowledge so far.

    Attributes:
        candidate: Candidate.
        min_seconds: Lower bound of the step's seconds: the candidate's own, or the bound of the base candidate of a
            variant.
        sketch: Estimate by the plan; None before planning.
        opened: Whether variants with less memory are queued.
        outcome: Outcome, a constant of `report.choice`.
        why: Reason for the outcome; empty if the outcome says all.
        position: Position among the trials; None before compiling.
        trial: Result of compiling and running; None before.
    """

    candidate: Candidate | RefusedCandidate
    min_seconds: float = math.inf
    sketch: PlanEstimate | None = None
    opened: bool = False
    outcome: str = LEFT
    why: str = ""
    position: int | None = None
    trial: Trial | None = None

    @property
    def peak(self) -> int | None:
        """Peak bytes of the fullest device, as compiled, else as estimated; None if unknown."""
        compiled = None if self.trial is None else self.trial.peak
        estimated = None if self.sketch is None else self.sketch.peak_bytes
        return estimated if compiled is None else compiled


@dataclass(eq=False)
class MemoryVariants:
    """Variants of a candidate that take less memory.

    Attributes:
        base: Candidate to save memory of.
        variants: Variants not planned yet, in the order to try.
    """

    base: SearchNode
    variants: list[Candidate | RefusedCandidate]


def _complexity(candidate: Candidate | RefusedCandidate) -> int:
    """Return a measure of complexity: how much can go wrong, needs tuning and is hard to read in a profile.

    Each part of a sum counts, and each option searched with the strategy.

    >>> from jaxshard_magic import mesh
    >>> from jaxshard_magic.search import Requests, strategy_space
    >>> requests = Requests(["pp", "fsdp+tp", "fsdp", "dp"], mesh("cpu:4 data=4"), ["data=4", "data=2 model=2"])
    >>> found = {each.strategy: _complexity(each) for each in strategy_space(requests)}
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
    least = min((_complexity(n.candidate) for n in close), default=0)
    alike = near([n for n in close if _complexity(n.candidate) == least], ALIKE)
    first = min(alike, key=lambda n: place[n.candidate.strategy], default=None)
    return list(nodes) if first is None else [first, *(n for n in nodes if n is not first)]


def allowance(node: SearchNode, chosen: SearchNode, place: Mapping[str, int]) -> float:
    """Return the ratio to the fastest time up to which a node may still come before the chosen node.

    Args:
        node: Candidate in question.
        chosen: Best candidate so far.
        place: Position of each strategy in the search.
    """
    mine, theirs = _complexity(node.candidate), _complexity(chosen.candidate)
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


def as_considered(node: SearchNode) -> SearchCandidate:
    """Return a candidate in the form of a choice's report."""
    candidate, known = node.candidate, node.sketch or PlanEstimate()
    return SearchCandidate(
        candidate.strategy,
        dict(candidate.axes),
        dict(candidate.options),
        candidate.line,
        node.outcome,
        node.why,
        known.min_seconds,
        known.peak_bytes,
        known.array_bytes,
        known.seconds,
        known.max_seconds,
    )


def budget_error(nodes: Sequence[SearchNode], budget: float, seconds: float) -> ShardError:
    """Return the error for a budget spent before any candidate had compiled.

    Args:
        nodes: All candidates.
        budget: Seconds allowed.
        seconds: Seconds spent.
    """
    compiling = any(node.position is not None for node in nodes)
    doing = "no compile was done" if compiling else "all was still being planned"
    return ShardError(
        f"--budget {budget:g}: after {seconds:.2g} s {doing}; give it more, or --plan-only for what the plans alone say"
    )


def notes(interrupted: bool, guess: Chip | None) -> tuple[str, ...]:
    """Return the notes on a choice.

    Args:
        interrupted: Whether the user interrupted the search.
        guess: Chip whose figures were used; None if the hardware's own figures are known.
    """
    said = []
    if interrupted:
        said.append("Interrupted: what had compiled is chosen from.")
    if guess is not None:
        said.append(
            f"No figures of this hardware are known: candidates were tried in the order that a {guess.name} gives "
            "them, and none was ruled out by what it takes at least."
        )
    return tuple(said)
