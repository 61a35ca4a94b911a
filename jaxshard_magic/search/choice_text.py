"""Report of a search: candidates, notes, and the error for a spent budget."""

from collections.abc import Sequence

from ..errors import ShardError
from ..hardware import Chip
from ..report.choice import SearchCandidate
from .nodes import SearchNode
from .plan_estimate import PlanEstimate


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
