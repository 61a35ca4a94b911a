"""Re-emit a program that is still to be differentiated."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from . import control_flow
from .emit import Emitter
from .ir import Equation, Program, SubJaxpr
from .primitives import bind
from .references import discharge_references


class Replay(Emitter):
    """Emitter for a loss: keeps custom derivative rules and remat, inlines jits.

    `Emitter` inlines derivative rules as well, since gradients of its programs have been taken. Subclasses rewrite
    equations with the same hooks.
    """

    def run_equation(self, e: Equation, values: list) -> list:
        if e.primitive.custom_derivative:
            return self.after(e, bind(e.jaxpr_eqn, self.before(e, values)))
        if e.primitive.remat:
            return control_flow.checkpoint(e, self._as_function(e.bodies[0].sub_jaxpr), values)
        return super().run_equation(e, values)


class PerBodyReplay(Replay):
    """Replay with a cache per body, for results shared by everything that reads them in the same body.

    Attributes:
        cache: Empty at the start of a body.
    """

    def __init__(self, program: Program):
        super().__init__(program)
        self.cache: dict[Any, Any] = {}

    def run(self, scope: SubJaxpr, args: Any) -> list:
        # Tracers of one body must not be used in another, so each body has a cache of its own.
        outer, self.cache = self.cache, {}
        try:
            return super().run(scope, args)
        finally:
            self.cache = outer


def retrace(emitter: Emitter, avals: Sequence[Any] | None = None) -> ClosedJaxpr:
    """Return the program of an emitter as a new jaxpr. Its constants are those of jits in the program.

    Args:
        emitter: Emitter to run.
        avals: Input avals; None for those of the program.
    """
    inputs = emitter.program.closed.in_avals if avals is None else avals
    return discharge_references(jax.make_jaxpr(lambda *xs: emitter(*xs))(*inputs))


def run_replay(closed: ClosedJaxpr, kind: type[Replay], *options: Any) -> ClosedJaxpr:
    """Return `closed` after a single rewrite: trace `kind(Program(closed), *options)`.

    Args:
        closed: Jaxpr to rewrite.
        kind: Replay class.
        options: Further arguments of `kind`.
    """
    return retrace(kind(Program(closed), *options))
