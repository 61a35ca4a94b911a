"""Look-ups in tables with a row for each group by rows sorted by group: the biases of experts."""

from .ir import Equation, Value
from .sort_analysis import SortAnalysis


def group_gather(orders: SortAnalysis, e: Equation) -> tuple[int, int] | None:
    """Return the order whose rows `e` looks up in a table of groups, and the dimension of the table that counts groups.

    The equation is a gather of biases, `b[experts[order]]` where `order` sorts `experts`, or the scatter-add that is
    its gradient, into zeros. None for any other equation.

    Args:
        orders: Analysis of sorted rows.
        e: The equation.

    Returns:
        The order (the index of its `sort` equation), and the dimension.
    """
    sums = e.primitive.is_scatter and e.primitive.is_additive
    index = e.operands[1] if sums or e.primitive.is_gather else None
    order = None if index is None else orders.order_of(index)
    if order is None or not is_sort_key(orders, order, index):
        return None
    dn = e.params["dimension_numbers"]
    rows, collapsed = (
        (dn.scatter_dims_to_operand_dims, dn.inserted_window_dims)
        if sums
        else (dn.start_index_map, dn.collapsed_slice_dims)
    )
    is_single_dim = tuple(rows) == tuple(collapsed) and len(rows) == 1
    if not is_single_dim or (sums and orders.histograms.constants.operand_scalar(e, 0) != 0):
        return None
    return order, rows[0]


def is_sort_key(orders: SortAnalysis, order: int, index: Value | None) -> bool:
    """Return whether the numbers of `index` are the sort keys of `order`, so that each row reads the row of its group.

    Args:
        orders: Analysis of sorted rows.
        order: Index of the `sort` equation.
        index: Indices of the look-up, None for a literal.
    """
    root = root_of_index(orders, index)
    e = None if root is None else orders.program.producer.get(root)
    if root is None or e is None:
        return False
    # The sorted keys are a result of the sort itself, or were gathered by the sorted row numbers: `keys[order]`.
    sorted_keys, lookup = None, orders.lookups.get(e.index)
    if orders.sorts.get(e.index) == order:
        sorted_keys = e.operands[e.results.index(root)]
    elif lookup is not None and lookup.order == order and lookup.into and lookup.copies_per_row == 1:
        sorted_keys = e.operands[0] if e.primitive.is_gather else None
    return sorted_keys is not None and orders.histograms.are_equal(
        sorted_keys, orders.program.equations[order].operands[0]
    )


def root_of_index(orders: SortAnalysis, index: Value | None) -> Value | None:
    """Return the value with the numbers of `index` before reshapes and before negative numbers were wrapped.

    Args:
        orders: Analysis of sorted rows.
        index: Indices of a look-up, None for a literal.
    """
    value, root = None, orders.histograms.resolve_calls(index)
    while root is not None and root != value:
        value, e = root, orders.program.producer.get(root)
        if e is not None and (before := orders.histograms.rearranged_operand(e)) is not None:
            root = orders.histograms.resolve_calls(before)
    return value
