"""Table of XLA faults: divided arrays that XLA compiles wrongly, or not at all, and the workaround for each.

`tests/program/test_xla_faults.py` has a program of plain JAX for each fault, which fails as soon as XLA is right: then
remove the row and its workaround. A fault has one of three workarounds:

- `rewrite`: the equation is emitted in another form, partitioned rightly by XLA.
- `replicated_dims`: no device has a part of the dimensions at fault; the report names the source line.
- `guard`: another module avoids the fault where it emits the equation.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.version import __version_info__ as jax_version

from .ir import Equation
from .primitives import bind, is_literal, shape_of
from .primitives.primitive import Kind

GROUP_COUNTS = ("feature_group_count", "batch_group_count")
DimsBySlot = Mapping[int, frozenset[int]]  # dimensions of operands, then of results, by position
IsDivided = Callable[[int], bool]  # whether a dimension may be divided, in an operand or in a result


@dataclass(frozen=True)
class XlaFault:
    """Fault of XLA.

    Attributes:
        name: Operation at fault, for the report and for the fault's test.
        symptom: Misbehaviour, as text after the word XLA.
        cpu_only: Only XLA for the CPU is affected.
        fixed_in: First version of jax with a correct XLA; None if none is known.
        replicated_dims: Returns the dimensions of an equation that must not be divided.
        independent_dims: Returns the dimensions, by number in all operands and results, along which the equation
            computes each position by itself. These may be divided instead.
        rewrite: Computes an equation in another form from its operands; None for an equation not at fault.
        guard: Module that avoids the fault, relative to the package, unless this table does.
    """

    name: str
    symptom: str
    cpu_only: bool = False
    fixed_in: tuple[int, ...] | None = None
    replicated_dims: Callable[[Equation], DimsBySlot] | None = None
    independent_dims: Callable[[Equation], frozenset[int]] = lambda e: frozenset()
    rewrite: Callable[[Equation, list, IsDivided], list | None] | None = None
    guard: str | None = None

    @property
    def is_present(self) -> bool:
        """True if the installed XLA has the fault."""
        return self.fixed_in is None or jax_version < self.fixed_in


def find_replicated_dims(e: Equation, *, cpu: bool) -> tuple[XlaFault, DimsBySlot] | None:
    """Return the fault that forbids dividing dimensions of `e`, and the dimensions by slot; None if all may be.

    Args:
        e: Any equation.
        cpu: The program runs on CPU devices.
    """
    for fault in FAULTS:
        if fault.replicated_dims is not None and fault.is_present and (cpu or not fault.cpu_only):
            slots = {k: dims for k, dims in fault.replicated_dims(e).items() if dims}
            if slots:
                return fault, slots
    return None


def needs_explicit_sharding(e: Equation, *, cpu: bool) -> bool:
    """Return whether XLA must not choose which dimensions of `e` are divided.

    True for dimensions that must be replicated, for convolutions in groups, and for the gradient of any maximum over
    windows.

    Args:
        e: Any equation.
        cpu: The program runs on CPU devices.
    """
    # The gradient of a maximum counts even without overlaps: for padded windows next to each other XLA aborts (jaxlib
    # 0.10, 0.12).
    grouped = e.contraction is not None and any(e.params.get(name, 1) > 1 for name in GROUP_COUNTS)
    return grouped or e.name == "select_and_scatter_add" or find_replicated_dims(e, cpu=cpu) is not None


def convolution_windows(e: Equation) -> list[tuple[int, int, int]]:
    """Return the (image, window, result) dimensions along which a convolution slides.

    The window has several elements, at several positions. `DIVIDED_CONVOLUTION` may concern any of them, whichever is
    divided.
    """
    if e.contraction is None or not e.contraction.windowed:
        return []
    window, result = shape_of(e.jaxpr_eqn.invars[1]), shape_of(e.jaxpr_eqn.outvars[0])
    return [(i, j, k) for i, j, k in e.contraction.windowed if window[j] > 1 and result[k] > 1]


def bind_with_workaround(e: Equation, values: list, is_divided: IsDivided, *, cpu: bool) -> list:
    """Compute `e`, in another form where XLA would be wrong.

    Args:
        e: Equation without bodies.
        values: Operands.
        is_divided: Returns whether a dimension, by number, may be divided in an operand or a result.
        cpu: The program runs on CPU devices.
    """
    for fault in FAULTS:
        if fault.rewrite is not None and fault.is_present and (cpu or not fault.cpu_only):
            results = fault.rewrite(e, values, is_divided)
            if results is not None:
                return results
    return bind(e.jaxpr_eqn, values)


def _pad_by_dimension(e: Equation, values: list, is_divided: IsDivided) -> list | None:
    """Pad between elements, or by a negative amount, along a single divided dimension at a time."""
    if e.name != "pad":
        return None
    config = list(e.params["padding_config"])
    at_fault = [d for d, (low, high, inner) in enumerate(config) if (inner or min(low, high) < 0) and is_divided(d)]
    if not at_fault:
        return None
    x, fill = values
    for d in at_fault:
        x, config[d] = _pad_dimension(x, fill, d, *config[d]), (0, 0, 0)
    return [lax.pad(x, fill, config) if any(map(any, config)) else x]


def _pad_dimension(x: Any, fill: Any, d: int, low: int, high: int, inner: int) -> Any:
    """Pad along `d` as `lax.pad` does, by slices, reshapes and padding of edges."""
    if inner and x.shape[d] > 1:
        # An element and the padding after it form a row of a new dimension, so a device with an element also has its
        # padding.
        before = min(max(low, 0), inner)
        rows = [(0, 0, 0)] * (x.ndim + 1)
        rows[d + 1] = (before, inner - before, 0)
        shape = (*x.shape[:d], x.shape[d] * (inner + 1), *x.shape[d + 1 :])
        x = lax.pad(jnp.expand_dims(x, d + 1), fill, rows).reshape(shape)
        low, high = low - before, high - (inner - before)
    x = lax.slice_in_dim(x, max(-low, 0), x.shape[d] - max(-high, 0), axis=d)
    edges = [(0, 0, 0)] * x.ndim
    edges[d] = (max(low, 0), max(high, 0), 0)
    return lax.pad(x, fill, edges) if any(edges[d]) else x


def _isolate_padding(e: Equation, values: list, is_divided: IsDivided) -> list | None:
    """Give padding with nonzero values an operand that no other equation reads."""
    config = e.params.get("padding_config", e.params.get("padding", ()))
    if e.name != "pad" and e.primitive.kind is not Kind.WINDOW:
        return None
    if not any(any(edges) and is_divided(d) for d, edges in enumerate(config)) or _fills_with_zeros(e, values):
        return None
    # Behind a barrier the operand is an array of its own, and XLA cannot take the edges of another padding for these.
    return bind(e.jaxpr_eqn, [lax.optimization_barrier(values[0]), *values[1:]])


def _fills_with_zeros(e: Equation, values: list) -> bool:
    """Return whether an equation pads with zeros."""
    # A window without an operand for its identity pads with its own: 0 only for a sum.
    if e.primitive.kind is Kind.WINDOW and len(values) == 1:
        return e.primitive.is_additive
    return is_literal(e.jaxpr_eqn.invars[-1]) and not values[-1]


def _overlapping_windows(e: Equation) -> DimsBySlot:
    """Return the dimensions of overlapping windows, for the gradient of a maximum over windows."""
    if e.name != "select_and_scatter_add":
        return {}
    sizes, steps = e.params["window_dimensions"], e.params["window_strides"]
    return _in_all_slots(e, (d for d, (size, step) in enumerate(zip(sizes, steps, strict=True)) if size > step))


def _windows_over_dilated(e: Equation) -> DimsBySlot:
    """Return the dimensions of windows over a dilated array."""
    return _in_all_slots(e, (d for d, step in enumerate(e.params.get("base_dilation", ())) if step > 1))


def _in_all_slots(e: Equation, dims: Iterable[int]) -> DimsBySlot:
    """Return the same dimensions for all operands and results."""
    return dict.fromkeys(range(len(e.operands) + len(e.results)), frozenset(dims))


def _dims_without_window(e: Equation) -> frozenset[int]:
    """Return the dimensions without a window: size and stride 1."""
    windows = zip(e.params["window_dimensions"], e.params["window_strides"], strict=True)
    return frozenset(d for d, window in enumerate(windows) if window == (1, 1))


def _dilated_convolution(e: Equation) -> DimsBySlot:
    """Return the dimensions of a dilated convolution.

    Dilated image, or dilated window together with strides or longer than the result (the kernel gradient of a strided
    convolution).
    """
    if e.contraction is None or "lhs_dilation" not in e.params:
        return {}
    window, out = (shape_of(v) for v in (e.jaxpr_eqn.invars[1], e.jaxpr_eqn.outvars[0]))
    params = (e.params[name] for name in ("lhs_dilation", "rhs_dilation", "window_strides"))
    dilated = [
        dims
        for dims, image, kernel, stride in zip(e.contraction.windowed, *params, strict=True)
        if image > 1 or (kernel > 1 and (stride > 1 or window[dims[1]] > out[dims[2]]))
    ]
    return {k: frozenset(dims[k] for dims in dilated) for k in range(3)}


def _fft_dims(e: Equation) -> DimsBySlot:
    """Return the dimensions of a Fourier transform."""
    if e.name != "fft":
        return {}
    return dict.fromkeys((0, 1), frozenset(range(len(_fft_batch_dims(e)), len(shape_of(e.jaxpr_eqn.invars[0])))))


def _fft_batch_dims(e: Equation) -> frozenset[int]:
    """Return the batch dimensions of a Fourier transform."""
    return frozenset(range(len(shape_of(e.jaxpr_eqn.invars[0])) - len(e.params["fft_lengths"])))


def _row_major_fft(e: Equation, values: list, _divided: IsDivided) -> list | None:
    """Compute a Fourier transform with row-major operand and result."""
    if e.name != "fft":
        return None
    # XLA for the CPU stops unless the last dimension is the minor one, and does not arrange for that itself.
    row_major = Layout(tuple(range(values[0].ndim)))
    return [with_layout_constraint(bind(e.jaxpr_eqn, [with_layout_constraint(values[0], row_major)])[0], row_major)]


def widen_operands(e: Equation, values: list, dtype: Any) -> list:
    """Return the operands of the product `e` in a dtype for which XLA for the CPU has a kernel.

    bfloat16 operands become `dtype`, unless the product is of two plain matrices.

    Args:
        e: Product.
        values: Operands.
        dtype: Dtype of the result.
    """
    c = e.contraction
    if (
        c is None
        or c.ragged_dim is not None
        or c.windowed
        or not (c.batch or len(c.left_free) > 1 or len(c.right_free) > 1)
    ):
        return values
    # XLA for the CPU has no kernel for some batched bfloat16 products with a float32 result, and stops at run time.
    narrow = dtype == jnp.float32 and all(jnp.result_type(x) == jnp.bfloat16 for x in values)
    return [x.astype(dtype) for x in values] if narrow else values


def _widened_product(e: Equation, values: list, _divided: IsDivided) -> list | None:
    """Compute a product with widened operands."""
    if not e.primitive.is_product:
        return None
    wide = widen_operands(e, values, getattr(e.jaxpr_eqn.outvars[0].aval, "dtype", None))
    return None if wide is values else bind(e.jaxpr_eqn, wide)


def _empty_grouped_convolution(e: Equation, values: list, _divided: IsDivided) -> list | None:
    """Return the zero result of a grouped convolution over an empty array."""
    if e.name != "conv_general_dilated" or max(e.params[k] for k in GROUP_COUNTS) == 1:
        return None
    out: Any = e.jaxpr_eqn.outvars[0].aval
    # XLA divides by zero here, which ends the process.
    return [jnp.zeros(out.shape, out.dtype)] if any(not x.size for x in values) else None


def _clamped_slice(e: Equation, values: list, _divided: IsDivided) -> list | None:
    """Compute a `dynamic_slice` with starts clamped in advance, as XLA clamps them."""
    if e.name != "dynamic_slice":
        return None
    x, *starts = values
    return bind(e.jaxpr_eqn, [x, *_clamp_starts(starts, x.shape, e.params["slice_sizes"])])


def _clamped_update(e: Equation, values: list, _divided: IsDivided) -> list | None:
    """Compute a `dynamic_update_slice` with starts clamped in advance, as XLA does on a single device."""
    if e.name != "dynamic_update_slice":
        return None
    x, update, *starts = values
    return bind(e.jaxpr_eqn, [x, update, *_clamp_starts(starts, x.shape, update.shape)])


def _clamp_starts(starts: Sequence[Any], sizes: Sequence[int], lengths: Sequence[int]) -> list:
    """Return integer starts, clamped so that slices of `lengths` end within an array of `sizes`."""
    # The end of a long dimension may be beyond the range of a narrow index dtype.
    last = (size - length for size, length in zip(sizes, lengths, strict=True))
    return [
        lax.clamp(jnp.zeros_like(i), i, jnp.full_like(i, min(end, jnp.iinfo(jnp.result_type(i)).max)))
        for i, end in zip(starts, last, strict=True)
    ]


def _isolate_scatter(e: Equation, values: list, is_divided: IsDivided) -> list | None:
    """Scatter to a single position (or one for each device), the array's sharding hidden from XLA by a barrier."""
    if not e.primitive.is_scatter:
        return None
    x, places, *more = values
    numbers = e.params["dimension_numbers"]
    per_row = numbers.operand_batching_dims and any(map(is_divided, numbers.scatter_dims_to_operand_dims))
    if math.prod(jnp.shape(places)[:-1]) != 1 and not per_row:
        return None
    # XLA adds the start of a device's shard to the position if it sees that the array was replicated before.
    return bind(e.jaxpr_eqn, [lax.optimization_barrier(x), places, *more])


CROSSED_PRODUCT = XlaFault(
    "a product over several dimensions, one divided alike in both operands and others by one axis crosswise,",
    "gives wrong numbers",
    guard="strategies/unsharded_dims.py",
)
FURTHER_DIVIDED_SUM = XlaFault(
    "a sum along several divided axes of products side by side, of which some, not all, divide these products further,",
    "gives wrong numbers",
    guard="strategies/unsharded_dims.py",
)
DIVIDED_CONVOLUTION = XlaFault(
    "a convolution along a divided dimension, on a mesh of which an axis divides its output channels, or for the "
    "gradient of its kernel not what it is summed over,",
    "adds up over the wrong devices",
    guard="strategies/unsharded_dims.py",
)
FAULTS = (
    XlaFault(
        "padding between elements",
        "gives wrong numbers, stops or aborts, also for padding by less than nothing, where operand and result are not "
        "divided alike",
        rewrite=_pad_by_dimension,
    ),
    XlaFault(
        "two paddings of one array",
        "takes the edges of the first for those of the second, which pads with other numbers",
        fixed_in=(0, 12),
        rewrite=_isolate_padding,
    ),
    XlaFault(
        "the gradient of a maximum over overlapping windows",
        "gives wrong numbers",
        replicated_dims=_overlapping_windows,
        independent_dims=_dims_without_window,
    ),
    XlaFault(
        "windows over a dilated array, as in the gradient of an average with strides,",
        "gives wrong numbers or stops",
        replicated_dims=_windows_over_dilated,
        independent_dims=_dims_without_window,
    ),
    XlaFault(
        "a dilated convolution, or the gradient of a strided one,",
        "gives wrong numbers or aborts",
        replicated_dims=_dilated_convolution,
    ),
    XlaFault(
        "a Fourier transform",
        "gathers all of it on every device, or aborts,",
        replicated_dims=_fft_dims,
        independent_dims=_fft_batch_dims,
    ),
    XlaFault(
        "the layout in memory of a Fourier transform's operand and result",
        "stops unless their last dimension is the minor one, and does not see to it",
        cpu_only=True,
        rewrite=_row_major_fft,
    ),
    XlaFault(
        "a product of several matrices in bfloat16 with a result in float32",
        "has no kernel for some, and stops when the program runs",
        cpu_only=True,
        rewrite=_widened_product,
    ),
    XlaFault(
        "a slice that would reach beyond the end, and is divided afterwards,",
        "takes the parts from behind the end: it adds the start of a part to the start that was given",
        fixed_in=(0, 12),
        rewrite=_clamped_slice,
    ),
    XlaFault(
        "an update that would reach beyond the end of a divided dimension", "leaves it out", rewrite=_clamped_update
    ),
    XlaFault(
        "a scatter to one place on a device, of an array that was whole before,",
        "puts rows of other places beside it: it adds the start of a part to the place that was given",
        fixed_in=(0, 12),
        rewrite=_isolate_scatter,
    ),
    XlaFault(
        "a convolution whose groups are divided",
        "gives wrong numbers",
        guard="strategies/regions/grouped_convolutions.py",
    ),
    CROSSED_PRODUCT,
    FURTHER_DIVIDED_SUM,
    DIVIDED_CONVOLUTION,
    XlaFault(
        "a convolution in groups of arrays without an element",
        "divides by zero, which ends the process,",
        rewrite=_empty_grouped_convolution,
    ),
    XlaFault(
        "a sum in bfloat16 over manual axes of a mesh that has automatic ones",
        "aborts",
        cpu_only=True,
        guard="strategies/regions/partial_sums.py",
    ),
    XlaFault(
        "two collectives that do not wait for each other, one in a loop",
        "takes one for the other and aborts after 40 seconds",
        cpu_only=True,
        guard="strategies/ring_attention.py",
    ),
)
