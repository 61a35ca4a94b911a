"""Replace `jax.Ref`s by arrays: a write becomes a result, read by later equations.

A write has no result, so any analysis that follows values (roles, batch, liveness) would miss its effect. JAX does the
same when it lowers a program ("state discharge").

Footgun: JAX drops the derivative rule of a function that uses references and keeps only the function. All gradients
have been taken by then, except those of a captured loss, whose rules `gradient_calls` keeps.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax._src.core import InternalMutableArrayEffect  # these three have no public equivalents
from jax._src.state import AbstractRef
from jax._src.state.discharge import discharge_state
from jax.extend.core import ClosedJaxpr


def read_reference(reference: Any) -> jax.Array:
    """Return the array that a reference holds, not a copy of it as `reference[...]` is."""
    return reference._refs._buf


def write_reference(reference: Any, value: jax.Array) -> None:
    """Have a reference hold an array, whose layout may be another one than before."""
    held = reference._refs
    # The type of a reference says how its array lies over explicit mesh axes.
    reference._aval = held._aval = reference._aval.update(inner_aval=jax.typeof(value))
    held._buf = value


def write_references(places: Sequence[tuple[int, int]], leaves: Sequence[Any], outs: Sequence[Any]) -> None:
    """Write results of a call into references among its arguments.

    Args:
        places: Position of a reference in `leaves`, and number of the output with its new value, for each.
        leaves: Leaves of the arguments.
        outs: Outputs of the call.
    """
    for i, o in places:
        write_reference(leaves[i], outs[o])


def copy_reference(reference: Any) -> Any:
    """Return a new reference with the same values."""
    return jax.new_ref(read_reference(reference))


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
