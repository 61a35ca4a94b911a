"""Batch rules of slices, concatenations, lookups, scatters and windows."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..primitives.sharding_rules import axis_dims
from .batch_labels import CONSTANT, Constant, ExampleSum, Label, PerExample, RowIndex, SizeDependent
from .rule_site import NotProvable, RuleSite, conversion_factor, dim_after_removal, product_scale, size_factor, with_dim


def slice_like(site: RuleSite) -> list[Label]:
    """Label a linear slice or the like, along other dimensions than the examples', or with all of theirs."""
    label = site.labels[0]
    if isinstance(label, RowIndex) or (isinstance(label, PerExample) and not _keeps_dim(site, label.dim)):
        raise NotProvable
    return [label] * len(site.eqn.results)


def _keeps_dim(site: RuleSite, dim: int) -> bool:
    """Return whether a slice, repetition or running sum leaves dimension `dim` as it is."""
    if "padding_config" in site.params:
        return not any(site.params["padding_config"][dim])
    if site.eqn.primitive.has_axis:
        return dim not in axis_dims(site.params, len(site.operand_shape(0)))
    return site.result_shape[dim] == site.operand_shape(0)[dim]


def dynamic_slice(site: RuleSite) -> list[Label]:
    """Label a slice at constant offsets."""
    if any(site.make_exact(i) != CONSTANT for i in range(1, len(site.labels))):
        raise NotProvable
    return slice_like(site)


def pad(site: RuleSite) -> Label:
    """Label padding.

    The padding value is the same for all rows, whatever their scale, and counts as a part of each sum.
    """
    label = site.labels[0]
    if isinstance(label, PerExample):
        if not _keeps_dim(site, label.dim):
            raise NotProvable
        return label if site.is_zero_operand(1) else site.make_all_exact((0, 1))
    return site.align((0, 1))


def tile(site: RuleSite) -> list[Label]:
    """Label a repetition of rows, or of one row for all examples."""
    dim, label = site.growing_dim(), site.labels[0]
    if isinstance(label, (Constant, SizeDependent)) and dim is not None and site.operand_shape(0)[dim] == 1:
        return [PerExample(dim, size_factor(label))]
    return slice_like(site)


def concatenate(site: RuleSite) -> Label:
    """Label a concatenation along another dimension than the examples'."""
    axis = site.params["dimension"]
    if any(isinstance(x, RowIndex) for x in site.labels):
        return _concatenate_row_index(site, axis)
    label = site.align(range(len(site.labels)))
    if isinstance(label, PerExample) and label.dim == axis:
        raise NotProvable
    return label


def _concatenate_row_index(site: RuleSite, axis: int) -> Label:
    """Return the label of index vectors made of row indices and other indices.

    Args:
        site: The concatenation.
        axis: Its dimension, the last.

    Raises:
        NotProvable: Row indices of several dimensions, or other indices with rows elsewhere.
    """
    columns, offset, dims = [], 0, set()
    for i, label in enumerate(site.labels):
        width = site.operand_shape(i)[axis]
        if isinstance(label, RowIndex) and label.columns is None:
            columns += range(offset, offset + width)
            dims.add(label.dim)
        else:
            other = site.make_exact(i)
            dims |= {other.dim} if isinstance(other, PerExample) else set()
        offset += width
    if len(dims) != 1 or axis in dims or axis != len(site.result_shape) - 1:
        raise NotProvable
    return RowIndex(dims.pop(), tuple(columns))


def stack(site: RuleSite) -> Label:
    """Label a stack along a new dimension."""
    axis = site.params["axis"]
    label = site.align(range(len(site.labels)))
    return PerExample(label.dim + (label.dim >= axis), label.scale) if isinstance(label, PerExample) else label


def unstack(site: RuleSite) -> list[Label]:
    """Label the slices of an array along another dimension than the examples'."""
    label, axis = site.labels[0], site.params["axis"]
    if isinstance(label, (PerExample, RowIndex)) and label.dim == axis:
        raise NotProvable
    return [with_dim(label, dim_after_removal(label, (axis,)))] * len(site.eqn.results)


def gather(site: RuleSite) -> Label:
    """Label a lookup.

    An index without rows reads the same places for all examples; with rows, the results are per example. Row indices
    are exact only in the rows that they count.
    """
    dn, (operand, index) = site.params["dimension_numbers"], site.labels[:2]
    index_dims = [d for d in range(len(site.result_shape)) if d not in dn.offset_dims]  # result dimensions of the index
    if isinstance(index, RowIndex):
        _check_row_match(site, dn.start_index_map, index, operand)
        return PerExample(index_dims[index.dim], product_scale([operand], [1]))
    index = site.make_exact(1)
    if not isinstance(index, PerExample):
        if isinstance(operand, RowIndex):
            raise NotProvable
        if not isinstance(operand, PerExample):
            return operand
        removed = (*dn.collapsed_slice_dims, *dn.operand_batching_dims)
        if site.params["slice_sizes"][operand.dim] != site.operand_shape(0)[operand.dim]:
            raise NotProvable
        return with_dim(operand, _slice_dim(site, operand, removed, dn.offset_dims))
    paired = zip(dn.operand_batching_dims, dn.start_indices_batching_dims, strict=True)
    if isinstance(operand, ExampleSum) or (isinstance(operand, PerExample) and (operand.dim, index.dim) not in paired):
        raise NotProvable
    return PerExample(index_dims[index.dim], product_scale([operand], [1]))


def _check_row_match(site: RuleSite, index_map: Sequence[int], index: RowIndex, operand: Label) -> None:
    """Raise `NotProvable` unless index vectors name in each row that row of `operand`, and no other.

    Args:
        site: The lookup.
        index_map: For each column of the index, the operand dimension that it indexes.
        index: Label of the index.
        operand: Label of the operand.
    """
    columns = [c for c, d in enumerate(index_map) if isinstance(operand, PerExample) and d == operand.dim]
    at = range(site.operand_shape(1)[-1]) if index.columns is None else index.columns
    if len(columns) != 1 or list(at) != columns:
        raise NotProvable


def _slice_dim(site: RuleSite, operand: PerExample, removed: Collection[int], slice_dims: Sequence[int]) -> int:
    """Return the position of the dimension of `operand` in slices of it.

    Args:
        site: The lookup.
        operand: Label of the operand.
        removed: Operand dimensions that slices lack.
        slice_dims: Result dimensions of the slices.
    """
    kept = [d for d in range(len(site.operand_shape(0))) if d not in removed]
    if operand.dim not in kept:
        raise NotProvable
    return slice_dims[kept.index(operand.dim)]


def scatter(site: RuleSite) -> Label:
    """Label a scatter: a sum over examples if rows are added into one array, else rows into rows."""
    dn, (operand, index, updates) = site.params["dimension_numbers"], site.labels[:3]
    index_dims = [d for d in range(len(site.operand_shape(2))) if d not in dn.update_window_dims]
    adds = site.eqn.primitive.is_additive
    if isinstance(index, RowIndex):
        _check_row_match(site, dn.scatter_dims_to_operand_dims, index, operand)
        return _scatter_rows(site, index_dims[index.dim])
    index = site.make_exact(1)
    if isinstance(index, PerExample):
        paired = list(zip(dn.operand_batching_dims, dn.scatter_indices_batching_dims, strict=True))
        if isinstance(operand, PerExample) and (operand.dim, index.dim) in paired:
            return _scatter_rows(site, index_dims[index.dim])
        if not adds or not isinstance(updates, PerExample) or updates.dim != index_dims[index.dim]:
            raise NotProvable
        # Each microbatch adds its rows to the same operand, which has to count once in their sum.
        target = ExampleSum(updates.scale)
        site.scale_operand(0, conversion_factor(operand, target, site.ratio))
        return target
    if not isinstance(operand, PerExample):
        return site.align((0, 2)) if site.eqn.primitive.linear_operands is not None else site.make_all_exact()
    removed = (*dn.inserted_window_dims, *dn.operand_batching_dims)
    return _scatter_rows(site, _slice_dim(site, operand, removed, dn.update_window_dims))


def _scatter_rows(site: RuleSite, dim: int) -> Label:
    """Label updates set into, or added to, an operand with the same examples.

    Args:
        site: The scatter.
        dim: Dimension of the updates with their examples.
    """
    operand, updates = site.labels[0], site.labels[2]
    linear = site.eqn.primitive.linear_operands is not None
    if not isinstance(operand, PerExample):
        raise NotProvable
    if isinstance(updates, PerExample):
        if updates.dim != dim or site.operand_shape(2)[dim] != site.operand_shape(0)[operand.dim]:
            raise NotProvable
        if linear:
            site.scale_operand(2, updates.scale / operand.scale)
            return operand
    site.make_exact(2)
    return site.make_exact(0)


def update_slice(site: RuleSite) -> Label:
    """Label an update at constant offsets, of all examples if along their dimension."""
    if any(site.make_exact(i) != CONSTANT for i in range(2, len(site.labels))):
        raise NotProvable
    label = site.align((0, 1))
    if isinstance(label, PerExample) and site.operand_shape(0)[label.dim] != site.operand_shape(1)[label.dim]:
        raise NotProvable
    return label


def pooling(site: RuleSite) -> list[Label]:
    """Label pooling over other dimensions than the examples'."""
    label = site.labels[0] if site.eqn.primitive.is_additive and len(site.labels) == 1 else site.make_all_exact()
    if isinstance(label, PerExample) and label.dim in window_dims(site.params, len(site.operand_shape(0))):
        raise NotProvable
    return [label] * len(site.eqn.results)


def window_dims(params: Mapping[str, Any], rank: int) -> set[int]:
    """Return the dimensions with a window, of an equation that reduces or scatters by windows.

    Args:
        params: Parameters of the equation.
        rank: Rank of its operand.
    """
    moves = [params[k] for k in ("window_dimensions", "window_strides", "base_dilation") if k in params]
    return {d for d in range(rank) if any(each[d] != 1 for each in moves) or any(params["padding"][d])}
