"""A step whose loss is scaled while it is differentiated, and that is left out where its gradients overflow."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey

from ..program.capture import Gradient, Taking, taken
from ..program.hooks import gradients_by
from ..program.roles import RNG, Roles
from ..program.trace import Traced, marking
from .scaling import Scale, adjusted, all_finite, initial, kept_where, unscaled

CARRIED = len(Scale._fields)  # inputs of the step that are its own, and come back as its last outputs


def taken_scaled(
    call: Gradient, loss: Any, operands: Sequence[Any], seed: float, scale: Scale | None
) -> list:
    """As `taken`; with a `scale` the backward pass starts with so much more, and the gradients are divided by it."""
    if scale is None:
        return taken(call, loss, operands, seed)
    outs = taken(call, loss, operands, seed * scale.value)
    return [*outs[: call.outs], *unscaled(outs[call.outs :], scale)]


def with_scaled_gradients(captured: Traced, taking: Taking, roles: Roles) -> Traced:
    """The step of `captured` with its gradients as `taking` takes them, its loss scale among its inputs and outputs.

    The scale is held as the first constants. A step whose gradients are not finite gives back the state that it was
    given, but for random keys.
    """
    first = initial()

    def run(value, good, *inputs):
        taking.scale, taking.gradients = Scale(value, good), []
        outs = taking(*inputs)
        finite = all_finite(taking.gradients)
        for o, i in roles.state.items():
            if roles.of[i] != RNG:
                outs[o] = kept_where(finite, outs[o], inputs[i])
        return [*outs, *adjusted(taking.scale, finite)]

    with gradients_by(marking):
        closed = jax.make_jaxpr(run)(*first, *captured.closed.in_avals)
    names = tuple((GetAttrKey("loss_scale"), GetAttrKey(name)) for name in Scale._fields)
    consts = (*(jnp.asarray(x) for x in first), *captured.consts)
    return Traced(closed, (*names, *captured.in_paths), (*captured.out_paths, *names), consts)
