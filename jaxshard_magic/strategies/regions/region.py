"""Interface of regions: equations with a special lowering, and the collectives and scratch memory of that lowering."""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from ...plan import PlannedCollective
from ...program.ir import Equation, SubJaxpr, Value
from ...program.phases import equation_phases
from ..layout import Layout, Spec
from ..zigzag_plan import ZigzagPlan, find_zigzag_plan
from .deferral_analysis import DeferredSums, find_deferred_sums


@dataclass(frozen=True, eq=False)
class Context:
    """A step in which regions are searched for.

    Attributes:
        layout: The layout.
        labels: Name scope of equations, by index.
        reduce: Time of the reduction of gradients accumulated by a loop: at each trip ("each"), after the loop
            ("once"), or so and with weights gathered before the loop ("once-gathered").
        sum_dtype: Dtype of reductions of gradients; None for the dtype of each gradient.
        exported: Values read by another program, besides the outputs.
        accepts_partial: Gradients among the outputs that may be partial sums, since the caller reduces them.
    """

    layout: Layout
    labels: Mapping[int, str]
    reduce: str
    sum_dtype: Any
    exported: Collection[Value]
    accepts_partial: Collection[Value]

    @cached_property
    def readers(self) -> dict[Value, list[str]]:
        """Primitives that read each value; "out" stands for the end of a body and for another program."""
        readers: dict[Value, list[str]] = {v: ["out"] for v in self.exported}
        for scope in self.layout.program.sub_jaxprs():
            for e in scope.equations:
                for v in e.operands:
                    if v is not None:
                        readers.setdefault(v, []).append(e.name)
            for v in scope.outputs:
                if v is not None:
                    readers.setdefault(v, []).append("out")
        return readers

    @cached_property
    def phases(self) -> dict[int, str]:
        return equation_phases(self.layout.program, self.layout.flow)

    @cached_property
    def zigzag(self) -> ZigzagPlan:
        """Zig-zag order shared by all rings; empty where other programs read values of this one."""
        # Another program expects positions in sequential order.
        if self.exported or self.accepts_partial:
            return ZigzagPlan()
        return find_zigzag_plan(self.layout, self.deferred.values)

    @cached_property
    def deferred(self) -> DeferredSums:
        """Sums over the examples whose reduction is deferred.

        They wait for the end of a loop, unless each trip reduces its own, or for the caller of the outputs in
        `accepts_partial`.
        """
        layout = self.layout
        if self.reduce != "each":
            return find_deferred_sums(layout, self.accepts_partial, self.exported)
        if not self.accepts_partial:
            return DeferredSums()
        batch = {*layout.batch_axes}
        values = (v for v in range(len(layout.program.avals)) if not layout.is_activation(v))
        # As a partial sum each device would hold the whole of a gradient that is stored in shards.
        shared = [v for v in values if any(batch.intersection(axes) for axes in layout.stored_spec(v))]
        return find_deferred_sums(layout, self.accepts_partial, {*self.exported, *shared})


class Emission(Protocol):
    """Hooks of the lowering that a region may use."""

    def before(self, e: Equation, values: list) -> list:
        """Return the operands of `e` as `e` reads them: weights gathered."""
        ...

    def after(self, e: Equation, outs: list) -> list:
        """Return the results of `e` under their specs: activations and gradients constrained."""
        ...

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, computed once in a body for each key."""
        ...

    def gather(self, x: Any, weight: Value) -> Any:
        """Return a weight gathered from its stored spec to its compute spec."""
        ...

    def enter_body(self, scope: SubJaxpr, args: Any) -> list:
        """Run a loop's body, with its inputs and outputs constrained."""
        ...

    def at(self, path: Iterable[Equation]) -> AbstractContextManager[None]:
        """Bind primitives under the name scope and source line of the last equation in `path`, each in a body of the
        one before."""
        ...


@dataclass(frozen=True, eq=False)
class Region:
    """Equations that are not lowered one by one.

    An equation may be a member of several regions. The first in `KINDS` is asked first, and may call `default`, the
    lowering by the other regions and finally the plain lowering. Every method defaults to no change.

    Invariants:
    - The numbers equal the plain step's, to rounding. A region changes the device or the order of sums, never the
      terms.
    - Members are found from the traced step and the layout, before anything is emitted, and do not change afterwards.
    - `collectives` and `scratch_bytes` describe the lowering by `emit`, without the collectives of `default` if `emit`
      does not call it. A test compares `collectives` with the compiled program.

    Attributes:
        members: Indices of the equations.
    """

    members: Collection[int]

    def emit(self, e: Equation, values: list, default: Callable[[list], list], lowering: Emission) -> list:
        """Lower a member and return its results.

        A result may be any object if members of this region are its only readers; see `Context.readers` for outputs of
        a body. Equations in the member's body are lowered only by a call of `default` or of `lowering.enter_body`.

        Args:
            e: The member.
            values: Operands as the program has them.
            default: Lowering without this region, from operands to results.
            lowering: Hooks of the plain lowering.
        """
        return default(values)

    def collectives(
        self, e: Equation, operand_collectives: Iterable[PlannedCollective], default: Iterable[PlannedCollective]
    ) -> Iterable[PlannedCollective]:
        """Return the collectives of a member in one step.

        Counts include loop trips (`e.trip_count`). Bytes are of the whole result, not of the links.

        Args:
            e: The member.
            operand_collectives: Collectives for the operands, from their specs to the specs read by `e`.
            default: All collectives without the region, including operands and bodies. Both arguments are generators
                over one state: read only one, and once.
        """
        return default

    def scratch_bytes(self, e: Equation, default: Callable[[], int]) -> int:
        """Return the bytes on a device that a member takes while it runs, besides operands and results.

        Args:
            e: The member.
            default: The same without this region.
        """
        return default()

    def boundary_spec(self, value: Value) -> Spec | None:
        """Return the spec of the array that represents `value` at the ends of loop and branch bodies; None for the
        layout's spec.

        An array with another shape than its value, such as partial sums with one dimension more, needs a spec here.
        Otherwise the ends of bodies constrain it like the value.
        """
        return None

    def finish_outputs(self, outs: list) -> list:
        """Return the outputs of the step, made of `outs`, the results of its equations."""
        return outs

    def output_collectives(self) -> Iterable[PlannedCollective]:
        """Return the collectives of `finish_outputs`."""
        return ()

    @property
    def gathered_weights(self) -> Collection[Value]:
        """Weights that the bodies of members find already gathered."""
        return ()
