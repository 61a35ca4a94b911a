"""Tables with a row for each group, of which each sorted row looks up its group's: the biases of experts."""

from .ir import Equation, Value
from .orders import Orders


def group_rows(orders: Orders, e: Equation) -> tuple[int, int] | None:
    """The order whose rows `e` looks up in such a table, or adds up in one that is zero, and the table's dimension
    that counts groups; None where it does neither.

    Biases `b[experts[order]]`, where `order` sorts `experts`, and their gradient.
    """
    sums = e.primitive.scatters and e.primitive.adds
    index = e.ins[1] if sums or e.primitive.gathers else None
    order = None if index is None else orders.sorted_by(index)
    if order is None or not by_key(orders, order, index):
        return None
    dn = e.params["dimension_numbers"]
    rows, gone = (
        (dn.scatter_dims_to_operand_dims, dn.inserted_window_dims)
        if sums
        else (dn.start_index_map, dn.collapsed_slice_dims)
    )
    one = tuple(rows) == tuple(gone) and len(rows) == 1
    if not one or (sums and orders.counts.constants.operand(e, 0) != 0):
        return None
    return order, rows[0]


def by_key(orders: Orders, order: int, index: Value | None) -> bool:
    """Are the numbers of `index` those that an order sorted by, so that each row's is its group?"""
    root = index_root(orders, index)
    e = None if root is None else orders.program.maker.get(root)
    if root is None or e is None:
        return False
    of, lookup = None, orders.lookups.get(e.index)
    if orders.sorts.get(e.index) == order:
        of = e.ins[e.outs.index(root)]
    elif lookup is not None and lookup.order == order and lookup.into and lookup.each == 1:
        of = e.ins[0] if e.primitive.gathers else None
    return of is not None and orders.counts.same(of, orders.program.equations[order].ins[0])


def index_root(orders: Orders, index: Value | None) -> Value | None:
    """The value whose numbers `index` has, under other dimensions or counted from the end."""
    value, root = None, orders.counts.inner(index)
    while root is not None and root != value:
        value, e = root, orders.program.maker.get(root)
        if e is not None and (before := orders.counts.relaid_from(e)) is not None:
            root = orders.counts.inner(before)
    return value
