"""Plan of one zigzag permutation of positions for all causal rings of a step, in place of one at every attention.

A causal ring is balanced when device d of n has the chunks d and 2n-1-d of the positions (zigzag order). Results of
equations equivariant to permutations of positions are in zigzag order wherever their operands are. After an attention
this holds up to sums over positions, equal in any order, and up to the step's outputs, which are restored to sequential
order. Before an attention it holds from the value that is permuted: the earlier the fewer bytes, at best the tokens
themselves. A step with an equation between two attentions that needs sequential positions is left unchanged.
`permute_positions` permutes one value.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..plan import PlannedCollective
from ..program.ir import Equation, Value
from ..program.op_labels import ZIGZAG
from ..program.permutation_equivariance import SubDimension, follow_permutation, is_attention_mask, is_equivariant
from ..program.union_find import UnionFind
from .layout import Axes, Layout, partition_spec, without_axes
from .reshard_steps import is_read_in_bfloat16
from .ring_attention import RingSpec, from_zigzag, to_zigzag, zigzag_order
from .ring_layout import as_zigzag, find_rings, ring_spec, shared_operands, zigzag_bytes


@dataclass(frozen=True, eq=False)
class ZigzagPlan:
    """Plan of the values in zigzag order, and of the permutations to and from zigzag order.

    Attributes:
        attentions: Rings, by equation index, with operands and results already in zigzag order.
        positions: Position dimension of each value.
        to_zigzag: Operands, by equation index and operand number, made in sequential and read in zigzag order.
        to_sequential: Operands made in zigzag and read in sequential order: gradients and the like, whole on every
            device.
        restored_outputs: Outputs of the step, by number, restored to sequential order.
        by_permute: Values permuted from device to device, in place of a gather.
    """

    attentions: frozenset[int] = frozenset()
    positions: Mapping[Value, SubDimension] = field(default_factory=dict)
    to_zigzag: Mapping[int, frozenset[int]] = field(default_factory=dict)
    to_sequential: Mapping[int, frozenset[int]] = field(default_factory=dict)
    restored_outputs: frozenset[int] = frozenset()
    by_permute: frozenset[Value] = frozenset()

    def collectives(self, layout: Layout) -> Iterator[tuple[int | None, PlannedCollective]]:
        """Yield the collectives of the plan, each with the index of the equation that reads the result.

        The index is None for outputs of the step.
        """
        seen = set[tuple[int | None, Value]]()
        for i in sorted(self.to_zigzag):
            e = layout.program.equations[i]
            for k in sorted(self.to_zigzag[i]):
                v, body = e.operands[k], e.parent and e.parent.index
                if v is not None and (body, v) not in seen:
                    seen.add((body, v))
                    moves = _permutation_collectives(
                        layout, v, self.positions[v], e.trip_count, by_permute=v in self.by_permute
                    )
                    yield from ((i, move) for move in moves)
        for v in (layout.program.outputs[o] for o in sorted(self.restored_outputs)):
            if v is not None:
                moves = _permutation_collectives(layout, v, self.positions[v], 1, by_permute=v in self.by_permute)
                yield from ((None, move) for move in moves)


def find_zigzag_plan(layout: Layout, unpermutable: Collection[Value] = ()) -> ZigzagPlan:
    """Return the plan of one permutation for all rings of a step.

    The plan is empty where such a permutation is impossible, or sends no fewer bytes than a permutation in each ring.

    Args:
        layout: The layout, with positions sharded.
        unpermutable: Values represented by an array of another shape (partial sums). They stay in sequential order.
    """
    all_rings = find_rings(layout)
    resident_operands = shared_operands(layout, all_rings)
    bytes_per_ring_plan = sum(
        size * e.trip_count for e in all_rings for size in zigzag_bytes(layout, e, resident_operands)
    )
    balanceable = [e for e in all_rings if as_zigzag(ring_spec(layout, e)) is not None]
    if not bytes_per_ring_plan or not balanceable:
        return ZigzagPlan()
    zigzag = _OrderAnalysis(layout, balanceable, _position_dims(layout, balanceable), unpermutable).plan()
    zigzag = replace(zigzag, by_permute=frozenset(_values_sent_by_permute(layout, zigzag, balanceable)))
    planned_bytes = sum(move.bytes * move.count for _, move in zigzag.collectives(layout))
    return zigzag if zigzag.attentions and planned_bytes < bytes_per_ring_plan else ZigzagPlan()


def _values_sent_by_permute(
    layout: Layout, zigzag: ZigzagPlan, ring_equations: Collection[Equation]
) -> Iterator[Value]:
    """Yield the values that are permuted from device to device."""
    program, readers = layout.program, defaultdict[Value | None, list[Equation]](list)
    for i, ks in zigzag.to_zigzag.items():
        for k in ks:
            readers[program.equations[i].operands[k]].append(program.equations[i])
    for v in {*readers, *(program.outputs[o] for o in zigzag.restored_outputs)}:
        if v is None or not _has_two_chunks(layout, v, zigzag.positions[v]):
            continue
        # XLA for the CPU may take a permute for a step of a ring that can run at the same time, as all collectives of
        # `shard_map`s share one number there. So only values that every ring waits for are sent by permute.
        if layout.is_cpu:
            dependent = layout.flow.descendants([v])
            if any(map(_in_a_loop, readers[v])) or any(e.operands[0] not in dependent for e in ring_equations):
                continue
        yield v


def _in_a_loop(e: Equation) -> bool:
    return e.parent is not None and (e.parent.is_control_flow or _in_a_loop(e.parent))


def _position_dims(layout: Layout, ring_equations: Collection[Equation]) -> dict[Value, SubDimension]:
    """Return the position dimension of each value connected to the operands of the rings."""
    program, members = layout.program, {e.index for e in ring_equations}
    equations_by_value: dict[Value, list[tuple[Equation, int]]] = defaultdict(list)
    linked: dict[Value, list[tuple[Value, int]]] = defaultdict(list)
    for e in program.equations:
        for k, v in enumerate((*e.operands, *e.results)):
            if v is not None and not e.bodies and not is_attention_mask(e, k):
                equations_by_value[v].append((e, k))
        for a, b, lead in _linked_values(e):
            linked[a].append((b, -lead))
            linked[b].append((a, lead))
    positions: dict[Value, SubDimension] = {}
    todo: list[Value] = []

    def put(v: Value | None, place: SubDimension) -> None:
        if v is not None and v not in positions and place.dim >= 0:
            positions[v] = place
            todo.append(v)

    for e in ring_equations:
        assert e.operands[0] is not None
        shape = program.shapes[e.operands[0]]
        put(e.operands[0], SubDimension(len(shape) - 2, shape[-2]))
    for v in todo:
        for e, slot in equations_by_value[v]:
            # Attentions that are no such rings need their positions in sequence.
            if e.name.startswith("attention") and e.index not in members:
                continue
            if (followed := follow_permutation(e, slot, positions[v])) is not None:
                values = (*e.operands, *e.results)
                for k, place in followed.items():
                    put(values[k], place)
        for w, shift in linked[v]:
            put(w, replace(positions[v], dim=positions[v].dim + shift))
    return positions


def _linked_values(e: Equation) -> Iterator[tuple[Value, Value, int]]:
    """Yield the values linked by bodies or by trips: outer value, inner value, and 1 where a loop steps over the outer
    one."""
    yield from _entering_values(e)
    yield from _inseparable_values(e)


def _entering_values(e: Equation) -> Iterator[tuple[Value, Value, int]]:
    """Yield the pairs of `_linked_values` that enter a body."""
    for body in e.bodies:
        yield from ((a, b, lead) for a, b, lead in body.inputs if a is not None)


def _inseparable_values(e: Equation) -> Iterator[tuple[Value, Value, int]]:
    """Yield the pairs of `_linked_values` that cannot be permuted in between."""
    for body in e.bodies:
        yield from ((y, x, lead) for x, y, lead in body.outputs if x is not None)
        yield from ((a, b, 0) for a, b in (*body.carries, *body.zero_trip) if a is not None and b is not None)


class _OrderConflict(Exception):
    """A value is needed in an order it cannot have."""


class _OrderAnalysis:
    """Analysis of the order of positions in each value: `zigzag_sets` and `sequential_sets`, by sets of linked
    values."""

    def __init__(
        self,
        layout: Layout,
        ring_equations: Collection[Equation],
        places: dict[Value, SubDimension],
        unpermutable: Collection[Value],
    ):
        self.layout, self.program, self.positions = layout, layout.program, places
        self.rings = frozenset(e.index for e in ring_equations)
        self.after_rings = layout.flow.descendants(v for e in ring_equations for v in e.results)
        self.equations = [e for e in self.program.equations if not e.bodies and self._has_positions(e)]
        self.bodies = [e for e in self.program.equations if e.bodies]
        self.equivariant = {e.index for e in self.equations if self._is_equivariant(e)}
        # For an equivariant equation, by index: whether its operands and results are in zigzag order.
        self.zigzag_by_equation: dict[int, bool] = {}
        self.value_sets = UnionFind(len(self.program.avals))
        self.sequential_sets, self.zigzag_sets = set[int](), set[int]()
        state = [self.program.inputs[i] for i in layout.roles.storage_order]
        self.stored_classes = {c for v in state for c in layout.storage.classes_of(v)}
        self.unpermutable = {v for v in unpermutable if v in places}

    def plan(self) -> ZigzagPlan:
        if not self.rings <= self.equivariant:
            return ZigzagPlan()
        try:
            return self._solve()
        except _OrderConflict:
            return ZigzagPlan()

    def _solve(self) -> ZigzagPlan:
        self._merge_linked_values()
        for e in self.equations:
            if e.index in self.equivariant and not self.after_rings.isdisjoint((*e.operands, *e.results)):
                # State is stored in sequential order from step to step.
                self.zigzag_by_equation[e.index] = not self._is_state_equation(e)
        # In this order, as zigzag order spreads only as far as sets that need sequential order.
        self._mark_sequential()
        self._mark_zigzag()
        self._mark_zigzag_body_inputs()
        return self._verified_plan()

    # Equations and values, and the order that each needs.

    def _has_positions(self, e: Equation) -> bool:
        return any(v in self.positions for v in (*e.operands, *e.results))

    def _is_equivariant(self, e: Equation) -> bool:
        """Return whether `e` is equivariant to a permutation of the positions of its operands and results."""
        positions_by_slot = {
            k: self.positions[v]
            for k, v in enumerate((*e.operands, *e.results))
            if v in self.positions and not is_attention_mask(e, k)
        }
        if e.name.startswith("attention") and e.index not in self.rings:
            return False
        return bool(positions_by_slot) and is_equivariant(e, positions_by_slot)

    def _is_state_equation(self, e: Equation) -> bool:
        """Return whether `e` works on parameters, their gradients or moments."""
        storage, touched = self.layout.storage, [v for v in (*e.operands, *e.results) if v in self.positions]
        return not storage.touches_batch(e) and any(
            storage.classes_of(v)[self.positions[v].dim] in self.stored_classes for v in touched
        )

    def _has_same_positions(self, a: Value, b: Value, lead: int) -> bool:
        """Return whether both values of a linked pair have the same position dimension, or neither has any."""
        outer, inner = self.positions.get(a), self.positions.get(b)
        if outer is None or inner is None:
            return outer is inner
        return replace(inner, dim=inner.dim + lead) == outer

    def _merge_linked_values(self) -> None:
        """Merge values that share an order: loop carries, results of bodies, and inputs of several bodies from one
        operand."""
        self.outer_values: dict[Value, list[Value]] = defaultdict(list)
        for e in self.bodies:
            for a, b, lead in _inseparable_values(e):
                if self._has_same_positions(a, b, lead):
                    self.value_sets.union(a, b)
            first_inner: dict[Value, Value] = {}
            for a, b, lead in _entering_values(e):
                if self._has_same_positions(a, b, lead):
                    self.value_sets.union(b, first_inner.setdefault(a, b))
                    self.outer_values[b].append(a)
        self.values_by_set: dict[int, list[Value]] = defaultdict(list)
        for v in self.positions:
            self.values_by_set[self.value_sets.find(v)].append(v)

    def _mark_sequential(self) -> None:
        """Mark the values that arrive in sequential order, and the values required so by their readers."""
        computed = {v for e in self.equations for v in e.results} | {
            v for e in self.bodies for body in e.bodies for v in (*e.results, *body.sub_jaxpr.inputs)
        }
        for v in self.positions:
            if v not in computed:
                # An input of the step, or a constant.
                self._require_sequential(v)
        for e in self.equations:
            if e.index not in self.equivariant:
                self._require_sequential(*e.results, *(v for v in e.operands if v not in self.after_rings))
            else:
                self._require_sequential(*(v for k, v in enumerate(e.operands) if is_attention_mask(e, k)))
                if self.zigzag_by_equation.get(e.index) is False:
                    self._require_sequential(*e.results)
        for e in self.bodies:
            for a, b, lead in _linked_values(e):
                if not self._has_same_positions(a, b, lead):
                    self._require_sequential(b, *(v for v in (a,) if v not in self.after_rings))
        early_outputs = (v for v in self.program.outputs if v not in self.after_rings)
        self._require_sequential(*early_outputs, *self.unpermutable)
        stored_values = (v for v in self.positions if v not in self.after_rings and not self.layout.is_activation(v))
        self._require_sequential(*(v for v in stored_values if any(self.layout.stored_spec(v))))

    def _require_sequential(self, *values: Value | None) -> None:
        """Mark values as sequential, and all values they are made from that do not depend on a ring."""
        todo = [v for v in values if v in self.positions]
        for v in todo:
            if (root := self.value_sets.find(v)) in self.sequential_sets:
                continue
            self.sequential_sets.add(root)
            for w in self.values_by_set[root]:
                e = self.program.producer.get(w)
                if e is not None and not e.bodies and e.index in self.equivariant:
                    if self.zigzag_by_equation.setdefault(e.index, False):
                        raise _OrderConflict
                    todo += [x for x in e.operands if x in self.positions and x not in self.after_rings]
                todo += [a for a in self.outer_values.get(w, ()) if a not in self.after_rings]

    def _mark_zigzag(self) -> None:
        """Mark values made from a ring's results, and the operands they meet, as zigzag, from as early as possible."""
        todo: list[Value | None] = []
        for e in self.equations:
            if self.zigzag_by_equation.get(e.index):
                todo += [*e.results, *(v for k, v in enumerate(e.operands) if not is_attention_mask(e, k))]
        for v in todo:
            if v not in self.positions or (root := self.value_sets.find(v)) in self.zigzag_sets:
                continue
            if root in self.sequential_sets:
                continue
            self.zigzag_sets.add(root)
            for w in self.values_by_set[root]:
                e = self.program.producer.get(w)
                if e is not None and not e.bodies and self.zigzag_by_equation.setdefault(e.index, True):
                    todo += e.operands
                todo += self.outer_values.get(w, ())
        # Equations that neither walk has reached, such as a sum of weights.
        for e in self.equations:
            if e.index in self.equivariant and e.index not in self.zigzag_by_equation:
                self.zigzag_by_equation[e.index] = any(map(self._is_zigzag, e.operands)) and not any(
                    map(self._is_sequential, e.results)
                )
                if self.zigzag_by_equation[e.index]:
                    self.zigzag_sets |= {self.value_sets.find(v) for v in e.results if v in self.positions}

    def _mark_zigzag_body_inputs(self) -> None:
        """Let values that a body does not change enter it in the order they have outside."""
        for e in self.bodies:
            for a, b, lead in _entering_values(e):
                root = self.value_sets.find(b)
                if self._has_same_positions(a, b, lead) and self._is_zigzag(a) and root not in self.sequential_sets:
                    self.zigzag_sets.add(root)

    def _is_zigzag(self, v: Value | None) -> bool:
        return v in self.positions and self.value_sets.find(v) in self.zigzag_sets

    def _is_sequential(self, v: Value | None) -> bool:
        return v in self.positions and self.value_sets.find(v) in self.sequential_sets

    # The plan, with every value verified.

    def _verified_plan(self) -> ZigzagPlan:
        """Return the permutations between the orders, and verify every value; nothing about the earlier choice is
        assumed.

        Raises:
            _OrderConflict: Some value is made and read in orders that no permutation of an operand reconciles.
        """
        to_zigzag: dict[int, set[int]] = defaultdict(set)
        to_sequential: dict[int, set[int]] = defaultdict(set)
        if self.sequential_sets & self.zigzag_sets or any(map(self._is_zigzag, self.unpermutable)):
            raise _OrderConflict
        for e in (*self.equations, *self.bodies):
            for k, reads_zigzag in self._reads_zigzag(e).items():
                v = e.operands[k]
                if reads_zigzag and not self._is_zigzag(v):
                    to_zigzag[e.index].add(k)
                elif not reads_zigzag and self._is_zigzag(v):
                    if self.layout.is_activation(v):
                        raise _OrderConflict
                    # Values other than activations are whole on every device, so that this permutation sends nothing.
                    to_sequential[e.index].add(k)
            makes_zigzag = self.zigzag_by_equation.get(e.index, False)
            if not e.bodies and any(v in self.positions and self._is_zigzag(v) != makes_zigzag for v in e.results):
                raise _OrderConflict
        return ZigzagPlan(
            self.rings,
            self.positions,
            {i: frozenset(ks) for i, ks in to_zigzag.items()},
            {i: frozenset(ks) for i, ks in to_sequential.items()},
            frozenset(o for o, v in enumerate(self.program.outputs) if self._is_zigzag(v)),
        )

    def _reads_zigzag(self, e: Equation) -> dict[int, bool]:
        """Return, for each operand of `e` with positions, whether `e` reads it in zigzag order."""
        if not e.bodies:
            reads_zigzag = e.index in self.equivariant and self.zigzag_by_equation[e.index]
            return {
                k: reads_zigzag and not is_attention_mask(e, k) for k, v in enumerate(e.operands) if v in self.positions
            }
        for a, b, lead in _inseparable_values(e):
            if not self._has_same_positions(a, b, lead) and (self._is_zigzag(a) or self._is_zigzag(b)):
                raise _OrderConflict
        zigzag_by_value: dict[Value, bool] = {}
        for a, b, lead in _entering_values(e):
            if a not in self.positions and b not in self.positions:
                continue
            reads_zigzag = self._is_zigzag(b)
            if (reads_zigzag and not self._has_same_positions(a, b, lead)) or zigzag_by_value.setdefault(
                a, reads_zigzag
            ) != reads_zigzag:
                raise _OrderConflict
        return {k: zigzag_by_value[v] for k, v in enumerate(e.operands) if v in self.positions and v in zigzag_by_value}


def permute_positions(
    layout: Layout, v: Value, x: Any, position: SubDimension, *, by_permute: bool, to_sequential: bool
) -> Any:
    """Return the array `x`, which represents the value `v`, with its positions in the other order.

    Args:
        layout: The layout, with positions sharded.
        v: The value.
        x: The array.
        position: The position dimension of `v`.
        by_permute: Send each of two chunks from device to device (see `_has_two_chunks`). Otherwise gather all
            positions, and each device takes its own chunks.
        to_sequential: Permute from zigzag to sequential order.
    """
    axes, n = layout.position_axes, layout.device_count(layout.position_axes)
    if not layout.is_activation(v):
        whole = layout.constrain(x, layout.compute_spec(v)) if any(layout.stored_spec(v)) else jnp.asarray(x)
        return _reorder_chunks(whole, position, n, to_sequential)
    spec = layout.activation_spec(v)
    if not by_permute:
        with jax.named_scope(ZIGZAG):
            whole = layout.constrain(x, without_axes(spec, axes))
            return layout.constrain(_reorder_chunks(whole, position, n, to_sequential), spec)
    ring, permute_shard, partition = (
        RingSpec(axes, n, position.size, n, zigzag=True),
        from_zigzag if to_sequential else to_zigzag,
        partition_spec(spec),
    )
    permute = jax.shard_map(
        lambda own: permute_shard(ring, own, position.dim),
        mesh=layout.mesh,
        in_specs=partition,
        out_specs=partition,
        check_vma=False,
    )
    return permute(layout.constrain(x, spec))


def _permutation_collectives(
    layout: Layout, v: Value, position: SubDimension, trips: int, *, by_permute: bool
) -> Iterator[PlannedCollective]:
    """Yield the collectives of `permute_positions`.

    Args:
        layout: The layout, with positions sharded.
        v: The value.
        position: The position dimension of `v`.
        trips: How often the step permutes the value.
        by_permute: As for `permute_positions`.
    """
    axes = layout.position_axes
    if not layout.is_activation(v):
        return
    narrowing = 2 if is_read_in_bfloat16(layout, v, layout.activation_spec(v)) else 1
    if by_permute:
        # Each of a device's two chunks has a collective-permute of its own.
        size = layout.transfer_bytes(v, layout.activation_spec(v)) // narrowing // 2
        yield PlannedCollective("collective-permute", axes, layout.device_count(axes), size, 2 * trips)
    elif gather_axes := _position_axes(layout, v, position):
        size = layout.transfer_bytes(v, without_axes(layout.activation_spec(v), gather_axes)) // narrowing
        yield PlannedCollective("all-gather", gather_axes, layout.device_count(gather_axes), size, trips)


def _has_two_chunks(layout: Layout, v: Value, position: SubDimension) -> bool:
    """Return whether every device has two chunks of the positions, and more than one number for each position.

    For tokens and the like a gather of all positions is cheaper.
    """
    if not layout.is_activation(v):
        return False
    shape, examples = layout.program.shapes[v], layout.batch.classes
    numbers_per_position = prod(
        size
        for d, (size, c) in enumerate(zip(shape, layout.dims.classes_of(v), strict=True))
        if d != position.dim and c not in examples
    )
    is_sharded = (
        layout.activation_spec(v)[position.dim] == layout.position_axes and shape[position.dim] == position.size
    )
    # One number for each position (token ids): gathering all of them is cheaper than two collective-permutes.
    return numbers_per_position > 1 and is_sharded


def _position_axes(layout: Layout, v: Value, position: SubDimension) -> Axes:
    """Return the mesh axes that shard the positions of a value; none for slices of an input whole on every device."""
    source = v
    while (
        (e := layout.program.producer.get(source)) is not None
        and e.primitive.data_movement
        and e.operands[0] is not None
    ):
        source = e.operands[0]
    whole = source in layout.program.inputs and not set(layout.position_axes).intersection(
        a for has in layout.activation_spec(source) for a in has
    )
    return () if whole else tuple(a for a in layout.activation_spec(v)[position.dim] if a in layout.position_axes)


def _reorder_chunks(x: Any, position: SubDimension, devices: int, to_sequential: bool) -> Any:
    """Return `x` with its 2 * `devices` chunks of positions reordered to zigzag, or back."""
    order = np.asarray(zigzag_order(devices))
    order, shape, d = np.argsort(order) if to_sequential else order, x.shape, position.dim
    # Positions may be merged with other dimensions into dimension `d`: with `stride` elements for each, `outer` times.
    outer = shape[d] // (position.size * position.stride)
    chunk_size = position.size * position.stride // (2 * devices)
    chunks = x.reshape(*shape[:d], outer, 2 * devices, chunk_size, *shape[d + 1 :])
    # All indices are valid: "clip" saves the mask that the default mode of `jnp.take` would add.
    return jnp.take(chunks, order, d + 1, mode="clip", unique_indices=True).reshape(shape)
