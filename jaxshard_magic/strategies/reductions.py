"""The collectives of a sum over what the mesh divides: where its result must lie says which."""

from collections.abc import Iterable, Iterator, Sequence

from ..plan import Sent
from ..program.ir import Equation, Value
from .layout import Axes, Layout, Spec, without
from .stepwise import scatters_sent, sent_in_pieces


def summed_over(layout: Layout, e: Equation) -> list[Axes]:
    """The mesh axes that `e` leaves a sum over, of each dimension that it contracts, reduces or looks up."""
    if (c := e.contraction) is not None:
        left, right = (layout.at(e, v) for v in e.ins[:2])
        return [tuple(a for a in left[i] if a in right[j]) for i, j in c.contracted]
    if e.primitive.reduces:
        spec = layout.at(e, e.ins[0])
        return [spec[d] for d in e.params["axes"]]
    adds = e.primitive.scatters and e.primitive.adds
    if adds and not layout.batchy(e.ins[0]) and layout.batchy(e.ins[2]):
        window = e.params["dimension_numbers"].update_window_dims
        return [axes for d, axes in enumerate(layout.used(e.ins[2])) if d not in window]
    if e.primitive.gathers and layout.batchy(e.outs[0]):
        spec = layout.used(e.ins[0])
        return [spec[d] for d in e.params["dimension_numbers"].start_index_map if d < len(spec)]
    return []


def activation_sum(
    layout: Layout,
    value: Value,
    over: Axes,
    trips: int,
    *,
    by_hand: bool = False,
    by_dim: Sequence[Axes] = (),
    made: Spec | None = None,
) -> Iterator[Sent]:
    """Adding up an activation over the mesh axes `over`: scattered where these divide it then, `by_hand` or by the
    compiler. `by_dim`: as of `gradient_sum`; `made`: how it lies where it is made, None for as it is wanted."""
    spec = layout.active(value)
    lying = {a for axes in spec for a in axes}
    into = tuple(a for a in over if a in lying)
    size = layout.moving(value, without(spec if made is None else made, into))
    if into and (by_hand or not layout.simulated):  # XLA for the CPU adds up all by itself, then slices
        yield Sent("reduce-scatter", over, layout.count(over), size, trips)
        return
    for axes in one_by_one(layout, over, by_dim):
        yield Sent("all-reduce", axes, layout.count(axes), size, trips)


def gradient_sum(
    layout: Layout,
    value: Value,
    over: Axes,
    trips: int,
    *,
    whole: bool = False,
    by_hand: bool = False,
    rows: int = 0,
    by_dim: Sequence[Axes] = (),
) -> Iterator[Sent]:
    """A sum over the examples, brought to where its parameter rests: scattered over the axes that divide it, `by_hand`
    or by the compiler, added up over the others, or added up as a `whole`. `rows`: of a product, how many each device
    adds up. `by_dim`: the axes of each dimension that the compiler adds up along, where it does."""
    rest = [] if whole else layout.at_rest(value)
    store = tuple(a for axes in rest for a in axes if a in over)
    others = tuple(a for a in over if a not in store)
    size = layout.moving(value, layout.in_use(value))
    if store:
        dtype = layout.program.avals[value].dtype
        pieces = sent_in_pieces(layout, store, rows, dtype)
        yield from scatters_sent(layout, store, size, trips, by_hand=by_hand, pieces=pieces)
        size //= layout.count(store)
    for axes in one_by_one(layout, others, () if store else by_dim):
        yield Sent("all-reduce", axes, layout.count(axes), size, trips)


def one_by_one(layout: Layout, over: Axes, by_dim: Sequence[Axes]) -> Iterable[Axes]:
    """The axes of each collective of a sum over `over`, which divide several dimensions, each by those of `by_dim`: XLA
    for the CPU adds up along one after the other where nothing is scattered, other compilers make one sum of it."""
    if not layout.simulated or not by_dim:
        return (over,) if over else ()
    return filter(None, (tuple(a for a in axes if a in over) for axes in by_dim))
