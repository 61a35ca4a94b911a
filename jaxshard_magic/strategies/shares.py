"""What one device does of a step's products under a layout."""

from collections.abc import Iterable, Sequence
from math import prod

from ..plan import Share
from ..program.flops import Work, parts
from ..program.ir import Value
from ..program.sizes import nbytes
from .layout import Axes, Layout


def shares(layout: Layout, works: Iterable[Work]) -> tuple[Share, ...]:
    """The part of each product that one device does, with the weights gathered and the activations divided as `Hold`
    holds them."""
    return tuple(_share(layout, work) for work in works)


def _share(layout: Layout, work: Work) -> Share:
    e = layout.program.equations[work.equation]
    tensors = [v for v in (*e.ins[:2], e.outs[0]) if v is not None]
    held = {v: nbytes(layout.program.avals[v]) // _count(layout, _axes_of(layout, v)) for v in tensors}
    divided = parts(e, lambda v: _axes_of(layout, v), layout.mesh.shape)
    return Share(
        work.flops // divided,
        e.trips * sum(held[v] for v in tensors),
        work.dtype,
        work.recomputed,
        work.exact,
        e.trips * sum(held[v] for v in tensors if not layout.batchy(v)),
    )


def _axes_of(layout: Layout, value: Value) -> Sequence[Axes]:
    return layout.active(value) if layout.batchy(value) else layout.in_use(value)


def _count(layout: Layout, spec: Sequence[Axes]) -> int:
    return prod(layout.count(axes) for axes in spec)
