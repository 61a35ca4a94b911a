"""The numbers of a test: of a block while a program runs, and of all it can be where it is read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..primitives import bind
from ..primitives.jaxprs import bind_as
from .attention import Apply, Condition, Leaf, Scores, Test

_TRUTHS = 4  # truth values that are tried in all ways


def leaves(test: Test) -> Iterator[Leaf]:
    """The operands of a test, in order."""
    if isinstance(test, Leaf):
        yield test
    elif isinstance(test, Apply):
        for operand in test.operands:
            yield from leaves(operand)


def evaluated(test: Test, array: Callable[[Leaf], Any], scores: Any = None, dtype: Any = None) -> Any:
    """The numbers of a test.

    Args:
        test: whose leaves have arrays that broadcast against each other.
        array: gives those.
        scores: takes the place of `Scores`.
        dtype: the type of all floats; None for that in which they are.
    """
    if isinstance(test, Scores):
        return scores
    if isinstance(test, Leaf):
        x = jnp.asarray(array(test))
        return x.astype(dtype) if dtype is not None and jnp.issubdtype(x.dtype, jnp.floating) else x
    operands = jnp.broadcast_arrays(*(evaluated(x, array, scores, dtype) for x in test.operands))
    return (bind(test.eqn, operands) if dtype is None else bind_as(test.eqn, operands, dtype))[0]


def met(conditions: Sequence[Condition], array: Callable[[Leaf], Any]) -> Any:
    """Where all conditions are met; True without any."""
    found: Any = True
    for condition in conditions:
        truth = evaluated(condition.test, array).astype(bool)
        found = found & (truth if condition.holds else ~truth)
    return found


def placed(x: Any, dims: Sequence[int | None], rank: int) -> Any:
    """An array with its dimensions at the places `dims` of `rank`, those of None (size 1) left out, others of size 1.

    >>> placed(np.ones((3, 1, 2)), (2, None, 0), 4).shape
    (2, 1, 3, 1)
    """
    sizes = dict(zip(dims, x.shape, strict=True))
    at = sorted((d, k) for k, d in enumerate(dims) if d is not None)
    order = [*(k for _, k in at), *(k for k, d in enumerate(dims) if d is None)]
    return x.transpose(order).reshape([sizes.get(d, 1) for d in range(rank)])


def is_known(leaf: Leaf) -> bool:
    """Whether its numbers are there before a program runs."""
    return isinstance(leaf.source, np.ndarray)


def is_truth(test: Test) -> bool:
    """Whether a test gives truth values."""
    if isinstance(test, Apply):
        return str(getattr(test.eqn.outvars[0].aval, "dtype", "")) == "bool"
    return isinstance(test, Leaf) and (
        test.truth or (is_known(test) and np.asarray(test.source).dtype == bool)
    )


def ways(test: Test) -> tuple[list[Test], Mapping[tuple[bool, ...], float]] | None:
    """The truths that decide on the number that `test` is, and that number for each way in which they can be; None for
    one that more decides on."""
    truths: dict[int, tuple[Test, Any]] = {}
    if not _by_truths(test, truths) or not 0 < len(truths) <= _TRUTHS:
        return None
    numbers = {}
    with jax.ensure_compile_time_eval():
        for way in product((False, True), repeat=len(truths)):
            given = {k: two[way[i]] for i, (k, (_, two)) in enumerate(truths.items())}
            numbers[way] = float(_number(test, given))
    return [truth for truth, _ in truths.values()], numbers


def _by_truths(test: Test, truths: dict[int, tuple[Test, Any]]) -> bool:
    """Whether a test is made of truths and of numbers alone; collects the truths, each with the two numbers that it
    stands for."""
    if is_truth(test) and not (isinstance(test, Leaf) and _size(test) == 1):
        truths[id(test)] = test, (np.False_, np.True_)
        return True
    if isinstance(test, Apply):
        return all(_by_truths(operand, truths) for operand in test.operands)
    if not isinstance(test, Leaf) or not is_known(test):
        return False
    x = np.asarray(test.source)
    if x.size > 1:
        low, high = x.min(), x.max()
        if low == high or not ((x == low) | (x == high)).all():
            return False
        truths[id(test)] = Leaf(x == high, test.dims), (low, high)
    return True


def _number(test: Test, given: Mapping[int, Any]) -> Any:
    if id(test) in given:
        return jnp.asarray(given[id(test)])
    if isinstance(test, Leaf):
        return jnp.asarray(test.source).reshape(())
    assert isinstance(test, Apply)
    return bind(test.eqn, [_number(operand, given) for operand in test.operands])[0]


def _size(leaf: Leaf) -> int:
    return np.asarray(leaf.source).size if is_known(leaf) else 2
