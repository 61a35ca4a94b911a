"""Permutation of one value's positions between sequential order and the zigzag order of a causal ring."""

from collections.abc import Iterator
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..plan import PlannedCollective
from ..program.ir import Value
from ..program.op_labels import ZIGZAG
from ..program.permutation_equivariance import SubDimension
from .layout import Axes, Layout, partition_spec, without_axes
from .reshard_steps import is_read_in_bfloat16
from .ring_attention import RingSpec, from_zigzag, to_zigzag, zigzag_order


def permute_positions(
    layout: Layout, v: Value, x: Any, position: SubDimension, *, by_permute: bool, to_sequential: bool
) -> Any:
    """Return the array `x`, which represents the value `v`, with its positions in the other order.

    Args:
        layout: The layout, with positions sharded.
        v: The value.
        x: The array.
        position: The position dimension of `v`.
        by_permute: Send each of two chunks from device to device (see `has_two_chunks`). Otherwise gather all
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


def permutation_collectives(
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


def has_two_chunks(layout: Layout, v: Value, position: SubDimension) -> bool:
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
