"""Dynamic loss scaling: keeps small float16 gradients from vanishing, and skips steps with overflow.

The loss is differentiated with a large seed, and its gradients are divided by the seed (Micikevicius et al. 2018,
"Mixed Precision Training", section 3.2). A scale with overflow is halved and the step skipped: it keeps the old state.
A scale without overflow for `PATIENCE` steps is doubled. The constants are those of `torch.amp.GradScaler`, except for
the first scale.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey

from ..program.gradient_calls import GradientCall, GradientEmitter, value_and_gradients
from ..program.hooks import hook_vjp
from ..program.roles import RNG, InputRoles
from ..program.trace import Traced, marking_vjp

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


NUM_SCALE_VALUES = len(LossScale._fields)  # first inputs and last outputs of the step


def scaled_value_and_gradients(
    call: GradientCall, loss: Any, operands: Sequence[Any], seed: float, scale: LossScale | None
) -> list:
    """Return the results of a gradient call, differentiated under a loss scale.

    The backward pass starts with `seed` times the scale, and the gradients are divided by it.

    Args:
        call: The gradient call.
        loss: Loss of the call, a callable.
        operands: Operands of the call.
        seed: Cotangent of the loss.
        scale: Loss scale; None for none.
    """
    if scale is None:
        return value_and_gradients(call, loss, operands, seed)
    outs = value_and_gradients(call, loss, operands, seed * scale.value)
    return [*outs[: call.num_outputs], *unscaled(outs[call.num_outputs :], scale)]


def with_scaled_gradients(captured: Traced, taking: GradientEmitter, roles: InputRoles) -> Traced:
    """Return the step of `captured` with scaled gradients and its loss scale among inputs and outputs.

    The scale comes as the first constants and the last outputs. A step with gradients that are not finite returns the
    state that it was given, except for random keys.

    Args:
        captured: The step with each gradient call as an equation.
        taking: Emitter of the step's gradients.
        roles: Roles of the step's inputs and outputs.
    """
    first = initial()

    def run(value, good, *inputs):
        taking.scale, taking.gradients = LossScale(value, good), []
        outs = taking(*inputs)
        finite = all_finite(taking.gradients)
        for o, i in roles.state.items():
            # A key that stayed the same would make the next step draw the same numbers.
            if roles.by_input[i] != RNG:
                outs[o] = kept_where(finite, outs[o], inputs[i])
        return [*outs, *next_scale(taking.scale, finite)]

    with hook_vjp(marking_vjp):
        closed = jax.make_jaxpr(run)(*first, *captured.closed.in_avals)
    names = tuple((GetAttrKey("loss_scale"), GetAttrKey(name)) for name in LossScale._fields)
    consts = (*(jnp.asarray(x) for x in first), *captured.consts)
    return Traced(closed, (*names, *captured.in_paths), (*captured.out_paths, *names), consts)
