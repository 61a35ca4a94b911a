"""The type in which devices add up gradients, where it is not the one that the step computes them in.

A product of activations in bfloat16 adds up in float32 before it rounds, so that its result is to be had in float32 for
nothing: a sum over the devices of such results loses nothing to rounding, and sends twice the bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from ..program.ir import Equation
from ..program.phases import BACKWARD
from ..program.primitives import bind_as, is_float
from .deferred import summed_batch
from .layout import Layout

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


@dataclass(frozen=True)
class SumTypes:
    """`dtype`: what devices add up in, None where each sum keeps its own. `made`: the equations, by index, that sum
    over the divided batch and make their result in it."""

    dtype: Any = None
    made: frozenset[int] = field(default_factory=frozenset)

    def of(self, own: Any, *, gradient: bool) -> Any:
        """The type to add up values of type `own` in. All go to a wider one, to a narrower one gradients alone."""
        if self.dtype is None or not is_float(own):
            return own
        wider = jnp.finfo(own).bits < jnp.finfo(self.dtype).bits
        return self.dtype if wider or gradient else own


OWN_TYPES = SumTypes()


def sum_types(layout: Layout, dtype: Any, phases: Mapping[int, str]) -> SumTypes:
    """What changes in `layout`'s program where devices add up in `dtype`. Among sums over the batch, those of products
    in the backward pass count as gradients: the others of it, of biases and looked up rows, lose by a narrower type."""
    types = SumTypes(dtype)
    if dtype is None or layout.count(layout.batch_axes) < 2:
        return OWN_TYPES
    made = set()
    for e in layout.program.equations:
        if summed_batch(layout, e) is not None:
            own = layout.program.avals[e.outs[0]].dtype
            gradient = e.name in _PRODUCTS and phases.get(e.index) == BACKWARD
            if types.of(own, gradient=gradient) != own:
                made.add(e.index)
    return SumTypes(dtype, frozenset(made))


def summed_as(e: Equation, values: list, dtype: Any) -> list:
    """The results of `e` in `dtype`; the operands of a product stay as they are."""
    if e.name not in _PRODUCTS:
        values = [v.astype(dtype) if is_float(v.dtype) else v for v in values]
    return bind_as(e.eqn, values, dtype)
