"""Products (matmuls, convolutions): which dimensions of their operands and result correspond, and their FLOPs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

Shape = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Contraction:
    """The dimensions of a product's operands `left` and `right` and of its result, by what becomes of them.

    `contracted`: (left, right) that are multiplied and summed over; `batch`: (left, right, result) that go through side
    by side; `left`, `right`: (operand, result) that are free. `summed`: dimensions of `left` that are summed over, also
    where none of `right` is the same (grouped channels). `windowed`: (left, right, result) under a window. `grouped`:
    (left, right, result) that as many groups divide in their order, each of which meets its own alone.

    Where rows of `left` belong to groups, each with a matrix of its own (experts): `ragged` is the dimension of `left`
    that the groups divide, in their order, so that its rows can't be told apart without `sizes`, the operand of the
    groups' sizes. `by_group`: (operand or, for the result, -1, dimension) that count the groups, `sizes` among them;
    `sized`: (sizes, left) where each row of `left` has groups of its own.
    """

    contracted: Pairs = ()
    batch: tuple[tuple[int, int, int], ...] = ()
    left: Pairs = ()
    right: Pairs = ()
    summed: tuple[int, ...] = ()
    windowed: tuple[tuple[int, int, int], ...] = ()
    grouped: tuple[int, int, int] | None = None
    ragged: int | None = None
    by_group: Pairs = ()
    sized: Pairs = ()


def dot(params: Mapping[str, Any], shapes: Sequence[Shape]) -> Contraction:
    """`dot_general`, `scaled_dot`: the result has batch dimensions, then those of `left`, then those of `right`."""
    return _dot(params["dimension_numbers"], shapes)


def _dot(numbers: Any, shapes: Sequence[Shape], groups: Sequence[int] = (), first: int = 0) -> Contraction:
    (lc, rc), (lb, rb) = numbers
    free = [d for d in range(len(shapes[0])) if d not in lc and d not in lb]
    after = first + len(lb) + len(free)
    others = [d for d in range(len(shapes[1])) if d not in rc and d not in rb and d not in groups]
    return Contraction(
        contracted=tuple(zip(lc, rc, strict=True)),
        batch=tuple(zip(lb, rb, range(first, first + len(lb)), strict=True)),
        left=tuple(zip(free, range(first + len(lb), after), strict=True)),
        right=tuple(zip(others, range(after, after + len(others)), strict=True)),
        summed=tuple(lc),
    )


def ragged_dot(params: Mapping[str, Any], shapes: Sequence[Shape]) -> Contraction:
    """`ragged_dot_general`, in the three ways that jax has for it (`RaggedDotDimensionNumbers`): rows of `left` meet
    their group's matrix of `right`; or both are summed over group by group (the gradient of that), and the result has
    the groups first; or the groups divide a batch dimension, and nothing depends on them."""
    numbers = params["ragged_dot_dimension_numbers"]
    (lc, rc), (lb, rb) = numbers.dot_dimension_numbers
    (ragged,), groups = numbers.lhs_ragged_dimensions, tuple(numbers.rhs_group_dimensions)
    first = int(ragged in lc)
    plain = _dot(((lc, rc), (lb, rb)), shapes, groups, first)
    count = len(shapes[2]) - 1
    inside = lc if first else [] if ragged in lb else [d for d, _ in plain.left]
    counted = [(1, d) for d in groups] + ([(-1, 0)] if first else [])
    sized = tuple(zip(range(count), (*lb, *inside), strict=False))
    return replace(plain, ragged=ragged, by_group=((2, count), *counted), sized=sized)


def scaled_matmul(_params: Mapping[str, Any], _shapes: Sequence[Shape]) -> Contraction:
    """cuDNN's: (batch, rows, depth) and (batch, columns, depth), and their scales."""
    return Contraction(contracted=((2, 2),), batch=((0, 0, 0),), left=((1, 1),), right=((1, 2),), summed=(2,))


def conv(params: Mapping[str, Any], _shapes: Sequence[Shape]) -> Contraction:
    """Examples, channels and what a window slides over. Groups tear the channels apart."""
    (batch, channels, *space), (made, read, *window), (example, out, *places) = params["dimension_numbers"]
    one, single = (params[k] == 1 for k in ("batch_group_count", "feature_group_count"))
    return Contraction(
        contracted=((channels, read),) if single else (),
        left=((batch, example),) if one else (),
        right=((made, out),) if one and single else (),
        summed=(channels,),
        windowed=tuple(zip(space, window, places, strict=True)),
        grouped=None if one and single else (channels if one else batch, made, out),
    )


def dot_work(
    contraction: Contraction, _params: Mapping[str, Any], shapes: Sequence[Shape], _out: Shape
) -> int:
    """The multiply-adds of a matmul: each element of `left` meets the free ones of `right`; of a ragged one, those of
    its own group."""
    return prod(shapes[0]) * prod(shapes[1][d] for d, _ in contraction.right)


def conv_work(
    _contraction: Contraction, params: Mapping[str, Any], shapes: Sequence[Shape], out: Shape
) -> int:
    """As XLA's cost analysis: what meets padding, or the zeros between dilated elements, is not counted."""
    left, right = shapes[:2]
    (batch, channels, *space), (_, _, *window), (_, made, *places) = params["dimension_numbers"]
    distances = (params[name] for name in ("rhs_dilation", "window_strides", "padding", "lhs_dilation"))
    meetings = [
        _meetings(left[i], (right[k], dilation), (out[o], stride), low, spread)
        for i, k, o, dilation, stride, (low, _), spread in zip(space, window, places, *distances, strict=True)
    ]
    examples = left[batch] // params["batch_group_count"]
    return examples * left[channels] // params["feature_group_count"] * out[made] * prod(meetings)


def _meetings(size: int, window: tuple[int, int], places: tuple[int, int], low: int, spread: int) -> int:
    """How many pairs (element of the window, place of the window) of one dimension meet an element of the input.

    Element k at place o meets `o * stride + k * dilation - low`; the input's elements lie `spread` apart. `window` and
    `places`: how many there are, and their distance.
    """
    (few, step), (many, stride) = sorted((window, places))
    positions = stride * np.arange(many) - low
    found = 0
    for k in range(few):
        at = positions + step * k
        found += np.count_nonzero((at >= 0) & (at <= (size - 1) * spread) & (at % spread == 0))
    return int(found)


def attention_work(params: Mapping[str, Any], shapes: Sequence[Shape]) -> int:
    """Of each query with each key that its distance lets it see: a score, and a part of the sum of values."""
    return _pairs(params["form"].span, shapes) * (shapes[0][-1] + shapes[2][-1])


def attention_gradient_work(params: Mapping[str, Any], shapes: Sequence[Shape]) -> int:
    """Scores once more and their gradients, and the gradients of queries, keys and values."""
    return _pairs(params["form"].span, shapes) * (3 * shapes[0][-1] + 2 * shapes[2][-1])


def _pairs(span: Any, shapes: Sequence[Shape]) -> int:
    """How many pairs of a query and a key are at distances in `span`, in all examples and heads."""
    *others, queries, _ = shapes[0]
    keys, at = shapes[1][-2], np.arange(queries)
    first = 0 if span.high is None else np.maximum(0, at - span.high)
    last = keys - 1 if span.low is None else np.minimum(keys - 1, at - span.low)
    return prod(others) * int(np.broadcast_to(np.maximum(0, last - first + 1), queries).sum())
