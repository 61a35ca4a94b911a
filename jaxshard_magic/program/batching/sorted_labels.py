"""Labels for sorted rows: those of unsorted rows, each with its own position in another order.

A label of sorted rows says that each row belongs to an example, not to which one: the sort analysis alone knows that.
An order that it follows to its end is the same for any batch sorted on its own, and only what leaves the order is known
outside. A new batch rule must not label as `PerExample` what the analysis calls unknown: tokens sorted by expert,
multiplied by group and put back are followed because each microbatch sorts its own rows.
"""

from fractions import Fraction

from ..sort_analysis import SortAnalysis
from ..sort_states import ConstantValue, IntegerRows, RowReordering, SortedAlong
from .batch_labels import CONSTANT, ExampleSum, Label, PerExample, SortedIndex
from .batch_rules import not_provable
from .rule_site import NotProvable, RuleSite, product_scale


def uniform_labels(site: RuleSite, small: SortAnalysis, large: SortAnalysis) -> list[Label] | None:
    """Return labels for results that are one number everywhere, the same in both programs; None for others.

    Args:
        site: The equation.
        small: Sort analysis of the small program.
        large: Sort analysis of the large program.
    """
    pairs = zip(site.eqn.results, site.large_eqn.results, strict=True)
    states = [(small.states.get(v), large.states.get(w)) for v, w in pairs]
    if not all(isinstance(a, ConstantValue) and isinstance(b, ConstantValue) and a.value == b.value for a, b in states):
        return None
    dim = site.growing_dim() if states else None
    labels: list[Label] = [CONSTANT if dim is None else PerExample(dim)] * len(states)
    return labels


def sorted_result_labels(site: RuleSite, small: SortAnalysis, large: SortAnalysis) -> list[Label]:
    """Return labels for the results of an equation that sorts, reorders or reads sorted rows.

    Args:
        site: The equation.
        small: Sort analysis of the small program.
        large: Sort analysis of the large program.

    Raises:
        NotProvable: The analyses of the two programs differ, or a result is no row of an example.
    """
    e, f = site.eqn, site.large_eqn
    states = [small.states.get(v) for v in e.results]
    if any(type(a) is not type(large.states.get(v)) for a, v in zip(states, f.results, strict=True)):
        raise NotProvable
    if e.index in small.sorts or e.index in small.inverse_sorts:
        return [_sort_label(site, k, is_inverse=e.index in small.inverse_sorts) for k in range(len(e.results))]
    if e.index in small.lookups:
        return [_lookup_label(site, small.lookups[e.index], large.lookups.get(f.index))]
    if e.index in small.grouped_products:
        return [_product_label(site)]
    if any(isinstance(s, IntegerRows) for s in states):
        return [SortedIndex(s.dim) if isinstance(s, IntegerRows) else _raise_not_provable() for s in states]
    if not all(s is None or isinstance(s, (SortedAlong, ConstantValue)) for s in states):
        raise NotProvable
    result = (e.primitive.batch_rule or not_provable)(site)
    labels = result if isinstance(result, list) else [result] * len(e.results)
    if any(
        isinstance(s, SortedAlong) and x != PerExample(s.dim, _label_scale(x))
        for s, x in zip(states, labels, strict=True)
    ):
        raise NotProvable
    return labels


def _raise_not_provable() -> Label:
    raise NotProvable


def _label_scale(label: Label) -> Fraction:
    return label.scale if isinstance(label, PerExample) else Fraction(1)


def _sort_label(site: RuleSite, k: int, is_inverse: bool) -> Label:
    """Return the label of result `k` of a sort: the sorted keys, the order itself, or what is sorted with them.

    Args:
        site: The sort.
        k: Position of the result.
        is_inverse: The sort undoes an earlier order.
    """
    label = site.labels[k]
    if k == 0 and not is_inverse:
        label = site.make_exact(0)
        if not isinstance(label, PerExample):
            raise NotProvable
    return label if isinstance(label, PerExample) else SortedIndex(0)


def _lookup_label(site: RuleSite, lookup: RowReordering, large_lookup: RowReordering | None) -> Label:
    """Return the label of rows brought into an order, or back from it, by a gather or scatter."""
    e = site.eqn
    if large_lookup is None or (lookup.into, lookup.copies_per_row) != (large_lookup.into, large_lookup.copies_per_row):
        raise NotProvable
    if not e.primitive.is_scatter:
        dn, operand = site.params["dimension_numbers"], site.labels[0]
        (lookup_dim,) = dn.start_index_map
        index_dims = [d for d in range(len(site.result_shape)) if d not in dn.offset_dims]
        if not isinstance(operand, PerExample) or operand.dim != lookup_dim or len(index_dims) != 1:
            raise NotProvable
        return PerExample(index_dims[0], operand.scale)
    dn, (operand, updates) = site.params["dimension_numbers"], site.labels[::2]
    (scatter_dim,) = dn.scatter_dims_to_operand_dims
    index_dims = [d for d in range(len(site.operand_shape(2))) if d not in dn.update_window_dims]
    if not isinstance(updates, PerExample) or [updates.dim] != index_dims:
        raise NotProvable
    # Rows set in an array of zeros keep their own scale.
    if site.is_zero_operand(0):
        return PerExample(scatter_dim, updates.scale)
    if not isinstance(operand, PerExample) or operand.dim != scatter_dim:
        raise NotProvable
    site.scale_operand(2, updates.scale / operand.scale)
    return operand


def _product_label(site: RuleSite) -> Label:
    """Return the label of a ragged product: rows meet the matrix of their group, or are summed group by group."""
    c, (left, right) = site.eqn.contraction, site.labels[:2]
    assert c is not None
    scale = product_scale((left, right), (1, 1))
    if isinstance(left, PerExample) and isinstance(right, PerExample) and (left.dim, right.dim) in c.contracted:
        return ExampleSum(scale)
    if not isinstance(left, PerExample) or isinstance(right, (PerExample, ExampleSum)):
        raise NotProvable
    return PerExample(next(out for d, out in c.left_free if d == left.dim), scale)
