"""Examples taken in microbatches: which rows each has, arrays cut so and put together again."""

from typing import Any

import jax.numpy as jnp
from jax import lax


def rows_of(examples: int, microbatches: int, shards: int) -> Any:
    """The rows of each microbatch, int32[microbatches, examples / microbatches]: an equal part of what each of
    `shards` devices holds, so that no example moves between them.

    >>> rows_of(8, 2, 2).tolist()
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    return split(jnp.arange(examples, dtype=jnp.int32), 0, microbatches, shards)


def split(x: Any, dim: int, microbatches: int, shards: int) -> Any:
    """`[.., examples at dim, ..]` -> `[microbatches, .., examples / microbatches at dim, ..]`, as in `rows_of`."""
    before, size, after = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
    cut = x.reshape(*before, shards, microbatches, size // (shards * microbatches), *after)
    return jnp.moveaxis(cut, dim + 1, 0).reshape(microbatches, *before, size // microbatches, *after)


def join(parts: Any, dim: int, shards: int) -> Any:
    """The inverse of `split`.

    >>> join(split(jnp.arange(12).reshape(3, 4), 1, 2, 2), 1, 2).tolist()
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    """
    n, *shape = parts.shape
    before, size, after = shape[:dim], shape[dim], shape[dim + 1 :]
    cut = parts.reshape(n, *before, shards, size // shards, *after)
    return jnp.moveaxis(cut, 0, dim + 1).reshape(*before, n * size, *after)


def places_of(rows: Any, size: int) -> Any:
    """The places in a dimension of `size` of these rows, int32[examples]: several for each row, or one for several.

    >>> places_of(jnp.array([2, 3, 6, 7]), 8).tolist(), places_of(jnp.array([2, 3, 6, 7]), 2).tolist()
    ([4, 5, 6, 7, 12, 13, 14, 15], [1, 3])
    """
    n = rows.shape[0]
    if size >= n:
        each = size // n
        return (rows[:, None] * each + jnp.arange(each, dtype=rows.dtype)).reshape(-1)
    of = n // size
    return lax.div(rows.reshape(size, of)[:, 0], jnp.asarray(of, rows.dtype))
