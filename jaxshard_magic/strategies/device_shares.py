"""FLOPs and bytes of one device in a step's products under a layout."""

from collections.abc import Iterable, Sequence
from functools import partial
from math import prod

from jax import lax

from ..plan import DeviceWork
from ..program.flops import Work, num_shards
from ..program.ir import Equation, Value
from .layout import Layout

# Passes of a TPU's matrix unit for a product of float32: the unit multiplies bfloat16 (see `jax.lax.Precision`).
_PASSES = {lax.Precision.HIGH: 3, lax.Precision.HIGHEST: 6}


def device_shares(layout: Layout, works: Iterable[Work]) -> tuple[DeviceWork, ...]:
    """Return one device's share of each product, with weights gathered and activations sharded as in `ShardedLowering`.

    Args:
        layout: The layout.
        works: The products of the step.
    """
    return tuple(_device_share(layout, work) for work in works)


def _device_share(layout: Layout, work: Work) -> DeviceWork:
    e = layout.program.equations[work.equation]
    tensors = [v for v in (*e.operands[:2], e.results[0]) if v is not None]
    size = {v: layout.shard_bytes(v, layout.compute_spec_in(e, v)) for v in tensors}
    divided, trips = num_shards(e, partial(layout.compute_spec_in, e), layout.mesh.shape), e.trip_count
    if layout.experts is not None and e.index in layout.experts.loop_equations:
        # In a loop over experts each device does the trips of its own experts.
        expert_devices = layout.device_count(layout.experts.axes)
        divided, trips = divided * expert_devices, trips // expert_devices
    return DeviceWork(
        work.flops // divided,
        trips * sum(size[v] for v in tensors),
        work.dtype,
        work.recomputed,
        work.exact,
        trips * sum(size[v] for v in tensors if not layout.is_activation(v)),
        _matrix_dims(layout, e),
        _multiplication_passes(e, work.dtype),
    )


def _matrix_dims(layout: Layout, e: Equation) -> tuple[int, int, int] | None:
    """Return (rows, columns, contracted) of one matrix product on a device; None where groups have matrices of their
    own.

    For a convolution, each output position is a row and the window is contracted.
    """
    c, out = e.contraction, e.results[0]
    left, right = e.operands[:2]
    if c is None or left is None or right is None or c.grouped is not None or c.ragged_dim is not None:
        return None
    left_sizes, right_sizes, out_sizes = (_local_sizes(layout, e, v) for v in (left, right, out))
    rows = [left_sizes[d] for d, _ in c.left_free] + [out_sizes[d] for *_, d in c.windowed]
    # Either operand may be whole along a contracted dimension: each device sums over the shard of the other.
    summed = [min(left_sizes[a], right_sizes[b]) for a, b in c.contracted] + [right_sizes[d] for _, d, _ in c.windowed]
    return prod(rows), prod(right_sizes[d] for d, _ in c.right_free), prod(summed)


def _local_sizes(layout: Layout, e: Equation, v: Value) -> Sequence[int]:
    """Return the local sizes of a value's dimensions, as `e` reads or writes it; the largest shard where sizes are
    uneven."""
    pairs = zip(layout.program.shapes[v], layout.compute_spec_in(e, v), strict=True)
    return [-(-size // layout.device_count(axes)) for size, axes in pairs]


def _multiplication_passes(e: Equation, dtype: str) -> int:
    """Return the number of bfloat16 multiplications that a TPU makes for one product; 1 for other dtypes than
    float32."""
    precision = e.params.get("precision")
    given = precision if isinstance(precision, tuple) else (precision,)
    asked = [_PASSES.get(p, 1) for p in given if isinstance(p, lax.Precision)]
    return max(asked, default=1) if dtype == "float32" else 1
