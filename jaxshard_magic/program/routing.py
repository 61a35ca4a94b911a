"""Layers that route tokens to experts, and how many rows of tokens each expert gets.

A layer chooses experts by a `top_k` or an `argmax` along them. Several choices from the same router products (the best,
then the best of the rest) belong to a single layer. With a capacity per expert, a product with a mask of shape (tokens,
experts, capacity) dispatches the tokens, and a row left out by the mask is dropped.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from math import prod
from operator import add
from typing import Any

import jax.numpy as jnp

from .dimensions import Dimensions, StorageClasses
from .experts import stack_dims
from .flops import Product, find_products
from .flow import Flow, follow_aliases, stop_at_products
from .ir import Equation, Value
from .phases import FORWARD
from .primitives import scan_counts
from .source_lines import user_location
from .topk_sites import TopKSite, find_topk_sites


@dataclass(frozen=True)
class ExpertChoice:
    """Result of an equation that holds numbers of experts.

    Attributes:
        equation: Index of the equation.
        out: Number of the result.
        group_dims: Dimensions that count groups of tokens, each with a capacity of its own.
        example_dims: Dimensions that count examples, or tokens of all examples.
    """

    equation: int
    out: int
    group_dims: tuple[int, ...]
    example_dims: tuple[int, ...]


@dataclass(frozen=True)
class DispatchMask:
    """Operand of a product that assigns tokens to capacity slots of experts.

    Attributes:
        equation: Index of the product.
        operand: Number of the operand.
        expert_dim: Dimension that counts experts.
        capacity: Number of slots per expert and group.
        group_count: Number of groups.
        example_dims: Dimensions that count examples, or tokens of all examples.
    """

    equation: int
    operand: int
    expert_dim: int
    capacity: int
    group_count: int
    example_dims: tuple[int, ...]


@dataclass(frozen=True)
class RoutedLayer:
    """Layer that routes tokens to experts.

    Attributes:
        expert_count: Number of experts.
        experts_per_token: Number of experts chosen for a token.
        tokens: Tokens that choose in a single run of the layer.
        choices: Choices of the layer.
        mask: Mask that dispatches tokens; None without capacities.
        loops: Scans around the layer, outermost first: whether each trip is a layer of its own, and the number of
            trips.
        file: File of the first choice, as Python knows it.
        line: Line of the first choice.
    """

    expert_count: int
    experts_per_token: int
    tokens: int
    choices: tuple[ExpertChoice, ...]
    mask: DispatchMask | None
    loops: tuple[tuple[bool, int], ...] = ()
    file: str | None = None
    line: int | None = None

    @property
    def layer_count(self) -> int:
        """Number of layers; more than 1 in a scan over layers."""
        return prod(trips for each, trips in self.loops if each)

    @property
    def runs_per_step(self) -> int:
        """Number of runs of each layer per step: 1 per microbatch."""
        return prod(trips for each, trips in self.loops if not each)

    def real_counts(self, share: Fraction) -> tuple[int, int]:
        """Return the tokens and groups of a step that belong to examples, not to padding.

        Args:
            share: Share of the rows that are examples.
        """
        example_dims = [set(c.example_dims) for c in self.choices]
        tokens = self.tokens * self.runs_per_step * (share if any(example_dims) else 1)
        if self.mask is None:
            return int(tokens), 1
        grouped = any(rows.intersection(c.group_dims) for rows, c in zip(example_dims, self.choices, strict=True))
        return int(tokens), int(self.mask.group_count * self.runs_per_step * (share if grouped else 1))


def find_routed_layers(
    dims: Dimensions,
    storage: StorageClasses,
    flow: Flow,
    phases: Mapping[int, str],
    params: Collection[int],
    expert_counts: Collection[int],
    expert_classes: Collection[int],
    capacity_classes: Collection[int],
    example_classes: Collection[int],
    derived: Collection[Value] = (),
) -> tuple[RoutedLayer, ...]:
    """Return the layers of a step that choose experts, in order.

    Layers in branches, or in loops of unknown length, are left out.

    Args:
        dims: Dimension classes of the step.
        storage: Batch dimensions of the step.
        flow: Data flow of the step.
        phases: Phase of each equation.
        params: Inputs that are parameters.
        expert_counts: Possible numbers of experts.
        expert_classes: Dimension classes that count experts.
        capacity_classes: Dimension classes that count the capacity slots of an expert.
        example_classes: Dimension classes that count examples.
        derived: Further values computed from choices, such as group sizes of sorted rows.
    """
    program, param_inputs = dims.program, set(params)
    sources = flow.ancestors(derived, stop_at_products).keys()
    all_products = find_products(dims, storage)
    weighted = {p.equation.index for p in all_products if p.weight_operands}
    layers = defaultdict[Any, list[TopKSite]](list)
    reaches_experts = _ReachesExperts(dims, flow, phases, all_products, set(expert_classes), set(example_classes))
    for r in find_topk_sites(program):
        e = r.equation
        if r.indices_result is None or r.size not in expert_counts or phases.get(e.index) != FORWARD:
            continue
        ranks_experts = dims.classes_of(r.operand)[r.dim] in expert_classes and reaches_experts(r)
        if (ranks_experts or not sources.isdisjoint(e.results)) and _enclosing_loops(flow, param_inputs, e) is not None:
            # Choices from the same router products (the best, then the best of the rest) are one layer.
            layers[r.size, _router_products(flow, weighted, r.operand) or e.index].append(r)
    masks = [
        m
        for p in all_products
        if not p.weight_operands
        and (m := _find_mask(dims, p, phases, expert_classes, capacity_classes, example_classes))
    ]
    return tuple(_make_layer(dims, flow, param_inputs, example_classes, layer, masks) for layer in layers.values())


class _ReachesExperts:
    """Predicate on rankings: whether the chosen indices, by token, meet results of experts.

    False for a choice used only by a load-balancing loss, or by a metric.
    """

    def __init__(
        self,
        dims: Dimensions,
        flow: Flow,
        phases: Mapping[int, str],
        found: Iterable[Product],
        classes: Set[int],
        rows: Set[int],
    ):
        self._dims, self._flow, self._phases, self._example_classes = dims, flow, phases, rows
        self._weighted = {p.equation.index for p in found if p.weight_operands}
        experts = [p for p in found if any(_has_expert_matrices(p, k, classes) for k in p.weight_operands)]
        # Up to the next weight only: later layers depend on all choices of earlier ones.
        results = (v for p in experts for v in p.equation.results)
        self._expert_results = flow.descendants(results, lambda _v, _w, e: self._is_before_next_weight(e))

    def __call__(self, r: TopKSite) -> bool:
        # A value without a dimension of examples is a sum over tokens, as in a load-balancing loss.
        by_token = self._flow.descendants(
            r.equation.results, lambda v, _w, e: self._is_before_next_weight(e) and self._has_examples(v)
        )
        readers = (
            e for v in by_token for _, e in self._flow.successors[v] if e is not None and self._is_before_next_weight(e)
        )
        return any(not self._expert_results.isdisjoint(v for v in e.operands if v is not None) for e in readers)

    def _is_before_next_weight(self, e: Equation | None) -> bool:
        """Return whether an equation is in the forward pass, before the next weight."""
        return e is None or (self._phases.get(e.index) == FORWARD and e.index not in self._weighted)

    def _has_examples(self, v: Value) -> bool:
        """Return whether a value has a dimension of examples; True where no such dimension is known."""
        return not self._example_classes or not self._example_classes.isdisjoint(self._dims.classes_of(v))


def _has_expert_matrices(p: Product, k: int, classes: Set[int]) -> bool:
    """Return whether operand `k` of a product has a matrix for each expert."""
    return any(p.dim_classes[k][d] in classes for d in stack_dims(p, k))


def _router_products(flow: Flow, weighted: Collection[int], logits: Value) -> frozenset[int]:
    """Return the nearest products with a weight from which logits are computed, by index."""

    def before_weights(v: Value, _w: Value, e: Equation | None) -> bool:
        return e is None or e.index not in weighted

    makers = flow.program.producer
    sources = flow.ancestors([logits], before_weights)
    return frozenset(makers[v].index for v in sources if v in makers and makers[v].index in weighted)


def _make_layer(
    dims: Dimensions,
    flow: Flow,
    params: set[int],
    rows: Collection[int],
    layer: Sequence[TopKSite],
    masks: Sequence[DispatchMask],
) -> RoutedLayer:
    """Return a layer from all of its rankings."""
    program, first = dims.program, layer[0].equation
    from_choices = flow.descendants(
        (r.equation.results[r.indices_result] for r in layer if r.indices_result is not None), stop_at_products
    )
    mask = next((m for m in masks if program.equations[m.equation].operands[m.operand] in from_choices), None)
    groups = frozenset[int]() if mask is None else _group_classes(dims, program.equations[mask.equation], mask)
    choices, best, tokens = [], 0, 0
    for r in layer:
        assert r.indices_result is not None and r.k is not None
        v = r.equation.results[r.indices_result]
        classes = dims.classes_of(v)
        grouped, examples = (tuple(d for d, c in enumerate(classes) if c in some) for some in (groups, rows))
        choices.append(ExpertChoice(r.equation.index, r.indices_result, grouped, examples))
        # The result has k entries for each token.
        best, tokens = best + r.k, prod(program.shapes[v]) // r.k
    loops = _enclosing_loops(flow, params, first) or ()
    return RoutedLayer(
        layer[0].size, best, tokens, tuple(choices), mask, loops, *(user_location(first.jaxpr_eqn) or (None, None))
    )


def _group_classes(dims: Dimensions, e: Equation, mask: DispatchMask) -> frozenset[int]:
    """Return the classes of a mask's dimensions that count groups: all except tokens, experts and capacity slots."""
    v, c = e.operands[mask.operand], e.contraction
    assert v is not None and c is not None
    contracted = {pair[mask.operand] for pair in c.contracted}
    tokens = {dims.classes_of(v)[d] for d in contracted}
    batch = {triple[mask.operand] for triple in c.batch}
    return frozenset(dims.classes_of(v)[d] for d in batch) - tokens


def _find_mask(
    dims: Dimensions,
    p: Product,
    phases: Mapping[int, str],
    classes: Collection[int],
    places: Collection[int],
    rows: Collection[int],
) -> DispatchMask | None:
    """Return the mask of a product that dispatches tokens to capacity slots; None for other products."""
    e, c = p.equation, p.equation.contraction
    if c is None or c.ragged_dim is not None or phases.get(e.index) != FORWARD:
        return None
    for k, tensor in enumerate((p.left, p.right)):
        expert = [d for d, x in enumerate(tensor) if x in classes]
        capacity = [d for d, x in enumerate(tensor) if x in places]
        contracted = {pair[k] for pair in c.contracted}
        other = set((p.right, p.left)[k])
        # Dispatch sums over tokens and keeps experts and slots; the product that combines results sums over these.
        if len(expert) != 1 or not capacity or contracted & {*expert, *capacity} or other & {*classes, *places}:
            continue
        v = e.operands[k]
        if v is None:
            continue
        shape = dims.program.shapes[v]
        group_dims = [d for d in range(len(shape)) if d not in contracted and d not in (*expert, *capacity)]
        examples = tuple(d for d, x in enumerate(tensor) if x in rows)
        return DispatchMask(
            e.index, k, expert[0], prod(shape[d] for d in capacity), prod(shape[d] for d in group_dims), examples
        )
    return None


def _enclosing_loops(flow: Flow, params: set[int], e: Equation) -> tuple[tuple[bool, int], ...] | None:
    """Return `RoutedLayer.loops` for an equation; None in a branch, or in a loop of unknown length.

    A scan that steps over parameters goes through layers.
    """
    loops, parent = list[tuple[bool, int]](), e.parent
    while parent is not None:
        if parent.is_cond or parent.is_while:
            return None
        if parent.is_scan:
            sequences = parent.operands[sum(scan_counts(parent.params)) :]
            loops.append(
                (not params.isdisjoint(flow.input_ancestors(sequences, follow_aliases)), parent.params["length"])
            )
        parent = parent.parent
    return tuple(reversed(loops))


def tokens_per_expert(route: RoutedLayer, choice: ExpertChoice, numbers: Any, real: Any) -> Any:
    """Return how many tokens of each group chose each expert, shape (groups, experts), int32.

    Args:
        route: Layer.
        choice: Choice of the layer.
        numbers: Expert numbers: the value of the choice in a run of the layer.
        real: Bool per row, True for examples; None if all rows are.
    """
    rest = tuple(d for d in range(numbers.ndim) if d not in choice.group_dims)
    each = numbers[..., None] == jnp.arange(route.expert_count, dtype=numbers.dtype)
    return _without_padding(each, choice.example_dims, real).sum(rest, dtype=jnp.int32).reshape(-1, route.expert_count)


def filled_slots(mask: DispatchMask, places: Any, real: Any) -> Any:
    """Return how many capacity slots of each expert hold a token, shape (experts,), int32.

    Args:
        mask: Dispatch mask.
        places: Value of the mask in a run of the layer.
        real: Bool per row, True for examples; None if all rows are.
    """
    rest = tuple(d for d in range(places.ndim) if d != mask.expert_dim)
    return _without_padding(places != 0, mask.example_dims, real).sum(rest, dtype=jnp.int32)


def _without_padding(x: Any, rows: Iterable[int], real: Any) -> Any:
    """Return `x`, bool, with False in rows that belong to no example."""
    if real is None:
        return x
    for d in rows:
        # A dimension of tokens has several positions for each entry of `real`.
        of = jnp.arange(x.shape[d]) * len(real) // x.shape[d]
        x &= jnp.expand_dims(real[of], [i for i in range(x.ndim) if i != d])
    return x


def load_by_layer(route: RoutedLayer, counts: Iterable[Any], masked: Any) -> tuple[Any, Any, Any]:
    """Return load by layer and expert, each of shape (layers, experts).

    Args:
        route: Layer.
        counts: Results of `tokens_per_expert` for each choice, stacked by the layer's loops.
        masked: Result of `filled_slots`, stacked by the same loops; None without a mask.

    Returns:
        Tokens that chose each expert, the largest number of them in a single group, and filled slots (None without
        `masked`).
    """
    total = reduce(add, counts)
    trips = tuple(n for _, n in route.loops)
    # Trips that are no layers of their own are microbatches: runs of the same layer.
    over = tuple(i for i, (each, _) in enumerate(route.loops) if not each)

    def by_layer(x: Any, how: Any) -> Any:
        return how(x.reshape(*trips, route.expert_count), over).reshape(-1, route.expert_count)

    most = by_layer(total.max(-2), jnp.max)
    places = None if masked is None else by_layer(masked, jnp.sum)
    return by_layer(total.sum(-2), jnp.sum), most, places
