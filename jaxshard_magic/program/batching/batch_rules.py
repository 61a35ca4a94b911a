"""Batch rules of the primitive table: labels of an equation's results, from the labels of its operands.

A rule takes a `RuleSite` and returns one label, or a list with a label for each result. It raises `NotProvable` for
results that no label describes. Rules of slices, concatenations, lookups, scatters and windows come last.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from ..primitives import sharding_rules
from .batch_labels import CONSTANT, Constant, ExampleSum, Label, PerExample, RowIndex, SizeDependent, size_label
from .rule_site import (
    NotProvable,
    RuleSite,
    common_dim,
    conversion_factor,
    dim_after_removal,
    product_scale,
    size_factor,
    with_dim,
)


def not_provable(_site: RuleSite) -> Label:
    """Raise `NotProvable`, for primitives that mix examples or have no known rule."""
    raise NotProvable


def elementwise(site: RuleSite) -> Label:
    """Label a nonlinear elementwise result: all operands are made exact. Parameters must not depend on the batch."""
    if not site.has_same_params():
        raise NotProvable
    return site.make_all_exact()


def first_exact(site: RuleSite) -> Label:
    """Label a result that is a nonlinear function of the first operand alone."""
    return site.make_exact(0)


def pass_through(site: RuleSite) -> list[Label]:
    """Label each result as the operand at the same position, for linear functions of one operand."""
    return list(site.labels)


def convert(site: RuleSite) -> Label:
    """Label a cast: linear, except from floats to integers."""
    # Rounding to whole numbers is not linear, so a scaled operand must be made exact first.
    to = site.params["new_dtype"]
    linear = jnp.issubdtype(to, jnp.inexact) or (jnp.issubdtype(to, jnp.integer) and not site.is_inexact(0))
    return site.labels[0] if linear else site.make_exact(0)


def add(site: RuleSite) -> Label:
    """Label a sum of operands, brought to one label."""
    return site.align(range(len(site.labels)))


def select(site: RuleSite) -> Label:
    """Label a selection by an exact condition between cases of one label."""
    which, cases = site.make_exact(0), site.align(range(1, len(site.labels)))
    dim = common_dim([which, cases])
    if dim is None or isinstance(cases, PerExample):
        return cases
    # A sum over rows can't select for each row.
    if isinstance(cases, ExampleSum):
        raise NotProvable
    return site.make_all_exact()


def mul(site: RuleSite) -> Label:
    """Label a product of two operands: a sum over examples meets neither rows nor another sum."""
    return _multiply(site.labels, (1, 1))


def div(site: RuleSite) -> Label:
    """Label a quotient; the divisor must not be a sum, and integer division makes both operands exact."""
    return _multiply(site.labels, (1, -1)) if site.is_inexact(0) else site.make_all_exact()


def _multiply(labels: Sequence[Label], powers: Sequence[int]) -> Label:
    """Return the label of a product of powers of values.

    Raises:
        NotProvable: Several factors are sums over examples, or a sum meets rows.
    """
    scale = product_scale(labels, powers)
    dim, sums = common_dim(labels), sum(isinstance(x, ExampleSum) for x in labels)
    # A product of sums is not the sum of the products.
    if sums + (dim is not None) > 1:
        raise NotProvable
    return ExampleSum(scale) if sums else size_label(scale) if dim is None else PerExample(dim, scale)


def product(site: RuleSite) -> Label:
    """Label a contraction: contracted examples are summed, batch and free examples keep their rows.

    Raises:
        NotProvable: Rows are divided by groups (ragged): their groups in another batch are not known.
    """
    c = site.eqn.contraction
    assert c is not None
    left, right = site.labels[:2]
    if any(
        isinstance(site.make_exact(i), PerExample) and not _has_sizes_per_row(site, c.group_size_dims)
        for i in range(2, len(site.labels))
    ):
        raise NotProvable
    left_dim, right_dim = ((x.dim if isinstance(x, PerExample) else None) for x in (left, right))
    # A microbatch would need the group sizes of its own rows.
    if c.ragged_dim is not None and left_dim == c.ragged_dim:
        raise NotProvable
    if left_dim is None and right_dim is None:
        return _multiply((left, right), (1, 1))
    scale = product_scale((left, right), (1, 1))
    if left_dim is not None and right_dim is not None:
        if (left_dim, right_dim) in c.contracted:
            return ExampleSum(scale)
        result_dims = [out for a, b, out in c.batch if (a, b) == (left_dim, right_dim)]
    elif isinstance(left, ExampleSum) or isinstance(right, ExampleSum):
        raise NotProvable
    else:
        free, dim = (c.left_free, left_dim) if right_dim is None else (c.right_free, right_dim)
        result_dims = [out for d, out in free if d == dim]
    if not result_dims:
        raise NotProvable
    return PerExample(result_dims[0], scale)


def attention(site: RuleSite) -> list[Label]:
    """Label fused attention, with examples in its batch dimensions only."""
    label = site.make_all_exact()
    if isinstance(label, PerExample) and label.dim >= site.params["form"].batch:
        raise NotProvable
    return [label] * len(site.eqn.results)


def _has_sizes_per_row(site: RuleSite, group_size_dims: Sequence[tuple[int, int]]) -> bool:
    """Return whether the sizes of the groups have a row for each row of the left operand."""
    left, sizes = site.labels[0], site.labels[2]
    return isinstance(left, PerExample) and isinstance(sizes, PerExample) and (sizes.dim, left.dim) in group_size_dims


def reduce_sum(site: RuleSite) -> Label:
    """Label a sum: a sum over examples if it reduces their dimension."""
    label = site.labels[0]
    if isinstance(label, PerExample) and label.dim in site.params["axes"]:
        return ExampleSum(label.scale)
    if isinstance(label, RowIndex):
        raise NotProvable
    return with_dim(label, dim_after_removal(label, site.params["axes"]))


def nonlinear_reduction(site: RuleSite) -> Label | list[Label]:
    """Label a nonlinear reduction, along other dimensions than the examples'."""
    removed = sharding_rules.reduced_dims(site.params)
    label = site.make_all_exact()
    if isinstance(label, PerExample) and label.dim in removed:
        raise NotProvable
    return [with_dim(label, dim_after_removal(label, removed))] * len(site.eqn.results)


def shape_change(site: RuleSite) -> Label:
    """Label a reshape, transpose or broadcast.

    Examples keep their order if a dimension of the result runs through their dimension. A number repeated along the
    batch counts as many examples.
    """
    # Factors come from the large program: in a small program of one example, the example's dimension is
    # indistinguishable from any other dimension of size 1.
    label, dim, factors = site.labels[0], site.growing_dim(), site.large_eqn.factors
    if not isinstance(label, (PerExample, RowIndex)):
        return label if dim is None or isinstance(label, ExampleSum) else PerExample(dim, size_factor(label))
    result_dim = None if factors is None else factors.leading_dim(label.dim)
    if result_dim is None or (
        isinstance(label, RowIndex) and site.result_shape[result_dim] != site.operand_shape(0)[label.dim]
    ):
        raise NotProvable
    return with_dim(label, result_dim)


def iota(site: RuleSite) -> Label:
    """Label an iota along the batch as row indices, along other dimensions as equal rows."""
    dim = site.growing_dim()
    if dim is None:
        raise NotProvable
    return RowIndex(dim) if dim == site.params["dimension"] else PerExample(dim)


def along_axis(site: RuleSite) -> list[Label]:
    """Label results of a primitive that works along one dimension, on each example by itself.

    Raises:
        NotProvable: The dimension is the examples'.
    """
    label = site.make_all_exact()
    if isinstance(label, PerExample) and label.dim in sharding_rules.axis_dims(site.params, len(site.operand_shape(0))):
        raise NotProvable
    return [label] * len(site.eqn.results)


def random_draw(site: RuleSite) -> Label:
    """Label a random draw. With one key for all examples the whole batch is drawn; a microbatch takes its rows."""
    if not isinstance(site.labels[0], Constant):
        return site.make_exact(0)
    dim = site.growing_dim()
    # A body that runs unchanged can't take its rows from a draw for the whole batch.
    if dim is None or site.in_fixed_body:
        raise NotProvable
    site.draw_dim = dim
    return PerExample(dim)


def random_gamma(site: RuleSite) -> Label:
    """Label a gamma draw.

    Raises:
        NotProvable: One key for all examples: the draws depend on the number of examples.
    """
    label = site.make_all_exact()
    if isinstance(site.labels[0], Constant) and isinstance(label, PerExample):
        raise NotProvable
    return label


def matrices(site: RuleSite) -> list[Label]:
    """Label operations on the last dimensions (matrices, transforms), with examples in the dimensions before them."""
    inner = site.eqn.primitive.matrix_dims or len(site.params["fft_lengths"])
    label = site.make_all_exact()
    if isinstance(label, PerExample) and label.dim >= len(site.operand_shape(0)) - inner:
        raise NotProvable
    return [label] * len(site.eqn.results)


def linear_collective(site: RuleSite) -> list[Label]:
    """Label linear collectives between devices: each device has the same number of examples in every microbatch.

    The rows of a microbatch meet the same rows of other devices as in the whole batch.
    """
    if any(isinstance(x, RowIndex) for x in site.labels):
        raise NotProvable
    return list(site.labels)


def nonlinear_collective(site: RuleSite) -> list[Label]:
    """Label `pmax` and `pmin`, which are not linear."""
    return [site.make_exact(i) for i in range(len(site.labels))]


def all_gather(site: RuleSite) -> list[Label]:
    """Label an all-gather along a named axis."""
    return _resizing_collective(site, "all_gather_dimension", 1)


def reduce_scatter(site: RuleSite) -> list[Label]:
    """Label a reduce-scatter along a named axis."""
    return _resizing_collective(site, "scatter_dimension", -1)


def _resizing_collective(site: RuleSite, param: str, rank_change: int) -> list[Label]:
    """Label linear collectives that add, remove or resize a dimension.

    Args:
        site: Site of the collective.
        param: Parameter that names the dimension.
        rank_change: Change of rank if the devices get a dimension of their own (not tiled).
    """
    at, tiled = site.params[param], site.params["tiled"]
    return [_shift_dim(label, at, 0 if tiled else rank_change) for label in linear_collective(site)]


def _shift_dim(label: Label, at: int, rank_change: int) -> Label:
    """Shift the dimension of `label` by `rank_change` at position `at`.

    Raises:
        NotProvable: The devices' rows are concatenated, or divided, along the examples.
    """
    if not isinstance(label, PerExample):
        return label
    if label.dim == at and rank_change < 1:  # concatenates the devices' rows, or takes a part of them
        raise NotProvable
    return PerExample(label.dim + rank_change * (label.dim >= at), label.scale)


def all_to_all(site: RuleSite) -> list[Label]:
    """Label a tiled all-to-all along other dimensions than the examples'."""
    p, label = site.params, linear_collective(site)[0]
    if isinstance(label, PerExample) and (not p["tiled"] or label.dim in (p["split_axis"], p["concat_axis"])):
        raise NotProvable
    return [label]


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
        return dim not in sharding_rules.axis_dims(site.params, len(site.operand_shape(0)))
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
