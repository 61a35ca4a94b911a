"""Replace `jax.Ref`s by arrays: a write becomes a result, read by later equations.

A write has no result, so any analysis that follows values (roles, batch, liveness) would miss its effect. JAX does the
same when it lowers a program ("state discharge").

Footgun: JAX drops the derivative rule of a function that uses references and keeps only the function. All gradients
have been taken by then, except those of a captured loss, whose rules `gradient_calls` keeps.
"""

from typing import Any

from jax._src.core import InternalMutableArrayEffect  # these three have no public equivalents
from jax._src.state import AbstractRef
from jax._src.state.discharge import discharge_state
from jax.extend.core import ClosedJaxpr


def discharge_references(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return `closed` without references of its own or among its inputs.

    Inputs become arrays, and their last values follow the outputs. References among the constants stay.
    """
    return discharge_state(closed) if makes_references(closed) or has_reference_inputs(closed.jaxpr) else closed


def makes_references(jaxpr: Any) -> bool:
    """Return whether a jaxpr, or an equation, makes references of its own."""
    return any(isinstance(effect, InternalMutableArrayEffect) for effect in jaxpr.effects)


def has_reference_inputs(jaxpr: Any) -> bool:
    """Return whether some of the inputs of a jaxpr, or of an equation, are references."""
    return any(isinstance(v.aval, AbstractRef) for v in jaxpr.invars)
