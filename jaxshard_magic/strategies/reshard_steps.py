"""Steps, collectives and bytes that reshard an activation from one spec to another.

A mesh axis that moves to another dimension is an all-to-all; an axis that shards nothing afterwards is a gather. A TPU
sends float32 operands of products at default precision in bfloat16, the type in which the products multiply them.
"""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..plan import PlannedCollective
from ..program.ir import Equation, Value
from .layout import Axes, Layout, Spec


def reshard_steps(current: Spec, target: Spec) -> list[Spec]:
    """Return the specs that an activation passes through from `current` to `target`, both included.

    The all-to-all comes before the gather, so that each device gathers from a smaller shard.

    >>> reshard_steps([("data", "expert"), ()], [(), ("expert",)])
    [[('data', 'expert'), ()], [('data',), ('expert',)], [(), ('expert',)]]
    """
    used_axes = {a for axes in target for a in axes}
    after_all_to_all = [
        (*(a for a in was if a not in used_axes or a in then), *(a for a in then if a not in was))
        for was, then in zip(current, target, strict=True)
    ]
    return [current, *([after_all_to_all] if after_all_to_all not in (current, target) else []), target]


def reshard_collectives(
    layout: Layout, v: Value, current: Spec, target: Spec, trips: int
) -> Iterator[PlannedCollective]:
    """Yield the collectives that reshard `v`.

    Args:
        layout: The layout of the step.
        v: An activation.
        current: Current spec.
        target: Target spec.
        trips: How often the step does so.
    """
    exchanged, gathered = _exchanged_and_gathered_axes(current, target)
    # A TPU converts to bfloat16 before the transfer if all readers multiply in bfloat16: half the bytes.
    narrowing = 2 if exchanged + gathered and is_read_in_bfloat16(layout, v, target) else 1
    if exchanged:
        yield PlannedCollective(
            "all-to-all",
            exchanged,
            layout.device_count(exchanged),
            layout.transfer_bytes(v, current) // narrowing,
            trips,
        )
    if gathered:
        size = layout.transfer_bytes(v, target) // narrowing
        yield PlannedCollective("all-gather", gathered, layout.device_count(gathered), size, trips)


def reshard_bytes(layout: Layout, v: Value, current: Spec, target: Spec) -> int:
    """Return the bytes that one device sends to reshard `v`, without narrowing to bfloat16."""
    exchanged, gathered = (layout.device_count(axes) for axes in _exchanged_and_gathered_axes(current, target))
    own, then = layout.shard_bytes(v, current), layout.shard_bytes(v, target)
    # A device sends its shard without its own part in an all-to-all, and as much as it receives in a gather.
    return own * (exchanged - 1) // exchanged + then * (gathered - 1) // gathered


def _exchanged_and_gathered_axes(current: Spec, target: Spec) -> tuple[Axes, Axes]:
    """Return the mesh axes that move to another dimension, and the mesh axes that shard nothing afterwards."""
    used_axes = {a for axes in target for a in axes}
    pairs = [(a, then) for was, then in zip(current, target, strict=True) for a in was]
    exchanged = tuple(a for a, then in pairs if a in used_axes and a not in then)
    return exchanged, tuple(a for a, _ in pairs if a not in used_axes)


def is_multiplied_in_bfloat16(layout: Layout, e: Equation, v: Value) -> bool:
    """Return whether `e` is a product of matrices, or a convolution, that multiplies its float32 operand `v` in
    bfloat16.

    Products without a contraction, with a vector operand, and ragged products multiply and add in float32 (seen on
    v5e).
    """
    if layout.platform != "tpu" or layout.program.avals[v].dtype != jnp.float32 or not e.primitive.is_product:
        return False
    if (c := e.contraction) is None or c.windowed:
        return is_default_precision(e.params.get("precision"))
    matrices = c.ragged_dim is None and bool(c.contracted and c.left_free and c.right_free)
    return matrices and is_default_precision(e.params.get("precision"))


def is_read_in_bfloat16(layout: Layout, v: Value, spec: Spec | None = None) -> bool:
    """Return whether all readers of a value are products that take it in bfloat16, directly or through aliases and
    slices.

    Args:
        layout: The layout of the step.
        v: A value. Results of a body, and operands handed to another, count as read in float32.
        spec: Consider only readers of an activation under this spec; None for all readers.
    """
    if layout.platform != "tpu" or layout.program.avals[v].dtype != jnp.float32:
        return False
    readers = [
        (w, e)
        for w, e in layout.flow.successors[v]
        if w in layout.flow.live_values
        and (spec is None or (layout.activation_spec(v) if e is None else layout.compute_spec_in(e, v)) == spec)
    ]
    return bool(readers) and all(
        e is not None
        and (
            is_read_in_bfloat16(layout, w, None if spec is None else layout.activation_spec(w))
            if e.primitive.alias or e.primitive.data_movement
            else is_multiplied_in_bfloat16(layout, e, v)
        )
        for w, e in readers
    )


def is_default_precision(*precisions: Any) -> bool:
    """Return whether products leave the choice of precision to the hardware.

    Each argument is a precision for both operands, or a tuple with a precision for each.
    """
    given = (p for each in precisions for p in (each if isinstance(each, tuple) else (each,)))
    return all(p in (None, lax.Precision.DEFAULT) for p in given)
