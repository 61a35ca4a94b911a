"""Retrace of a captured step together with the losses of its gradient calls, to rewrite each around its weights."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from jax.extend.core import ClosedJaxpr

from .emit import Replay, retrace
from .gradient_calls import GradientCall, gradient_equations, gradient_p
from .ir import Equation, Program, Value
from .primitives import hoist_constants
from .trace import Traced

F = TypeVar("F")
LossByEquation = Mapping[int, ClosedJaxpr]


class ReplaceLosses(Replay):
    """Emitter of a captured step with other losses in its gradient calls.

    Args:
        program: The step.
        losses: New loss by index of the gradient call.
    """

    def __init__(self, program: Program, losses: LossByEquation):
        super().__init__(program)
        self._losses = losses

    def run_equation(self, e: Equation, values: list) -> list:
        loss = self._losses.get(e.index)
        if loss is None:
            return super().run_equation(e, values)
        call, n = e.params["gradient"], len(loss.consts)
        # Constants of the new loss become its first operands, so positions of other operands increase by their number.
        known = {k + n: x for k, x in call.known_constants.items()}
        new_call = GradientCall(hoist_constants(loss), call.num_closed_over + n, known)
        return gradient_p.bind(*loss.consts, *values, gradient=new_call)


def retrace_with_losses(
    captured: Traced,
    find_sites: Callable[[Program, Iterable[Value]], F],
    make_emitter: Callable[[Program, F, LossByEquation], ReplaceLosses],
) -> tuple[Traced | None, list[F]]:
    """Rewrite a captured step and each of its losses by one pass.

    Args:
        captured: A step with captured gradient calls.
        find_sites: Function from a program and the values of its weights to the equations to rewrite; false where there
            are none.
        make_emitter: Function from a program, the result of `find_sites` and new losses to the emitter of the rewritten
            program.

    Returns:
        The rewritten step, None where there is nothing to rewrite, and all results of `find_sites`: the step's, then
            the losses'.
    """
    program = Program(captured.closed)
    sites, losses = [find_sites(program, program.inputs)], dict[int, ClosedJaxpr]()
    for e in gradient_equations(program):
        call: GradientCall = e.params["gradient"]
        loss = Program(call.loss)
        sites.append(find_sites(loss, [loss.inputs[i] for i in call.differentiated_positions]))
        if sites[-1]:
            losses[e.index] = retrace(make_emitter(loss, sites[-1], {}))
    if not any(sites):
        return None, sites
    return replace(captured, closed=retrace(make_emitter(program, sites[0], losses))), sites
