"""Weights gathered, and gradients scattered, in several collectives in place of one.

A TPU turns a gather over a whole wrapped cube into an all-reduce of twice the bytes, and likewise a reduce-scatter over
more than a ring of chips at once; over parts of the axis neither happens. A `shard_map` is written only for axes with
more than one step; everything else is left to the compiler.
"""

from collections.abc import Iterator
from typing import Any

import jax

from ..plan import Finding, PlannedCollective
from ..program.ir import Value
from ..targets.gathers import GatherPlan, chip_under, gather, plan_gather
from .layout import Axes, Layout, partition_spec, without_axes


def needs_steps(layout: Layout, axes: Axes) -> bool:
    """Return whether XLA makes a gather over `axes` an all-reduce, and several gathers avoid that."""
    return len(plan_gather(layout.mesh, axes).steps) > 1


def gather_weight_in_steps(layout: Layout, x: Any, weight: Value) -> Any | None:
    """Gather a weight from its stored spec over the axes that its compute spec lacks, in steps; None if one step
    suffices.

    Args:
        layout: The layout.
        x: The array of the weight.
        weight: The weight.
    """
    plans = _gather_plans(layout, weight)
    if not any(len(each.steps) > 1 for each in plans.values()):
        return None
    stored = layout.stored_spec(weight)

    def on_device(part: Any) -> Any:
        for dim, each in plans.items():
            # XLA keeps the `all_gather`s of one `shard_map` separate, without barriers between them.
            part = gather(part, dim, each.steps, layout.mesh)
        return part

    return jax.shard_map(
        on_device,
        mesh=layout.mesh,
        in_specs=partition_spec(stored),
        out_specs=partition_spec(without_axes(stored, layout.gather_axes(weight))),
        check_vma=False,
    )(x)


def gather_collectives(
    layout: Layout, weight: Value, trips: int, *, narrowed: bool = False
) -> Iterator[PlannedCollective]:
    """Yield the collectives that gather a weight from its stored spec to its compute spec.

    Args:
        layout: The layout.
        weight: The weight.
        trips: Times in a step.
        narrowed: Whether the weight is sent at half of its bytes (float32 as bfloat16).
    """
    over = layout.gather_axes(weight)
    if not over:
        return
    size = layout.transfer_bytes(weight, layout.compute_spec(weight)) // (2 if narrowed else 1)
    ways = _gather_plans(layout, weight)
    if all(len(each.steps) == 1 and not each.is_all_reduce for each in ways.values()):
        yield PlannedCollective("all-gather", over, layout.device_count(over), size, trips)
        return
    size //= layout.device_count(over)
    for each in ways.values():
        for step in each.steps:
            size *= step.size
            kind = "all-reduce" if each.is_all_reduce else "all-gather"
            yield PlannedCollective(kind, step.axes, step.size, size, trips, step.stride)


def is_sum_pipelined(layout: Layout, axes: Axes, rows: int, dtype: Any) -> bool:
    """Return whether a TPU's compiler makes a sum piece by piece, and sends each piece while it multiplies the next.

    The condition: a product of `rows` on each device takes longer than a piece over a link. Seen on v5e:4x4 above 256
    rows of bfloat16 (273 by this formula), v5e:2x4 above 512, v6e:4x4 above 512, v5p:2x2x4 above 256.

    Args:
        layout: The layout.
        axes: Mesh axes to sum over.
        rows: Length of the sum on each device.
        dtype: Dtype of the sum.
    """
    chip = chip_under(layout.mesh)
    if chip is None or chip.kind != "tpu" or not chip.link.bandwidth:
        return False
    multiplied = 2 * rows / (chip.peak(str(dtype)) or float("inf"))
    return multiplied > dtype.itemsize / layout.device_count(axes) / chip.link.bandwidth


def scatter_collectives(
    layout: Layout, axes: Axes, size: int, trips: int, *, in_shard_map: bool, pipelined: bool
) -> Iterator[PlannedCollective]:
    """Yield the collectives that scatter a sum over `axes`, an all-reduce where the compiler makes one of it.

    Args:
        layout: The layout.
        axes: Mesh axes to sum over.
        size: Bytes of the sum.
        trips: Times in a step.
        in_shard_map: Whether a `shard_map` scatters, and not the compiler.
        pipelined: Whether the compiler sends the sum piece by piece.
    """
    each = plan_gather(layout.mesh, axes, scatters=in_shard_map)
    # Outside of a `shard_map` XLA for the CPU all-reduces, then slices.
    unscattered = not in_shard_map and (layout.is_cpu or len(each.steps) > 1)
    if not in_shard_map and not unscattered and not pipelined:
        unscattered = len(plan_gather(layout.mesh, axes, scatters=True).steps) > 1
    if unscattered or each.is_all_reduce:
        yield PlannedCollective("all-reduce", axes, layout.device_count(axes), size, trips)
        return
    for step in reversed(each.steps):
        yield PlannedCollective("reduce-scatter", step.axes, step.size, size, trips, step.stride)
        size //= step.size


def gather_findings(layout: Layout) -> Iterator[Finding]:
    """Yield one finding for each set of axes over which gathers need several steps, or become all-reduces."""
    plans = dict.fromkeys(each for value in sorted(layout.state) for each in _gather_plans(layout, value).values())
    for each in plans:
        over = tuple(dict.fromkeys(axis for step in reversed(each.steps) for axis in step.axes))
        devices = f"{'+'.join(over)}={layout.device_count(over)}"
        makes = f"the compiler makes one gather over {devices} of this slice an all-reduce, which sends twice the bytes"
        if len(each.steps) > 1:
            sizes = " and of ".join(str(step.size) for step in each.steps)
            message = f"weights are gathered in steps of {sizes} devices: {makes}"
            yield Finding("gathered-in-steps", "info", message)
        elif each.is_all_reduce:
            yield Finding("gathers-reduced", "warning", f"{makes}, and no steps are known that avoid it")


def _gather_plans(layout: Layout, weight: Value) -> dict[int, GatherPlan]:
    """Return the gather of each dimension with more axes in a weight's stored spec than in the compute spec.

    Empty if a remaining axis follows a gathered axis.
    """
    stored, gathered_axes = layout.stored_spec(weight), set(layout.gather_axes(weight))
    plans: dict[int, GatherPlan] = {}
    for dim, has in enumerate(stored):
        over = tuple(axis for axis in has if axis in gathered_axes)
        if over and has[-len(over) :] != over:
            # A gather puts shards together in order only over the minor axes of a dimension.
            return {}
        if over:
            plans[dim] = plan_gather(layout.mesh, over)
    return plans
