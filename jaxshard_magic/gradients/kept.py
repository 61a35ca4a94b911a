"""What each equation of a loss keeps for its backward pass, as jax's own derivative rules say."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..program.ir import Equation, Scope, Value
from ..program.primitives import bind, is_literal
from ..program.sizes import nbytes


@dataclass(frozen=True)
class Kept:
    """`values`: operands and results that an equation keeps; `own`: bytes of what it keeps besides."""

    values: tuple[Value, ...]
    own: int


def keeps(scope: Scope) -> list[Kept]:
    """What every equation of a scope keeps when all its floating-point inputs are differentiated.

    A loop keeps that of all its trips.
    """
    moving = {v for v, var in zip(scope.ins, scope.jaxpr.invars, strict=True) if _inexact(var)}
    known: dict[Hashable, tuple[tuple[int, ...], tuple[int, ...], int]] = {}
    found = []
    for e in scope.equations:
        active = tuple(v in moving for v in e.ins)
        if e.name == "stop_gradient" or not any(active) or not any(map(_inexact, e.eqn.outvars)):
            found.append(Kept((), 0))
            continue
        moving.update(v for v, var in zip(e.outs, e.eqn.outvars, strict=True) if _inexact(var))
        key = _key(e, active)
        if key not in known:
            known[key] = _residuals(e, active)
        ins, outs, own = known[key]
        values = [*(e.ins[k] for k in ins), *(e.outs[k] for k in outs)]
        found.append(Kept(tuple(v for v in values if v is not None), own))
    return found


def _residuals(e: Equation, active: tuple[bool, ...]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Which operands and which results the backward pass of an equation reads, and bytes of what else it does."""
    given = [v.aval for v in e.eqn.invars if not is_literal(v)]

    def run(*xs: Any) -> tuple[list, list]:
        rest = iter(xs)
        values = [v.val if is_literal(v) else next(rest) for v in e.eqn.invars]
        chosen = [k for k, on in enumerate(active) if on]

        def differentiated(*ys: Any) -> list:
            mixed = dict(enumerate(values)) | dict(zip(chosen, ys, strict=True))
            return bind(e.eqn, list(mixed.values()))

        outs, back = jax.vjp(differentiated, *(values[k] for k in chosen))
        return outs, jax.tree.leaves(back)

    try:
        with e.eqn.ctx.manager:
            jaxpr = jax.make_jaxpr(run)(*given).jaxpr
    except (NotImplementedError, ValueError):  # it has no derivative; jax says so where one is asked for
        return (), (), 0
    outs, kept = jaxpr.outvars[: len(e.outs)], jaxpr.outvars[len(e.outs) :]
    positions = [k for k, v in enumerate(e.eqn.invars) if not is_literal(v)]
    ins = dict(zip(jaxpr.invars, positions, strict=True))
    kept = {v for v in kept if not is_literal(v) and v not in jaxpr.constvars}
    results = {v: k for k, v in enumerate(outs) if not is_literal(v)}
    return (
        tuple(ins[v] for v in kept if v in ins),
        tuple(results[v] for v in kept if v in results and v not in ins),
        sum(nbytes(v.aval) for v in kept if v not in ins and v not in results),
    )


def _key(e: Equation, active: tuple[bool, ...]) -> Hashable:
    """Equal for equations that keep alike."""
    key = e.name, active, tuple(str(v.aval) for v in e.eqn.invars), tuple(e.params.items())
    try:
        hash(key)
    except TypeError:
        return e.index
    return key


def _inexact(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)
