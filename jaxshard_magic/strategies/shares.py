"""One device's share of a step's products under a layout."""

from collections.abc import Iterable, Sequence
from functools import partial
from math import prod

from jax import lax

from ..plan import Share
from ..program.flops import Work, parts
from ..program.ir import Equation, Value
from .layout import Layout

# How often a TPU multiplies bfloat16 for a product of float32 (the docstring of `jax.lax.Precision`).
_PASSES = {lax.Precision.HIGH: 3, lax.Precision.HIGHEST: 6}


def shares(layout: Layout, works: Iterable[Work]) -> tuple[Share, ...]:
    """The part of each product that one device does, with the weights gathered and the activations divided as `Hold`
    holds them."""
    return tuple(_share(layout, work) for work in works)


def _share(layout: Layout, work: Work) -> Share:
    e = layout.program.equations[work.equation]
    tensors = [v for v in (*e.ins[:2], e.outs[0]) if v is not None]
    size = {v: layout.bytes_of(v, layout.read(e, v)) for v in tensors}
    divided, trips = parts(e, partial(layout.read, e), layout.mesh.shape), e.trips
    if layout.experts is not None and e.index in layout.experts.inside:
        own = layout.count(layout.experts.axes)
        divided, trips = divided * own, trips // own
    return Share(
        work.flops // divided,
        trips * sum(size[v] for v in tensors),
        work.dtype,
        work.recomputed,
        work.exact,
        trips * sum(size[v] for v in tensors if not layout.batchy(v)),
        _dims(layout, e),
        _passes(e, work.dtype),
    )


def _dims(layout: Layout, e: Equation) -> tuple[int, int, int] | None:
    """Rows, columns and what is summed over, of one of the matrices that a device multiplies; under a window every
    place is a row, and what the window covers is summed over. None where groups have matrices of their own."""
    c, out = e.contraction, e.outs[0]
    left, right = e.ins[:2]
    if c is None or left is None or right is None or c.grouped is not None or c.ragged is not None:
        return None
    ours, theirs, made = (_sizes(layout, e, v) for v in (left, right, out))
    rows = [ours[d] for d, _ in c.left] + [made[d] for *_, d in c.windowed]
    summed = [min(ours[a], theirs[b]) for a, b in c.contracted] + [theirs[d] for _, d, _ in c.windowed]
    return prod(rows), prod(theirs[d] for d, _ in c.right), prod(summed)


def _sizes(layout: Layout, e: Equation, v: Value) -> Sequence[int]:
    """The dimensions of what one device has of a value where `e` works with it."""
    pairs = zip(layout.program.shapes[v], layout.read(e, v), strict=True)
    return [-(-size // layout.count(axes)) for size, axes in pairs]


def _passes(e: Equation, dtype: str) -> int:
    precision = e.params.get("precision")
    given = precision if isinstance(precision, tuple) else (precision,)
    asked = [_PASSES.get(p, 1) for p in given if isinstance(p, lax.Precision)]
    return max(asked, default=1) if dtype == "float32" else 1
