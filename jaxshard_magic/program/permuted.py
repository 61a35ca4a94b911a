"""Where a dimension goes through an equation that treats its places alike, in whatever order they are.

A permutation of the places of some operands is one of some results, or of none where it sums over them. Of an equation
for which that does not hold, or of which it is not known, nothing is said.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from .ir import Equation
from .primitives import shape_of
from .primitives.dims import along, reduced
from .primitives.factors import Place
from .primitives.primitive import Kind

Slots = dict[int, Place]  # by operand, then by result


def follow(e: Equation, slot: int, place: Place) -> Slots | None:
    """The operands and results of `e` whose places change with those of the one at `slot`.

    None where others than these would change, too. For equations without bodies.
    """
    rule = _RULES.get(e.primitive.kind)
    return None if rule is None else rule(_Site(e), slot, place)


def together(e: Equation, places: Slots) -> bool:
    """Whether `e` makes the same of its operands in another order of these `places`, but for that order."""
    if e.primitive.kind is Kind.EACH:
        return all(
            places.get(k) == place for s in places for k, place in _each(_Site(e), s, places[s]).items()
        )
    slot = next(iter(places))
    return follow(e, slot, places[slot]) == places


def in_order(e: Equation, slot: int) -> bool:
    """Whether an operand is read in its own order, whatever the order of the others: masks of attention."""
    return e.primitive.kind is Kind.ATTENTION and first_mask(e) <= slot < len(e.ins)


def first_mask(e: Equation) -> int:
    """How many operands an attention has before those of its mask."""
    return 7 if e.name == "attention_gradient" else 3


class _Site:
    """An equation with the shapes of its operands and results; `out`: the slot of its first result."""

    def __init__(self, e: Equation):
        self.name, self.params, self.primitive = e.name, e.params, e.primitive
        self.contraction, self.factors = e.contraction, e.factors
        self.shapes = [shape_of(x) for x in (*e.eqn.invars, *e.eqn.outvars)]
        self.out = len(e.ins)
        self.masks = first_mask(e) if e.primitive.kind is Kind.ATTENTION else self.out


def _elementwise(e: _Site, slot: int, place: Place) -> Slots | None:
    """Numbers, and dimensions of one, meet all places."""
    ranks = {len(shape) for shape in e.shapes if shape}
    size = e.shapes[slot][place.dim]
    at = {k: shape[place.dim] for k, shape in enumerate(e.shapes) if len(ranks) == 1 and shape}
    return (
        dict.fromkeys((k for k in at if at[k] == size), place)
        if {*at.values()} in ({size}, {1, size})
        else None
    )


def _each(e: _Site, slot: int, place: Place) -> Slots:
    return {slot: place, (slot + e.out if slot < e.out else slot - e.out): place}


def _shape(e: _Site, slot: int, place: Place) -> Slots | None:
    factors = e.factors if slot == 0 or e.factors is None else e.factors.inverse
    if factors is None or slot not in (0, e.out):
        return None
    if place.dim in factors.inverse.repeated:
        return {slot: place}
    found = factors.moved(place)
    return None if found is None else {slot: place, e.out - slot: found}


def _product(e: _Site, slot: int, place: Place) -> Slots | None:
    c = e.contraction
    if c is None or c.ragged is not None or c.grouped is not None or e.out != 2:
        return None
    groups = [
        *({0: a, 1: b} for a, b in c.contracted),
        *({0: a, 1: b, 2: o} for a, b, o in c.batch),
        *({0: a, 2: o} for a, o in c.left),
        *({1: b, 2: o} for b, o in c.right),
    ]
    found = next((dims for dims in groups if dims.get(slot) == place.dim), None)
    return None if found is None else {k: replace(place, dim=d) for k, d in found.items()}


def _attention(e: _Site, slot: int, place: Place) -> Slots | None:
    """All have positions before the width, numbers of queries last; those of keys are taken for those of queries."""
    numbers = (4, 5, 6) if e.masks == 7 else (e.out + 1, e.out + 2)
    found = {
        k: replace(place, dim=len(e.shapes[k]) - (1 if k in numbers else 2))
        for k in range(len(e.shapes))
        if not e.masks <= k < e.out
    }
    return found if found.get(slot) == place and place.inner == 1 else None


def _reduction(e: _Site, slot: int, place: Place) -> Slots | None:
    if e.out != 1:
        return None
    gone = reduced(e.params)
    kept = [d for d in range(len(e.shapes[0])) if d not in gone]
    if slot == 0 and place.dim in gone:
        return {0: place} if e.primitive.reduces else None
    d = kept[place.dim] if slot else place.dim
    return {0: replace(place, dim=d), 1: replace(place, dim=kept.index(d))}


def _along(e: _Site, slot: int, place: Place) -> Slots | None:
    """Alike at all places of other dimensions than the one that it works along."""
    if place.dim in along(e.params, len(e.shapes[slot])):
        return None
    same = all(len(shape) == len(e.shapes[slot]) for shape in e.shapes)
    return dict.fromkeys(range(len(e.shapes)), place) if same else None


def _cut(e: _Site, slot: int, place: Place) -> Slots | None:
    """What leaves the dimension whole."""
    d, size, params = place.dim, e.shapes[slot][place.dim], e.params
    taken: Sequence[int] = (0, e.out)
    if e.name == "slice":
        steps = params["strides"]
        whole = params["start_indices"][d] == 0 and e.shapes[0][d] == e.shapes[e.out][d] == size
        whole = whole and (steps is None or steps[d] == 1)
    elif e.name == "pad":
        whole = tuple(params["padding_config"][d]) == (0, 0, 0)
    elif e.name in ("dynamic_slice", "dynamic_update_slice"):
        taken = (0, e.out) if e.name == "dynamic_slice" else (0, 1, e.out)
        whole = all(e.shapes[k][d] == size for k in taken)
    elif e.name in ("concatenate", "split"):
        taken, whole = range(len(e.shapes)), d not in along(params, len(e.shapes[slot]))
    else:
        whole = e.name == "rev" and d not in params["dimensions"]
    return dict.fromkeys(taken, place) if whole and slot in taken else None


def _lookup(e: _Site, slot: int, place: Place) -> Slots | None:
    if e.params.get("indices_are_sorted"):
        return None
    groups = _looked_up(e) if e.name == "gather" else _put(e)
    found = next((dims for dims in groups if dims.get(slot) == place.dim), None)
    return None if found is None else {k: replace(place, dim=d) for k, d in found.items()}


def _looked_up(e: _Site) -> list[dict[int, int]]:
    """The dimensions of operand, index and result that are one dimension, each place looked up by itself."""
    dn, (operand, index, out) = e.params["dimension_numbers"], e.shapes
    gone = (*dn.collapsed_slice_dims, *dn.operand_batching_dims)
    sliced = [d for d in range(len(operand)) if d not in gone]
    whole = [
        {0: d, 2: o}
        for d, o in zip(sliced, dn.offset_dims, strict=True)
        if e.params["slice_sizes"][d] == operand[d]
    ]
    spots = [o for o in range(len(out)) if o not in dn.offset_dims]
    own = dict(zip(dn.start_indices_batching_dims, dn.operand_batching_dims, strict=True))
    rows = [{1: i, 2: spots[i]} | ({0: own[i]} if i in own else {}) for i in range(len(index) - 1)]
    return [*whole, *rows]


def _put(e: _Site) -> list[dict[int, int]]:
    """The same of operand, index, updates and result; where updates of all places are added, of the first three."""
    dn, (operand, index, updates) = e.params["dimension_numbers"], e.shapes[:3]
    gone = (*dn.inserted_window_dims, *dn.operand_batching_dims)
    window = [d for d in range(len(operand)) if d not in gone]
    whole = [
        {0: d, 2: u, 3: d}
        for d, u in zip(window, dn.update_window_dims, strict=True)
        if updates[u] == operand[d]
    ]
    spots = [u for u in range(len(updates)) if u not in dn.update_window_dims]
    own = dict(zip(dn.scatter_indices_batching_dims, dn.operand_batching_dims, strict=True))
    rows = [
        {1: i, 2: spots[i]} | ({0: own[i], 3: own[i]} if i in own else {})
        for i in range(len(index) - 1)
        if i in own or e.primitive.adds
    ]
    return [*whole, *rows]


_RULES: dict[Kind, Callable[[_Site, int, Place], Slots | None]] = {
    Kind.ELEMENTWISE: _elementwise,
    Kind.EACH: _each,
    Kind.SHAPE: _shape,
    Kind.PRODUCT: _product,
    Kind.ATTENTION: _attention,
    Kind.REDUCTION: _reduction,
    Kind.RUNNING: _along,
    Kind.ORDER: _along,
    Kind.CUT: _cut,
    Kind.LOOKUP: _lookup,
}
