"""A program whose gradient calls are given other losses."""

from collections.abc import Mapping

from jax.extend.core import ClosedJaxpr

from .capture import Gradient, gradient_p
from .ir import Equation, Program
from .replay import Replay, retraced
from .trace import hoisted


class WithLosses(Replay):
    """Runs a program; `losses`: what gradient calls have in the place of theirs, by their equations' index."""

    def __init__(self, program: Program, losses: Mapping[int, ClosedJaxpr]):
        super().__init__(program)
        self._losses = losses

    def retraced(self) -> ClosedJaxpr:
        return retraced(self)

    def equation(self, e: Equation, values: list) -> list:
        loss = self._losses.get(e.index)
        if loss is None:
            return super().equation(e, values)
        call, n = e.params["gradient"], len(loss.consts)
        known = {k + n: x for k, x in call.known.items()}
        whole = Gradient(hoisted(loss), call.closed_over + n, known)
        return gradient_p.bind(*loss.consts, *values, gradient=whole)
