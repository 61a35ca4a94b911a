"""A captured step run anew with its losses: what is found of its weights in each is done there."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from jax.extend.core import ClosedJaxpr

from .capture import Gradient, gradient_p, gradients_of
from .ir import Equation, Program, Value
from .primitives import hoisted
from .replay import Replay, retraced
from .trace import Traced

F = TypeVar("F")
Losses = Mapping[int, ClosedJaxpr]


class WithLosses(Replay):
    """Runs a program; `losses`: what gradient calls have in the place of theirs, by their equations' index."""

    def __init__(self, program: Program, losses: Losses):
        super().__init__(program)
        self._losses = losses

    def equation(self, e: Equation, values: list) -> list:
        loss = self._losses.get(e.index)
        if loss is None:
            return super().equation(e, values)
        call, n = e.params["gradient"], len(loss.consts)
        known = {k + n: x for k, x in call.known.items()}
        whole = Gradient(hoisted(loss), call.closed_over + n, known)
        return gradient_p.bind(*loss.consts, *values, gradient=whole)


def run_anew(
    captured: Traced,
    find: Callable[[Program, Iterable[Value]], F],
    run: Callable[[Program, F, Losses], WithLosses],
) -> tuple[Traced | None, list[F]]:
    """A captured step as `run` has it and each of its losses, by what `find` finds of the weights there, and all that
    was found; None where that is nothing anywhere, which is false."""
    program = Program(captured.closed)
    found, losses = [find(program, program.inputs)], dict[int, ClosedJaxpr]()
    for e in gradients_of(program):
        call: Gradient = e.params["gradient"]
        loss = Program(call.loss)
        found.append(find(loss, [loss.inputs[i] for i in call.differentiated]))
        if found[-1]:
            losses[e.index] = retraced(run(loss, found[-1], {}))
    if not any(found):
        return None, found
    return replace(captured, closed=retraced(run(program, found[0], losses))), found
