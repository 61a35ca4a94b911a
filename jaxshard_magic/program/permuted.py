"""Where a dimension goes through an equation that treats its places alike, in whatever order they are.

A permutation of the places of some operands is one of some results, or of none where it sums over them. Of an equation
for which that does not hold, or of which it is not known, nothing is said. It is read off sharding rules, but for
places that were merged with others, and for attention.
"""

from dataclasses import replace

from .ir import Equation
from .primitives.factors import Factors, Place
from .primitives.primitive import Kind
from .primitives.sharding_rules import Role

Slots = dict[int, Place]  # by operand, then by result


def follow(e: Equation, slot: int, place: Place) -> Slots | None:
    """Return the operands and results of `e` whose places change with those of the one at `slot`.

    None where others than these would change, too. For equations without bodies.
    """
    if e.primitive.kind is Kind.ATTENTION:
        return _attention(e, slot, place)
    if e.factors is not None:
        return _under_other_dimensions(e.factors, slot, place)
    shared = (s for s in e.sharding_rule.shared if s.role is not Role.LINKED)
    dims = next((s.dims for s in shared if s.dims.get(slot) == place.dim), None)
    return None if dims is None else {k: replace(place, dim=d) for k, d in dims.items()}


def together(e: Equation, places: Slots) -> bool:
    """Return whether `e` makes the same of its operands in another order of these `places`, but for that order."""
    if e.primitive.kind is Kind.EACH:  # pairs that have nothing to do with each other
        return all(
            places.get(k) == place for s in places for k, place in (follow(e, s, places[s]) or {}).items()
        )
    slot = next(iter(places))
    return follow(e, slot, places[slot]) == places


def in_order(e: Equation, slot: int) -> bool:
    """Return whether an operand is read in its own order, whatever that of the others: masks of attention."""
    return e.primitive.kind is Kind.ATTENTION and first_mask(e) <= slot < len(e.ins)


def first_mask(e: Equation) -> int:
    """Return how many operands an attention has before those of its mask."""
    return 7 if e.name == "attention_gradient" else 3


def _under_other_dimensions(factors: Factors, slot: int, place: Place) -> Slots | None:
    """Follow places through a reshape or the like, also those that are merged with others."""
    factors = factors.inverse if slot else factors
    if place.dim in factors.inverse.repeated:
        return {slot: place}
    found = factors.moved(place)
    return None if found is None else {slot: place, 1 - slot: found}


def _attention(e: Equation, slot: int, place: Place) -> Slots | None:
    """All have positions before the width, numbers of queries last; those of keys are taken for those of queries."""
    out, masks = len(e.ins), first_mask(e)
    numbers = (4, 5, 6) if masks == 7 else (out + 1, out + 2)
    found = {
        k: replace(place, dim=len(shape) - (1 if k in numbers else 2))
        for k, shape in enumerate(e.shapes)
        if not masks <= k < out
    }
    return found if found.get(slot) == place and place.inner == 1 else None
