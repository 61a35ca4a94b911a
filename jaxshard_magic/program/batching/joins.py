"""Rows that the data joins to each other: the nodes of a graph, which are looked up by its edges, or multiplied with
its adjacency matrix. Each is made of others, so that they are no examples by themselves."""

from collections.abc import Collection, Iterator

from ..dimensions import Dimensions
from ..ir import Equation, Value
from ..primitives.primitive import Kind
from ..roles import Roles


def find_joins(dims: Dimensions, roles: Roles, rows: Collection[int]) -> tuple[int | None, set[int]]:
    """The first equation, by its index, that looks the rows of a batch up in each other, None where none does; and the
    dimension classes of what they are looked up by (edges) and added up to (nodes again, or graphs). `rows`: the
    batch's classes."""
    program = dims.program
    data = {program.inputs[i] for i in roles.data}
    related = {v for v in data if len([c for c in dims.big(v) if c in rows]) > 1}
    first, beside, sums = None, set[int](), list[tuple[int, set[int]]]()
    for e in program.equations:
        places = {dims.of(v)[d] for v, d in _looked_up(dims, e, data)}
        if not places.isdisjoint(rows):
            beside |= _edges(dims, e.ins[1])
        if e.primitive.adds and places:
            sums += [(c, places) for c in _edges(dims, e.ins[1])]
        joins = not places.isdisjoint(rows) or (e.primitive.product and _reads(dims, e, related))
        first = e.index if first is None and joins else first
    return first, beside.union(*(into for c, into in sums if c in beside or c in rows))


def _looked_up(dims: Dimensions, e: Equation, data: Collection[Value]) -> Iterator[tuple[Value, int]]:
    """The dimensions that an equation looks up in, or adds into, by whole numbers among the data: not those of which
    each row is looked up by its own."""
    if e.primitive.kind is not Kind.LOOKUP:
        return
    indices, index, numbers = dims.links.indices, e.ins[1], e.params["dimension_numbers"]
    if e.primitive.gathers:
        table, along = e.ins[0], numbers.start_index_map
    else:
        table, along = e.outs[0], numbers.scatter_dims_to_operand_dims
    if index is None or table is None or indices.inputs(index).isdisjoint(data):
        return
    for column, d in enumerate(along):
        if indices.counted(index, column) is None:
            yield table, d


def _edges(dims: Dimensions, index: Value | None) -> set[int]:
    """The class that counts the rows of an index: of several, the longest."""
    rows = [c for c in dims.big(index)[:-1] if c is not None]
    return {max(rows, key=lambda c: dims.largest[c])} if rows else set()


def _reads(dims: Dimensions, e: Equation, among: Collection[Value]) -> bool:
    """Does an equation read one of these inputs, also inside of loops or in another type?"""
    return any(not dims.links.indices.inputs(v).isdisjoint(among) for v in e.ins[:2])
