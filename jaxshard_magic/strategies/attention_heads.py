"""Attention with whole positions and sharded heads, and the points where the spec changes from sharded positions and
back.

Around each attention, queries, keys and values go from sharded positions to sharded heads by an all-to-all each, and
the result goes back by another (Jacobs et al. 2023, "DeepSpeed Ulysses"); gradients take the other way. In between a
device has all positions of its heads, so any mask and any form of attention works. The equations of an attention are
recognised from the step: equations on values with two position dimensions (scores), and equations only they read or
that only read them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from ..program.ir import Equation, Value
from ..program.primitives.primitive import Kind
from ..program.union_find import UnionFind
from .layout import Axes, Layout, Spec, SpecOverrides

_PLAIN = (Kind.ELEMENTWISE, Kind.SHAPE, Kind.REDUCTION)


@dataclass(frozen=True)
class AttentionBlock:
    """An attention with its backward pass, between two changes of spec.

    Attributes:
        equations: Equations of the attention, by index.
        scores: The first product that computes scores.
        head_classes: Dimension classes of the heads, sharded while positions are whole. Empty where no size divides.
        sizes: Sizes of the dimensions that would have to divide.
        axes: Mesh axes over which they would.
    """

    equations: frozenset[int]
    scores: Equation
    head_classes: frozenset[int]
    sizes: tuple[int, ...]
    axes: Axes


@dataclass(frozen=True)
class _HeadDim:
    """Head dimension of one product.

    Attributes:
        sharded_class: Class of the sharded dimension, None where no size divides.
        sizes: Sizes of the dimensions considered.
        axes: Mesh axes considered.
    """

    sharded_class: int | None
    sizes: tuple[int, ...]
    axes: Axes


class AttentionBlocks:
    """The attentions of a step with sharded positions.

    Each consists of the equations on values with two position dimensions, and of neighbours up to the point where the
    fewest bytes cross.
    """

    def __init__(self, layout: Layout):
        self._layout, self._program = layout, layout.program
        self._used = layout.flow.live_values
        self._linked_values = UnionFind(len(layout.program.avals))
        for e in self._program.equations:
            for body in e.bodies:
                # Both sides of a body's boundary get one spec: a change of spec there would be a reshard at each trip
                # of a loop.
                pairs = [(a, b) for a, b, _ in (*body.inputs, *body.outputs)] + body.carries + body.zero_trip
                for a, b in pairs:
                    if a is not None and b is not None:
                        self._linked_values.union(a, b)
        self._inside: set[int] = set()
        # Outputs of the products with scores, and values made of them inside the attention.
        self._results: set[Value] = set()
        for e in self._program.equations:
            if not e.bodies and any(map(self._is_scores, (*e.operands, *e.results))):
                self._add(e)
        self._add_enclosed()
        for e in [e for e in self._program.equations if e.index in self._inside and e.primitive.is_product]:
            for v in e.operands:
                self._inside.update(x.index for x in self._chain_before(v))
            for v in e.results:
                self._inside.update(x.index for x in self._chain_after(v))

    @cached_property
    def blocks(self) -> tuple[AttentionBlock, ...]:
        """All attentions, in program order."""
        return tuple(self._find_blocks())

    def head_overrides(self) -> SpecOverrides:
        """Return the specs of values in the attentions, and the points of change. All attentions must have heads that
        divide."""
        return self._overrides({i: a.head_classes for a in self.blocks for i in a.equations})

    def _find_blocks(self) -> Iterator[AttentionBlock]:
        """Yield the attentions; all attentions of one layer, connected by values made in it, are a single one."""
        equation_sets, inside = UnionFind(len(self._program.equations)), self._inside_equations()
        first_equation: dict[int, int] = {}
        shared_sets = {self._linked_values.find(v) for e in inside for v in e.results if self._layout.is_activation(v)}
        shared_sets |= {
            self._linked_values.find(v) for e in inside if e.primitive.is_product for v in e.operands if v is not None
        }
        for e in inside:
            for group in {
                self._linked_values.find(v) for v in (*e.operands, *e.results) if v is not None
            } & shared_sets:
                if self._is_inside_set(group):
                    equation_sets.union(first_equation.setdefault(group, e.index), e.index)
        equations_by_block = defaultdict[int, list[Equation]](list)
        for e in inside:
            equations_by_block[equation_sets.find(e.index)].append(e)
        for equations in equations_by_block.values():
            scores = [e for e in equations if e.primitive.is_product and self._is_scores(e.results[0])]
            if not scores:
                continue
            head_dims = [self._head_dim(e) for e in scores]
            indivisible = next((each for each in head_dims if each.sharded_class is None), None)
            heads = (
                frozenset()
                if indivisible
                else frozenset(each.sharded_class for each in head_dims if each.sharded_class is not None)
            )
            described = indivisible or head_dims[0]
            yield AttentionBlock(
                frozenset(e.index for e in equations), scores[0], heads, described.sizes, described.axes
            )

    def _overrides(self, heads: Mapping[int, frozenset[int]]) -> SpecOverrides:
        """Return the spec overrides, given the head classes sharded in each equation, by index; other equations are
        outside."""
        values: dict[Value, Spec] = {**self._layout.spec_overrides.values}
        for e in self._inside_equations():
            for v in (*e.operands, *e.results):
                if v is not None and e.index in heads and self._layout.is_activation(v):
                    group = self._linked_values.find(v)
                    if self._is_inside_set(group):
                        values |= {w: self._head_spec(w, heads[e.index]) for w in self._values_by_set[group]}
        operands, results = {**self._layout.spec_overrides.operands}, {**self._layout.spec_overrides.results}
        for e in self._program.equations:
            # A change of spec that another pass has set at this equation stays.
            if e.bodies or any(v in self._layout.spec_overrides.results for v in e.results):
                continue
            classes = heads.get(e.index)
            for v in (*e.operands, *e.results):
                if v is None or not self._layout.is_activation(v):
                    continue
                spec = self._layout.activation_spec(v) if classes is None else self._head_spec(v, classes)
                if spec == values.get(v, self._layout.activation_spec(v)):
                    continue
                if v not in e.results:
                    operands[e.index, v] = spec
                # The result of a product that sums over heads is reduced straight to its own spec: before, no device
                # has it.
                elif not self._sums_heads(e, classes):
                    results[v] = spec
        return SpecOverrides(values, operands, results)

    def _inside_equations(self) -> list[Equation]:
        return [e for e in self._program.equations if e.index in self._inside]

    @cached_property
    def _values_by_set(self) -> dict[int, list[Value]]:
        """Values linked through the inputs and outputs of bodies, by set number."""
        found = defaultdict[int, list[Value]](list)
        for v in range(len(self._program.avals)):
            found[self._linked_values.find(v)].append(v)
        return found

    @cached_property
    def _readers(self) -> dict[int, list[Equation]]:
        return self._equations_by_set(lambda e: e.operands)

    @cached_property
    def _makers(self) -> dict[int, list[Equation]]:
        return self._equations_by_set(lambda e: e.results)

    def _equations_by_set(self, values_of: Callable[[Equation], Iterable[Value | None]]) -> dict[int, list[Equation]]:
        found = defaultdict[int, list[Equation]](list)
        for e in self._program.equations:
            if not e.bodies and not self._used.isdisjoint(e.results):
                for v in {v for v in values_of(e) if v is not None}:
                    found[self._linked_values.find(v)].append(e)
        return found

    @cached_property
    def _boundary_sets(self) -> set[int]:
        ends = (*self._program.inputs, *self._program.outputs)
        return {self._linked_values.find(v) for v in ends if v is not None}

    def _is_inside_set(self, group: int) -> bool:
        """Return whether a set of linked values is sharded by heads.

        Either all readers are inside, or some readers and all makers. Inputs and outputs of the step never are.
        """
        readers = [e.index in self._inside for e in self._readers[group]]
        if group in self._boundary_sets or not readers:
            return False
        return all(readers) or (any(readers) and all(e.index in self._inside for e in self._makers[group]))

    def _position_dims(self, v: Value | None) -> list[int]:
        """Return the position dimensions of a value."""
        if v is None or not self._layout.is_activation(v):
            return []
        shape, classes = self._program.shapes[v], self._layout.dims.classes_of(v)
        return [d for d, c in enumerate(classes) if shape[d] > 1 and c in self._layout.position_classes]

    def _is_scores(self, v: Value | None) -> bool:
        return len(self._position_dims(v)) > 1

    def _add(self, e: Equation) -> None:
        self._inside.add(e.index)
        if e.primitive.is_product or any(v in self._results for v in e.operands):
            self._results.update(v for v in e.results if not self._is_scores(v))

    def _add_enclosed(self) -> None:
        """Add equations with only inside operands: maximum and sum of a softmax, division by a sum of mixed values."""
        grown = True
        while grown:
            # An equation that is added may enclose further ones.
            grown = False
            made_inside = {
                self._linked_values.find(v) for e in self._inside_equations() for v in e.results
            } - self._boundary_sets
            made_inside = {g for g in made_inside if all(e.index in self._inside for e in self._makers[g])}
            results = {self._linked_values.find(v) for v in self._results}
            for e in self._program.equations:
                if e.index in self._inside or e.bodies or e.primitive.kind not in _PLAIN:
                    continue
                read_sets = {
                    self._linked_values.find(v) for v in e.operands if v is not None and self._layout.is_activation(v)
                }
                # An equation that reads only results comes after the attention: `_chain_after` decides about it.
                if read_sets and read_sets <= made_inside and not read_sets <= results:
                    self._add(e)
                    grown = True

    def _chain_before(self, v: Value | None) -> list[Equation]:
        """Return the chain of equations that makes operand `v`, back to the point where the fewest bytes cross.

        Such equations are casts, transposes, and keys and values repeated for groups of queries.
        """
        chain: list[Equation] = []
        best, fewest_bytes = 0, self._bytes(v)
        while v is not None and self._position_dims(v) and self._is_read_only_inside(v, chain):
            e = self._program.producer.get(v)
            operand = None if e is None or e.index in self._inside else self._only_activation(e)
            if e is None or operand is None or len(self._values_by_set[self._linked_values.find(v)]) > 1:
                break
            chain.append(e)
            v = operand
            if self._has_divisible_heads(v) and self._bytes(v) <= fewest_bytes and self._is_read_only_inside(v, chain):
                best, fewest_bytes = len(chain), self._bytes(v)
        return chain[:best]

    def _chain_after(self, v: Value) -> list[Equation]:
        """Return the chain of equations made from result `v`, up to the point where the fewest bytes cross."""
        chain: list[Equation] = []
        best, fewest_bytes = 0, self._bytes(v)
        while self._position_dims(v) and not self._is_scores(v):
            readers, group = (
                self._readers[self._linked_values.find(v)],
                self._values_by_set[self._linked_values.find(v)],
            )
            if len(readers) != 1 or len(group) > 1 or self._only_activation(readers[0]) != v:
                break
            chain.append(readers[0])
            v = readers[0].results[0]
            if self._has_divisible_heads(v) and self._bytes(v) <= fewest_bytes:
                best, fewest_bytes = len(chain), self._bytes(v)
        return chain[:best]

    def _is_read_only_inside(self, v: Value, chain: list[Equation]) -> bool:
        """Return whether all readers of `v` are inside or in `chain`."""
        return all(e.index in self._inside or e in chain for e in self._readers[self._linked_values.find(v)])

    def _only_activation(self, e: Equation) -> Value | None:
        """Return the only activation operand of an elementwise, shape or reduction equation; None without exactly
        one."""
        if e.bodies or e.primitive.kind not in _PLAIN or len(e.results) != 1:
            return None
        arrays = [v for v in e.operands if v is not None and self._program.shapes[v]]
        return arrays[0] if len(arrays) == 1 and self._layout.is_activation(arrays[0]) else None

    def _bytes(self, v: Value | None) -> int:
        return 0 if v is None else self._layout.shard_bytes(v, self._layout.activation_spec(v))

    def _has_divisible_heads(self, v: Value) -> bool:
        """Return whether `v` has heads of any attention that divide."""
        over = self._head_axes(v)
        by_heads = self._head_spec(v, self._all_head_classes)
        return bool(over) and any(set(over) <= set(axes) for axes in by_heads)

    @cached_property
    def _all_head_classes(self) -> frozenset[int]:
        scores = [e for e in self._inside_equations() if e.primitive.is_product and self._is_scores(e.results[0])]
        return frozenset(each.sharded_class for each in map(self._head_dim, scores) if each.sharded_class is not None)

    def _head_axes(self, v: Value) -> Axes:
        """Return the mesh axes available for heads: the position axes without the axes that tensor parallelism uses in
        `v`."""
        tensor = {a for axes in self._layout.tensor_axes(v) for a in axes}
        return tuple(a for a in self._layout.position_axes if a not in tensor)

    def _head_dim(self, e: Equation) -> _HeadDim:
        """Return the largest divisible head dimension of a product of queries and keys.

        For grouped queries: the groups, where the heads of keys do not divide.
        """
        out, c = e.results[0], e.contraction
        assert c is not None
        shape, classes, examples = (
            self._program.shapes[out],
            self._layout.dims.classes_of(out),
            self._layout.batch.classes,
        )
        position_dims, tensor, position_axes = (
            set(self._position_dims(out)),
            self._layout.tensor_axes(out),
            self._head_axes(out),
        )
        sizes, over = [], position_axes
        # Batch dimensions of the product first: the heads of keys. Then its free dimensions: groups of queries that
        # share keys.
        for side in [o for *_, o in c.batch], [o for _, o in (*c.left_free, *c.right_free)]:
            heads = [d for d in side if shape[d] > 1 and d not in position_dims and classes[d] not in examples]
            for d in sorted(heads, key=lambda d: -shape[d]):
                if shape[d] % self._layout.device_count((*tensor[d], *position_axes)) == 0:
                    return _HeadDim(classes[d], (shape[d],), (*tensor[d], *position_axes))
                sizes, over = [*sizes, shape[d]], (*tensor[d], *over)
        return _HeadDim(None, tuple(sizes), tuple(dict.fromkeys(over)))

    def _head_spec(self, v: Value, heads: frozenset[int]) -> Spec:
        """Return the spec of a value inside an attention: positions whole, heads over the axes that shard positions
        outside."""
        shape, classes = self._program.shapes[v], self._layout.dims.classes_of(v)
        spec, over = self._layout.activation_spec(v), self._head_axes(v)
        for d, c in enumerate(classes):
            if c in self._layout.position_classes:
                spec[d] = ()
            elif c in heads and over and shape[d] % self._layout.device_count((*spec[d], *over)) == 0:
                # A mesh axis may shard only one dimension of an array.
                spec[d], over = (*spec[d], *over), ()
        return spec

    def _sums_heads(self, e: Equation, heads: frozenset[int] | None) -> bool:
        """Return whether product `e` sums over heads, so no device has the result before the reduction."""
        if heads is None or e.contraction is None or e.operands[0] is None:
            return False
        classes = self._layout.dims.classes_of(e.operands[0])
        return any(classes[d] in heads for d, _ in e.contraction.contracted)
