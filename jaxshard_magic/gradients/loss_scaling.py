"""Dynamic loss scaling: keeps small float16 gradients from vanishing, and skips steps with overflow.

The loss is differentiated with a large seed, and its gradients are divided by the seed (Micikevicius et al. 2018,
"Mixed Precision Training", section 3.2). A scale with overflow is halved and the step skipped. A scale without overflow
for `PATIENCE` steps is doubled. The constants are those of `torch.amp.GradScaler`, except for the first scale.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

FIRST = 2.0**15
LEAST = 1.0  # a loss that overflows at scale 1 overflows without scaling too
FACTOR = 2.0
PATIENCE = 2000  # steps


class LossScale(NamedTuple):
    """State of dynamic loss scaling.

    Attributes:
        value: Factor of the loss, float32 [].
        good: Steps since the last change, int32 [].
    """

    value: jax.Array
    good: jax.Array


def initial() -> LossScale:
    """Return the scale of the first step."""
    return LossScale(jnp.asarray(FIRST, jnp.float32), jnp.asarray(0, jnp.int32))


def next_scale(scale: LossScale, finite: Any) -> LossScale:
    """Return the scale of the next step.

    Args:
        scale: Scale of this step.
        finite: Whether this step's gradients are finite, bool [].

    >>> halved = next_scale(initial(), False)
    >>> float(halved.value), int(halved.good)
    (16384.0, 0)
    """
    good = jnp.where(finite, scale.good + 1, 0)
    due = good >= PATIENCE
    grown = scale.value * FACTOR
    # An infinite scale would stay infinite: half of it is, too.
    value = jnp.where(due & jnp.isfinite(grown), grown, scale.value)
    value = jnp.where(finite, value, jnp.maximum(scale.value / FACTOR, LEAST))
    return LossScale(value, jnp.where(due, 0, good))


def all_finite(grads: Any) -> jax.Array:
    """Return whether every float in a tree is finite, bool []."""
    floats = [x for x in jax.tree.leaves(grads) if _is_float(x)]
    return jnp.all(jnp.stack([jnp.isfinite(x).all() for x in floats])) if floats else jnp.asarray(True)


def unscaled(grads: Any, scale: LossScale) -> Any:
    """Divide gradients of the scaled loss by the scale, in float32. Each gradient keeps its dtype."""

    def divided(g):
        # The scale may exceed the range of float16.
        return (g.astype(jnp.promote_types(g.dtype, jnp.float32)) / scale.value).astype(g.dtype)

    return jax.tree.map(lambda g: divided(g) if _is_float(g) else g, grads)


def kept_where(finite: Any, new: Any, old: Any) -> Any:
    """Return the tree `new` where `finite` is true, else `old`, leaf by leaf."""
    return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
