"""Traced backward passes of `jax.custom_vjp` functions, and the labels expected of their results.

Such a rule is any function: it may normalise the gradients of all rows by their norm, although the function itself
works row by row. Labels of the function's values say nothing about its gradient.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..ir import Equation, Program
from ..primitives import bind
from .batch_labels import Constant, ExampleSum, Label, PerExample, UnknownLabel, size_label


def has_custom_vjp(e: Equation) -> bool:
    """Return whether `e` calls a function with a `jax.custom_vjp` rule."""
    return e.primitive.custom_derivative and "bwd" in e.params


def differentiable_positions(values: Sequence[Any]) -> list[int]:
    """Return the positions of the floating-point values, which have gradients.

    Args:
        values: Objects with an aval.
    """
    return [i for i, v in enumerate(values) if jnp.issubdtype(v.aval.dtype, jnp.inexact)]


def trace_vjp(e: Equation) -> Program:
    """Trace the gradient of an equation.

    The program maps (all operands, cotangents of the floating-point results) to cotangents of the floating-point
    operands.
    """
    ins, outs = differentiable_positions(e.jaxpr_eqn.invars), differentiable_positions(e.jaxpr_eqn.outvars)
    avals = [v.aval for v in (*e.jaxpr_eqn.invars, *(e.jaxpr_eqn.outvars[o] for o in outs))]

    def run(*arrays: Any) -> Any:
        operands, cotangents = arrays[: len(e.jaxpr_eqn.invars)], arrays[len(e.jaxpr_eqn.invars) :]

        # Other operands are closed over: `jax.vjp` gives integers float0 cotangents.
        def function(*floats: Any) -> list:
            primals = [*operands]
            for i, x in zip(ins, floats, strict=True):
                primals[i] = x
            results = bind(e.jaxpr_eqn, primals)
            return [results[o] for o in outs]

        return jax.vjp(function, *(operands[i] for i in ins))[1]([*cotangents])

    return Program(jax.make_jaxpr(run)(*avals))


def gradient_label(label: Label) -> Label:
    """Return the label expected of the gradient of a value labelled `label`.

    Microbatches add up the gradients of parameters, so a constant has a sum over examples.
    """
    match label:
        case PerExample(dim, scale):
            # With values `scale` times as large, gradients are `scale` times smaller.
            return PerExample(dim, 1 / scale)
        case ExampleSum(scale):
            return size_label(1 / scale)
        case Constant():
            return ExampleSum()
    return UnknownLabel()
