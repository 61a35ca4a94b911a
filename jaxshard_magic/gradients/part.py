"""Some values of a program without the rest of it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ..program.emit import Emitter
from ..program.flow import needed
from ..program.ir import Equation, Program, Scope, Value
from ..program.replay import Replay


class Chosen(Emitter):
    """Mixed into an `Emitter`: of its program's top level, or of remat in it, runs what the values chosen need."""

    def choose(
        self, wanted: Sequence[Value], known: Collection[Value] = (), scope: Scope | None = None
    ) -> None:
        """From now on make `wanted` from the program's inputs and from the values `known`; those of the body `scope`
        where one is given."""
        self._wanted, self._scope = tuple(wanted), scope or self.program.top
        equations = self._scope.equations
        self._idle = {e.index for e in equations} - needed(self._scope, {*wanted} - {*known}, known)
        self._opened = _opened(self._scope, {*wanted})

    def make(self, inputs: Sequence[Any], known: Mapping[Value, Any] | None = None) -> list:
        """The values chosen, from inputs (None for what they don't need) and from what is known."""
        self._known = known or {}
        inputs = [self._known.get(v, x) for v, x in zip(self._scope.ins, inputs, strict=True)]
        self._made: dict[Value, Any] = {**dict(zip(self._scope.ins, inputs, strict=True)), **self._known}
        if not set(self._wanted) <= self._made.keys():
            if self._scope is self.program.top:
                super().__call__(*inputs)
            else:
                self.run(self._scope, inputs)
        return [self._made[v] for v in self._wanted]

    def run(self, scope: Scope, args: Any) -> list:
        if scope is not self._scope:
            return super().run(scope, args)
        return super().run(replace(scope, jaxpr=SimpleNamespace(outvars=[]), outs=[]), args)

    def equation(self, e: Equation, values: list) -> list:
        if e.index in self._idle:
            return [self._known.get(v) for v in e.outs]
        opened = e.index in self._opened
        made = self.run(e.doors[0].scope, values) if opened else super().equation(e, values)
        outs = [self._known.get(v, x) for v, x in zip(e.outs, made, strict=True)]
        self._made.update((v, x) for v, x in zip(e.outs, outs, strict=True) if v in self._wanted)
        return outs


class Part(Chosen, Replay):
    """Makes the values `wanted` of a program, from its inputs and the values `known`, before gradients are taken."""

    def __init__(
        self,
        program: Program,
        wanted: Sequence[Value],
        known: Collection[Value] = (),
        scope: Scope | None = None,
    ):
        super().__init__(program)
        self.choose(wanted, known, scope)

    def __call__(self, inputs: Sequence[Any], known: Mapping[Value, Any] | None = None) -> list:
        return self.make(inputs, known)


def _opened(scope: Scope, wanted: set[Value]) -> set[int]:
    """The equations with remat that some of `wanted` are made inside of."""
    return {
        e.index
        for e in scope.equations
        if e.primitive.remat
        for door in e.doors
        if any(v in wanted for x in door.scope.equations for v in x.outs) or _opened(door.scope, wanted)
    }
