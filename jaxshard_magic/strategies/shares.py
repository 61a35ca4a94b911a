"""One device's share of a step's products under a layout."""

from collections.abc import Iterable

from ..plan import Share
from ..program.flops import Work, parts
from .layout import Layout


def shares(layout: Layout, works: Iterable[Work]) -> tuple[Share, ...]:
    """The part of each product that one device does, with the weights gathered and the activations divided as `Hold`
    holds them."""
    return tuple(_share(layout, work) for work in works)


def _share(layout: Layout, work: Work) -> Share:
    e = layout.program.equations[work.equation]
    tensors = [v for v in (*e.ins[:2], e.outs[0]) if v is not None]
    size = {v: layout.bytes_of(v, layout.used(v)) for v in tensors}
    divided = parts(e, layout.used, layout.mesh.shape)
    return Share(
        work.flops // divided,
        e.trips * sum(size[v] for v in tensors),
        work.dtype,
        work.recomputed,
        work.exact,
        e.trips * sum(size[v] for v in tensors if not layout.batchy(v)),
    )
