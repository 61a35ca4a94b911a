"""Evaluation of selected values of a program, without the equations that they don't need."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ..program.emit import Emitter, Replay
from ..program.flow import required_equations
from ..program.ir import Equation, Program, SubJaxpr, Value


class PartialEmitter(Emitter):
    """Emitter mixin that runs only the equations needed for selected values.

    Values are those of one jaxpr: the program's top level or a body, and the remat inside of it.
    """

    def choose(self, wanted: Sequence[Value], known: Collection[Value] = (), scope: SubJaxpr | None = None) -> None:
        """Select the values to compute from now on.

        Args:
            wanted: Values to compute.
            known: Values that will be passed to `make`.
            scope: Jaxpr of the values; None for the top level.
        """
        self._wanted, self._scope = tuple(wanted), scope or self.program.top
        equations = self._scope.equations
        self._idle = {e.index for e in equations} - required_equations(self._scope, {*wanted} - {*known}, known)
        self._opened = _opened(self._scope, {*wanted})

    def make(self, inputs: Sequence[Any], known: Mapping[Value, Any] | None = None) -> list:
        """Compute the selected values.

        Args:
            inputs: Inputs of the jaxpr; None for those that are not needed.
            known: Values computed already.
        """
        self._known = known or {}
        inputs = [self._known.get(v, x) for v, x in zip(self._scope.inputs, inputs, strict=True)]
        self._made: dict[Value, Any] = {**dict(zip(self._scope.inputs, inputs, strict=True)), **self._known}
        if not set(self._wanted) <= self._made.keys():
            if self._scope is self.program.top:
                super().__call__(*inputs)
            else:
                self.run(self._scope, inputs)
        return [self._made[v] for v in self._wanted]

    def run(self, scope: SubJaxpr, args: Any) -> list:
        if scope is not self._scope:
            return super().run(scope, args)
        # Without outputs: the jaxpr's own may be among the values that are not computed.
        return super().run(replace(scope, jaxpr=SimpleNamespace(outvars=[]), outputs=[]), args)

    def run_equation(self, e: Equation, values: list) -> list:
        if e.index in self._idle:
            return [self._known.get(v) for v in e.results]
        opened = e.index in self._opened
        made = self.run(e.bodies[0].sub_jaxpr, values) if opened else super().run_equation(e, values)
        outs = [self._known.get(v, x) for v, x in zip(e.results, made, strict=True)]
        self._made.update((v, x) for v, x in zip(e.results, outs, strict=True) if v in self._wanted)
        return outs


class PartialReplay(PartialEmitter, Replay):
    """Callable that computes values of a program before its gradients are taken.

    Args:
        program: The program.
        wanted: Values to compute.
        known: Values that will be passed with each call.
        scope: Jaxpr of the values; None for the top level.
    """

    def __init__(
        self, program: Program, wanted: Sequence[Value], known: Collection[Value] = (), scope: SubJaxpr | None = None
    ):
        super().__init__(program)
        self.choose(wanted, known, scope)

    def __call__(self, inputs: Sequence[Any], known: Mapping[Value, Any] | None = None) -> list:
        return self.make(inputs, known)


def _opened(scope: SubJaxpr, wanted: set[Value]) -> set[int]:
    """Return the indices of equations with remat that make some of `wanted` inside."""
    return {
        e.index
        for e in scope.equations
        if e.primitive.remat
        for body in e.bodies
        if any(v in wanted for x in body.sub_jaxpr.equations for v in x.results) or _opened(body.sub_jaxpr, wanted)
    }
