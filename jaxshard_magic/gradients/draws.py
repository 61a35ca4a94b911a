"""Random draws of one microbatch, equal to its rows of the whole batch's draw.

Dropout then gives the numbers of the plain step.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from ..program.batching.followed_program import FollowedProgram
from ..program.ir import Equation
from ..program.primitives import bind, shape_of
from ..program.replay import Replay
from .rows import row_positions


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
