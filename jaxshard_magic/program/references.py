"""`jax.Ref`s of a step turned into arrays: what an equation writes becomes a result that later ones read.

A write has no result, so that whoever follows values (roles, the batch, what a part of a program needs) would miss it.
JAX does the same where it lowers a program ("state discharge").

Footgun: where a function with a derivative rule of its own uses references, JAX keeps the function and drops the rule,
as all gradients are taken by then. Those of a captured loss are not (`capture` keeps the rule).
"""

from typing import Any

from jax._src.core import InternalMutableArrayEffect  # jax has no public form of these three
from jax._src.state import AbstractRef
from jax._src.state.discharge import discharge_state
from jax.extend.core import ClosedJaxpr


def discharged(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return `closed` without the references that it makes, and those that are its inputs: these become arrays, whose
    last values follow the outputs. References among its constants stay."""
    return discharge_state(closed) if makes_references(closed) or reads_references(closed.jaxpr) else closed


def makes_references(jaxpr: Any) -> bool:
    """Return whether a jaxpr, or an equation, makes references of its own."""
    return any(isinstance(effect, InternalMutableArrayEffect) for effect in jaxpr.effects)


def reads_references(jaxpr: Any) -> bool:
    """Return whether some of the inputs of a jaxpr, or of an equation, are references."""
    return any(isinstance(v.aval, AbstractRef) for v in jaxpr.invars)
