"""Facts about a traced step, collected before any decision about sharding."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from .batching.batch import Batch
from .dimensions import Dimensions, StorageClasses
from .experts import find_expert_loops, find_experts
from .flops import Work, count_work
from .flow import Flow, follow_aliases
from .gathered_weights import may_gather_weights
from .ir import Program
from .op_labels import label_equations
from .phases import equation_phases
from .primitives import scan_counts
from .roles import InputRoles
from .sizes import nbytes
from .trace import Traced
from .unrolled_experts.detection import may_have_unrolled_experts

if TYPE_CHECKING:
    from ..specs import RequestedSpec


@dataclass(frozen=True)
class Facts:
    """Facts about a traced step.

    Attributes:
        traced: The step.
        program: Its equations.
        dimensions: Logical dimensions of its values.
        flow: Dataflow: dependencies between values.
        roles: Role of each input, and the output that is its next value.
        batch: Dimensions that hold examples.
        user_placements: Placements requested by the user, by input.
    """

    traced: Traced
    program: Program
    dimensions: Dimensions
    flow: Flow
    roles: InputRoles
    batch: Batch
    user_placements: "Mapping[int, RequestedSpec]"

    @cached_property
    def storage(self) -> StorageClasses:
        """Classes of dimensions stored with one layout."""
        return self.dimensions.storage_classes(self.batch.classes)

    @cached_property
    def phases(self) -> Mapping[int, str]:
        """Phase (forward, backward or update) of every equation, by index."""
        return equation_phases(self.program, self.flow)

    @cached_property
    def labels(self) -> Mapping[int, str]:
        """Name scope of each labelled equation, by index."""
        return label_equations(self.program, self.flow, self.roles, self.phases)

    @cached_property
    def mixes_experts(self) -> bool:
        """True if tokens choose among experts, in products over all experts or in loops."""
        known = self.dimensions, self.storage, self.flow, self.roles
        return bool(find_experts(*known).classes or find_expert_loops(self.dimensions, self.flow, self.roles))

    @cached_property
    def may_mix_experts(self) -> bool:
        """True if tokens choose among experts, or may do so in Python loops over experts or in look-ups of matrices."""
        if self.mixes_experts or may_have_unrolled_experts(self.program):
            return True
        params = [self.program.inputs[i] for i in self.roles.weights]
        return may_gather_weights(self.program, self.flow.descendants(params, follow_aliases))

    @cached_property
    def work(self) -> tuple[Work, ...]:
        """FLOPs and bytes of every product."""
        return count_work(self.program, self.flow, self.phases)


def largest_weight(flow: Flow, roles: InputRoles) -> int | None:
    """Return the bytes of the largest weight that an equation reads, on all devices together; None without weights.

    A weight that a scan steps over counts by the slice read in a trip.
    """
    program = flow.program
    avals = {i: program.avals[v] for i, v in enumerate(program.inputs) if i in roles.weights}
    sizes = {i: nbytes(aval) for i, aval in avals.items()}
    read_sizes = dict(sizes)
    for e in program.equations:
        if e.is_scan:
            consts, carried = scan_counts(e.params)
            for i in flow.input_ancestors(e.operands[consts + carried :], follow_aliases) & sizes.keys():
                read_sizes[i] = min(read_sizes[i], sizes[i] // max(1, e.params["length"]))
    return max(read_sizes.values(), default=None)
