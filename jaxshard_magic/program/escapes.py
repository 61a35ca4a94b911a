"""Values that a loss leaves behind, in an object or a list, and that the rest of the step reads.

A key holder that is asked in the loss and again after the gradient moves its key on inside the loss. In plain JAX what
is not differentiated there is a value of the step's own trace. A captured loss has a trace of its own, whose values the
step takes for constants where it reads them: they become further results of the gradient call.

Footgun: what is differentiated, or made in a loop or a jit of the loss, JAX lets nobody read outside of it. That stays
an error.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax._src.core import escaped_tracer_error  # jax has no public form of these two
from jax._src.interpreters.ad import jvp_jaxpr
from jax.core import Tracer

from ..errors import ShardError
from .capture import Gradient, gradient_p, gradients_of
from .ir import Equation, Program, Value
from .lines import users_line
from .primitives import with_outputs, without_inputs
from .replay import Replay, retraced
from .trace import Traced


def with_escapes(traced: Traced) -> Traced:
    """Return a step whose gradient calls, where they are captured, give what their losses leave behind for it.

    Raises ShardError, from the error that `jax.jit` raises of the step, for other values that outlive their trace.
    """
    escaped = {i: x for i, x in enumerate(traced.consts) if isinstance(x, Tracer)}
    if not escaped:
        return traced
    program = Program(traced.closed)
    adopted = {
        e.index: found for e in gradients_of(program) if (found := _left_by(e.params["gradient"], escaped))
    }
    whole = Program(retraced(_Adopting(program, adopted))) if adopted else program
    read = {v for e in whole.top.equations for v in e.ins} | {*whole.outputs}
    for i, x in escaped.items():
        if whole.inputs[i] in read:
            raise ShardError(
                f"the step can't be compiled: {_reading(whole, i)} an array that was left in an object or a list by a "
                "function that JAX differentiates, compiles or loops over; have that function return it (of a loss "
                "with has_aux=True)"
            ) from escaped_tracer_error(x)
    return replace(
        traced,
        closed=without_inputs(whole.closed, escaped),
        in_paths=tuple(path for i, path in enumerate(traced.in_paths) if i not in escaped),
        consts=tuple(x for i, x in enumerate(traced.consts) if i not in escaped),
    )


def _left_by(call: Gradient, escaped: Mapping[int, Any]) -> dict[int, Any]:
    """The variables of a loss, by which of `escaped` they are, that are not differentiated."""
    made = {v for eqn in call.loss.jaxpr.eqns for v in eqn.outvars}
    found = {i: x.val for i, x in escaped.items() if getattr(x, "val", None) in made}
    if not found:
        return {}
    moving = [k in call.differentiated for k in range(len(call.loss.in_avals))]
    _, differentiated = jvp_jaxpr(with_outputs(call.loss, found.values()), moving, False)
    return {i: v for (i, v), d in zip(found.items(), differentiated[call.outs :], strict=True) if not d}


class _Adopting(Replay):
    """Runs a captured step; `adopted`: of its gradient calls, by index, which inputs of the step they leave behind, as
    which variables of their losses."""

    def __init__(self, program: Program, adopted: Mapping[int, Mapping[int, Any]]):
        super().__init__(program)
        self._adopted = adopted
        self._names = {i: _names(program, i) for found in adopted.values() for i in found}
        self._left: Sequence[Any] = ()

    def through(self, equations: Iterable[Equation], env: dict) -> None:
        for e in equations:
            super().through([e], env)
            for i, x in zip(self._adopted.get(e.index, ()), self._left, strict=False):
                env.update((v, x) for v in self._names[i] if v in env)

    def equation(self, e: Equation, values: list) -> list:
        if (found := self._adopted.get(e.index)) is None:
            return super().equation(e, values)
        call: Gradient = e.params["gradient"]
        outs = gradient_p.bind(*values, gradient=replace(call, loss=with_outputs(call.loss, found.values())))
        self._left = outs[call.outs : call.outs + len(found)]
        return [*outs[: call.outs], *outs[call.outs + len(found) :]]


def _names(program: Program, i: int) -> set[Value]:
    """The values that input `i` is, in the step and in bodies that it enters as it is."""
    names = {program.inputs[i]}
    for e in program.equations:
        for door in e.doors:
            carried = {b for _, b in door.loop}
            names |= {b for a, b, lead in door.into if a in names and not lead and b not in carried}
    return names


def _reading(program: Program, i: int) -> str:
    """`cell [3], line 4, reads`, for the first of the user's lines that reads input `i`."""
    names = _names(program, i)
    lines = (users_line(e.eqn) for e in program.equations if not names.isdisjoint(e.ins))
    line = next((line for line in lines if line is not None), None)
    return "it returns" if line is None else f"{line}, reads"
