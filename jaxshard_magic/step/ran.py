"""What a run of a step took, by which a later one is told to be of the same step."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..program.roles import OPTIMIZER, PARAMS

if TYPE_CHECKING:
    from .entry import Entry


@dataclass(frozen=True)
class Ran:
    """`state`: path, shape and dtype of each parameter and of what the optimizer keeps; `examples`: the size of the
    batch, None where there is none."""

    state: frozenset[tuple[str, tuple[int, ...], Any]]
    examples: int | None

    def examples_of(self, later: "Entry") -> int | None:
        """The size of the batch, where `later` is a run of the same step: of a model of the same parameters."""
        return self.examples if self.state and self.state == ran(later).state else None


def ran(entry: "Entry") -> Ran:
    """What calls of this program took."""
    state = ((x.path, x.shape, x.dtype) for x in entry.plan.leaves if x.role in (PARAMS, OPTIMIZER))
    return Ran(frozenset(state), entry.examples)
