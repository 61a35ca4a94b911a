"""Permutation equivariance of equations: follow a permuted dimension from an operand to results, and back.

A permutation of positions along dimensions of some operands becomes a permutation of some results, or vanishes in a
sum. Equations without this property, and unknown equations, give None. Read from sharding rules, except for merged
dimensions (see `primitives/factors`) and attention.
"""

from dataclasses import replace

from .ir import Equation
from .primitives.factors import Factors, SubDimension
from .primitives.primitive import Kind
from .primitives.sharding_rules import Role

PlacesBySlot = dict[int, SubDimension]  # slots: operands, then results


def follow_permutation(e: Equation, slot: int, place: SubDimension) -> PlacesBySlot | None:
    """Return the positions, by operand and then by result, permuted along with `place` of slot `slot`.

    Args:
        e: Equation without bodies.
        slot: Number of the operand; results follow operands.
        place: Permuted dimension.

    Returns:
        None if the permutation would change anything else as well.
    """
    if e.primitive.kind is Kind.ATTENTION:
        return _through_attention(e, slot, place)
    if e.factors is not None:
        return _through_factors(e.factors, slot, place)
    shared = (s for s in e.sharding_rule.shared if s.role is not Role.LINKED)
    dims = next((s.dims for s in shared if s.dims.get(slot) == place.dim), None)
    return None if dims is None else {k: replace(place, dim=d) for k, d in dims.items()}


def is_equivariant(e: Equation, places: PlacesBySlot) -> bool:
    """Return whether permuting `places` of operands and results leaves `e` the same function.

    Args:
        e: Equation without bodies.
        places: Permuted dimension, by slot.
    """
    if e.primitive.kind is Kind.PASS_THROUGH:  # its pairs of operand and result are independent
        return all(
            places.get(k) == place for s in places for k, place in (follow_permutation(e, s, places[s]) or {}).items()
        )
    slot = next(iter(places))
    return follow_permutation(e, slot, places[slot]) == places


def is_attention_mask(e: Equation, slot: int) -> bool:
    """Return whether an operand is an attention's mask: read in an order of its own, whatever that of the others."""
    return e.primitive.kind is Kind.ATTENTION and first_mask_slot(e) <= slot < len(e.operands)


def first_mask_slot(e: Equation) -> int:
    """Return the number of operands of an attention ahead of those of its mask."""
    return 7 if e.name == "attention_gradient" else 3


def _through_factors(factors: Factors, slot: int, place: SubDimension) -> PlacesBySlot | None:
    """Follow positions through a reshape or the like, including positions merged with other dimensions."""
    factors = factors.inverse if slot else factors
    # Numbers along a broadcast dimension are equal, so its permutation changes nothing else.
    if place.dim in factors.inverse.repeated_dims:
        return {slot: place}
    found = factors.map_to_result(place)
    return None if found is None else {slot: place, 1 - slot: found}


def _through_attention(e: Equation, slot: int, place: SubDimension) -> PlacesBySlot | None:
    """Follow positions through an attention.

    Positions come just before the width; position numbers have them last. Positions of keys count as those of queries.
    """
    n_operands, first_mask = len(e.operands), first_mask_slot(e)
    position_slots = (4, 5, 6) if first_mask == 7 else (n_operands + 1, n_operands + 2)
    places = {
        k: replace(place, dim=len(shape) - (1 if k in position_slots else 2))
        for k, shape in enumerate(e.shapes)
        if not first_mask <= k < n_operands
    }
    return places if places.get(slot) == place and place.stride == 1 else None
