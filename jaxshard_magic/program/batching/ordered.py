"""How rows follow the batch while they are sorted: as rows do that are not, each with its own place in another order.

A label says of sorted rows what it says of rows: which of them are of which example is known to `Orders` alone. What
`Orders` follows to an end is the same for any batch that is sorted by itself, and only what leaves an order is known
outside of it.
"""

from fractions import Fraction

from ..order_states import Known, Lookup, Numbers, Sorted
from ..orders import Orders
from .examples import CONSTANT, Label, Ordered, Rows, Sum
from .rules import lost
from .site import Lost, Site, scale_of


def known(site: Site, small: Orders, large: Orders) -> list[Label] | None:
    """The labels of results that are one number everywhere, the same in both programs; None for others."""
    pairs = zip(site.e.outs, site.f.outs, strict=True)
    states = [(small.of.get(v), large.of.get(w)) for v, w in pairs]
    if not all(isinstance(a, Known) and isinstance(b, Known) and a.number == b.number for a, b in states):
        return None
    dim = site.varying() if states else None
    labels: list[Label] = [CONSTANT if dim is None else Rows(dim)] * len(states)
    return labels


def follow(site: Site, small: Orders, large: Orders) -> list[Label]:
    """The labels of the results of an equation that has to do with an order, in both programs."""
    e, f = site.e, site.f
    states = [small.of.get(v) for v in e.outs]
    if any(type(a) is not type(large.of.get(v)) for a, v in zip(states, f.outs, strict=True)):
        raise Lost
    if e.index in small.sorts or e.index in small.backs:
        return [_sorted(site, k, back=e.index in small.backs) for k in range(len(e.outs))]
    if e.index in small.lookups:
        return [_looked_up(site, small.lookups[e.index], large.lookups.get(f.index))]
    if e.index in small.products:
        return [_product(site)]
    if any(isinstance(s, Numbers) for s in states):
        return [Ordered(s.dim) if isinstance(s, Numbers) else _lost() for s in states]
    if not all(s is None or isinstance(s, (Sorted, Known)) for s in states):
        raise Lost
    found = (e.primitive.follow or lost)(site)
    labels = found if isinstance(found, list) else [found] * len(e.outs)
    if any(
        isinstance(s, Sorted) and x != Rows(s.dim, _scale(x)) for s, x in zip(states, labels, strict=True)
    ):
        raise Lost
    return labels


def _lost() -> Label:
    raise Lost


def _scale(label: Label) -> Fraction:
    return label.scale if isinstance(label, Rows) else Fraction(1)


def _sorted(site: Site, k: int, back: bool) -> Label:
    """Keys as they are, or the order that they had; what is sorted with them."""
    label = site.labels[k]
    if k == 0 and not back:
        label = site.exact(0)
        if not isinstance(label, Rows):
            raise Lost
    return label if isinstance(label, Rows) else Ordered(0)


def _looked_up(site: Site, lookup: Lookup, other: Lookup | None) -> Label:
    """Rows of the batch that are brought into an order, or back."""
    e = site.e
    if other is None or (lookup.into, lookup.each) != (other.into, other.each):
        raise Lost
    if not e.primitive.scatters:
        dn, operand = site.params["dimension_numbers"], site.labels[0]
        (looked,) = dn.start_index_map
        spots = [d for d in range(len(site.out)) if d not in dn.offset_dims]
        if not isinstance(operand, Rows) or operand.dim != looked or len(spots) != 1:
            raise Lost
        return Rows(spots[0], operand.scale)
    dn, (operand, updates) = site.params["dimension_numbers"], site.labels[::2]
    (rows,) = dn.scatter_dims_to_operand_dims
    spots = [d for d in range(len(site.shape(2))) if d not in dn.update_window_dims]
    if not isinstance(updates, Rows) or [updates.dim] != spots:
        raise Lost
    if site.zero(0):
        return Rows(rows, updates.scale)
    if not isinstance(operand, Rows) or operand.dim != rows:
        raise Lost
    site.scale(2, updates.scale / operand.scale)
    return operand


def _product(site: Site) -> Label:
    """Rows meet the matrix of their group, or are summed over group by group."""
    c, (left, right) = site.e.contraction, site.labels[:2]
    assert c is not None
    scale = scale_of((left, right), (1, 1))
    if isinstance(left, Rows) and isinstance(right, Rows) and (left.dim, right.dim) in c.contracted:
        return Sum(scale)
    if not isinstance(left, Rows) or isinstance(right, (Rows, Sum)):
        raise Lost
    return Rows(next(out for d, out in c.left if d == left.dim), scale)
