"""Dtype in which devices reduce gradients, where it differs from the dtype of the gradients.

A product of bfloat16 activations accumulates in float32 before rounding, so a float32 result is free. A reduction of
float32 results loses nothing to rounding and sends twice the bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ...program.ir import Equation
from ...program.phases import BACKWARD
from ...program.primitives import bind_with_dtype, is_float
from ...program.xla_faults import widen_operands
from ..layout import Layout
from .deferral_analysis import summed_batch_dims
from .region import Context, Emission, Region


@dataclass(frozen=True, eq=False)
class TypedReductions(Region):
    """Equations that sum over the sharded batch and return their result in `dtype`, the dtype of the reduction."""

    layout: Layout
    dtype: Any

    def emit(self, e: Equation, values: list, default: Callable[[list], list], lowering: Emission) -> list:
        return lowering.after(
            e, bind_with_dtype(e.jaxpr_eqn, self.cast_operands(e, lowering.before(e, values)), self.dtype)
        )

    def cast_operands(self, e: Equation, values: list) -> list:
        """Return the operands of `e` cast to the reduction dtype, except for those of products."""
        if e.primitive.is_product:
            # Products accumulate bfloat16 in float32 anyway, so that their result dtype is enough.
            return widen_operands(e, values, self.dtype) if self.layout.is_cpu else values
        return [v.astype(self.dtype) if is_float(v.dtype) else v for v in values]


def reduction_dtype(dtype: Any, value_dtype: Any, *, gradient: bool) -> Any:
    """Return the dtype in which devices reduce a value.

    A wider dtype applies to all values, a narrower one to gradients alone.

    Args:
        dtype: The dtype asked for; None for the value's own.
        value_dtype: Dtype of the value.
        gradient: Whether the value is a gradient.
    """
    if dtype is None or not is_float(value_dtype):
        return value_dtype
    wider = jnp.finfo(value_dtype).bits < jnp.finfo(dtype).bits
    return dtype if wider or gradient else value_dtype


def find_typed_reductions(context: Context) -> TypedReductions:
    """Find the sums over the batch with another dtype for the reduction.

    Only products in the backward pass count as gradients; biases and looked up rows would lose by a narrower dtype.
    """
    layout, dtype = context.layout, context.sum_dtype
    members = set[int]()
    if dtype is not None and layout.device_count(layout.batch_axes) > 1:
        for e in layout.program.equations:
            if summed_batch_dims(layout, e) is not None:
                own = layout.program.avals[e.results[0]].dtype
                gradient = e.primitive.is_product and context.phases.get(e.index) == BACKWARD
                if reduction_dtype(dtype, own, gradient=gradient) != own:
                    members.add(e.index)
    return TypedReductions(members, layout, dtype)
