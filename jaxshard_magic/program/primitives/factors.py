"""Which dimension of an operand is which of a result, for primitives that keep numbers and change dimensions.

The one place that knows it of reshapes, transposes, broadcasts and the like (`Kind.SHAPE`): each row of the table has
a function here that gives its `Factors`, in the way of Shardy's sharding rules. `tests/test_factors.py` holds them
against the primitives themselves and against Shardy. What has no such function is unknown to all readers, never a
reshape.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

Shape = tuple[int, ...]
Groups = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True)
class Place:
    """`count` places along dimension `dim` of a value: what stands at i there is of place `i // inner % count`.

    `inner` is more than one, or the dimension longer than the places, where a reshape merged it with others.
    """

    dim: int
    count: int
    inner: int = 1


@dataclass(frozen=True, slots=True)
class Factors:
    """The dimensions of an operand and of the result that has its numbers.

    Args:
        operand: the operand's shape.
        result: the result's shape.
        groups: (dimensions of the operand, dimensions of the result): the former, merged with the major one first, are
            the latter, merged likewise. The operand is repeated along dimensions of the result that face none of its
            own, unless they are of size 1. Nothing is known of a dimension in no group: of an empty array's.
    """

    operand: Shape
    result: Shape
    groups: Groups

    @property
    def inverse(self) -> "Factors":
        """The same from the result to the operand."""
        return Factors(self.result, self.operand, tuple((new, old) for old, new in self.groups))

    @property
    def repeated(self) -> frozenset[int]:
        """The dimensions of the result along which all numbers are the same, for the operand has none of them."""
        return frozenset(d for old, new in self.groups if not old for d in new)

    @property
    def repeats(self) -> bool:
        """Return whether the result may have a number of the operand more often than the operand has."""
        return prod(self.operand) != prod(self.result)

    def moved(self, place: Place) -> Place | None:
        """Return the place in the result of what has `place` in the operand.

        None where it is torn apart, has no dimension in the result, or is not known.
        """
        old, new = self._group(place.dim)
        if len(old) == len(new) == 1:
            return replace(place, dim=new[0])
        step = place.inner * prod(self.operand[d] for d in old[old.index(place.dim) + 1 :]) if old else 0
        for k, d in enumerate(new):
            after = prod(self.result[minor] for minor in new[k + 1 :])
            if step and step % after == 0 and (after * self.result[d]) % (step * place.count) == 0:
                return Place(d, place.count, step // after)
        return None

    def whole(self, dim: int) -> int | None:
        """Return the dimension of the result that is the operand's `dim`, neither merged nor split, or None."""
        old, new = self._group(dim)
        return new[0] if len(old) == len(new) == 1 else None

    def leading(self, dim: int) -> int | None:
        """Return the dimension of the result that goes through the operand's `dim` in its order: what is major in it,
        if it is split, or it with what is minor to it, if it is merged. None without one.

        >>> reshape({}, (8, 6), (4, 2, 6)).leading(0), reshape({}, (8, 6), (48,)).leading(1)
        (0, None)
        """
        old, new = self._group(dim)
        major = prod(self.operand[d] for d in old[: old.index(dim)]) if old else 0
        return next((d for k, d in enumerate(new) if prod(self.result[m] for m in new[:k]) == major), None)

    def _group(self, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return next((group for group in self.groups if dim in group[0]), ((), ()))


def broadcast(params: Mapping[str, Any], operand: Shape, result: Shape) -> Factors:
    """A dimension of size 1 that is repeated has none in the result."""
    into = params["broadcast_dimensions"]
    kept = [(a, b) for a, b in enumerate(into) if operand[a] == result[b]]
    return _one_to_one(operand, result, kept)


def transpose(params: Mapping[str, Any], operand: Shape, result: Shape) -> Factors:
    return _one_to_one(operand, result, [(a, b) for b, a in enumerate(params["permutation"])])


def squeeze(params: Mapping[str, Any], operand: Shape, result: Shape) -> Factors:
    kept = [d for d in range(len(operand)) if d not in params["dimensions"]]
    return _one_to_one(operand, result, [(a, b) for b, a in enumerate(kept)])


def expand_dims(params: Mapping[str, Any], operand: Shape, result: Shape) -> Factors:
    return squeeze(params, result, operand).inverse


def reshape(params: Mapping[str, Any], operand: Shape, result: Shape) -> Factors:
    """Minimal groups of equal product, without dimensions of size 1, which face none.

    `dimensions` is the order in which the operand's dimensions are gone through; None: their own.
    """
    order = params.get("dimensions") or range(len(operand))
    ones = [((d,), ()) for d, size in enumerate(operand) if size == 1]
    ones += [((), (d,)) for d, size in enumerate(result) if size == 1]
    groups = []
    for old, new in reshape_groups([operand[d] for d in order], result):
        before = tuple(order[d] for d in old if operand[order[d]] != 1)
        after = tuple(d for d in new if result[d] != 1)
        if before and after:
            groups.append((before, after))
    return Factors(operand, result, (*groups, *ones))


def _one_to_one(operand: Shape, result: Shape, pairs: Sequence[tuple[int, int]]) -> Factors:
    """The factors of pairs (dimension of the operand, dimension of the result); all others face none."""
    before, after = ({pair[k] for pair in pairs} for k in (0, 1))
    groups: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((a,), (b,)) for a, b in pairs]
    groups += [((d,), ()) for d in range(len(operand)) if d not in before]
    groups += [((), (d,)) for d in range(len(result)) if d not in after]
    return Factors(operand, result, tuple(groups))


def reshape_groups(a: Sequence[int], b: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The minimal groups of dimensions of shapes `a` and `b` with equal products, in order.

    >>> reshape_groups((8, 6), (8, 2, 3))
    [([0], [0]), ([1], [1, 2])]
    """
    groups, i, j = [], 0, 0
    while i < len(a) or j < len(b):
        left, right = ([i] if i < len(a) else []), ([j] if j < len(b) else [])
        pa, pb = (a[i] if left else 1), (b[j] if right else 1)
        i, j = i + len(left), j + len(right)
        while pa != pb:
            if pa < pb and i < len(a):
                pa, i = pa * a[i], i + 1
                left.append(i - 1)
            elif j < len(b):
                pb, j = pb * b[j], j + 1
                right.append(j - 1)
            else:
                return groups  # an empty array: sizes of 0 say nothing
        groups.append((left, right))
    return groups
