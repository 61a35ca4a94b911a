"""Dynamic loss scaling: small gradients kept from vanishing in float16, and steps whose gradients overflow skipped.

The loss is differentiated with a large seed, and its gradients divided by it (Micikevicius et al. 2018, section 3.2).
A scale that makes them overflow is halved and the step left out; after a while without overflow it is doubled, as
`torch.amp.GradScaler` does with these very numbers but for its first one.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

FIRST = 2.0**15
LEAST = 1.0  # a loss that overflows even so is no matter of scale
FACTOR = 2.0
PATIENCE = 2000  # steps


class Scale(NamedTuple):
    """`value`: what the loss is multiplied by, float32 []. `good`: steps since it last changed, int32 []."""

    value: jax.Array
    good: jax.Array


def initial() -> Scale:
    """The scale of the first step."""
    return Scale(jnp.asarray(FIRST, jnp.float32), jnp.asarray(0, jnp.int32))


def adjusted(scale: Scale, finite: Any) -> Scale:
    """The scale of the next step; `finite` (bool []): were this step's gradients?

    >>> halved = adjusted(initial(), False)
    >>> float(halved.value), int(halved.good)
    (16384.0, 0)
    """
    good = jnp.where(finite, scale.good + 1, 0)
    due = good >= PATIENCE
    grown = scale.value * FACTOR
    value = jnp.where(due & jnp.isfinite(grown), grown, scale.value)
    value = jnp.where(finite, value, jnp.maximum(scale.value / FACTOR, LEAST))
    return Scale(value, jnp.where(due, 0, good))


def all_finite(grads: Any) -> jax.Array:
    """Is every float of a tree finite? bool []."""
    floats = [x for x in jax.tree.leaves(grads) if _is_float(x)]
    return jnp.all(jnp.stack([jnp.isfinite(x).all() for x in floats])) if floats else jnp.asarray(True)


def unscaled(grads: Any, scale: Scale) -> Any:
    """Gradients of the loss from those of the scaled loss, divided in float32, each in its own dtype."""

    def divided(g):
        return (g.astype(jnp.promote_types(g.dtype, jnp.float32)) / scale.value).astype(g.dtype)

    return jax.tree.map(lambda g: divided(g) if _is_float(g) else g, grads)


def kept_where(finite: Any, new: Any, old: Any) -> Any:
    """The tree `new` where the step counts, and `old`, leaf by leaf, where it is left out."""
    return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
