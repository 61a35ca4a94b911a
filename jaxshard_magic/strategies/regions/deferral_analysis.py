"""Analysis of sums over the examples whose all-reduce can wait until a loop has accumulated them.

A sum over a sharded batch is the sum of the shards' own sums, and linear equations can work on partial sums. A gradient
accumulated by a loop, over microbatches or over time, is then reduced once after the loop and not at every trip. A
value waits if all readers allow it, up to a loop's carry. A step without accumulating loops reduces as before, and
never holds a whole gradient in place of a stored shard.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import jax.numpy as jnp

from ...program.flow import transitive_closure
from ...program.ir import Body, Equation, Program, Value
from ...program.primitives import called_body, scan_counts
from ..layout import Axes, Layout

BatchDims = tuple[int | None, ...]


@dataclass(frozen=True)
class DeferredSums:
    """Sums whose reduction waits.

    Attributes:
        values: Values represented by one partial sum for each shard of the batch.
        makers: Equations that sum over the batch and make such values, by index, with the batch dimension of each
            operand.
    """

    values: frozenset[Value] = frozenset()
    makers: Mapping[int, BatchDims] = field(default_factory=dict)


def find_deferred_sums(
    layout: Layout, accepts_partial: Collection[Value] = (), not_deferrable: Collection[Value] = ()
) -> DeferredSums:
    """Return the sums that can wait for the end of a loop, or for the caller.

    Args:
        layout: The layout.
        accepts_partial: Outputs that the caller takes as partial sums.
        not_deferrable: Values that must be reduced where they are made.
    """
    if layout.device_count(layout.batch_axes) < 2:
        return DeferredSums()
    program = layout.program
    makers = {e.index: dims for e in program.equations if (dims := summed_batch_dims(layout, e)) is not None}
    roots = {program.equations[i].results[0] for i in makers}
    after = _linear_successors(layout, makers)
    # Start from everything reachable through linear equations, then shrink to a fixed point: a refused value makes its
    # neighbours refused, and values made only of refused ones are no longer reachable.
    partial_values, previous = transitive_closure(roots, lambda v: after.get(v, ())), None
    while partial_values != previous:
        previous = partial_values
        partial_values = _consistent_values(program, makers, partial_values - {*not_deferrable}, {*accepts_partial})
        partial_values = transitive_closure(roots & partial_values, lambda v: after.get(v, ()), partial_values)
    return DeferredSums(
        frozenset(partial_values),
        {i: d for i, d in makers.items() if program.equations[i].results[0] in partial_values},
    )


def summand_positions(e: Equation) -> range:
    """Return the positions of operands that may be partial sums; empty for an equation that is not linear."""
    if e.primitive.bilinear:
        return range(2)
    return range(len(e.operands))[e.primitive.linear_operands or slice(0)]


def needs_all_summands(e: Equation) -> bool:
    """Return whether a linear equation needs all its summands as partial sums, as addition does, or only one."""
    return not e.primitive.bilinear


def summed_batch_dims(layout: Layout, e: Equation) -> BatchDims | None:
    """Return the batch dimension of each operand of an equation that sums over the batch; None for other equations.

    Args:
        layout: The layout.
        e: The equation.
    """
    batchy = [layout.is_activation(v) for v in e.operands]
    if e.bodies or not any(batchy) or any(layout.is_activation(v) for v in e.results):
        return None
    if not (axes := _reduction_axes(layout, e)):
        return None
    dims = tuple(_batch_dim(layout, e, v, axes) if b else None for v, b in zip(e.operands, batchy, strict=True))
    if any(b and d is None for b, d in zip(batchy, dims, strict=True)):
        return None
    if (c := e.contraction) is not None:
        # Convolutions with the batch in groups are left to XLA.
        is_ungrouped = e.params.get("batch_group_count", 1) == 1
        is_sum = is_ungrouped and all(batchy[:2]) and dims[:2] in c.contracted and dims[0] != c.ragged_dim
    elif e.primitive.is_combinable:
        is_sum = e.primitive.linear_operands is not None and dims[0] in e.params["axes"]
    else:
        is_sum = e.primitive.is_scatter and e.primitive.is_additive and batchy == [False, True, True]
    return dims if is_sum else None


def _is_by_expert(layout: Layout, e: Equation) -> bool:
    return layout.experts is not None and e.index in layout.experts.equations


def _reduction_axes(layout: Layout, e: Equation) -> Axes:
    """Return the batch axes over which devices sum the result of `e`.

    Empty if `e` works by expert and the result does not, or the reverse: along some of the axes devices have other
    experts, not other examples.
    """
    axes = layout.gradient_sum_axes(e.results[0])
    return axes if _is_by_expert(layout, e) == (axes != layout.batch_axes) else ()


def _batch_dim(layout: Layout, e: Equation, value: Value | None, axes: Axes) -> int | None:
    """Return the one dimension of `value` that is the batch and divides over `axes`, or None.

    Where `e` works by expert, it is the dimension of slots instead.
    """
    if value is None:
        return None
    shared = (
        layout.experts.shared_capacity_classes
        if layout.experts is not None and _is_by_expert(layout, e)
        else frozenset()
    )
    examples = shared or layout.batch.classes - layout.position_classes
    batch_dims = [d for d, c in enumerate(layout.dims.classes_of(value)) if c in examples]
    size, n = layout.program.shapes[value], layout.device_count(axes)
    return batch_dims[0] if len(batch_dims) == 1 and size[batch_dims[0]] % n == 0 else None


def _is_linear(layout: Layout, e: Equation) -> bool:
    """Return whether `e` is linear, without activations among operands and results, and in dtypes that add."""
    if not summand_positions(e) or any(layout.is_activation(v) for v in (*e.operands, *e.results)):
        return False
    avals = layout.program.avals
    out = avals[e.results[0]].dtype
    operands = [avals[v].dtype for k, v in enumerate(e.operands) if v is not None and k in summand_positions(e)]
    # Integers may be cast to floats. Booleans may not, since they do not add.
    if jnp.issubdtype(out, jnp.inexact):
        return all(jnp.issubdtype(d, jnp.number) for d in operands)
    # Integer division rounds, so that it is not linear.
    return e.name != "div" and all(jnp.issubdtype(d, jnp.integer) for d in (out, *operands))


def _linear_successors(layout: Layout, makers: Mapping[int, BatchDims]) -> dict[Value, list[Value]]:
    """Return the values linear in each value: the paths of partial sums."""
    successors: dict[Value, list[Value]] = defaultdict(list)
    for e in layout.program.equations:
        if e.is_scan or called_body(e.jaxpr_eqn) is not None:
            for body in e.bodies:
                edges = [(a, b) for a, b, _ in body.outputs] + body.carries
                # An initial carry is no path into a loop: only sums made inside are worth deferring.
                edges += [] if e.is_scan else [(a, b) for a, b, _ in body.inputs]
                for a, b in edges:
                    if a is not None and b is not None:
                        successors[a].append(b)
        elif e.index not in makers and _is_linear(layout, e):
            for k in summand_positions(e):
                if (v := e.operands[k]) is not None and _has_same_parts(layout, e, v):
                    successors[v].extend(e.results)
    return successors


def _has_same_parts(layout: Layout, e: Equation, v: Value) -> bool:
    """Return whether partial sums of `v` are partial sums, over the same axes, of the results of `e`."""
    return all(layout.gradient_sum_axes(v) == layout.gradient_sum_axes(out) for out in e.results)


def _consistent_values(
    program: Program, makers: Mapping[int, BatchDims], partial_values: set[Value], accepts_partial: set[Value]
) -> set[Value]:
    """Return the largest subset of `partial_values` that the makers and readers of each value allow."""
    partial_values = partial_values - (({*program.outputs} | _unread_values(program)) - accepts_partial)
    touching: dict[Value, list[Equation]] = defaultdict(list)
    todo = []
    for e in program.equations:
        touched = partial_values.intersection(_boundary_values(e))
        for v in touched:
            touching[v].append(e)
        if touched:
            todo.append(e)
    while todo:
        e = todo.pop()
        for v in partial_values.intersection(_refused_values(e, makers, partial_values)):
            # Equations that touch a removed value may now refuse others.
            partial_values.discard(v)
            todo.extend(touching[v])
    return partial_values


def _unread_values(program: Program) -> set[Value]:
    """Return the values that nothing reads, except carries."""
    read = {v for e in program.equations for v in e.operands}
    carried = set()
    for e in program.equations:
        for body in e.bodies:
            read.update(body.sub_jaxpr.outputs)
            # A carry may be partial although its trip does not read it.
            carried.update(b for _, b in body.carries)
    return set(range(len(program.avals))) - read - carried


def _boundary_values(e: Equation) -> list[Value | None]:
    """Return all values at an equation and at the boundaries of its bodies."""
    inside = (v for body in e.bodies for v in (*body.sub_jaxpr.inputs, *body.sub_jaxpr.outputs))
    return [*e.operands, *e.results, *inside]


def _refused_values(e: Equation, makers: Mapping[int, BatchDims], partial_values: set[Value]) -> Iterable[Value | None]:
    """Return the values that cannot be partial sums because of `e`."""
    if e.bodies:
        if e.is_scan:
            return _refused_by_scan_body(e, e.bodies[0], partial_values)
        if called_body(e.jaxpr_eqn) is None:
            return _boundary_values(e)
        pairs = [(a, b) for a, b, _ in (*e.bodies[0].inputs, *e.bodies[0].outputs)]
        return [v for pair in pairs if not partial_values.issuperset(pair) for v in pair]
    if e.index in makers:
        return e.operands[1:] if e.primitive.is_scatter else e.operands
    parts = [k for k, v in enumerate(e.operands) if v in partial_values]
    fits = parts and partial_values.issuperset(e.results) and set(parts) <= set(summand_positions(e))
    return () if fits and (needs_all_summands(e) or len(parts) == 1) else (*e.operands, *e.results)


def _refused_by_scan_body(e: Equation, body: Body, partial_values: set[Value]) -> list[Value | None]:
    """Return the values that cannot be partial sums because of a scan.

    Constants and scanned inputs are whole. After the loop a carry may go on as partial sums or be reduced. Stacked
    results are partial if the values that they are stacked from are.
    """
    n, k = scan_counts(e.params)
    refused: list[Value | None] = []
    for i, (a, b, _) in enumerate(body.inputs):
        if not n <= i < n + k:
            refused += [a, b]
    for i, (inside, outside, _) in enumerate(body.outputs):
        if i >= k:
            refused += [] if partial_values.issuperset((inside, outside)) else [inside, outside]
        # A carry has one form at both ends of a trip: the initial carry and the body's inputs and outputs are partial
        # together, or not at all.
        elif not partial_values.issuperset((inside, body.sub_jaxpr.inputs[n + i])):
            refused += [e.operands[n + i], body.sub_jaxpr.inputs[n + i], inside, outside]
    return refused
