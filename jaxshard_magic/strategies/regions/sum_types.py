"""The type in which devices add up gradients, where it is not the one that the step computes them in.

A product of activations in bfloat16 adds up in float32 before it rounds, so that its result is to be had in float32 for
nothing: a sum over the devices of such results loses nothing to rounding, and sends twice the bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ...program.ir import Equation
from ...program.phases import BACKWARD
from ...program.primitives import bind_as, is_float
from ...program.xla_faults import widened
from ..layout import Layout
from .deferred import summed_batch
from .region import Context, Emission, Region


@dataclass(frozen=True, eq=False)
class TypedSums(Region):
    """Equations that sum over the divided batch and make their result in `dtype`, as which devices add it up."""

    layout: Layout
    dtype: Any

    def emit(self, e: Equation, values: list, rest: Callable[[list], list], hold: Emission) -> list:
        return hold.after(e, bind_as(e.eqn, self.operands(e, hold.before(e, values)), self.dtype))

    def operands(self, e: Equation, values: list) -> list:
        """The operands of `e`, in the type in which it takes them: those of a product as they are."""
        if e.primitive.product:
            return widened(e, values, self.dtype) if self.layout.simulated else values
        return [v.astype(self.dtype) if is_float(v.dtype) else v for v in values]


def sum_type(dtype: Any, own: Any, *, gradient: bool) -> Any:
    """The type in which devices add up values of type `own` where they add up in `dtype`, None for each in its own. All
    go to a wider one, to a narrower one gradients alone."""
    if dtype is None or not is_float(own):
        return own
    wider = jnp.finfo(own).bits < jnp.finfo(dtype).bits
    return dtype if wider or gradient else own


def typed_sums(context: Context) -> TypedSums:
    """The sums over the batch whose type changes. Those of products in the backward pass count as gradients: the
    others of it, of biases and looked up rows, lose by a narrower type."""
    layout, dtype = context.layout, context.sum_dtype
    members = set[int]()
    if dtype is not None and layout.count(layout.batch_axes) > 1:
        for e in layout.program.equations:
            if summed_batch(layout, e) is not None:
                own = layout.program.avals[e.outs[0]].dtype
                gradient = e.primitive.product and context.phases.get(e.index) == BACKWARD
                if sum_type(dtype, own, gradient=gradient) != own:
                    members.add(e.index)
    return TypedSums(members, layout, dtype)
