"""Collectives of a sum over sharded dimensions; the spec of the result decides their kind."""

from collections.abc import Iterable, Iterator, Sequence

from ..plan import PlannedCollective
from ..program.ir import Equation, Value
from .layout import Axes, Layout, Spec, without_axes
from .weight_gathers import is_sum_pipelined, scatter_collectives


def summed_axes(layout: Layout, e: Equation) -> list[Axes]:
    """Return the mesh axes over which `e` leaves a sum, for each dimension contracted, reduced or looked up."""
    if (c := e.contraction) is not None:
        left, right = (layout.compute_spec_in(e, v) for v in e.operands[:2])
        return [tuple(a for a in left[i] if a in right[j]) for i, j in c.contracted]
    if e.primitive.is_combinable:
        spec = layout.compute_spec_in(e, e.operands[0])
        return [spec[d] for d in e.params["axes"]]
    adds = e.primitive.is_scatter and e.primitive.is_additive
    if adds and not layout.is_activation(e.operands[0]) and layout.is_activation(e.operands[2]):
        window = e.params["dimension_numbers"].update_window_dims
        return [axes for d, axes in enumerate(layout.spec_in_use(e.operands[2])) if d not in window]
    if e.primitive.is_gather and layout.is_activation(e.results[0]):
        # In a lookup in a sharded table each device finds the rows of its own part, and zeros for the others.
        spec = layout.spec_in_use(e.operands[0])
        return [spec[d] for d in e.params["dimension_numbers"].start_index_map if d < len(spec)]
    return []


def activation_reductions(
    layout: Layout,
    value: Value,
    over: Axes,
    trips: int,
    *,
    in_shard_map: bool = False,
    axes_by_dim: Sequence[Axes] = (),
    made_spec: Spec | None = None,
) -> Iterator[PlannedCollective]:
    """Yield the reduction of an activation over mesh axes: a reduce-scatter where its spec has these axes, else an
    all-reduce.

    Args:
        layout: The layout.
        value: The activation.
        over: Mesh axes to sum over.
        trips: Times in a step.
        in_shard_map: Whether a `shard_map` scatters, and not the compiler.
        axes_by_dim: As in `gradient_reductions`.
        made_spec: Spec of the unreduced sum; None for the spec of the result.
    """
    spec = layout.activation_spec(value)
    spec_axes = {a for axes in spec for a in axes}
    scattered = tuple(a for a in over if a in spec_axes)
    size = layout.transfer_bytes(value, without_axes(spec if made_spec is None else made_spec, scattered))
    # Outside of a `shard_map` XLA for the CPU all-reduces, then slices.
    if scattered and (in_shard_map or not layout.is_cpu):
        yield PlannedCollective("reduce-scatter", over, layout.device_count(over), size, trips)
        return
    for axes in sequential_axes(layout, over, axes_by_dim):
        yield PlannedCollective("all-reduce", axes, layout.device_count(axes), size, trips)


def gradient_reductions(
    layout: Layout,
    value: Value,
    over: Axes,
    trips: int,
    *,
    unscattered: bool = False,
    in_shard_map: bool = False,
    summed_rows: int = 0,
    axes_by_dim: Sequence[Axes] = (),
) -> Iterator[PlannedCollective]:
    """Yield the reductions of a gradient: a reduce-scatter over the axes of its stored spec, an all-reduce over the
    others.

    Args:
        layout: The layout.
        value: The gradient, stored like its parameter.
        over: Mesh axes to sum over.
        trips: Times in a step.
        unscattered: Whether to all-reduce over all axes.
        in_shard_map: Whether a `shard_map` scatters, and not the compiler.
        summed_rows: For a product, the length of the sum on each device.
        axes_by_dim: Axes of each summed dimension, where the compiler reduces.
    """
    stored = [] if unscattered else layout.stored_spec(value)
    scattered = tuple(a for axes in stored for a in axes if a in over)
    replicated = tuple(a for a in over if a not in scattered)
    size = layout.transfer_bytes(value, layout.compute_spec(value))
    if scattered:
        dtype = layout.program.avals[value].dtype
        pieces = is_sum_pipelined(layout, scattered, summed_rows, dtype)
        yield from scatter_collectives(layout, scattered, size, trips, in_shard_map=in_shard_map, pipelined=pieces)
        # The other axes reduce only the shard that the scatter leaves.
        size //= layout.device_count(scattered)
    for axes in sequential_axes(layout, replicated, () if scattered else axes_by_dim):
        yield PlannedCollective("all-reduce", axes, layout.device_count(axes), size, trips)


def sequential_axes(layout: Layout, over: Axes, axes_by_dim: Sequence[Axes]) -> Iterable[Axes]:
    """Return the axes of each all-reduce of a sum over several dimensions.

    Args:
        layout: The layout.
        over: Mesh axes to sum over.
        axes_by_dim: Axes of each summed dimension; empty for a single all-reduce.
    """
    # A TPU reduces several dimensions in one all-reduce. XLA for the CPU reduces them one after the other if it
    # scatters nothing.
    if not layout.is_cpu or not axes_by_dim:
        return (over,) if over else ()
    return filter(None, (tuple(a for a in axes if a in over) for axes in axes_by_dim))
