"""Biases of experts whose rows are sorted: tables of which each row looks up its expert's."""

from dataclasses import replace
from typing import TYPE_CHECKING

from ..program.flow import by_alias
from ..program.group_rows import group_rows
from .away import find_away
from .sorting import Sorting

if TYPE_CHECKING:
    from .layout import Layout


def with_tables(layout: "Layout", sorting: Sorting) -> Sorting:
    """`sorting` with its tables: of parameters whose rows are read beside products alone, so that they can be looked
    up where the experts are."""
    found = _found(layout, sorting) if sorting.orders else {}
    while found:
        sorting = replace(sorting, tables={i: d for i, (d, _) in found.items()})
        away, program = find_away(sorting), layout.program
        looked_up = {i: program.equations[i].outs[0] for i in found if program.equations[i].name == "gather"}
        kept = {found[i][1] for i, v in looked_up.items() if v in away.values}
        apart = {found[i][1] for i, v in looked_up.items() if v not in away.values}
        left = {i: (d, c) for i, (d, c) in found.items() if c in kept - apart}
        if left == found:
            return sorting
        found = left
    return replace(sorting, tables={})


def _found(layout: "Layout", sorting: Sorting) -> dict[int, tuple[int, int]]:
    """Lookups in parameters and their gradients: the dimension that counts groups, and its storage class."""
    orders, program, found = sorting.of, layout.program, dict[int, tuple[int, int]]()
    groups = {
        sorting.order_of(e): program.shapes[e.ins[2]][0] for e in sorting.products() if e.ins[2] is not None
    }
    params = {program.inputs[i] for i in layout.roles.stored}
    for e in program.equations:
        of_group = group_rows(orders, e)
        table = e.outs[0] if e.primitive.scatters else e.ins[0] if e.ins else None
        if of_group is None or table is None or layout.batchy(table):
            continue
        order, d = of_group
        made = e.primitive.scatters or params & layout.flow.back([table], by_alias).keys()
        if made and groups.get(order) == program.shapes[table][d]:
            found[e.index] = d, layout.storage.of(table)[d]
    return found
