"""What is told of the candidates of a search, and of how it ended."""

from collections.abc import Sequence

from ..errors import ShardError
from ..hardware import Chip
from ..report.choice import Considered
from .nodes import Node
from .sketch import Sketch


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


def notes(interrupted: bool, guess: Chip | None) -> tuple[str, ...]:
    """What a choice is to be read with. `guess`: the chip whose figures were taken where none of this hardware are
    known."""
    said = []
    if interrupted:
        said.append("Interrupted: what had compiled is chosen from.")
    if guess is not None:
        said.append(
            f"No figures of this hardware are known: candidates were tried in the order that a {guess.name} gives "
            "them, and none was ruled out by what it takes at least."
        )
    return tuple(said)
