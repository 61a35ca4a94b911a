"""Planned collectives of a layout, derived from the traced step before anything is compiled.

Sharded weights are gathered for products with activations, and a product contracting a sharded dimension is summed over
devices: activations under tensor parallelism, gradients over the examples. Compiled steps send the same, and sometimes
slightly more: scalars, and values resharded by the compiler. A plan takes 10 to 30 ms; Shardy's passes would take 0.3
to 2 s, too slow for a search, and serve as a test of this module.
"""

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from jax.version import __version_info__ as jax_version

from ..plan import PlannedCollective
from ..program.ir import Body, Equation, SubJaxpr, Value
from ..program.phases import equation_phases
from ..program.primitives.primitive import Kind
from ..program.sizes import nbytes
from .layout import Axes, Spec, without_axes
from .reductions import activation_reductions, gradient_reductions, summed_axes
from .regions import Region
from .regions.deferral_analysis import find_deferred_sums
from .reshard_steps import is_multiplied_in_bfloat16, reshard_collectives
from .sharded_lowering import ShardedLowering
from .unsharded_dims import is_summed_before_scatter
from .weight_gathers import gather_collectives


def planned_collectives(
    lowering: ShardedLowering, equations: Container[int] | None = None
) -> tuple[PlannedCollective, ...]:
    """Return the collectives of one step, in program order, loops counted with all trips.

    Axes of one device send nothing and are left out.

    Args:
        lowering: The lowering of the step.
        equations: Indices of top-level equations that are a program of their own; None for the whole step.
    """
    collectives = _StepCollectives(lowering)
    sent = tuple(collectives.of_step() if equations is None else collectives.of_equations(equations))
    single_device_axes = {axis for axis, n in lowering.layout.mesh.shape.items() if n == 1}
    if not single_device_axes:
        return sent
    return tuple(
        replace(each, axes=tuple(axis for axis in each.axes if axis not in single_device_axes))
        for each in sent
        if each.group_size > 1
    )


@dataclass
class _BodyState:
    """Values already moved in one body, which later equations read at no further cost.

    Attributes:
        is_loop: Whether the body keeps what it gathers until its end, as loops and checkpoints do.
        gathered_bytes: Bytes of gathered weights, by the value before the gather, the oldest first.
        resharded: Activations resharded for a reader, with the spec.
    """

    is_loop: bool
    gathered_bytes: dict[Value, int] = field(default_factory=dict)
    resharded: set[tuple[Value, tuple[Axes, ...]]] = field(default_factory=set)


class _StepCollectives:
    """Derivation of a step's collectives, equation by equation."""

    def __init__(self, lowering: ShardedLowering):
        self._lowering, self._layout = lowering, lowering.layout
        self._program = lowering.program
        self._used = self._layout.flow.live_values
        self._gathered_positions: set[tuple[Value, Axes, str | None]] = set()
        self._partner_axes = self._linked_axes() if self._layout.position_classes else {}

    @cached_property
    def _phases(self) -> dict[int, str]:
        return equation_phases(self._program, self._layout.flow)

    def of_step(self) -> Iterator[PlannedCollective]:
        """Yield the collectives of the whole step."""
        yield from self._of_sub_jaxpr(self._program.top, _BodyState(False), {})
        for region in self._lowering.regions:
            yield from region.output_collectives()

    def of_equations(self, equations: Container[int]) -> Iterator[PlannedCollective]:
        """Yield the collectives of some top-level equations, which gather their own weights."""
        top = self._program.top
        chosen = [e for e in top.equations if e.index in equations]
        yield from self._of_sub_jaxpr(replace(top, equations=chosen), _BodyState(False), {})

    def _of_sub_jaxpr(
        self, scope: SubJaxpr, body: _BodyState, outer_values: dict[Value, Value]
    ) -> Iterator[PlannedCollective]:
        """Yield the collectives of a sub-jaxpr.

        Args:
            scope: The sub-jaxpr.
            body: Values already moved.
            outer_values: Values outside of bodies that run inline, by the value inside.
        """
        for e in scope.equations:
            # XLA drops dead code, which therefore sends nothing.
            if e.bodies or not self._used.isdisjoint(e.results):
                for sent in self._of_equation(e, self._lowering.regions_of(e), body, outer_values):
                    yield sent if sent.equation is not None else replace(sent, equation=e.index)

    def _of_equation(
        self, e: Equation, regions: tuple[Region, ...], body: _BodyState, outer_values: dict[Value, Value]
    ) -> Iterator[PlannedCollective]:
        if regions:
            default = self._of_equation(e, regions[1:], body, outer_values)
            yield from regions[0].collectives(e, self._of_operands(e, body, outer_values), default)
            return
        if e.bodies:
            yield from self._reshards(e, body, outer_values)
        for door in e.bodies:
            yield from self._of_sub_jaxpr(door.sub_jaxpr, *self._enter_body(e, door, body, outer_values))
        if not e.bodies:
            yield from self._of_operands(e, body, outer_values)
            yield from self._reductions(e)

    def _of_operands(
        self, e: Equation, body: _BodyState, outer_values: dict[Value, Value]
    ) -> Iterator[PlannedCollective]:
        """Yield the collectives that bring an equation's operands to the specs under which it reads them."""
        yield from self._weight_gathers(e, body, outer_values)
        yield from self._position_gathers(e)
        yield from self._reshards(e, body, outer_values)

    def _enter_body(
        self, e: Equation, door: Body, body: _BodyState, outer_values: dict[Value, Value]
    ) -> tuple[_BodyState, dict[Value, Value]]:
        """Return the state and the outer values for a body of `e`: new ones where the body stays a body."""
        # With `prevent_cse` a recomputation stays separate from the forward pass, and gathers its weights again.
        is_recomputation = e.primitive.remat and e.params.get("differentiated") and e.params.get("prevent_cse")
        if is_recomputation or e.is_control_flow:
            return _BodyState(True), {}
        return body, {b: outer_values.get(a, a) for a, b, _ in door.inputs if a is not None}

    def _weight_gathers(
        self, e: Equation, body: _BodyState, outer_values: dict[Value, Value]
    ) -> Iterator[PlannedCollective]:
        """Yield the all-gathers of weights that `e` reads and that are not gathered yet."""
        layout = self._layout
        if not layout.storage.touches_batch(e) or e.primitive.is_scatter:
            return
        for v in e.operands:
            if v is None or layout.is_activation(v) or not self._program.shapes[v]:
                continue
            over = self._lowering.gather_axes(v)
            source = outer_values.get(v, v)
            # A weight in another memory layout, such as a transpose, is made of its gathered source.
            laid = self._lowering.layout_changes.get(source)
            if (
                not over
                or source in body.gathered_bytes
                or (laid is not None and outer_values.get(laid, laid) in body.gathered_bytes)
            ):
                continue
            for sent in gather_collectives(layout, v, e.trip_count, narrowed=is_multiplied_in_bfloat16(layout, e, v)):
                yield replace(sent, value=v)
            body.gathered_bytes[source] = nbytes(self._program.avals[v])
            # As in `ShardedLowering._gather_weight`: above a limit, straight-line code drops the weight gathered first,
            # and gathers it again for a later use.
            while (
                not body.is_loop
                and len(body.gathered_bytes) > 1
                and sum(body.gathered_bytes.values()) > self._lowering.cache_limit
            ):
                body.gathered_bytes.pop(next(iter(body.gathered_bytes)))

    def _reductions(self, e: Equation) -> Iterator[PlannedCollective]:
        """Yield the reductions of a sum that `e` leaves over sharded dimensions."""
        by_dim, out = summed_axes(self._layout, e), e.results[0]
        over = _unique(a for axes in by_dim for a in axes)
        if over and self._layout.is_activation(out):
            made_spec = self._layout.compute_spec_in(e, out)
            yield from activation_reductions(
                self._layout, out, over, e.trip_count, axes_by_dim=by_dim, made_spec=made_spec
            )
        elif over:
            # XLA all-reduces the gradient of a lookup before it shards it; for a TPU this is not certain.
            is_lookup_gradient = e.primitive.is_scatter and self._layout.platform != "tpu"
            whole = is_lookup_gradient or is_summed_before_scatter(self._layout, e)
            rows = self._summed_rows(e, over)
            sums = gradient_reductions(
                self._layout, out, over, e.trip_count, unscattered=whole, summed_rows=rows, axes_by_dim=by_dim
            )
            yield from (self._hoist_reduction(e, sent) for sent in sums)

    def _hoist_reduction(self, e: Equation, reduction: PlannedCollective) -> PlannedCollective:
        """Return the gradient sum of `e` with the number of times that it is made.

        XLA for TPUs moves an all-reduce out of a loop if the loop only accumulates the result. Since libtpu 0.0.50 (jax
        0.12) the all-reduce moves out of outer loops as well; with libtpu 0.0.42 it did not. Reduce-scatters stay in
        the loop. XLA for CPUs and GPUs moves neither.
        """
        if self._layout.platform != "tpu" or reduction.kind != "all-reduce" or e.trip_count < 2:
            return reduction
        flow, count, outer = self._layout.flow, reduction.count, e.parent
        added_up = flow.descendants((v for v in e.results if v in self._deferrable), self._is_accumulated)
        while outer is not None:
            if outer.is_scan:
                carries = outer.bodies[0].carries
                if not any(b in added_up and b in flow.descendants([a], self._is_accumulated) for b, a in carries):
                    break
                count //= outer.params["length"]
                # libtpu before 0.0.50 (jax 0.12) moves the all-reduce out of the innermost loop only.
                if jax_version < (0, 12):
                    break
            outer = outer.parent
        return replace(reduction, count=count)

    def _is_accumulated(self, made: Value, _of: Value, e: Equation | None) -> bool:
        """Return whether a value is made of another by sums, casts, slices and concatenations."""
        if e is not None and not (e.primitive.alias or e.primitive.kind is Kind.SLICE):
            return e.primitive.is_additive and e.primitive.is_elementwise and made in self._deferrable
        return made in self._deferrable

    @cached_property
    def _deferrable(self) -> Set[Value]:
        """Values that devices may hold as partial sums until a loop has accumulated them."""
        return find_deferred_sums(self._layout).values

    def _summed_rows(self, e: Equation, over: Axes) -> int:
        """Return the length of the sum on each device in a product; 0 for other equations."""
        if (c := e.contraction) is None or e.operands[0] is None:
            return 0
        shape = self._program.shapes[e.operands[0]]
        return math.prod(shape[i] for i, _ in c.contracted) // self._layout.device_count(over)

    def _reshards(self, e: Equation, body: _BodyState, outer_values: dict[Value, Value]) -> Iterator[PlannedCollective]:
        """Yield the reshards of values where experts or attention by heads begin or end, or where a whole dimension is
        needed.

        Each value is resharded once in a body, as in the lowering.
        """
        layout = self._layout
        for v in dict.fromkeys(e.operands):
            if v is None:
                continue
            moves = layout.experts is not None and layout.is_activation(v) and not e.bodies
            if not moves and (e.index, v) not in layout.spec_overrides.operands:
                continue
            current, target = layout.spec_between_uses(v), layout.compute_spec_in(e, v)
            if current != target and (at := (outer_values.get(v, v), tuple(target))) not in body.resharded:
                body.resharded.add(at)
                for sent in reshard_collectives(layout, v, current, target, e.trip_count):
                    yield replace(sent, value=v)
        for v in e.results:
            if v in layout.spec_overrides.results:
                made = [*layout.spec_overrides.results[v]]
                yield from reshard_collectives(layout, v, made, layout.spec_between_uses(v), e.trip_count)

    def _position_gathers(self, e: Equation) -> Iterator[PlannedCollective]:
        """Yield the all-gathers of activations whose positions `e` needs whole."""
        layout = self._layout
        if not layout.position_classes:
            return
        partners = self._partner_axes.get(e.index, {})
        for v in dict.fromkeys(e.operands):
            if v is None or not layout.is_activation(v) or (e.index, v) in layout.spec_overrides.operands:
                continue
            spec = layout.activation_spec(v)
            nodes = self._program.dim_numbers(v)
            gone = _unique(
                a
                for n, axes in zip(nodes, spec, strict=True)
                for a in axes
                if a in layout.position_axes and n in partners and a not in partners[n]
            )
            narrow = is_multiplied_in_bfloat16(layout, e, v)
            # An operand that a TPU multiplies in bfloat16 is gathered once more for the backward pass.
            at = v, gone, self._phases.get(e.index) if narrow else None
            if gone and at not in self._gathered_positions:
                self._gathered_positions.add(at)
                size = layout.transfer_bytes(v, without_axes(spec, gone)) // (2 if narrow else 1)
                if e.primitive.is_combinable:
                    # XLA reduces each device's shard first, and gathers what remains.
                    size = min(size, layout.transfer_bytes(e.results[0], layout.compute_spec_in(e, e.results[0])))
                yield self._collective("all-gather", gone, size, e.trip_count)

    def _linked_axes(self) -> dict[int, dict[int, set[str]]]:
        """Return, by equation and dimension number, the mesh axes of the dimensions related to it there."""
        program, axes_of = self._program, defaultdict[int, dict[int, set[str]]](dict)
        specs: dict[tuple[int, Value], Spec] = {}
        value_of = [v for v in range(len(program.avals)) for _ in program.dim_numbers(v)]
        for link in self._layout.dims.links.links:
            if link.equation is None:
                continue
            for a, b in ((link.a, link.b), (link.b, link.a)):
                at = link.equation, (v := value_of[b])
                if at not in specs:
                    specs[at] = self._layout.compute_spec_in(program.equations[link.equation], v)
                axes_of[link.equation].setdefault(a, set()).update(specs[at][b - program.first_dim[v]])
        return axes_of

    def _collective(self, kind: str, axes: Axes, size: int, count: int) -> PlannedCollective:
        return PlannedCollective(kind, axes, self._layout.device_count(axes), size, count)


def _unique(axes: Iterable[str]) -> Axes:
    return tuple(dict.fromkeys(axes))
