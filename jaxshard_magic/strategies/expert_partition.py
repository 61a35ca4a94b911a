"""Partition of a step into an expert-sharded and a token-sharded region, by a minimum cut over the bytes sent between
them.

Tokens are sharded over all batch axes. In the expert-sharded region, experts are sharded over the expert axes instead.
Products with a weight for each expert belong there; the router needs all experts and does not. For the other equations
a minimum cut decides. With one-hot dispatch it cuts right after dispatch and right before the combination, an
all-to-all each. Where all experts see all tokens, the tokens are gathered before, and summed over the experts after.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from ..program.ir import Equation, Value
from ..program.primitives.factors import broadcast
from ..program.primitives.primitive import Kind
from ..program.primitives.sharding_rules import reduced_dims
from ..program.union_find import UnionFind
from .layout import Axes, Layout, ShardedExperts, Spec, without_axes
from .min_cut import FlowNetwork, Node
from .reshard_steps import reshard_bytes


def partition_expert_region(layout: Layout, experts: ShardedExperts) -> ShardedExperts:
    """Return `experts` with the partition filled in.

    The result has the storage classes of `experts.weight_classes`, and others that follow them (biases).

    Args:
        layout: The layout; `layout.experts` is set to `experts`, not to the result.
        experts: The experts, with the storage classes known to be sharded.
    """
    layout.experts = experts
    index, partition = _ExpertIndex(layout, experts), experts
    for c in sorted(experts.classes):
        part = _ExpertPartition(layout, experts, c, index).solve()
        partition = replace(
            partition,
            weight_classes=partition.weight_classes | part.weight_classes,
            equations=partition.equations | part.equations,
            activations=partition.activations | part.activations,
        )
    return partition


class _ExpertIndex:
    """Values and equations of the experts, by the dimension class counting the experts.

    Attributes:
        values: Values with a dimension of the class, or with slots for the tokens of all examples.
        value_sets: `values` as sets.
        equations: Equations without bodies, used by the outputs, with one of `values` and an activation.
        body_pairs: Pairs of `values` on the outside and inside of a body.
        linked: Dimension numbers related to others by an equation, by its index.
    """

    def __init__(self, layout: Layout, experts: ShardedExperts):
        program = layout.program
        self.values, self.equations = (defaultdict[int, list[Value]](list), defaultdict[int, list[Equation]](list))
        self.body_pairs = defaultdict[int, list[tuple[Value, Value]]](list)
        self.linked = defaultdict[int, set[int]](set)
        classes = [self._expert_classes(layout, experts, v) for v in range(len(program.avals))]
        for v, own in enumerate(classes):
            for c in own:
                self.values[c].append(v)
        self.value_sets = {c: frozenset(values) for c, values in self.values.items()}
        for e in program.equations:
            ends = [v for v in (*e.operands, *e.results) if v is not None]
            for a, b in _body_value_pairs(e):
                for c in classes[a] & classes[b]:
                    self.body_pairs[c].append((a, b))
            if e.bodies or layout.flow.live_values.isdisjoint(e.results) or not any(map(layout.is_activation, ends)):
                continue
            for c in frozenset[int]().union(*(classes[v] for v in ends)):
                self.equations[c].append(e)
        for link in layout.dims.links.links:
            if link.equation is not None:
                self.linked[link.equation] |= {link.a, link.b}

    @staticmethod
    def _expert_classes(layout: Layout, experts: ShardedExperts, v: Value) -> frozenset[int]:
        big = layout.dims.nontrivial_classes(v)
        return experts.classes.intersection(big) or (
            frozenset() if experts.shared_capacity_classes.isdisjoint(big) else experts.classes
        )


def _body_value_pairs(e: Equation) -> Iterable[tuple[Value, Value]]:
    """Yield the pairs of values identified by a body of `e`: inputs, outputs, carries and zero-trip results."""
    for body in e.bodies:
        pairs = [(a, b) for a, b, _ in (*body.inputs, *body.outputs)]
        for a, b in (*pairs, *body.carries, *body.zero_trip):
            if a is not None and b is not None:
                yield a, b


class _ExpertPartition:
    """Minimum-cut problem for the experts counted by one dimension class.

    A node holds everything that must be in one region: an equation with its results, values on both sides of a body's
    boundary, or the storage class of a parameter.
    """

    def __init__(self, layout: Layout, experts: ShardedExperts, expert_class: int, index: _ExpertIndex):
        self._layout, self._program, self._experts, self._expert_class = (layout, layout.program, experts, expert_class)
        self._index = index
        self._groups = UnionFind(len(self._program.avals) + len(self._program.equations))
        self._network = FlowNetwork()

    def solve(self) -> ShardedExperts:
        """Build the network, cut it, and return the experts with the resulting region."""
        equations = self._index.equations[self._expert_class]
        for e in equations:
            for v in filter(self._is_expert_activation, e.results):
                self._groups.union(v, self._equation_number(e))
        for a, b in self._index.body_pairs[self._expert_class]:
            if self._is_expert_activation(a) and self._is_expert_activation(b):
                self._groups.union(a, b)
        self._add_terminal_costs(equations)
        self._add_weight_costs(equations)
        self._add_exchange_costs(equations)
        self._add_loop_costs()
        by_expert = self._network.min_cut()
        return replace(
            self._experts,
            weight_classes=frozenset(n[1] for n in by_expert if isinstance(n, tuple) and n[0] == "stored"),
            equations=frozenset(e.index for e in equations if self._node(e) in by_expert),
            activations=frozenset(
                v for v in self._index.values[self._expert_class] if self._is_made_by_expert(v, by_expert)
            ),
        )

    def _is_made_by_expert(self, v: Value, by_expert: set[Node]) -> bool:
        return self._is_expert_activation(v) and self._groups.find(v) in by_expert

    def _has_experts(self, v: Value | None) -> bool:
        return v in self._index.value_sets[self._expert_class]

    def _is_expert_activation(self, v: Value | None) -> bool:
        """Return whether `v` is an activation with a part for each expert, or with slots shared by all experts."""
        return self._layout.is_activation(v) and self._has_experts(v)

    def _equation_number(self, e: Equation) -> int:
        return len(self._program.avals) + e.index

    def _node(self, e: Equation) -> Node:
        return self._groups.find(self._equation_number(e))

    def _storage_class(self, v: Value) -> int | None:
        """Return the storage class that counts the experts of a parameter or its gradient; None for an activation."""
        if self._layout.is_activation(v) or self._expert_class not in self._layout.dims.nontrivial_classes(v):
            return None
        return self._layout.storage.classes_of(v)[self._layout.dims.nontrivial_classes(v).index(self._expert_class)]

    def _add_terminal_costs(self, equations: list[Equation]) -> None:
        """Add the equations of a fixed region, and the cost of each equation's sums in either region."""
        net = self._network
        for e in equations:
            stored = {self._storage_class(v) for v in (*e.operands, *e.results) if v is not None}
            if e.primitive.is_product and stored & self._experts.weight_classes:
                # An infinite cost fixes a node to a side: no minimum cut pays it.
                net.add_cost(net.SOURCE, self._node(e), math.inf)
            elif self._is_dispatch(e) or not self._can_work_by_expert(e):
                net.add_cost(self._node(e), net.SINK, math.inf)
            else:
                net.add_cost(self._node(e), net.SINK, self._reduction_bytes(e, by_expert=True))
                net.add_cost(net.SOURCE, self._node(e), self._reduction_bytes(e, by_expert=False))

    def _is_dispatch(self, e: Equation) -> bool:
        """Return whether `e` moves tokens to the slots of experts, or back."""
        ends = (v for v in (*e.operands, *e.results) if v is not None)
        return e.primitive.is_product and any(
            self._experts.capacity_classes & set(self._layout.dims.classes_of(v)) for v in ends
        )

    def _can_work_by_expert(self, e: Equation) -> bool:
        """Return whether `e` can run on each device's experts alone: no other expert is needed, or `e` sums over the
        experts."""
        if e.primitive.is_scatter:
            return False
        if e.primitive.kind in (Kind.SOURCE, Kind.RANDOM) or e.primitive.factors is broadcast:
            return True
        program, summed = self._program, set[int]()
        if e.primitive.is_combinable and e.primitive.linear_operands is not None and e.operands[0] is not None:
            summed = {program.dim_number(e.operands[0], d) for d in reduced_dims(e.params)}
        ends = [v for v in (*e.operands, *e.results) if self._has_experts(v)]
        nodes = {
            program.dim_number(v, d)
            for v in ends
            if v is not None
            for d, c in enumerate(self._layout.dims.nontrivial_classes(v))
            if c == self._expert_class
        }
        return nodes <= self._index.linked[e.index] | summed

    def _reduction_bytes(self, e: Equation, *, by_expert: bool) -> int:
        """Return the bytes that a device sends in a step to reduce the result of `e`."""
        out = e.results[0]
        if not self._layout.is_activation(out):
            return 0
        over = self._reduction_axes(e, by_expert)
        spec = self._layout.operand_spec(out, by_expert and self._has_experts(out))
        n, size = self._layout.device_count(over), self._layout.shard_bytes(out, without_axes(spec, over))
        scattered = any(a in axes for axes in spec for a in over)
        # In a ring of n devices a reduce-scatter sends (n - 1) / n of the bytes, an all-reduce twice that.
        return e.trip_count * size * (n - 1) // n * (1 if scattered else 2)

    def _reduction_axes(self, e: Equation, by_expert: bool) -> Axes:
        def lying(v: Value) -> Spec:
            return (
                self._layout.operand_spec(v, by_expert)
                if self._layout.is_activation(v)
                else self._weight_spec(v, by_expert)
            )

        (first, second), found = (*e.operands, None, None)[:2], list[str]()
        if (c := e.contraction) is not None and first is not None and second is not None:
            left, right = lying(first), lying(second)
            # Only an axis that shards both operands leaves a sum over devices.
            found = [a for i, j in c.contracted for a in left[i] if a in right[j]]
        elif e.primitive.is_combinable and first is not None:
            found = [a for d in reduced_dims(e.params) for a in lying(first)[d]]
        return tuple(dict.fromkeys(found))

    def _weight_spec(self, v: Value, by_expert: bool) -> Spec:
        axes = self._experts.axes if by_expert else ()
        return [axes if c == self._expert_class else () for c in self._layout.dims.nontrivial_classes(v)]

    def _add_weight_costs(self, equations: list[Equation]) -> None:
        """Add the cost of a parameter in another region than the equations that read it."""
        net = self._network
        for e in equations:
            for v in {*e.operands, *e.results} - {None}:
                if v is None or (sc := self._storage_class(v)) is None:
                    continue
                size = e.trip_count * self._layout.shard_bytes(v, [])
                # A cost in both directions: either region may be that of the parameter.
                net.add_cost(self._node(e), ("stored", sc), size)
                net.add_cost(("stored", sc), self._node(e), size)
                if sc in self._experts.weight_classes:
                    net.add_cost(net.SOURCE, ("stored", sc), math.inf)

    def _add_exchange_costs(self, equations: list[Equation]) -> None:
        """Add the bytes of activations made in one region and read in the other, once for any number of readers."""
        net, readers = self._network, defaultdict[Value, list[Equation]](list)
        for e in equations:
            for v in {v for v in e.operands if v is not None and self._layout.is_activation(v)}:
                readers[v].append(e)
        for loop in self._experts.loops.values():
            readers |= {v: readers[v] for v in loop.stacked_values if self._is_expert_activation(v)}
        for v, read_by in readers.items():
            trips = max((e.trip_count for e in read_by), default=1)
            tokens, experts = self._layout.operand_spec(v, False), self._layout.operand_spec(v, True)
            # A value without experts is made in the token region.
            made = self._groups.find(v) if self._has_experts(v) else net.SINK
            # The auxiliary nodes ("to", v) and ("from", v) make an exchange count once: all readers are tied to them at
            # an infinite cost, and only they to the producer.
            net.add_cost(("to", v), made, trips * reshard_bytes(self._layout, v, tokens, experts))
            net.add_cost(
                made, ("from", v), trips * reshard_bytes(self._layout, v, experts, tokens) * self._has_experts(v)
            )
            for e in read_by:
                net.add_cost(self._node(e), ("to", v), math.inf)
                net.add_cost(("from", v), self._node(e), math.inf)

    def _add_loop_costs(self) -> None:
        """Fix the values stacked or scanned by loops over experts to the expert-sharded region."""
        net = self._network
        for loop in self._experts.loops.values():
            for v in filter(self._is_expert_activation, loop.stacked_values):
                if v in loop.equation.results:
                    net.add_cost(net.SOURCE, self._groups.find(v), math.inf)
                else:
                    net.add_cost(net.SOURCE, ("to", v), math.inf)
