"""The backward pass of a function that has a rule of its own (`jax.custom_vjp`), traced, and what it has to give.

Such a rule is any function: it may normalise the gradients of all rows by their norm, say, where the function itself
works row by row. So what follows the batch in the function says nothing about its gradient.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..ir import Equation, Program
from ..primitives import bind
from .examples import Constant, Label, Rows, Sum, Unknown, sized


def has_own_gradient(e: Equation) -> bool:
    """Return whether `e` calls a function whose gradient is a rule of its own, of any form."""
    return e.primitive.custom and "bwd" in e.params


def moving(values: Sequence[Any]) -> list[int]:
    """Return the positions of those that have gradients; `values` have avals."""
    return [i for i, v in enumerate(values) if jnp.issubdtype(v.aval.dtype, jnp.inexact)]


def pulled_back(e: Equation) -> Program:
    """Return `(operands..., gradients of the moving results...) -> gradients of the moving operands` of `e`."""
    ins, outs = moving(e.eqn.invars), moving(e.eqn.outvars)
    avals = [v.aval for v in (*e.eqn.invars, *(e.eqn.outvars[o] for o in outs))]

    def run(*arrays: Any) -> Any:
        operands, cotangents = arrays[: len(e.eqn.invars)], arrays[len(e.eqn.invars) :]

        def function(*moved: Any) -> list:
            given = [*operands]
            for i, x in zip(ins, moved, strict=True):
                given[i] = x
            made = bind(e.eqn, given)
            return [made[o] for o in outs]

        return jax.vjp(function, *(operands[i] for i in ins))[1]([*cotangents])

    return Program(jax.make_jaxpr(run)(*avals))


def gradient_of(label: Label) -> Label:
    """Return the label that the gradient of a value with that label has, where microbatches add up what parameters
    get."""
    match label:
        case Rows(dim, scale):
            return Rows(dim, 1 / scale)
        case Sum(scale):
            return sized(1 / scale)
        case Constant():
            return Sum()
    return Unknown()
