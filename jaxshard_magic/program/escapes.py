"""Values that a loss leaves in an object or a list, and that the rest of the step reads.

An example is a random key holder that is used inside the loss and again after the gradient. In plain JAX a value of the
loss that is not differentiated belongs to the trace of the step. A captured loss has a trace of its own, and its
escaped values would become constants of the step. Here they become additional results of the gradient call.

Footgun: JAX lets nobody read a differentiated value, or a value made in a loop or a jit of the loss, outside of the
loss. That stays an error.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax._src.core import escaped_tracer_error  # these two have no public equivalents
from jax._src.interpreters.ad import jvp_jaxpr
from jax.core import Tracer

from ..errors import ShardError
from .emit import Replay, retrace
from .gradient_calls import GradientCall, gradient_equations, gradient_p
from .ir import Equation, Program, Value
from .primitives import with_outputs, without_inputs
from .source_lines import user_line
from .trace import Traced


def return_escaped_values(traced: Traced) -> Traced:
    """Return a step whose captured gradient calls also return the values that escape from their losses.

    Args:
        traced: A captured step; escaped values are tracers among its constants.

    Raises:
        ShardError: Another value outlives its trace. The cause is the error raised by `jax.jit` for such a step.
    """
    escaped = {i: x for i, x in enumerate(traced.consts) if isinstance(x, Tracer)}
    if not escaped:
        return traced
    program = Program(traced.closed)
    escaped_by_call = {
        e.index: found for e in gradient_equations(program) if (found := _escaped_from(e.params["gradient"], escaped))
    }
    rewritten = Program(retrace(_ReturnEscaped(program, escaped_by_call))) if escaped_by_call else program
    read = {v for e in rewritten.top.equations for v in e.operands} | {*rewritten.outputs}
    for i, x in escaped.items():
        if rewritten.inputs[i] in read:
            raise ShardError(
                f"the step can't be compiled: {_first_read(rewritten, i)} an array that was left in an "
                "object or a list by a "
                "function that JAX differentiates, compiles or loops over; have that function return it (of a loss "
                "with has_aux=True)"
            ) from escaped_tracer_error(x)
    return replace(
        traced,
        closed=without_inputs(rewritten.closed, escaped),
        in_paths=tuple(path for i, path in enumerate(traced.in_paths) if i not in escaped),
        consts=tuple(x for i, x in enumerate(traced.consts) if i not in escaped),
    )


def _escaped_from(call: GradientCall, escaped: Mapping[int, Any]) -> dict[int, Any]:
    """Return the variables of a loss that are among `escaped` and are not differentiated, by number of the input."""
    # A tracer of a jaxpr has its variable as `val`, also after the trace has ended.
    loss_variables = {v for eqn in call.loss.jaxpr.eqns for v in eqn.outvars}
    variables = {i: x.val for i, x in escaped.items() if getattr(x, "val", None) in loss_variables}
    if not variables:
        return {}
    has_tangent = [k in call.differentiated_positions for k in range(len(call.loss.in_avals))]
    # With instantiate=False, jvp_jaxpr returns for each output whether its tangent may be nonzero.
    _, differentiated = jvp_jaxpr(with_outputs(call.loss, variables.values()), has_tangent, False)
    return {i: v for (i, v), d in zip(variables.items(), differentiated[call.num_outputs :], strict=True) if not d}


class _ReturnEscaped(Replay):
    """Emitter of a captured step whose gradient calls return escaped values.

    Args:
        program: The captured step.
        escaped_by_call: For each gradient call, by index: variables of its loss by number of the step's input.
    """

    def __init__(self, program: Program, escaped_by_call: Mapping[int, Mapping[int, Any]]):
        super().__init__(program)
        self._escaped_by_call = escaped_by_call
        self._aliases = {i: _aliases_of_input(program, i) for found in escaped_by_call.values() for i in found}
        self._escaped_arrays: Sequence[Any] = ()

    def run_equations(self, equations: Iterable[Equation], env: dict) -> None:
        """Run equations; after a gradient call replace the inputs that stand for its escaped values."""
        for e in equations:
            super().run_equations([e], env)
            # Until the call has run, an escaped value is an input of the step; from here on it is a result of the call.
            for i, x in zip(self._escaped_by_call.get(e.index, ()), self._escaped_arrays, strict=False):
                env.update((v, x) for v in self._aliases[i] if v in env)

    def run_equation(self, e: Equation, values: list) -> list:
        """Bind a gradient call with the escaped variables as additional outputs of the loss."""
        if (found := self._escaped_by_call.get(e.index)) is None:
            return super().run_equation(e, values)
        call: GradientCall = e.params["gradient"]
        outs = gradient_p.bind(*values, gradient=replace(call, loss=with_outputs(call.loss, found.values())))
        self._escaped_arrays = outs[call.num_outputs : call.num_outputs + len(found)]
        return [*outs[: call.num_outputs], *outs[call.num_outputs + len(found) :]]


def _aliases_of_input(program: Program, i: int) -> set[Value]:
    """Return the values equal to input `i`: in the step, and in bodies entered unchanged."""
    names = {program.inputs[i]}
    for e in program.equations:
        for body in e.bodies:
            carried = {b for _, b in body.carries}
            names |= {b for a, b, lead in body.inputs if a in names and not lead and b not in carried}
    return names


def _first_read(program: Program, i: int) -> str:
    """Return `cell [3], line 4, reads` for the user's first line that reads input `i`, else `it returns`."""
    names = _aliases_of_input(program, i)
    lines = (user_line(e.jaxpr_eqn) for e in program.equations if not names.isdisjoint(e.operands))
    line = next((line for line in lines if line is not None), None)
    return "it returns" if line is None else f"{line}, reads"
