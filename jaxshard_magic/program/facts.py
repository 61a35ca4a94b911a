"""`Facts`: what is understood of a traced step, before anything is decided about it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .batching.batch import Batch
from .dimensions import Dimensions
from .flow import Flow
from .ir import Program
from .roles import Roles
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
