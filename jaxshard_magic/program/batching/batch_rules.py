"""Batch rules of the primitive table: labels of an equation's results, from the labels of its operands.

A rule takes a `RuleSite` and returns one label, or a list with a label for each result. It raises `NotProvable` for
results that no label describes.
"""

from collections.abc import Sequence

import jax.numpy as jnp

from ..primitives import sharding_rules
from .batch_labels import Constant, ExampleSum, Label, PerExample, RowIndex, size_label
from .rule_site import NotProvable, RuleSite, common_dim, dim_after_removal, product_scale, size_factor, with_dim


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
