"""Loops, branches and checkpoints of a traced program, bound again around other bodies.

All code that re-emits a program (emitters, passes over a loss) binds control flow here, so that all parameters but the
bodies stay: the unrolling of a scan, the platform of a branch, the operands of a checkpoint that may not be merged with
the forward pass. Bodies may close over arrays and references of the surrounding trace; closed-over values become
operands, as in JAX's own functions.

Footguns:
- **The condition of a `while` may have shape `[n]`.** `jax.vmap` leaves one bool for each row in the jaxpr. Only JAX's
  lowering adds the "any", and keeps the carries of stopped rows and the contents of their references (jax 0.10.2 and
  0.12, `_while_lowering`). `lax.while_loop` refuses such a condition, so the primitive itself is bound.
- **A `jax.Ref` is no array**: a reference can neither pass an `optimization_barrier` nor be a carry of a loop.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .ir import Equation
from .primitives import bind_cond, hoist_constants

BodyFunction = Callable[..., Sequence[Any]]  # a body, called with its inputs


def scan(
    e: Equation, trip: Callable[[Any, Any], Any], initial: Sequence[Any], xs: Any, length: int | None = None
) -> Any:
    """Run `lax.scan(trip, initial, xs)` with the direction and the unrolling of the scan `e`.

    Args:
        e: The scan.
        trip: Body, `(carry, x) -> (carry, y)`.
        initial: First carries.
        xs: Pytree of stacked inputs.
        length: Number of trips; None for the number of `e`.

    Returns:
        The last carries and the stacked outputs.
    """
    length = e.params["length"] if length is None else length
    options = {name: e.params[name] for name in ("reverse", "unroll")}
    return lax.scan(trip, tuple(map(_array, initial)), xs, length=length, **options)


def while_loop(e: Equation, condition: BodyFunction, body: BodyFunction, initial: Sequence[Any]) -> list:
    """Run the `while` equation `e` with other bodies, and return the last carries.

    Args:
        e: The loop.
        condition: Function of the carries that returns a list with one bool, or with an array of bools, one for each
            row.
        body: Function of the carries that returns the next carries.
        initial: First carries.
    """
    initial = tuple(map(_array, initial))
    # lax.while_loop accepts scalar conditions only; see the module's footguns.
    if not e.bodies[1].sub_jaxpr.jaxpr.outvars[0].aval.shape:
        return list(lax.while_loop(lambda carry: condition(*carry)[0], lambda carry: tuple(body(*carry)), initial))
    (condition_jaxpr, condition_constants), (body_jaxpr, body_constants) = (
        _closure_to_jaxpr(run, initial) for run in (condition, body)
    )
    params = {
        "cond_jaxpr": condition_jaxpr,
        "cond_nconsts": len(condition_constants),
        "body_jaxpr": body_jaxpr,
        "body_nconsts": len(body_constants),
    }
    return e.jaxpr_eqn.primitive.bind(*condition_constants, *body_constants, *initial, **e.params | params)


def cond(e: Equation, branches: Sequence[BodyFunction], index: Any, operands: Sequence[Any]) -> list:
    """Run the branch chosen by `index`, or by the platform, as the `cond` equation `e` does.

    Args:
        e: The equation.
        branches: One function for each branch.
        index: Number of the branch.
        operands: Arguments of the branch.
    """
    return list(bind_cond(e.jaxpr_eqn, branches, index, operands))


def checkpoint(e: Equation, body: BodyFunction, operands: Sequence[Any], **overrides: Any) -> list:
    """Run a `jax.checkpoint` that is not differentiated yet, with the parameters of `e`.

    Args:
        e: The checkpoint.
        body: Function of the operands, None where an operand is None; results may be None too.
        operands: Operands; None for an operand that the emitted part of the body does not read.
        overrides: Parameters to override.

    Returns:
        One result for each result of `e`; None where `body` returned None.
    """
    read_positions = [k for k, x in enumerate(operands) if x is not None]
    result_positions: list[int] = []

    def run(*xs: Any) -> list:
        inside = dict(zip(read_positions, xs, strict=True))
        outs = body(*map(inside.get, range(len(operands))))
        result_positions[:] = [k for k, x in enumerate(outs) if x is not None]
        return [outs[k] for k in result_positions]

    closed, consts = _closure_to_jaxpr(run, [operands[k] for k in read_positions])
    params = e.params | {"jaxpr": closed.jaxpr} | overrides
    if isinstance(prevent_flags := params["prevent_cse"], tuple):  # one flag per operand
        params["prevent_cse"] = (False,) * len(consts) + tuple(prevent_flags[k] for k in read_positions)
    outs = e.jaxpr_eqn.primitive.bind(*consts, *(operands[k] for k in read_positions), **params)
    result_by_position = dict(zip(result_positions, outs, strict=True))
    return [result_by_position.get(k) for k in range(len(e.results))]


def prevent_cse(e: Equation, operands: Sequence[Any]) -> list:
    """Return the operands for the body of a differentiated checkpoint.

    Operands marked by `prevent_cse` pass one optimization barrier; references are left out.
    """
    prevents = e.params["prevent_cse"]
    flags = prevents if isinstance(prevents, tuple) else (prevents,) * len(operands)
    needs_barrier = [p and not isinstance(x, jax.Ref) for p, x in zip(flags, operands, strict=True)]
    # As JAX lowers a checkpoint: without the barrier XLA merges the recomputation with the forward pass, and the values
    # that the checkpoint frees stay in memory.
    passed = iter(lax.optimization_barrier(tuple(x for x, p in zip(operands, needs_barrier, strict=True) if p)))
    return [next(passed) if p else x for x, p in zip(operands, needs_barrier, strict=True)]


def _closure_to_jaxpr(run: BodyFunction, operands: Sequence[Any]) -> tuple[Any, list]:
    """Return `run` as a jaxpr whose first inputs are the closed-over values, and these values."""
    closed = jax.make_jaxpr(lambda *xs: tuple(run(*xs)))(*operands)
    return hoist_constants(closed), closed.consts


def _array(x: Any) -> Any:
    return x if isinstance(x, jax.Array) else jnp.asarray(x)
