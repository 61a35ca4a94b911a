"""The collectives of a sum over what the mesh divides: where its result must lie says which."""

from collections.abc import Iterator

import jax.numpy as jnp

from ..plan import Sent
from ..program.ir import Value
from .layout import Axes, Layout, without
from .stepwise import scatters_sent, sent_in_pieces


def activation_sum(layout: Layout, value: Value, over: Axes, trips: int) -> Sent:
    """Adding up an activation over the mesh axes `over`: scattered where these divide its positions."""
    spec = layout.active(value)
    lying = {a for axes in spec for a in axes}
    into = tuple(a for a in over if a in lying)
    size = layout.bytes_of(value, without(spec, into))
    if layout.simulated and layout.program.avals[value].dtype == jnp.bfloat16:
        size *= 2  # the CPU adds them up in float32
    return Sent("reduce-scatter" if into else "all-reduce", over, layout.count(over), size, trips)


def gradient_sum(
    layout: Layout,
    value: Value,
    over: Axes,
    trips: int,
    *,
    whole: bool = False,
    by_hand: bool = False,
    rows: int = 0,
) -> Iterator[Sent]:
    """A sum over the examples, brought to where its parameter rests: scattered over the axes that divide it, `by_hand`
    or by the compiler, added up over the others, or added up as a `whole`. `rows`: of a product, how many each device
    adds up."""
    rest = [] if whole else layout.at_rest(value)
    store = tuple(a for axes in rest for a in axes if a in over)
    others = tuple(a for a in over if a not in store)
    size = layout.bytes_of(value, layout.in_use(value))
    if store:
        dtype = layout.program.avals[value].dtype
        pieces = sent_in_pieces(layout, store, rows, dtype)
        yield from scatters_sent(layout, store, size, trips, by_hand=by_hand, pieces=pieces)
        size //= layout.count(store)
    if others:
        yield Sent("all-reduce", others, layout.count(others), size, trips)
