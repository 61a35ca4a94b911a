"""What XLA compiles wrongly, or not at all, where arrays are divided, and what is done about it: one table.

`tests/test_xla_faults.py` has a program of plain JAX for each fault, which fails as soon as XLA is right: then the row
goes, and what guards it. A fault is guarded in one of three ways:

- `instead`: the equation is made in another form, which XLA partitions rightly.
- `whole`: no device has a part of the dimensions at fault; the report tells the line.
- `guard`: a module sees to it where it emits what is at fault.
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
Slots = Mapping[int, frozenset[int]]  # dimensions of operands, then of results, by position
Divided = Callable[[int], bool]  # whether a dimension may be divided, in an operand or in a result


@dataclass(frozen=True)
class Fault:
    """One fault of XLA.

    Args:
        name: what is at fault, for the report and for the fault's test.
        wrong: what XLA does with it, after the word XLA.
        cpu: whether only XLA for the CPU has it.
        mended: the first version of jax whose XLA is right; None where none is known.
        whole: the dimensions of an equation that must be whole.
        across: the dimensions, by number in all operands and results, along which it computes each place by itself, so
            that these may be divided in the place of what must be whole.
        instead: what an equation makes of its operands, in another form; None where it is not at fault.
        guard: the module that guards, relative to the package, where nothing here does.
    """

    name: str
    wrong: str
    cpu: bool = False
    mended: tuple[int, ...] | None = None
    whole: Callable[[Equation], Slots] | None = None
    across: Callable[[Equation], frozenset[int]] = lambda e: frozenset()
    instead: Callable[[Equation, list, Divided], list | None] | None = None
    guard: str | None = None

    @property
    def present(self) -> bool:
        """Return whether the XLA that is installed has it."""
        return self.mended is None or jax_version < self.mended


def whole_dimensions(e: Equation, *, cpu: bool) -> tuple[Fault, Slots] | None:
    """Return the fault because of which dimensions of `e` must be whole, and these; None where all may be divided.

    Args:
        e: any equation.
        cpu: whether it is for CPU devices.
    """
    for fault in FAULTS:
        if fault.whole is not None and fault.present and (cpu or not fault.cpu):
            slots = {k: dims for k, dims in fault.whole(e).items() if dims}
            if slots:
                return fault, slots
    return None


def divides_wrongly(e: Equation, *, cpu: bool) -> bool:
    """Return whether XLA must not choose by itself which dimensions of `e` are divided.

    So it is for what must be whole, for convolutions in groups, and for the gradient of any maximum over windows: of
    padded ones that lie side by side XLA aborts (jaxlib 0.10, 0.12).
    """
    grouped = e.contraction is not None and any(e.params.get(name, 1) > 1 for name in GROUP_COUNTS)
    return grouped or e.name == "select_and_scatter_add" or whole_dimensions(e, cpu=cpu) is not None


def windows_of(e: Equation) -> list[tuple[int, int, int]]:
    """Return the dimensions (image, window, result) along which a convolution has a window of more than one element at
    more than one place: those that `WINDOWED` may be about, whatever divides them."""
    if e.contraction is None or not e.contraction.windowed:
        return []
    window, result = shape_of(e.eqn.invars[1]), shape_of(e.eqn.outvars[0])
    return [(i, j, k) for i, j, k in e.contraction.windowed if window[j] > 1 and result[k] > 1]


def bind_mended(e: Equation, values: list, divided: Divided, *, cpu: bool) -> list:
    """Compute `e`, in another form where XLA would be wrong.

    Args:
        e: an equation without bodies.
        values: its operands.
        divided: whether a dimension, by number, may be divided in an operand or a result.
        cpu: whether it is for CPU devices.
    """
    for fault in FAULTS:
        if fault.instead is not None and fault.present and (cpu or not fault.cpu):
            made = fault.instead(e, values, divided)
            if made is not None:
                return made
    return bind(e.eqn, values)


def _pad_apart(e: Equation, values: list, divided: Divided) -> list | None:
    """Pad between elements, or by less than nothing, along divided dimensions one at a time."""
    if e.name != "pad":
        return None
    config = list(e.params["padding_config"])
    at_fault = [
        d for d, (low, high, inner) in enumerate(config) if (inner or min(low, high) < 0) and divided(d)
    ]
    if not at_fault:
        return None
    x, fill = values
    for d in at_fault:
        x, config[d] = _padded(x, fill, d, *config[d]), (0, 0, 0)
    return [lax.pad(x, fill, config) if any(map(any, config)) else x]


def _padded(x: Any, fill: Any, d: int, low: int, high: int, inner: int) -> Any:
    """Pad along `d` as `lax.pad` does, by slices, reshapes and padding of edges.

    Elements and what lies between them are rows of a dimension of their own: a device that has some of the elements has
    all that follows each of them.
    """
    if inner and x.shape[d] > 1:
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


def _edges_alone(e: Equation, values: list, divided: Divided) -> list | None:
    """Have padding by anything but zeros read an operand that no other equation reads."""
    config = e.params.get("padding_config", e.params.get("padding", ()))
    if e.name != "pad" and e.primitive.kind is not Kind.WINDOW:
        return None
    if not any(any(edges) and divided(d) for d, edges in enumerate(config)) or _fills_with_zeros(e, values):
        return None
    return bind(e.eqn, [lax.optimization_barrier(values[0]), *values[1:]])


def _fills_with_zeros(e: Equation, values: list) -> bool:
    if e.primitive.kind is Kind.WINDOW and len(values) == 1:
        return e.primitive.adds
    return is_literal(e.eqn.invars[-1]) and not values[-1]


def _overlapping(e: Equation) -> Slots:
    """The dimensions along which windows overlap whose largest elements take a gradient."""
    if e.name != "select_and_scatter_add":
        return {}
    sizes, steps = e.params["window_dimensions"], e.params["window_strides"]
    return _everywhere(e, (d for d, (size, step) in enumerate(zip(sizes, steps, strict=True)) if size > step))


def _spread_windows(e: Equation) -> Slots:
    """The dimensions in which windows see elements with nothing in between."""
    return _everywhere(e, (d for d, step in enumerate(e.params.get("base_dilation", ())) if step > 1))


def _everywhere(e: Equation, dims: Iterable[int]) -> Slots:
    return dict.fromkeys(range(len(e.ins) + len(e.outs)), frozenset(dims))


def _beside_windows(e: Equation) -> frozenset[int]:
    sides = zip(e.params["window_dimensions"], e.params["window_strides"], strict=True)
    return frozenset(d for d, side in enumerate(sides) if side == (1, 1))


def _dilated(e: Equation) -> Slots:
    """The dimensions of images that a convolution spreads out, or sees through a window that is spread out: with
    strides, or longer than the result, as in the gradient of a strided convolution's kernel."""
    if e.contraction is None or "lhs_dilation" not in e.params:
        return {}
    window, out = (shape_of(v) for v in (e.eqn.invars[1], e.eqn.outvars[0]))
    params = (e.params[name] for name in ("lhs_dilation", "rhs_dilation", "window_strides"))
    spread = [
        dims
        for dims, image, kernel, stride in zip(e.contraction.windowed, *params, strict=True)
        if image > 1 or (kernel > 1 and (stride > 1 or window[dims[1]] > out[dims[2]]))
    ]
    return {k: frozenset(dims[k] for dims in spread) for k in range(3)}


def _transformed(e: Equation) -> Slots:
    """The dimensions of a Fourier transform."""
    if e.name != "fft":
        return {}
    return dict.fromkeys((0, 1), frozenset(range(len(_beside_transform(e)), len(shape_of(e.eqn.invars[0])))))


def _beside_transform(e: Equation) -> frozenset[int]:
    return frozenset(range(len(shape_of(e.eqn.invars[0])) - len(e.params["fft_lengths"])))


def _laid_by_rows(e: Equation, values: list, _divided: Divided) -> list | None:
    """Transform an array whose last dimension is the minor one in memory, into another such array."""
    if e.name != "fft":
        return None
    by_rows = Layout(tuple(range(values[0].ndim)))
    return [with_layout_constraint(bind(e.eqn, [with_layout_constraint(values[0], by_rows)])[0], by_rows)]


def widened(e: Equation, values: list, dtype: Any) -> list:
    """Return the operands of the product `e` as XLA for the CPU can multiply them for a result of type `dtype`: in that
    type where they are of bfloat16 and are not two matrices."""
    c = e.contraction
    if (
        c is None
        or c.ragged is not None
        or c.windowed
        or not (c.batch or len(c.left) > 1 or len(c.right) > 1)
    ):
        return values
    narrow = dtype == jnp.float32 and all(jnp.result_type(x) == jnp.bfloat16 for x in values)
    return [x.astype(dtype) for x in values] if narrow else values


def _multiplied_wide(e: Equation, values: list, _divided: Divided) -> list | None:
    if not e.primitive.product:
        return None
    wide = widened(e, values, getattr(e.eqn.outvars[0].aval, "dtype", None))
    return None if wide is values else bind(e.eqn, wide)


def _groups_of_nothing(e: Equation, values: list, _divided: Divided) -> list | None:
    """Give the zeros that a convolution in groups makes of arrays without an element."""
    if e.name != "conv_general_dilated" or max(e.params[k] for k in GROUP_COUNTS) == 1:
        return None
    out: Any = e.eqn.outvars[0].aval
    return [jnp.zeros(out.shape, out.dtype)] if any(not x.size for x in values) else None


def _begun_within(e: Equation, values: list, _divided: Divided) -> list | None:
    """Slice from where XLA would begin, which is never so late that the slice would reach beyond the end."""
    if e.name != "dynamic_slice":
        return None
    x, *starts = values
    return bind(e.eqn, [x, *_within(starts, x.shape, e.params["slice_sizes"])])


def _updated_within(e: Equation, values: list, _divided: Divided) -> list | None:
    """Update from where XLA would begin on one device, which is never so late that it would reach beyond the end."""
    if e.name != "dynamic_update_slice":
        return None
    x, update, *starts = values
    return bind(e.eqn, [x, update, *_within(starts, x.shape, update.shape)])


def _within(starts: Sequence[Any], sizes: Sequence[int], lengths: Sequence[int]) -> list:
    """Return the starts, integers, of slices of these lengths, each so early that its slice ends within the array."""
    last = (size - length for size, length in zip(sizes, lengths, strict=True))
    return [
        lax.clamp(jnp.zeros_like(i), i, jnp.full_like(i, min(end, jnp.iinfo(jnp.result_type(i)).max)))
        for i, end in zip(starts, last, strict=True)
    ]


def _scattered_apart(e: Equation, values: list, divided: Divided) -> list | None:
    """Scatter to one place, which may be one for each device, of an array whose division XLA does not see through."""
    if not e.primitive.scatters:
        return None
    x, places, *more = values
    numbers = e.params["dimension_numbers"]
    of_rows = numbers.operand_batching_dims and any(map(divided, numbers.scatter_dims_to_operand_dims))
    if math.prod(jnp.shape(places)[:-1]) != 1 and not of_rows:
        return None
    return bind(e.eqn, [lax.optimization_barrier(x), places, *more])


CROSSED = Fault(
    "a product over several dimensions, one divided alike in both operands and others by one axis crosswise,",
    "gives wrong numbers",
    guard="strategies/undivided.py",
)
FURTHER = Fault(
    "a sum along several divided axes of products side by side, of which some, not all, divide these products further,",
    "gives wrong numbers",
    guard="strategies/undivided.py",
)
WINDOWED = Fault(
    "a convolution along a divided dimension, on a mesh of which an axis divides its output channels, or for the "
    "gradient of its kernel not what it is summed over,",
    "adds up over the wrong devices",
    guard="strategies/undivided.py",
)
FAULTS = (
    Fault(
        "padding between elements",
        "gives wrong numbers, stops or aborts, also for padding by less than nothing, where operand and result are not "
        "divided alike",
        instead=_pad_apart,
    ),
    Fault(
        "two paddings of one array",
        "takes the edges of the first for those of the second, which pads with other numbers",
        mended=(0, 12),
        instead=_edges_alone,
    ),
    Fault(
        "the gradient of a maximum over overlapping windows",
        "gives wrong numbers",
        whole=_overlapping,
        across=_beside_windows,
    ),
    Fault(
        "windows over a dilated array, as in the gradient of an average with strides,",
        "gives wrong numbers or stops",
        whole=_spread_windows,
        across=_beside_windows,
    ),
    Fault(
        "a dilated convolution, or the gradient of a strided one,",
        "gives wrong numbers or aborts",
        whole=_dilated,
    ),
    Fault(
        "a Fourier transform",
        "gathers all of it on every device, or aborts,",
        whole=_transformed,
        across=_beside_transform,
    ),
    Fault(
        "the layout in memory of a Fourier transform's operand and result",
        "stops unless their last dimension is the minor one, and does not see to it",
        cpu=True,
        instead=_laid_by_rows,
    ),
    Fault(
        "a product of several matrices in bfloat16 with a result in float32",
        "has no kernel for some, and stops when the program runs",
        cpu=True,
        instead=_multiplied_wide,
    ),
    Fault(
        "a slice that would reach beyond the end, and is divided afterwards,",
        "takes the parts from behind the end: it adds the start of a part to the start that was given",
        mended=(0, 12),
        instead=_begun_within,
    ),
    Fault(
        "an update that would reach beyond the end of a divided dimension",
        "leaves it out",
        instead=_updated_within,
    ),
    Fault(
        "a scatter to one place on a device, of an array that was whole before,",
        "puts rows of other places beside it: it adds the start of a part to the place that was given",
        mended=(0, 12),
        instead=_scattered_apart,
    ),
    Fault(
        "a convolution whose groups are divided",
        "gives wrong numbers",
        guard="strategies/regions/grouped.py",
    ),
    CROSSED,
    FURTHER,
    WINDOWED,
    Fault(
        "a convolution in groups of arrays without an element",
        "divides by zero, which ends the process,",
        instead=_groups_of_nothing,
    ),
    Fault(
        "a sum in bfloat16 over manual axes of a mesh that has automatic ones",
        "aborts",
        cpu=True,
        guard="strategies/regions/parts.py",
    ),
    Fault(
        "two collectives that do not wait for each other, one in a loop",
        "takes one for the other and aborts after 40 seconds",
        cpu=True,
        guard="strategies/ring.py",
    ),
)
