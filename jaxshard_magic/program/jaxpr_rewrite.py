"""Replace equations of a jaxpr, and of all bodies in its parameters, keeping everything unchanged by identity."""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import AbstractMesh, NamedSharding

from .gradient_calls import GradientCall
from .primitives import shape_of
from .thread_state import JaxContexts

# An identity, to put in the place of other equations.
IDENTITY_EQUATION = jax.make_jaxpr(lambda x: checkpoint_name(x, "placed by the step"))(0.0).jaxpr.eqns[0]

EquationRewrite = Callable[[JaxprEqn], Sequence[JaxprEqn]]  # an equation to its replacements


def rewrite_equations(jaxpr: Any, rewrite: EquationRewrite) -> Any:
    """Return `jaxpr` with every equation replaced; `jaxpr` itself where nothing changes.

    Args:
        jaxpr: An open jaxpr.
        rewrite: Function from an equation to its replacements. It runs before the bodies of the replacements are
            visited.
    """
    eqns = [_rewrite_bodies(new, rewrite) for eqn in jaxpr.eqns for new in rewrite(eqn)]
    same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def all_equations(jaxpr: Any) -> Iterator[JaxprEqn]:
    """Return an iterator over the equations of `jaxpr` and of all bodies in it."""
    equations: list[JaxprEqn] = []

    def note(eqn: JaxprEqn) -> tuple[JaxprEqn]:
        equations.append(eqn)
        return (eqn,)

    # A rewrite that changes nothing visits all bodies, and allocates no jaxpr.
    rewrite_equations(jaxpr, note)
    return iter(equations)


def constraint_like(eqn: JaxprEqn, sharding: NamedSharding) -> JaxprEqn:
    """Return an equation that constrains an array to a sharding, with the operand, the result and the line of `eqn`."""
    model = _constraint_equation(sharding, len(shape_of(eqn.invars[0])))
    return eqn.replace(primitive=model.primitive, params=model.params, effects=model.effects)


@lru_cache(maxsize=1024)
def _constraint_equation(sharding: NamedSharding, ndim: int) -> JaxprEqn:
    shape = jax.ShapeDtypeStruct((sharding.mesh.size,) * ndim, np.float32)  # any axes divide it
    # Without a mesh: the equation would remember the one that is set now.
    with JaxContexts(partial(jax.sharding.use_abstract_mesh, AbstractMesh((), ()))):
        [eqn] = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(shape).jaxpr.eqns
    return eqn


def _rewrite_bodies(eqn: JaxprEqn, change: EquationRewrite) -> JaxprEqn:
    """Return `eqn` with the bodies in its parameters rewritten."""
    params = {key: _rewrite_param(value, change) for key, value in eqn.params.items()}
    if all(params[key] is value for key, value in eqn.params.items()):
        return eqn
    return eqn.replace(params=params)


def _rewrite_param(value: Any, change: EquationRewrite) -> Any:
    """Return a parameter with all jaxprs in it rewritten, also in tuples and gradient calls.

    The result is `value` itself where nothing changes.
    """
    if isinstance(value, ClosedJaxpr):
        jaxpr = rewrite_equations(value.jaxpr, change)
        return value if jaxpr is value.jaxpr else ClosedJaxpr(jaxpr, value.consts)
    if isinstance(value, GradientCall):
        loss = _rewrite_param(value.loss, change)
        return value if loss is value.loss else replace(value, loss=loss)
    if isinstance(value, tuple):
        each = tuple(_rewrite_param(x, change) for x in value)
        return value if all(a is b for a, b in zip(each, value, strict=True)) else each
    return rewrite_equations(value, change) if hasattr(value, "eqns") else value
