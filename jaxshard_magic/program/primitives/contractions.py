"""Contractions (matmuls, convolutions): corresponding dimensions of operands and result, and multiply-adds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

Shape = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Contraction:
    """Dimensions of a product's operands and result, by their role.

    Rows of the left operand may belong to groups, each with a matrix of its own (experts): a ragged product.

    Attributes:
        contracted: (left, right) dimensions multiplied and summed over.
        batch: (left, right, result) dimensions that go through in pairs.
        left_free: (left, result) free dimensions.
        right_free: (right, result) free dimensions.
        summed: Dimensions of the left operand that are summed over, also without a partner in the right operand
            (grouped channels).
        windowed: (left, right, result) dimensions under a window.
        grouped: (left, right, result) dimensions divided into groups in order, each group meeting its own alone.
        ragged_dim: Dimension of the left operand divided into groups by size, in order: telling its rows apart needs
            the operand of the group sizes.
        group_dims: (operand, dimension) of all dimensions that count the groups, the operand of group sizes included;
            -1 stands for the result.
        group_size_dims: (group sizes, left) dimensions if each row of the left operand has groups of its own.
    """

    contracted: Pairs = ()
    batch: tuple[tuple[int, int, int], ...] = ()
    left_free: Pairs = ()
    right_free: Pairs = ()
    summed: tuple[int, ...] = ()
    windowed: tuple[tuple[int, int, int], ...] = ()
    grouped: tuple[int, int, int] | None = None
    ragged_dim: int | None = None
    group_dims: Pairs = ()
    group_size_dims: Pairs = ()


def dot(params: Mapping[str, Any], shapes: Sequence[Shape]) -> Contraction:
    """Return the dimensions of `dot_general` or `scaled_dot`.

    The result has the batch dimensions, then the free ones of the left, then of the right operand.
    """
    return _dot(params["dimension_numbers"], shapes)


def _dot(numbers: Any, shapes: Sequence[Shape], groups: Sequence[int] = (), first: int = 0) -> Contraction:
    (lc, rc), (lb, rb) = numbers
    left_free = [d for d in range(len(shapes[0])) if d not in lc and d not in lb]
    right_start = first + len(lb) + len(left_free)
    right_free = [d for d in range(len(shapes[1])) if d not in rc and d not in rb and d not in groups]
    return Contraction(
        contracted=tuple(zip(lc, rc, strict=True)),
        batch=tuple(zip(lb, rb, range(first, first + len(lb)), strict=True)),
        left_free=tuple(zip(left_free, range(first + len(lb), right_start), strict=True)),
        right_free=tuple(zip(right_free, range(right_start, right_start + len(right_free)), strict=True)),
        summed=tuple(lc),
    )


def ragged_dot(params: Mapping[str, Any], shapes: Sequence[Shape]) -> Contraction:
    """Return the dimensions of `ragged_dot_general`.

    JAX has three forms (`RaggedDotDimensionNumbers`). Rows of the left operand meet the matrix of their group; or both
    operands are summed over group by group (the gradient of the first form), and the result has the groups first; or
    the groups divide a batch dimension, and nothing depends on them.
    """
    numbers = params["ragged_dot_dimension_numbers"]
    (lc, rc), (lb, rb) = numbers.dot_dimension_numbers
    (ragged,), groups = numbers.lhs_ragged_dimensions, tuple(numbers.rhs_group_dimensions)
    # If the ragged dimension is summed over, the result has the groups as its first dimension.
    first = int(ragged in lc)
    plain = _dot(((lc, rc), (lb, rb)), shapes, groups, first)
    count = len(shapes[2]) - 1
    row_dims = lc if first else [] if ragged in lb else [d for d, _ in plain.left_free]
    group_dims = [(1, d) for d in groups] + ([(-1, 0)] if first else [])
    sized = tuple(zip(range(count), (*lb, *row_dims), strict=False))
    return replace(plain, ragged_dim=ragged, group_dims=((2, count), *group_dims), group_size_dims=sized)


def scaled_matmul(_params: Mapping[str, Any], _shapes: Sequence[Shape]) -> Contraction:
    """Return the dimensions of cuDNN's scaled matmul: (batch, rows, depth) and (batch, columns, depth), and their
    scales."""
    return Contraction(contracted=((2, 2),), batch=((0, 0, 0),), left_free=((1, 1),), right_free=((1, 2),), summed=(2,))


def conv(params: Mapping[str, Any], _shapes: Sequence[Shape]) -> Contraction:
    """Return the dimensions of a convolution: examples, channels and the window's."""
    (batch, channels, *space), (kernel_out, kernel_in, *window), (out_batch, out_channels, *out_space) = params[
        "dimension_numbers"
    ]
    # Grouped dimensions are neither contracted nor free.
    one_batch_group, one_feature_group = (params[k] == 1 for k in ("batch_group_count", "feature_group_count"))
    return Contraction(
        contracted=((channels, kernel_in),) if one_feature_group else (),
        left_free=((batch, out_batch),) if one_batch_group else (),
        right_free=((kernel_out, out_channels),) if one_batch_group and one_feature_group else (),
        summed=(channels,),
        windowed=tuple(zip(space, window, out_space, strict=True)),
        grouped=None
        if one_batch_group and one_feature_group
        else (channels if one_batch_group else batch, kernel_out, out_channels),
    )


def dot_multiply_adds(
    contraction: Contraction, _params: Mapping[str, Any], shapes: Sequence[Shape], _out: Shape
) -> int:
    """Return the multiply-adds of a matmul: each element of the left operand meets the free elements of the right one.

    A ragged product meets those of its own group alone.
    """
    return prod(shapes[0]) * prod(shapes[1][d] for d, _ in contraction.right_free)


def conv_multiply_adds(
    _contraction: Contraction, params: Mapping[str, Any], shapes: Sequence[Shape], out: Shape
) -> int:
    """Return the multiply-adds of a convolution, as XLA's cost analysis counts them.

    Window elements over padding, or over zeros between dilated elements, are not counted.
    """
    left, right = shapes[:2]
    (batch, channels, *space), (_, _, *window), (_, out_channels, *out_space) = params["dimension_numbers"]
    window_params = (params[name] for name in ("rhs_dilation", "window_strides", "padding", "lhs_dilation"))
    overlaps = [
        _window_overlaps(left[i], (right[k], dilation), (out[o], stride), low, spread)
        for i, k, o, dilation, stride, (low, _), spread in zip(space, window, out_space, *window_params, strict=True)
    ]
    examples = left[batch] // params["batch_group_count"]
    return examples * left[channels] // params["feature_group_count"] * out[out_channels] * prod(overlaps)


def _window_overlaps(
    size: int, window: tuple[int, int], outputs: tuple[int, int], padding_low: int, input_dilation: int
) -> int:
    """Return how many pairs (window element, window position) of one dimension meet an element of the input.

    Element k at position o meets `o * stride + k * dilation - padding_low`; the elements of the input are
    `input_dilation` apart.

    Args:
        size: Size of the input.
        window: Number of window elements, and their distance.
        outputs: Number of window positions, and their distance.
        padding_low: Padding before the first element.
        input_dilation: Distance of the input's elements.
    """
    # The pairs are symmetric in window and outputs, so the loop runs over the shorter.
    (few, step), (many, stride) = sorted((window, outputs))
    positions = stride * np.arange(many) - padding_low
    overlaps = 0
    for k in range(few):
        input_positions = positions + step * k
        overlaps += np.count_nonzero(
            (input_positions >= 0)
            & (input_positions <= (size - 1) * input_dilation)
            & (input_positions % input_dilation == 0)
        )
    return int(overlaps)


def attention_multiply_adds(params: Mapping[str, Any], shapes: Sequence[Shape]) -> int:
    """Return the multiply-adds of fused attention.

    Each visible query-key pair costs a score and a part of the sum of values.
    """
    return _visible_pairs(params["form"].span, shapes) * (shapes[0][-1] + shapes[2][-1])


def attention_gradient_multiply_adds(params: Mapping[str, Any], shapes: Sequence[Shape]) -> int:
    """Return the multiply-adds of attention's gradient.

    Scores are computed once more, with their gradients and the gradients of queries, keys and values.
    """
    return _visible_pairs(params["form"].span, shapes) * (3 * shapes[0][-1] + 2 * shapes[2][-1])


def _visible_pairs(span: Any, shapes: Sequence[Shape]) -> int:
    """Return the number of query-key pairs with a distance in `span`, over all examples and heads."""
    *others, queries, _ = shapes[0]
    keys, positions = shapes[1][-2], np.arange(queries)
    first = 0 if span.high is None else np.maximum(0, positions - span.high)
    last = keys - 1 if span.low is None else np.minimum(keys - 1, positions - span.low)
    return prod(others) * int(np.broadcast_to(np.maximum(0, last - first + 1), queries).sum())
