"""Sorted rows that stay on the experts' devices between products, instead of returning to the tokens' devices.

Each device of the expert axes has an array for the rows of the whole group of devices. Rows of other devices' experts
are zero in the results of products and of operations linear in products. Results of any other operation on such rows
are unknown there, so they stay on the experts' devices.

Biases of experts are tables in which each row looks up the entry of its expert: they are sharded as the rows need them.
"""

from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..program.flow import follow_aliases
from ..program.ir import Equation, Program, Value
from ..program.primitives.primitive import Kind
from ..program.sizes import nbytes
from ..program.sort_analysis import SortAnalysis
from .shard_local_sorts import ShardLocalSorts

if TYPE_CHECKING:
    from .layout import Layout

_ROW_BY_ROW = (Kind.ELEMENTWISE, Kind.SHAPE, Kind.SLICE, Kind.REDUCTION, Kind.CUMULATIVE)


@dataclass(frozen=True)
class ExpertResidentRows:
    """Rows resident with the experts: on each device of the expert axes the rows of the whole group, zero for other
    devices' experts.

    Attributes:
        values: Values in resident form.
        equations: Equations applied row by row to resident values, by index.
        returns_to_tokens: Equations (products, lookups in tables, row-by-row ones) whose results return to the tokens'
            devices.
        first_gathers: For each product or table lookup, by index, the values whose rows no earlier equation of the same
            body gathered.
        requests_group_sizes: Products that are the first of a body to request the row count of each group from each
            device.
    """

    values: frozenset[Value] = frozenset()
    equations: frozenset[int] = frozenset()
    returns_to_tokens: frozenset[int] = frozenset()
    first_gathers: Mapping[int, tuple[Value, ...]] = field(default_factory=dict)
    requests_group_sizes: frozenset[int] = frozenset()


def find_expert_resident_rows(sorting: ShardLocalSorts) -> ExpertResidentRows:
    """Return the largest set of rows that can stay resident: from a product, through row-by-row equations, to other
    products."""
    program = sorting.analysis.program
    grouped = {e.index for e in sorting.group_products()} | sorting.bias_lookups.keys()
    values = _resident_values(sorting, grouped)
    equations = {
        e.index
        for e in program.equations
        if e.index not in grouped and not e.bodies and any(v in values for v in e.operands)
    }
    makers = [program.equations[i] for i in sorted(grouped | equations)]
    back = {e.index for e in makers if sorting.sort_state(e.results[0]) is not None and e.results[0] not in values}
    # Reversed, so that the first product with each array of sizes is the one that remains.
    first_product_by_sizes = {
        sorting.analysis.histograms.resolve_calls(e.operands[2]): e.index for e in reversed([*sorting.group_products()])
    }
    return ExpertResidentRows(
        frozenset(values),
        frozenset(equations),
        frozenset(back),
        _first_gathers(sorting, grouped, values),
        frozenset(first_product_by_sizes.values()),
    )


def _resident_values(sorting: ShardLocalSorts, grouped: Set[int]) -> set[Value]:
    program = sorting.analysis.program
    resident = {v for v in range(len(program.avals)) if sorting.sort_state(v) is not None}
    readers, linked = _readers_and_links(program)
    while True:
        # A value that can't be resident takes its neighbours with it: shrink to the largest consistent set.
        remaining = {
            v
            for v in resident
            if _is_made_resident(sorting, v, resident, grouped, linked)
            and all(_can_read_resident(sorting, e, v, resident, grouped) for e in readers[v])
            and all(w in resident for w in linked[v])
        }
        if remaining == resident:
            return resident
        resident = remaining


def _readers_and_links(program: Program) -> tuple[Mapping[Value, list[Equation]], Mapping[Value, list[Value | None]]]:
    """Return the readers without bodies of each value, and the values linked to each by a body's inputs and outputs.

    A linked value None stands for an output of the whole program.
    """
    readers, linked = defaultdict[Value, list[Equation]](list), defaultdict[Value, list[Value | None]](list)
    for e in program.equations:
        for v in () if e.bodies else e.operands:
            if v is not None:
                readers[v].append(e)
        for body in e.bodies:
            for a, b in [(a, b) for a, b, _ in (*body.inputs, *body.outputs)]:
                if a is not None:
                    linked[a].append(b)
                    linked[b].append(a)
    for v in program.outputs:
        if v is not None:
            linked[v].append(None)
    return readers, linked


def _is_made_resident(
    sorting: ShardLocalSorts,
    v: Value,
    resident: set[Value],
    grouped: Set[int],
    linked: Mapping[Value, list[Value | None]],
) -> bool:
    e = sorting.analysis.program.producer.get(v)
    if e is None or e.bodies:
        return bool(linked[v])
    return e.index in grouped or _is_row_by_row(sorting, e, resident)


def _is_row_by_row(sorting: ShardLocalSorts, e: Equation, resident: set[Value]) -> bool:
    """Return whether `e` computes each row from resident rows and from values equal for all rows."""
    if e.primitive.kind not in _ROW_BY_ROW or any(sorting.sort_state(v) is None for v in e.results):
        return False
    state = next((s for v in e.operands if (s := sorting.sort_state(v)) is not None), None)
    return state is not None and all(
        v is None or v in resident or (sorting.sort_state(v) is None and _is_equal_for_all_rows(sorting, v, state.dim))
        for v in e.operands
    )


def _is_equal_for_all_rows(sorting: ShardLocalSorts, v: Value, dim: int) -> bool:
    return not sorting.analysis.program.shapes[v] or sorting.analysis.is_constant_along(v, dim)


def _can_read_resident(
    sorting: ShardLocalSorts, e: Equation, v: Value, resident: set[Value], grouped: Set[int]
) -> bool:
    """Return whether `e` can read resident rows as they are.

    The result of `e` may itself return to the tokens' devices if it is no larger than the operands and, as the results
    of products are, zero for other devices' experts.
    """
    if e.index in grouped:
        return v in row_operands(e)
    if not _is_row_by_row(sorting, e, resident):
        return False
    if len(e.results) > 1 or e.results[0] in resident:
        return all(w in resident for w in e.results)
    avals = sorting.analysis.program.avals
    read = sum(nbytes(avals[w]) for w in {*e.operands} if w is not None and w in resident)
    # Returning the result must not send more than returning the operands would.
    return nbytes(avals[e.results[0]]) <= read and _is_zero_for_other_experts(sorting, e.results[0], grouped)


def _is_zero_for_other_experts(sorting: ShardLocalSorts, v: Value | None, grouped: Set[int]) -> bool:
    """Return whether resident rows of `v` are zero on the devices without the rows' experts."""
    v = sorting.analysis.histograms.resolve_calls(v)
    e = None if v is None else sorting.analysis.program.producer.get(v)
    if e is None or e.bodies or sorting.sort_state(v) is None:
        return False
    if e.index in grouped:
        return True
    if e.primitive.bilinear:
        rows = [w for w in e.operands if sorting.sort_state(w) is not None]
        return len(rows) == 1 and _is_zero_for_other_experts(sorting, rows[0], grouped)
    linear = range(len(e.operands))[e.primitive.linear_operands or slice(0)]
    even = all(sorting.sort_state(w) is None for k, w in enumerate(e.operands) if k not in linear)
    return bool(linear) and even and all(_is_zero_for_other_experts(sorting, e.operands[k], grouped) for k in linear)


def row_operands(e: Equation) -> list[Value | None]:
    """Return the row operands of a grouped product, or of a lookup in a table with an entry for each group."""
    return e.operands[:2] if e.primitive.is_product else e.operands[2:3]


def _first_gathers(
    sorting: ShardLocalSorts, grouped: Set[int], resident: set[Value]
) -> Mapping[int, tuple[Value, ...]]:
    """Return, for each product or table lookup, the values whose rows no earlier equation of the body gathered.

    For tables the group index of each row is included, because other devices do not know the groups.
    """
    first_gathers, seen = dict[int, tuple[Value, ...]](), set[Value]()
    for i in sorted(grouped):
        e, gathered = sorting.analysis.program.equations[i], list[Value]()
        group_indices = e.operands[1:2] if i in sorting.bias_lookups else []
        for v in (*group_indices, *row_operands(e)):
            root = (
                _root_of_index(sorting.analysis, v)
                if v in group_indices
                else sorting.analysis.histograms.resolve_calls(v)
            )
            # XLA merges equal collectives, so that only the first gather of an array sends anything.
            if v is not None and sorting.sort_state(v) is not None and v not in resident and root not in seen:
                gathered.append(v)
                seen |= set() if root is None else {root}
        first_gathers[i] = tuple(dict.fromkeys(gathered))
    return first_gathers


def with_expert_biases(layout: "Layout", sorts: ShardLocalSorts) -> ShardLocalSorts:
    """Return `sorts` with the bias lookups whose rows stay on the experts' devices, so that the lookups can run there.

    Args:
        layout: The layout.
        sorts: The shard-local sorts, without biases.
    """
    lookups = _bias_lookups(layout, sorts) if sorts.local_orders else {}
    # Without one table fewer rows stay with the experts, which may exclude another table: repeat to a fixed point.
    while lookups:
        sorts = replace(sorts, bias_lookups={i: d for i, (d, _) in lookups.items()})
        away, program = find_expert_resident_rows(sorts), layout.program
        looked_up = {i: program.equations[i].results[0] for i in lookups if program.equations[i].name == "gather"}
        local_classes = {lookups[i][1] for i, v in looked_up.items() if v in away.values}
        other_classes = {lookups[i][1] for i, v in looked_up.items() if v not in away.values}
        # A table is sharded by expert for all of its lookups or for none.
        left = {i: (d, c) for i, (d, c) in lookups.items() if c in local_classes - other_classes}
        if left == lookups:
            return sorts
        lookups = left
    return replace(sorts, bias_lookups={})


def _bias_lookups(layout: "Layout", sorts: ShardLocalSorts) -> dict[int, tuple[int, int]]:
    """Return lookups in parameters and their gradients, each with the table's dimension of groups and the storage
    class of that dimension."""
    orders, program, lookups = sorts.analysis, layout.program, dict[int, tuple[int, int]]()
    groups = {
        sorts.product_order(e): program.shapes[e.operands[2]][0]
        for e in sorts.group_products()
        if e.operands[2] is not None
    }
    params = {program.inputs[i] for i in layout.roles.storage_order}
    for e in program.equations:
        of_group = _group_gather(orders, e)
        # The gradient of a lookup is a scatter, with a result of the table's shape.
        table = e.results[0] if e.primitive.is_scatter else e.operands[0] if e.operands else None
        if of_group is None or table is None or layout.is_activation(table):
            continue
        order, d = of_group
        is_parameter = e.primitive.is_scatter or params & layout.flow.ancestors([table], follow_aliases).keys()
        if is_parameter and groups.get(order) == program.shapes[table][d]:
            lookups[e.index] = d, layout.storage.classes_of(table)[d]
    return lookups


def _group_gather(orders: SortAnalysis, e: Equation) -> tuple[int, int] | None:
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
    if order is None or not _is_sort_key(orders, order, index):
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


def _is_sort_key(orders: SortAnalysis, order: int, index: Value | None) -> bool:
    """Return whether the numbers of `index` are the sort keys of `order`, so that each row reads the row of its group.

    Args:
        orders: Analysis of sorted rows.
        order: Index of the `sort` equation.
        index: Indices of the look-up, None for a literal.
    """
    root = _root_of_index(orders, index)
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


def _root_of_index(orders: SortAnalysis, index: Value | None) -> Value | None:
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
