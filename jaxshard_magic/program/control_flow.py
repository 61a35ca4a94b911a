"""Loops, branches and checkpoints of a traced program, bound anew around bodies that are run in another way.

Everything that re-emits a program (`Emitter`, `Replay` and their subclasses, passes over a loss) binds control flow
here, so that what JAX keeps beside the bodies stays: how a scan is unrolled, which platform a branch is for, which
operands of a checkpoint may not be merged with the forward pass. Bodies may close over arrays and references of the
trace around them; they become operands, as in JAX's own functions.

Footguns:
- **A `while` may have a condition of many bools.** `jax.vmap` leaves one for each row in the jaxpr; only JAX's lowering
  adds the "any", and keeps what a row that has stopped had: its carries, and what references hold for it (jax 0.10.2
  and 0.12, `_while_lowering`). `lax.while_loop` refuses such a condition, so the primitive itself is bound.
- **A `jax.Ref` is no array**: it passes no `optimization_barrier`, and is no carry of a loop.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .ir import Equation
from .primitives import conditional, hoisted

Run = Callable[..., Sequence[Any]]  # a body, called with its inputs


def scan(
    e: Equation, trip: Callable[[Any, Any], Any], start: Sequence[Any], xs: Any, length: int | None = None
) -> Any:
    """Run `lax.scan(trip, start, xs)` in the direction, and unrolled, as the scan `e`; `length`: of another number of
    trips."""
    length = e.params["length"] if length is None else length
    how = {name: e.params[name] for name in ("reverse", "unroll")}
    return lax.scan(trip, tuple(map(_array, start)), xs, length=length, **how)


def while_loop(e: Equation, condition: Run, body: Run, start: Sequence[Any]) -> list:
    """Run the `while` that `e` is; `condition` gives one bool, or one for each row of the carries (see above)."""
    start = tuple(map(_array, start))
    if not e.doors[1].scope.jaxpr.outvars[0].aval.shape:
        return list(
            lax.while_loop(lambda carry: condition(*carry)[0], lambda carry: tuple(body(*carry)), start)
        )
    (test, tested), (trip, fixed) = (_closed(run, start) for run in (condition, body))
    params = {"cond_jaxpr": test, "cond_nconsts": len(tested), "body_jaxpr": trip, "body_nconsts": len(fixed)}
    return e.eqn.primitive.bind(*tested, *fixed, *start, **e.params | params)


def cond(e: Equation, branches: Sequence[Run], index: Any, operands: Sequence[Any]) -> list:
    """Run the branch that `index` names, or that is for the platform at hand, as the `cond` `e` says."""
    return list(conditional(e.eqn, branches, index, operands))


def checkpoint(e: Equation, body: Run, operands: Sequence[Any], **changed: Any) -> list:
    """Run a checkpoint before its gradient is taken, with the parameters of `e`, or those that are `changed`."""
    given = [
        k for k, x in enumerate(operands) if x is not None
    ]  # None where the part that runs reads nothing
    gives: list[int] = []

    def run(*xs: Any) -> list:
        inside = dict(zip(given, xs, strict=True))
        outs = body(*map(inside.get, range(len(operands))))
        gives[:] = [k for k, x in enumerate(outs) if x is not None]
        return [outs[k] for k in gives]

    closed, consts = _closed(run, [operands[k] for k in given])
    params = e.params | {"jaxpr": closed.jaxpr} | changed
    if isinstance(prevents := params["prevent_cse"], tuple):  # one for each operand
        params["prevent_cse"] = (False,) * len(consts) + tuple(prevents[k] for k in given)
    outs = e.eqn.primitive.bind(*consts, *(operands[k] for k in given), **params)
    made = dict(zip(gives, outs, strict=True))
    return [made.get(k) for k in range(len(e.outs))]


def prevent_cse(e: Equation, operands: Sequence[Any]) -> list:
    """Return the operands that the body of a checkpoint reads once its gradient is taken.

    They pass a barrier, as where JAX lowers it: else XLA takes the recomputation for what the forward pass has made,
    and keeps in memory what was to be freed.
    """
    prevents = e.params["prevent_cse"]
    each = prevents if isinstance(prevents, tuple) else (prevents,) * len(operands)
    behind = [p and not isinstance(x, jax.Ref) for p, x in zip(each, operands, strict=True)]
    passed = iter(lax.optimization_barrier(tuple(x for x, p in zip(operands, behind, strict=True) if p)))
    return [next(passed) if p else x for x, p in zip(operands, behind, strict=True)]


def _closed(run: Run, operands: Sequence[Any]) -> tuple[Any, list]:
    """`run` as a jaxpr whose first inputs are what it closes over, and those."""
    closed = jax.make_jaxpr(lambda *xs: tuple(run(*xs)))(*operands)
    return hoisted(closed), closed.consts


def _array(x: Any) -> Any:
    return x if isinstance(x, jax.Array) else jnp.asarray(x)
