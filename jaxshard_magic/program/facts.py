"""`Facts`: what is understood of a traced step, before anything is decided about it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from .batching.batch import Batch
from .dimensions import Dimensions, Storage
from .expert_loops import find_expert_loops
from .experts import find_experts
from .flops import Work, counted
from .flow import Flow, by_alias
from .in_turn.found import may_be_in_turn
from .ir import Program
from .labels import labels
from .looked_up import may_look_up
from .phases import phases
from .roles import PARAMS, Roles
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

    @cached_property
    def storage(self) -> Storage:
        """What lies in memory alike."""
        return self.dimensions.storage(self.batch.classes)

    @cached_property
    def phases(self) -> Mapping[int, str]:
        """Forward, backward or update, of every equation by its index."""
        return phases(self.program, self.flow)

    @cached_property
    def labels(self) -> Mapping[int, str]:
        """Of each equation that has one, by its index."""
        return labels(self.program, self.flow, self.roles, self.phases)

    @cached_property
    def mixes_experts(self) -> bool:
        """Whether tokens choose among experts in it."""
        known = self.dimensions, self.storage, self.flow, self.roles
        return bool(find_experts(*known).classes or find_expert_loops(self.dimensions, self.flow, self.roles))

    @cached_property
    def may_mix_experts(self) -> bool:
        """Whether tokens choose among experts in it, or may where it goes through these one by one or looks them up."""
        if self.mixes_experts or may_be_in_turn(self.program):
            return True
        params = [v for v, role in zip(self.program.inputs, self.roles.of, strict=True) if role == PARAMS]
        return may_look_up(self.program, self.flow.forward(params, by_alias))

    @cached_property
    def work(self) -> tuple[Work, ...]:
        """Of every product."""
        return counted(self.program, self.flow, self.phases)
