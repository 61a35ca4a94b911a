"""Step with dynamic loss scaling: a step with overflow in its gradients keeps the old state."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey

from ..program.gradient_calls import GradientCall, GradientEmitter, value_and_gradients
from ..program.hooks import hook_vjp
from ..program.roles import RNG, InputRoles
from ..program.trace import Traced, marking_vjp
from .loss_scaling import LossScale, all_finite, initial, kept_where, next_scale, unscaled

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
