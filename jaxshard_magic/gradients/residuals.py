"""Residuals of each equation: what its backward pass reads, by JAX's own derivative rules."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..program.ir import Equation, SubJaxpr, Value
from ..program.primitives import bind, is_literal
from ..program.sizes import nbytes


@dataclass(frozen=True)
class Residuals:
    """Residuals of one equation.

    Attributes:
        values: Operands and results that are saved.
        own: Bytes of further saved arrays.
    """

    values: tuple[Value, ...]
    own: int


def equation_residuals(scope: SubJaxpr) -> list[Residuals]:
    """Return the residuals of every equation of a jaxpr, with all floating-point inputs differentiated.

    A loop's residuals are those of all its trips.
    """
    moving = {v for v, var in zip(scope.inputs, scope.jaxpr.invars, strict=True) if _inexact(var)}
    known: dict[Hashable, tuple[tuple[int, ...], tuple[int, ...], int]] = {}
    found = []
    for e in scope.equations:
        active = tuple(v in moving for v in e.operands)
        if e.name == "stop_gradient" or not any(active) or not any(map(_inexact, e.jaxpr_eqn.outvars)):
            found.append(Residuals((), 0))
            continue
        moving.update(v for v, var in zip(e.results, e.jaxpr_eqn.outvars, strict=True) if _inexact(var))
        key = _key(e, active)
        # Each key costs a trace of `jax.vjp`, and repeated layers have equal keys.
        if key not in known:
            known[key] = _residuals(e, active)
        ins, outs, own = known[key]
        values = [*(e.operands[k] for k in ins), *(e.results[k] for k in outs)]
        found.append(Residuals(tuple(v for v in values if v is not None), own))
    return found


def _residuals(e: Equation, active: tuple[bool, ...]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return positions of the operands and of the results that an equation saves, and bytes of further residuals."""
    given = [v.aval for v in e.jaxpr_eqn.invars if not is_literal(v)]

    def run(*xs: Any) -> tuple[list, list]:
        rest = iter(xs)
        values = [v.val if is_literal(v) else next(rest) for v in e.jaxpr_eqn.invars]
        chosen = [k for k, on in enumerate(active) if on]

        def differentiated(*ys: Any) -> list:
            mixed = dict(enumerate(values)) | dict(zip(chosen, ys, strict=True))
            return bind(e.jaxpr_eqn, list(mixed.values()))

        outs, back = jax.vjp(differentiated, *(values[k] for k in chosen))
        return outs, jax.tree.leaves(back)

    try:
        # With the JAX configuration under which the user's code made the equation.
        with e.jaxpr_eqn.ctx.manager:
            jaxpr = jax.make_jaxpr(run)(*given).jaxpr
    except (NotImplementedError, ValueError):  # no derivative: JAX raises again where the loss is differentiated
        return (), (), 0
    outs, kept = jaxpr.outvars[: len(e.results)], jaxpr.outvars[len(e.results) :]
    positions = [k for k, v in enumerate(e.jaxpr_eqn.invars) if not is_literal(v)]
    ins = dict(zip(jaxpr.invars, positions, strict=True))
    # Literals and constants are in memory anyway.
    kept = {v for v in kept if not is_literal(v) and v not in jaxpr.constvars}
    results = {v: k for k, v in enumerate(outs) if not is_literal(v)}
    return (
        tuple(ins[v] for v in kept if v in ins),
        tuple(results[v] for v in kept if v in results and v not in ins),
        sum(nbytes(v.aval) for v in kept if v not in ins and v not in results),
    )


def _key(e: Equation, active: tuple[bool, ...]) -> Hashable:
    """Return a key, equal for equations with the same residuals."""
    key = e.name, active, tuple(str(v.aval) for v in e.jaxpr_eqn.invars), tuple(e.params.items())
    try:
        hash(key)
    except TypeError:
        return e.index
    return key


def _inexact(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)
