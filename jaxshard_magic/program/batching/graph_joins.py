"""Rows joined to each other by the data: graph nodes, looked up by edges or multiplied with an adjacency matrix.

Each row is made of others, so that none is an example on its own.
"""

from collections.abc import Collection, Iterator

from ..dimensions import Dimensions
from ..ir import Equation, Value
from ..primitives.primitive import Kind
from ..roles import InputRoles


def find_joins(dims: Dimensions, roles: InputRoles, batch_classes: Collection[int]) -> tuple[int | None, set[int]]:
    """Return the first equation that looks the rows of a batch up in each other, and the classes of the indices.

    Args:
        dims: Dimension classes of the step.
        roles: Role of each input.
        batch_classes: Dimension classes of the batch.

    Returns:
        The index of the equation, None without one, and the classes of lookup indices (edges) and of what they are
        added up into (nodes again, or graphs).
    """
    program = dims.program
    data = {program.inputs[i] for i in roles.data}
    # An adjacency matrix has the batch in two dimensions.
    adjacency_inputs = {v for v in data if len([c for c in dims.nontrivial_classes(v) if c in batch_classes]) > 1}
    first, index_classes, sums = None, set[int](), list[tuple[int, set[int]]]()
    for e in program.equations:
        lookup_classes = {dims.classes_of(v)[d] for v, d in _data_lookups(dims, e, data)}
        if not lookup_classes.isdisjoint(batch_classes):
            index_classes |= _index_row_class(dims, e.operands[1])
        if e.primitive.is_additive and lookup_classes:
            sums += [(c, lookup_classes) for c in _index_row_class(dims, e.operands[1])]
        joins = not lookup_classes.isdisjoint(batch_classes) or (
            e.primitive.is_product and _reads_any(dims, e, adjacency_inputs)
        )
        first = e.index if first is None and joins else first
    return first, index_classes.union(*(into for c, into in sums if c in index_classes or c in batch_classes))


def _data_lookups(dims: Dimensions, e: Equation, data: Collection[Value]) -> Iterator[tuple[Value, int]]:
    """Find the dimensions that an equation looks up in, or adds into, by integers of the data.

    Leaves out dimensions whose rows are each looked up by their own number.
    """
    if e.primitive.kind is not Kind.LOOKUP:
        return
    indices, index, numbers = dims.links.indices, e.operands[1], e.params["dimension_numbers"]
    if e.primitive.is_gather:
        table, indexed_dims = e.operands[0], numbers.start_index_map
    else:
        table, indexed_dims = e.results[0], numbers.scatter_dims_to_operand_dims
    if index is None or table is None or indices.input_origins(index).isdisjoint(data):
        return
    for column, d in enumerate(indexed_dims):
        # An iota looks each row up by its own number, as in `logits[arange(n), labels]`.
        if indices.iota_dim(index, column) is None:
            yield table, d


def _index_row_class(dims: Dimensions, index: Value | None) -> set[int]:
    """Return the class that counts the rows of an index; the longest of several."""
    rows = [c for c in dims.nontrivial_classes(index)[:-1] if c is not None]
    return {max(rows, key=lambda c: dims.largest[c])} if rows else set()


def _reads_any(dims: Dimensions, e: Equation, inputs: Collection[Value]) -> bool:
    """Return whether an equation reads one of these inputs, also in a loop or with another dtype."""
    return any(not dims.links.indices.input_origins(v).isdisjoint(inputs) for v in e.operands[:2])
