"""Biases of experts with sorted rows: tables in which each row looks up the entry of its expert."""

from dataclasses import replace
from typing import TYPE_CHECKING

from ..program.flow import follow_aliases
from ..program.group_gathers import group_gather
from .expert_resident_rows import find_expert_resident_rows
from .shard_local_sorts import ShardLocalSorts

# `layout.py` imports this module.
if TYPE_CHECKING:
    from .layout import Layout


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
        of_group = group_gather(orders, e)
        # The gradient of a lookup is a scatter, with a result of the table's shape.
        table = e.results[0] if e.primitive.is_scatter else e.operands[0] if e.operands else None
        if of_group is None or table is None or layout.is_activation(table):
            continue
        order, d = of_group
        is_parameter = e.primitive.is_scatter or params & layout.flow.ancestors([table], follow_aliases).keys()
        if is_parameter and groups.get(order) == program.shapes[table][d]:
            lookups[e.index] = d, layout.storage.classes_of(table)[d]
    return lookups
