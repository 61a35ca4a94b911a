"""Factors: corresponding dimensions of operand and result in changes of shape (reshape, transpose, broadcast).

Each primitive of kind `SHAPE` has one function here that returns its `Factors`, in the manner of Shardy's sharding
rules. No other module knows how these primitives map dimensions; `tests/program/test_factors.py` compares the functions
with the primitives and with Shardy. A primitive without a function is unknown to all readers, never a reshape.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

Shape = tuple[int, ...]
Groups = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True)
class SubDimension:
    """Sub-dimension of a dimension: `size` positions, `stride` elements apart.

    Index i along `dim` belongs to position `i // stride % size`. The stride exceeds 1, or the dimension exceeds the
    positions, after a reshape merged the sub-dimension with others.

    Attributes:
        dim: The dimension.
        size: Number of positions.
        stride: Product of the sizes of more minor sub-dimensions merged into the dimension.
    """

    dim: int
    size: int
    stride: int = 1


@dataclass(frozen=True, slots=True)
class Factors:
    """Dimensions of an operand and of a result with the same numbers.

    Attributes:
        operand_shape: Shape of the operand.
        result_shape: Shape of the result.
        groups: (operand dimensions, result dimensions): the operand's, merged major first, are the result's, merged
            likewise. Result dimensions without operand dimensions repeat the operand, unless of size 1. Nothing is
            known of dimensions in no group, such as an empty array's.
    """

    operand_shape: Shape
    result_shape: Shape
    groups: Groups

    @property
    def inverse(self) -> "Factors":
        """Factors from the result to the operand."""
        return Factors(self.result_shape, self.operand_shape, tuple((new, old) for old, new in self.groups))

    @property
    def repeated_dims(self) -> frozenset[int]:
        """Dimensions of the result along which all numbers are equal, since the operand has none of them."""
        return frozenset(d for old, new in self.groups if not old for d in new)

    @property
    def has_repeats(self) -> bool:
        """True if the result may have a number of the operand more often than the operand."""
        return prod(self.operand_shape) != prod(self.result_shape)

    def map_to_result(self, sub_dimension: SubDimension) -> SubDimension | None:
        """Return the sub-dimension of the result that corresponds to `sub_dimension`.

        None if the sub-dimension is split, has no dimension in the result, or is unknown.
        """
        old, new = self._group(sub_dimension.dim)
        if len(old) == len(new) == 1:
            return replace(sub_dimension, dim=new[0])
        stride = (
            sub_dimension.stride * prod(self.operand_shape[d] for d in old[old.index(sub_dimension.dim) + 1 :])
            if old
            else 0
        )
        for k, d in enumerate(new):
            minor_size = prod(self.result_shape[minor] for minor in new[k + 1 :])
            if (
                stride
                and stride % minor_size == 0
                and (minor_size * self.result_shape[d]) % (stride * sub_dimension.size) == 0
            ):
                return SubDimension(d, sub_dimension.size, stride // minor_size)
        return None

    def unsplit_dim(self, dim: int) -> int | None:
        """Return the result dimension equal to the operand dimension `dim`, neither merged nor split, or None."""
        old, new = self._group(dim)
        return new[0] if len(old) == len(new) == 1 else None

    def leading_dim(self, dim: int) -> int | None:
        """Return the result dimension that runs through operand dimension `dim` in order, or None.

        A split dimension is led by its major part; a dimension merged with more minor ones by the merged dimension.

        >>> reshape({}, (8, 6), (4, 2, 6)).leading_dim(0), reshape({}, (8, 6), (48,)).leading_dim(1)
        (0, None)
        """
        old, new = self._group(dim)
        major = prod(self.operand_shape[d] for d in old[: old.index(dim)]) if old else 0
        return next((d for k, d in enumerate(new) if prod(self.result_shape[m] for m in new[:k]) == major), None)

    def _group(self, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the group of operand dimension `dim`, empty without one."""
        return next((group for group in self.groups if dim in group[0]), ((), ()))


def broadcast(params: Mapping[str, Any], operand: Shape, result: Shape) -> Factors:
    """Return the factors of `broadcast_in_dim`. A repeated dimension of size 1 has no dimension in the result."""
    into = params["broadcast_dimensions"]
    kept = [(a, b) for a, b in enumerate(into) if operand[a] == result[b]]
    return _one_to_one(operand, result, kept)


def transpose(params: Mapping[str, Any], operand: Shape, result: Shape) -> Factors:
    """Return the factors of `transpose`."""
    return _one_to_one(operand, result, [(a, b) for b, a in enumerate(params["permutation"])])


def squeeze(params: Mapping[str, Any], operand: Shape, result: Shape) -> Factors:
    """Return the factors of `squeeze`."""
    kept = [d for d in range(len(operand)) if d not in params["dimensions"]]
    return _one_to_one(operand, result, [(a, b) for b, a in enumerate(kept)])


def expand_dims(params: Mapping[str, Any], operand: Shape, result: Shape) -> Factors:
    """Return the factors of `expand_dims`, the inverse of `squeeze`."""
    return squeeze(params, result, operand).inverse


def reshape(params: Mapping[str, Any], operand: Shape, result: Shape) -> Factors:
    """Return the factors of `reshape`: minimal groups of equal product, without dimensions of size 1.

    Args:
        params: Parameters; `dimensions` is the order of the operand's dimensions, None for their own.
        operand: Shape of the operand.
        result: Shape of the result.
    """
    order = params.get("dimensions") or range(len(operand))
    # A dimension of size 1 fits into any group, so each is a group of its own.
    ones = [((d,), ()) for d, size in enumerate(operand) if size == 1]
    ones += [((), (d,)) for d, size in enumerate(result) if size == 1]
    groups = []
    for old, new in reshape_groups([operand[d] for d in order], result):
        operand_dims = tuple(order[d] for d in old if operand[order[d]] != 1)
        result_dims = tuple(d for d in new if result[d] != 1)
        if operand_dims and result_dims:
            groups.append((operand_dims, result_dims))
    return Factors(operand, result, (*groups, *ones))


def _one_to_one(operand: Shape, result: Shape, pairs: Sequence[tuple[int, int]]) -> Factors:
    """Return factors in which each (operand, result) pair is one dimension; other dimensions face none."""
    before, after = ({pair[k] for pair in pairs} for k in (0, 1))
    groups: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((a,), (b,)) for a, b in pairs]
    groups += [((d,), ()) for d in range(len(operand)) if d not in before]
    groups += [((), (d,)) for d in range(len(result)) if d not in after]
    return Factors(operand, result, tuple(groups))


def reshape_groups(a: Sequence[int], b: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return the minimal groups of dimensions of shapes `a` and `b` with equal products, in order.

    >>> reshape_groups((8, 6), (8, 2, 3))
    [([0], [0]), ([1], [1, 2])]
    """
    groups, i, j = [], 0, 0
    while i < len(a) or j < len(b):
        left, right = ([i] if i < len(a) else []), ([j] if j < len(b) else [])
        left_product, right_product = (a[i] if left else 1), (b[j] if right else 1)
        i, j = i + len(left), j + len(right)
        while left_product != right_product:
            if left_product < right_product and i < len(a):
                left_product, i = left_product * a[i], i + 1
                left.append(i - 1)
            elif j < len(b):
                right_product, j = right_product * b[j], j + 1
                right.append(j - 1)
            else:
                return groups  # an empty array: products of 0 don't tell which dimensions correspond
        groups.append((left, right))
    return groups
