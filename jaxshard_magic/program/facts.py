"""`Facts`: what is understood of a traced step, before anything is decided about it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .batching.batch import Batch
from .dimensions import Dimensions
from .flow import Flow
from .ir import Program
from .roles import RNG, Roles
from .trace import Traced

if TYPE_CHECKING:
    from ..specs import Placement


@dataclass(frozen=True)
class Facts:
    """A traced step understood.

    Args:
        traced: the step.
        program: its equations.
        dimensions: which dimensions of its values are the same.
        flow: what depends on what.
        roles: what each input is, and which output is its next value.
        batch: where the examples are.
        placed: by input, where the user wants it.
    """

    traced: Traced
    program: Program
    dimensions: Dimensions
    flow: Flow
    roles: Roles
    batch: Batch
    placed: "Mapping[int, Placement]"

    @property
    def rows(self) -> Batch:
        """The batch with the random keys that come one for each example."""
        inputs, examples = self.program.inputs, self.batch.classes
        keys = {
            i: tuple(d for d, c in enumerate(self.dimensions.of(inputs[i])) if c in examples)
            for i, role in enumerate(self.roles.of)
            if role == RNG
        }
        return replace(self.batch, dims={**self.batch.dims, **{i: dims for i, dims in keys.items() if dims}})
