"""The work of a step's products (matmuls, convolutions): FLOPs and bytes, counted from its equations.

Elementwise operations, reductions and `unseen` primitives are not counted, nor is what nothing uses, which XLA drops.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from .flow import Flow, by_anything
from .ir import Equation, Program, Scope, Value
from .phases import BACKWARD, FORWARD, UPDATE, phases
from .primitives import shape_of
from .sizes import array_bytes, nbytes

Shape = tuple[int, ...]

_UNSEEN = frozenset(
    {
        *("shard_map", "pallas_call", "custom_partitioning", "custom_linear_solve", "xla_pmap", "ffi_call"),
        *("pure_callback", "io_callback", "fft", "cholesky", "eig", "eigh", "geqrf", "geqp3", "hessenberg"),
        *("householder_product", "lu", "ormqr", "qr", "schur", "svd", "symmetric_product"),
        *("triangular_solve", "tridiagonal", "tridiagonal_solve"),
    }
)
_UNSEEN_ATTENTION = "dot_product_attention"  # cuDNN's, eight primitives
_REMATTED = "rematted_computation"  # the scope that jax puts around what remat does again


@dataclass(frozen=True)
class Work:
    """One product: what all devices together do for it in one step, loop trips multiplied in.

    `equation`: its index in the program. `flops`: two a multiply-add. `dtype`: of its wider operand, as numpy names it.
    `bytes`: of its operands and result. `phase`: forward, backward or update. `recomputed`: done a second time, for the
    backward pass. `exact`: False in a `while`, whose trips are not known and count as one.
    """

    equation: int
    flops: int
    dtype: str
    bytes: int
    phase: str
    recomputed: bool
    exact: bool


@dataclass(frozen=True)
class Totals:
    """FLOPs of one step on all devices. `recomputed` is part of `flops`, and in `by_phase` of the backward pass."""

    flops: int
    by_dtype: Mapping[str, int]
    by_phase: Mapping[str, int]
    recomputed: int
    exact: bool


def counted(program: Program, flow: Flow) -> tuple[Work, ...]:
    """The work of every product, bodies included, in the order of the program. Of the branches of a `cond` the one with
    most FLOPs counts, and the others are left out.

    >>> import jax, jax.numpy as jnp
    >>> program = Program(jax.make_jaxpr(jnp.matmul)(jnp.ones((8, 4)), jnp.ones((4, 2))))
    >>> [(w.flops, w.dtype, w.bytes, w.phase) for w in counted(program, Flow(program))]
    [(128, 'float32', 224, 'forward')]
    """
    used = flow.back(results(program), by_anything)
    return tuple(_inside(program.top, phases(program, flow), used.keys()))


def totals(works: Iterable[Work]) -> Totals:
    """The sums of `counted`."""
    works = tuple(works)
    by_dtype: Counter[str] = Counter()
    by_phase: Counter[str] = Counter(dict.fromkeys((FORWARD, BACKWARD, UPDATE), 0))
    for w in works:
        by_dtype[w.dtype] += w.flops
        by_phase[w.phase] += w.flops
    return Totals(
        flops=_flops(works),
        by_dtype=dict(by_dtype),
        by_phase=dict(by_phase),
        recomputed=_flops(w for w in works if w.recomputed),
        exact=all(w.exact for w in works),
    )


def parts(e: Equation, axes_of: Callable[[Value], Sequence[Sequence[str]]], sizes: Mapping[str, int]) -> int:
    """Over how many devices the work of a product is divided: along every mesh axis that divides a dimension of its
    operands or its result, each once (a dimension that is summed over divides the sum).

    `axes_of`: the mesh axes of every dimension of a value. `sizes`: devices along each mesh axis.
    """
    found = (axes_of(v) for v in (*e.ins[:2], e.outs[0]) if v is not None)
    return prod(sizes[a] for a in {a for dims in found for axes in dims for a in axes})


def multiply_adds(e: Equation) -> int:
    """The multiply-adds of a product each time that it runs."""
    left, right, out = map(shape_of, (*e.eqn.invars[:2], e.eqn.outvars[0]))
    return _MULTIPLY_ADDS[e.name](e.params, left, right, out)


def unseen(program: Program) -> tuple[str, ...]:
    """The names of the step's primitives that may do much work of which `counted` knows nothing: kernels, callbacks,
    what a `shard_map` holds, decompositions, Fourier transforms."""
    names = {e.name for e in program.equations}
    return tuple(sorted(n for n in names if n in _UNSEEN or n.startswith(_UNSEEN_ATTENTION)))


def _inside(
    scope: Scope,
    phase: Mapping[int, str],
    used: Container[Value],
    recomputed: bool = False,
    exact: bool = True,
) -> list[Work]:
    found = []
    for e in scope.equations:
        again = recomputed or _REMATTED in str(e.eqn.source_info.name_stack)
        if e.name in _MULTIPLY_ADDS and e.outs[0] in used:
            found.append(_work(e, phase[e.index], again, exact))
        known = exact and e.name != "while"
        bodies = [_inside(door.scope, phase, used, again, known) for door in e.doors]
        for body in [max(bodies, key=_flops)] if e.name == "cond" else bodies:
            found += body
    return found


def results(program: Program) -> list[Value | None]:
    """What a step is run for: its outputs, what decides on branches and trips, and operands of side effects."""
    found = list(program.outputs)
    for e in program.equations:
        if e.name == "cond":
            found.append(e.ins[0])
        elif e.name == "while":
            found += e.doors[1].scope.outs
        elif e.eqn.effects and not e.doors:
            found += e.ins
    return found


def _work(e: Equation, phase: str, recomputed: bool, exact: bool) -> Work:
    avals: list[Any] = [v.aval for v in (*e.eqn.invars, *e.eqn.outvars)]
    dtype = max((a.dtype for a in avals[:2]), key=lambda d: array_bytes((8,), d))
    return Work(
        equation=e.index,
        flops=2 * e.trips * multiply_adds(e),
        dtype=dtype.name,
        bytes=e.trips * sum(map(nbytes, avals)),
        phase=phase,
        recomputed=recomputed,
        exact=exact,
    )


def _flops(works: Iterable[Work]) -> int:
    return sum(w.flops for w in works)


def _free(shape: Shape, used: Iterable[int]) -> int:
    """The product of the dimensions of `shape` that are not `used`."""
    return prod(size for d, size in enumerate(shape) if d not in set(used))


def _dot(params: dict[str, Any], left: Shape, right: Shape, _out: Shape) -> int:
    (_, contracted), (_, batch) = params["dimension_numbers"]
    return prod(left) * _free(right, (*contracted, *batch))


def _ragged_dot(params: dict[str, Any], left: Shape, right: Shape, _out: Shape) -> int:
    """Each row (or element summed over) belongs to one group and meets that group's part of `right` alone."""
    numbers = params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    return prod(left) * _free(right, (*contracted, *batch, *numbers.rhs_group_dimensions))


def _scaled_matmul(_params: dict[str, Any], left: Shape, right: Shape, _out: Shape) -> int:
    """(batch, rows, depth) and (batch, columns, depth)."""
    return prod(left) * right[1]


def _conv(params: dict[str, Any], left: Shape, right: Shape, out: Shape) -> int:
    """As XLA's cost analysis: what meets padding, or the zeros between dilated elements, is not counted."""
    numbers = params["dimension_numbers"]
    (batch, channels, *space), (_, _, *window), (_, made, *places) = numbers
    meetings = [
        _meetings(left[i], (right[k], dilation), (out[o], stride), low, spread)
        for i, k, o, dilation, stride, (low, _), spread in zip(
            space,
            window,
            places,
            params["rhs_dilation"],
            params["window_strides"],
            params["padding"],
            params["lhs_dilation"],
            strict=True,
        )
    ]
    examples = left[batch] // params["batch_group_count"]
    return examples * left[channels] // params["feature_group_count"] * out[made] * prod(meetings)


def _meetings(size: int, window: tuple[int, int], places: tuple[int, int], low: int, spread: int) -> int:
    """How many pairs (element of the window, place of the window) of one dimension meet an element of the input.

    Element k at place o meets `o * stride + k * dilation - low`; the input's elements lie `spread` apart. `window` and
    `places`: how many there are, and their distance.
    """
    (few, step), (many, stride) = sorted((window, places))
    positions = stride * np.arange(many) - low
    found = 0
    for k in range(few):
        at = positions + step * k
        found += np.count_nonzero((at >= 0) & (at <= (size - 1) * spread) & (at % spread == 0))
    return int(found)


_MULTIPLY_ADDS: dict[str, Callable[[dict[str, Any], Shape, Shape, Shape], int]] = {
    "dot_general": _dot,
    "scaled_dot": _dot,
    "ragged_dot_general": _ragged_dot,
    "scaled_matmul_wrapper": _scaled_matmul,
    "conv_general_dilated": _conv,
}
