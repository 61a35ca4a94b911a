"""Nodes of a strategy search."""

import math
from dataclasses import dataclass

from ..report.choice import LEFT
from ..report.comparison import Trial
from .candidates import Candidate, RefusedCandidate
from .plan_estimate import PlanEstimate


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
