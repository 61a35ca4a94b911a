"""Random numbers of one microbatch as the whole batch's draw has them: dropout then gives the plain step's numbers."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from ..program.batching.follow import Followed
from ..program.ir import Equation
from ..program.primitives import bind, shape_of
from ..program.replay import Replay
from .rows import places_of


class Drawing(Replay):
    """Runs a microbatch's program, its random numbers those of `rows` of the whole batch."""

    def __init__(self, followed: Followed):
        super().__init__(followed.small)
        self.followed = followed
        self.rows: Any = None

    def equation(self, e: Equation, values: list) -> list:
        dim = self.followed.draws.get(e.index)
        if dim is None:
            return super().equation(e, values)
        return [drawn(e, self.followed.large.equations[e.index], dim, self.rows, values)]


def drawn(e: Equation, whole: Equation, dim: int, rows: Any, values: Sequence[Any]) -> Any:
    """What the draw `whole`, of the full batch, has in `rows` along `dim`; `e` is the same draw for a microbatch.

    Threefry's bits depend on their position alone (`jax_threefry_partitionable`), so only those rows are drawn; another
    generator draws all and keeps the rows.
    """
    shape, full = shape_of(e.eqn.outvars[0]), shape_of(whole.eqn.outvars[0])
    places = places_of(rows, shape[dim])
    if not _by_position(e, full):
        return jnp.take(bind(whole.eqn, list(values))[0], places, axis=dim, mode="clip")
    at = [
        lax.broadcast_in_dim(places.astype(jnp.uint32), shape, (d,))
        if d == dim
        else lax.broadcasted_iota(jnp.uint32, shape, d)
        for d in range(len(shape))
    ]
    zero = jnp.zeros(shape, jnp.uint32)
    count = sum((x * jnp.uint32(math.prod(full[d + 1 :])) for d, x in enumerate(at)), zero)
    first, second = jax.random.key_data(values[0])
    a, b = threefry2x32_p.bind(first + zero, second + zero, zero, count)
    return (a ^ b).astype(_dtype(e.eqn.outvars[0]))


def _by_position(e: Equation, full: tuple[int, ...]) -> bool:
    key = e.eqn.invars[0]
    return (
        e.name == "random_bits"
        and shape_of(key) == ()
        and "fry" in str(_dtype(key))
        and bool(jax.config.jax_threefry_partitionable)  # pyright: ignore[reportAttributeAccessIssue]
        and e.params["bit_width"] <= 32
        and math.prod(full) < 2**32
    )


def _dtype(var: Any) -> Any:
    return var.aval.dtype
