"""Some values of a program without the rest of it."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..program.ir import Equation, Program, Scope, Value
from ..program.primitives import REMAT
from ..program.replay import Replay


class Part(Replay):
    """Makes the values `wanted` of a program's top level, or of remat in it, from its inputs and the values `known`;
    those of the body `scope` where one is given."""

    def __init__(
        self,
        program: Program,
        wanted: Sequence[Value],
        known: Collection[Value] = (),
        scope: Scope | None = None,
    ):
        super().__init__(program)
        self._wanted, self._scope = tuple(wanted), scope or program.top
        equations = self._scope.equations
        self._idle = {e.index for e in equations} - needed(self._scope, {*wanted} - {*known}, known)

    def __call__(self, inputs: Sequence[Any], known: Mapping[Value, Any] | None = None) -> list:
        self._known = known or {}
        inputs = [self._known.get(v, x) for v, x in zip(self._scope.ins, inputs, strict=True)]
        self._made: dict[Value, Any] = {**dict(zip(self._scope.ins, inputs, strict=True)), **self._known}
        if not set(self._wanted) <= self._made.keys():
            self.run(self._scope, inputs)
        return [self._made[v] for v in self._wanted]

    def run(self, scope: Scope, args: Any) -> list:
        if scope is not self._scope:
            return super().run(scope, args)
        bare = Scope(
            _without_outputs(scope.jaxpr), scope.consts, scope.ins, [], scope.const_values, scope.equations
        )
        return super().run(bare, args)

    def equation(self, e: Equation, values: list) -> list:
        if e.index in self._idle:
            return [self._known.get(v) for v in e.outs]
        made = self.run(e.doors[0].scope, values) if e.name in REMAT else super().equation(e, values)
        outs = [self._known.get(v, x) for v, x in zip(e.outs, made, strict=True)]
        self._made.update((v, x) for v, x in zip(e.outs, outs, strict=True) if v in self._wanted)
        return outs


def _without_outputs(jaxpr: Any) -> Any:
    return jaxpr.replace(outvars=[], debug_info=jaxpr.debug_info._replace(result_paths=None))


def needed(scope: Scope, wanted: Collection[Value], known: Collection[Value]) -> set[int]:
    """The equations of a body that the values `wanted` depend on, not looking behind those `known`."""
    todo, found = set(wanted), set()
    for e in reversed(scope.equations):
        inside = {v for door in e.doors for inner in door.scope.equations for v in inner.outs}
        if todo.isdisjoint(e.outs) and todo.isdisjoint(inside):
            continue
        found.add(e.index)
        todo.update(v for v in e.ins if v is not None and v not in known)
    return found
