"""Run a program again before its gradients are taken: what decides how it is differentiated stays."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from . import control_flow
from .emit import Emitter
from .ir import Equation, Program, Scope
from .primitives import bind
from .references import discharged


class Replay(Emitter):
    """As `Emitter`, for a loss that is still to be differentiated: custom derivative rules and remat stay; jits are
    opened. A subclass rewrites equations in `before`, `equation` and `after`."""

    def equation(self, e: Equation, values: list) -> list:
        if e.primitive.custom:
            return self.after(e, bind(e.eqn, self.before(e, values)))
        if e.primitive.remat:
            return control_flow.checkpoint(e, self._function(e.doors[0].scope), values)
        return super().equation(e, values)


class ByBody(Replay):
    """A replay that makes some things once for all that reads them in a body: `made`, empty where a body begins."""

    def __init__(self, program: Program):
        super().__init__(program)
        self.made: dict[Any, Any] = {}

    def run(self, scope: Scope, args: Any) -> list:
        outside, self.made = self.made, {}
        try:
            return super().run(scope, args)
        finally:
            self.made = outside


def retraced(replay: Emitter, avals: Sequence[Any] | None = None) -> ClosedJaxpr:
    """What a replay makes of its program, as a jaxpr; `avals`: other inputs than the program's. Its constants are those
    that jits of the program hold."""
    given = replay.program.closed.in_avals if avals is None else avals
    return discharged(jax.make_jaxpr(lambda *xs: replay(*xs))(*given))


def replayed(closed: ClosedJaxpr, kind: type[Replay], *options: Any) -> ClosedJaxpr:
    """`closed` after one pass: `kind(Program(closed), *options)` run again under a trace."""
    return retraced(kind(Program(closed), *options))
