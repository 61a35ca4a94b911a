"""Rows of the batch in each microbatch: splitting arrays, joining them again, and random draws.

The draw of one microbatch equals its rows of the whole batch's draw. Dropout then gives the numbers of the plain step.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from ..program.batching.followed_program import FollowedProgram
from ..program.emit import Replay
from ..program.ir import Equation
from ..program.primitives import bind, shape_of


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


class BatchDrawReplay(Replay):
    """Run a microbatch's program with the random numbers of `rows`, int32 rows of the whole batch."""

    def __init__(self, followed: FollowedProgram):
        super().__init__(followed.small)
        self.followed = followed
        self.rows: Any = None

    def run_equation(self, e: Equation, values: list) -> list:
        dim = self.followed.draw_dims.get(e.index)
        if dim is None:
            return super().run_equation(e, values)
        return [draw_rows(e, self.followed.large.equations[e.index], dim, self.rows, values)]


def draw_rows(e: Equation, whole: Equation, dim: int, rows: Any, values: Sequence[Any]) -> Any:
    """Return rows of a full-batch random draw.

    Threefry's bits depend on their position alone under `jax_threefry_partitionable`: only `rows` are drawn. Other
    generators draw the whole batch and select the rows.

    Args:
        e: The draw at a microbatch.
        whole: The same draw at the full batch.
        dim: Dimension of the rows.
        rows: Rows of the microbatch, int32.
        values: Operands of the draw.
    """
    shape, full = shape_of(e.jaxpr_eqn.outvars[0]), shape_of(whole.jaxpr_eqn.outvars[0])
    places = row_positions(rows, shape[dim])
    if not _by_position(e, full):
        return jnp.take(bind(whole.jaxpr_eqn, list(values))[0], places, axis=dim, mode="clip")
    at = [
        lax.broadcast_in_dim(places.astype(jnp.uint32), shape, (d,))
        if d == dim
        else lax.broadcasted_iota(jnp.uint32, shape, d)
        for d in range(len(shape))
    ]
    zero = jnp.zeros(shape, jnp.uint32)
    count = sum((x * jnp.uint32(math.prod(full[d + 1 :])) for d, x in enumerate(at)), zero)
    # As `threefry_random_bits` of JAX: a counter per element in row-major order, and the exclusive or of both words.
    first, second = jax.random.key_data(values[0])
    a, b = threefry2x32_p.bind(first + zero, second + zero, zero, count)
    return (a ^ b).astype(_dtype(e.jaxpr_eqn.outvars[0]))


def _by_position(e: Equation, full: tuple[int, ...]) -> bool:
    key = e.jaxpr_eqn.invars[0]
    return (
        e.name == "random_bits"
        and shape_of(key) == ()
        and "fry" in str(_dtype(key))
        and bool(jax.config.jax_threefry_partitionable)  # pyright: ignore[reportAttributeAccessIssue]
        and e.params["bit_width"] <= 32
        # The counter of a larger draw has two words that are not 0.
        and math.prod(full) < 2**32
    )


def _dtype(var: Any) -> Any:
    return var.aval.dtype
