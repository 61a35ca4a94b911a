"""Rows of the batch in each microbatch: splitting arrays and joining them again."""

from typing import Any

import jax.numpy as jnp
from jax import lax


def microbatch_rows(examples: int, microbatches: int, shards: int) -> Any:
    """Return the rows of each microbatch, int32[microbatches, examples / microbatches].

    Each microbatch takes an equal part of every shard, so that no example moves between devices.

    >>> microbatch_rows(8, 2, 2).tolist()
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    return split_microbatches(jnp.arange(examples, dtype=jnp.int32), 0, microbatches, shards)


def split_microbatches(x: Any, dim: int, microbatches: int, shards: int) -> Any:
    """Split an array into microbatches with the rows of `microbatch_rows`.

    Args:
        x: Array with the examples along `dim`.
        dim: Dimension of the examples.
        microbatches: Number of microbatches.
        shards: Number of shards of the batch over devices.

    Returns:
        Array of shape `[microbatches, ..., examples / microbatches at dim, ...]`.
    """
    before, size, after = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
    # Shards first: each microbatch takes its rows from every shard, and no row moves between devices.
    cut = x.reshape(*before, shards, microbatches, size // (shards * microbatches), *after)
    return jnp.moveaxis(cut, dim + 1, 0).reshape(microbatches, *before, size // microbatches, *after)


def join_microbatches(parts: Any, dim: int, shards: int) -> Any:
    """Invert `split_microbatches`.

    >>> join_microbatches(split_microbatches(jnp.arange(12).reshape(3, 4), 1, 2, 2), 1, 2).tolist()
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    """
    n, *shape = parts.shape
    before, size, after = shape[:dim], shape[dim], shape[dim + 1 :]
    cut = parts.reshape(n, *before, shards, size // shards, *after)
    return jnp.moveaxis(cut, 0, dim + 1).reshape(*before, n * size, *after)


def row_positions(rows: Any, size: int) -> Any:
    """Return the positions of rows in a dimension of `size`, int32.

    Each row has several positions, or several rows share one, by the ratio of `size` to the number of rows.

    >>> row_positions(jnp.array([2, 3, 6, 7]), 8).tolist(), row_positions(jnp.array([2, 3, 6, 7]), 2).tolist()
    ([4, 5, 6, 7, 12, 13, 14, 15], [1, 3])
    """
    n = rows.shape[0]
    if size >= n:
        each = size // n
        return (rows[:, None] * each + jnp.arange(each, dtype=rows.dtype)).reshape(-1)
    of = n // size
    return lax.div(rows.reshape(size, of)[:, 0], jnp.asarray(of, rows.dtype))
