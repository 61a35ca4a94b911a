"""How one value's positions get from their order into that of a causal ring, and back."""

from collections.abc import Iterator
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..plan import Sent
from ..program.ir import Value
from ..program.labels import DEAL
from ..program.permuted import Place
from .changes import read_narrow
from .layout import Axes, Layout, partition_spec, without
from .ring import Ring, dealt, parts_in_order, put_back


def moved(layout: Layout, v: Value, x: Any, place: Place, *, by_parts: bool, back: bool) -> Any:
    """The array `x`, which stands for the value `v`, with its positions in the other order.

    Args:
        layout: with its positions divided.
        v: what it stands for.
        place: where that has positions.
        by_parts: from device to device, each part by itself (`goes_by_parts`); else each device takes its own of all.
        back: into their order, out of that of a ring.
    """
    axes, n = layout.sequence_axes, layout.count(layout.sequence_axes)
    if not layout.batchy(v):
        whole = layout.pin(x, layout.in_use(v)) if any(layout.at_rest(v)) else jnp.asarray(x)
        return _rearranged(whole, place, n, back)
    spec = layout.active(v)
    if not by_parts:
        with jax.named_scope(DEAL):
            whole = layout.pin(x, without(spec, axes))
            return layout.pin(_rearranged(whole, place, n, back), spec)
    ring, move, on = (
        Ring(axes, n, place.count, n, zigzag=True),
        put_back if back else dealt,
        partition_spec(spec),
    )
    around = jax.shard_map(
        lambda own: move(ring, own, place.dim), mesh=layout.mesh, in_specs=on, out_specs=on, check_vma=False
    )
    return around(layout.pin(x, spec))


def sent(layout: Layout, v: Value, place: Place, trips: int, *, by_parts: bool) -> Iterator[Sent]:
    """The collectives of `moved`."""
    axes = layout.sequence_axes
    if not layout.batchy(v):
        return
    share = 2 if read_narrow(layout, v, layout.active(v)) else 1
    if by_parts:
        size = layout.moving(v, layout.active(v)) // share // 2
        yield Sent("collective-permute", axes, layout.count(axes), size, 2 * trips)
    elif gone := _divided_over(layout, v, place):
        size = layout.moving(v, without(layout.active(v), gone)) // share
        yield Sent("all-gather", gone, layout.count(gone), size, trips)


def has_parts(layout: Layout, v: Value, place: Place) -> bool:
    """Has every device two parts of the positions, and more than a number for each: of tokens and the like it is
    cheaper to have all at once."""
    if not layout.batchy(v):
        return False
    shape, examples = layout.program.shapes[v], layout.batch.classes
    each = prod(
        size
        for d, (size, c) in enumerate(zip(shape, layout.dims.of(v), strict=True))
        if d != place.dim and c not in examples
    )
    own = layout.active(v)[place.dim] == layout.sequence_axes and shape[place.dim] == place.count
    return each > 1 and own


def _divided_over(layout: Layout, v: Value, place: Place) -> Axes:
    """Over which axes the positions of a value lie divided: what is cut from an input that is whole is whole."""
    source = v
    while (e := layout.program.maker.get(source)) is not None and e.primitive.moves and e.ins[0] is not None:
        source = e.ins[0]
    whole = source in layout.program.inputs and not set(layout.sequence_axes).intersection(
        a for has in layout.active(source) for a in has
    )
    return () if whole else tuple(a for a in layout.active(v)[place.dim] if a in layout.sequence_axes)


def _rearranged(x: Any, place: Place, devices: int, back: bool) -> Any:
    """Whole parts in another order."""
    order = np.asarray(parts_in_order(devices))
    order, shape, d = np.argsort(order) if back else order, x.shape, place.dim
    outer = shape[d] // (place.count * place.inner)
    each = place.count * place.inner // (2 * devices)
    parts = x.reshape(*shape[:d], outer, 2 * devices, each, *shape[d + 1 :])
    return jnp.take(parts, order, d + 1, mode="clip", unique_indices=True).reshape(shape)
