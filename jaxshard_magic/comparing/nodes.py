"""The candidates of a search, with what is known of them so far."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ShardError
from ..report.choice import LEFT, Considered
from ..report.comparison import Trial
from .candidates import Candidate, Refused
from .sketch import Sketch


@dataclass(eq=False)
class Node:
    """One candidate of the search. `least`: seconds that it takes at least, its own or those of the candidate that it
    takes less memory than; `outcome` and `why` are said once they are known."""

    candidate: Candidate | Refused
    least: float = math.inf
    sketch: Sketch | None = None
    opened: bool = False
    outcome: str = LEFT
    why: str = ""
    position: int | None = None
    trial: Trial | None = None


@dataclass(eq=False)
class Ladder:
    """What takes less memory than `of`, in the order in which it is tried."""

    of: Node
    rungs: list[Candidate | Refused]


def considered(node: Node) -> Considered:
    """A candidate as a choice tells it."""
    candidate, known = node.candidate, node.sketch or Sketch()
    return Considered(
        candidate.strategy,
        dict(candidate.axes),
        dict(candidate.options),
        candidate.line,
        node.outcome,
        node.why,
        known.least,
        known.needs,
        known.holds,
        known.seconds,
        known.most,
    )


def out_of_time(nodes: Sequence[Node], budget: float, seconds: float) -> ShardError:
    """That the budget ended before any of them had compiled."""
    compiling = any(node.position is not None for node in nodes)
    doing = "no compile was done" if compiling else "all was still being planned"
    return ShardError(
        f"--budget {budget:g}: after {seconds:.2g} s {doing}; give it more, or --plan-only for what the plans alone say"
    )
