"""Attentions of a step that run as rings: their specs, zig-zag order and bytes."""

from collections.abc import Collection, Iterable
from dataclasses import replace

import jax.numpy as jnp

from ..program.ir import Equation, Value
from ..program.permutation_equivariance import first_mask_slot
from ..program.primitives import shape_of
from ..program.union_find import UnionFind
from .layout import Layout, Spec
from .reshard_steps import is_default_precision, is_read_in_bfloat16
from .ring_attention import RingSpec, make_ring


def find_rings(layout: Layout) -> list[Equation]:
    """Return the attentions with queries and keys sharded over exactly the sequence axes."""
    return [e for e in layout.program.equations if _is_ring(layout, e)]


def ring_spec(layout: Layout, e: Equation) -> RingSpec:
    """Return the ring of an attention."""
    axes, query = layout.position_axes, e.operands[0]
    assert query is not None
    masks = [shape_of(var) for var in e.jaxpr_eqn.invars[first_mask_slot(e) :]]
    return make_ring(e.params["form"], axes, layout.device_count(axes), layout.program.shapes[query][-2], masks)


def as_zigzag(candidate: RingSpec) -> RingSpec | None:
    """Return a ring with operands and results in zig-zag order outside the ring as well.

    None where the ring needs positions in sequence, as it stops before the last step or its mask has queries and keys,
    and where the positions do not divide into two chunks for each device.
    """
    is_full_ring = candidate.steps == candidate.devices > 1 and not any(candidate.mask_is_grid)
    even = candidate.positions % (2 * candidate.devices) == 0
    return replace(candidate, zigzag=True, already_zigzag=True) if is_full_ring and even else None


def ring_specs(layout: Layout, e: Equation) -> list[Spec]:
    """Return the specs of a ring's operands, then of its results.

    Positions are sharded, except in masks without a dimension of queries; examples and heads are sharded as elsewhere.

    Args:
        layout: The layout.
        e: The attention, or gradient of one.
    """
    form, axes, at = e.params["form"], layout.position_axes, first_mask_slot(e)
    lead, has_gradient = _leading_spec(layout, e), is_gradient(e)
    rows: Spec = [*lead, axes]
    columns: Spec = [*lead[: form.batch], axes]
    operands = [[*rows, ()], [*columns, ()], [*columns, ()]]
    if has_gradient:
        operands += [[*rows, ()], rows, rows, rows]
    for grid, v, var in zip(ring_spec(layout, e).mask_is_grid, e.operands[at:], e.jaxpr_eqn.invars[at:], strict=True):
        sized = zip((*lead, (), ()), shape_of(var), strict=True)
        mask_spec: Spec = [has if size > 1 and v is not None else () for has, size in sized]
        if grid:
            mask_spec[-2] = axes
        operands.append(mask_spec)
    results = operands[:3] if has_gradient else [[*rows, ()], rows, rows]
    return [*operands, *results]


def ring_bytes(layout: Layout, e: Equation) -> list[int]:
    """Return the bytes that a device sends of each operand and result of a ring; 0 for a literal."""
    values = (*e.operands, *e.results)
    multiplied = range(4 if is_gradient(e) else 3)  # queries, keys, values, and the result's gradient
    default, sizes = is_default_precision(*e.params["form"].precision), list[int]()
    for k, (v, spec) in enumerate(zip(values, ring_specs(layout, e), strict=True)):
        if v is None:
            sizes.append(0)
            continue
        # By default a TPU multiplies float32 in bfloat16, and sends the operands of such products in bfloat16.
        wide = layout.platform == "tpu" and layout.program.avals[v].dtype == jnp.float32
        narrow = (
            default
            if k in multiplied
            else k >= len(e.operands) and is_read_in_bfloat16(layout, v, layout.activation_spec(v))
        )
        sizes.append(layout.transfer_bytes(v, spec) // (2 if wide and narrow else 1))
    return sizes


def zigzag_bytes(layout: Layout, e: Equation, shared: Collection[tuple[int, int]]) -> list[int]:
    """Return the bytes of each operand and result that a ring permutes to zig-zag order and back by itself.

    Args:
        layout: The layout.
        e: The attention, or gradient of one.
        shared: Operands that another ring has already permuted, by equation and position.
    """
    if not ring_spec(layout, e).zigzag:
        return []
    sizes = ring_bytes(layout, e)
    own = [size for k, size in enumerate(sizes[: first_mask_slot(e)]) if (e.index, k) not in shared]
    return [*own, *sizes[len(e.operands) :]]


def shared_operands(layout: Layout, members: Iterable[Equation]) -> frozenset[tuple[int, int]]:
    """Return operands, by equation and position, already read by an earlier ring in the same compiled body."""
    maker, seen, shared = layout.program.producer, set[tuple[int, bool, Value]](), set[tuple[int, int]]()
    joined = _merged_values(layout)
    for e in members:
        for k, v in enumerate(e.operands):
            if v is None:
                continue
            mask = k >= first_mask_slot(e)
            # XLA merges equal collectives of one body. A mask is gathered before it is broadcast, so look through
            # aliases.
            while mask and (made := maker.get(v)) is not None and made.primitive.alias and made.operands[0] is not None:
                v = made.operands[0]
            key = id(_compiled_body(layout, e)), mask, joined.find(v)
            if key in seen:
                shared.add((e.index, k))
            seen.add(key)
    return frozenset(shared)


def _compiled_body(layout: Layout, e: Equation) -> Equation | None:
    """Return the equation whose body `e` is compiled into."""
    outer = e.parent
    while outer is not None and _is_inlined_loop(layout, outer):
        outer = outer.parent
    return outer


def _merged_values(layout: Layout) -> UnionFind:
    """Return the values merged across the ends of inlined loops."""
    joined = UnionFind(len(layout.program.avals))
    for e in layout.program.equations:
        for body in e.bodies if _is_inlined_loop(layout, e) else ():
            for a, b, _ in (*body.inputs, *body.outputs):
                if a is not None and b is not None:
                    joined.union(a, b)
    return joined


def _is_inlined_loop(layout: Layout, e: Equation) -> bool:
    """Return whether a loop has one trip and is inlined by the compiler."""
    # On CPU devices the sums of `delay_until`, which order a ring's collectives, keep such a loop from being inlined.
    return not layout.is_cpu and e.is_scan and e.params["length"] == 1


def is_gradient(e: Equation) -> bool:
    return e.name == "attention_gradient"


def _is_ring(layout: Layout, e: Equation) -> bool:
    """Return whether `e` is an attention with queries and keys sharded over exactly the sequence axes."""
    if e.name not in ("attention", "attention_gradient") or not layout.position_classes:
        return False
    query, key = e.operands[:2]
    assert query is not None and key is not None
    if not (layout.is_activation(query) and layout.is_activation(key)):
        return False
    axes = layout.position_axes
    same = layout.program.shapes[query][-2] == layout.program.shapes[key][-2]
    return same and layout.activation_spec(query)[-2] == axes == layout.activation_spec(key)[-2]


def _leading_spec(layout: Layout, e: Equation) -> Spec:
    """Return the spec of the dimensions of examples, heads and groups, without the sequence axes."""
    form, query = e.params["form"], e.operands[0]
    assert query is not None
    spec = layout.activation_spec(query)[: form.batch + form.groups]
    return [tuple(a for a in axes if a not in layout.position_axes) for axes in spec]
