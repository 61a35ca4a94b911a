"""A step whose experts a Python loop goes through, with one equation for all of them in the place of each one's."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr

from ..capture import Gradient, gradient_p, gradients_of
from ..emit import Emitter
from ..ir import Equation, Program, Scope, Value
from ..replay import Replay, retraced
from ..trace import Traced, hoisted
from .chains import Family, Joined, Sum, Together
from .found import Found, One, Unit, find_in_turn


def experts_together(captured: Traced) -> tuple[Traced | None, tuple[str, ...]]:
    """A captured step with its experts side by side, and a line for each loop whose experts can't be; None where none
    is. Numbers differ from the step's by the order in which sums over experts are rounded."""
    program = Program(captured.closed)
    found = find_in_turn(program, program.inputs)
    losses, apart = dict[int, ClosedJaxpr](), [*found.apart]
    for e in gradients_of(program):
        call: Gradient = e.params["gradient"]
        loss = Program(call.loss)
        inside = find_in_turn(loss, [loss.inputs[i] for i in call.differentiated])
        apart += inside.apart
        if inside.orders:
            losses[e.index] = retraced(_SideBySide(loss, inside))
    if not found.orders and not losses:
        return None, tuple(apart)
    closed = retraced(_SideBySide(program, found, losses))
    return replace(captured, closed=closed), tuple(apart)


class _SideBySide(Replay):
    """Runs a program in the orders of `found`; `losses`: what gradient calls have in the place of theirs, by index."""

    def __init__(self, program: Program, found: Found, losses: Mapping[int, ClosedJaxpr] | None = None):
        super().__init__(program)
        self._found, self._losses = found, losses or {}

    def run(self, scope: Scope, args: Any) -> list:
        order = self._found.orders.get(scope)
        if order is None:
            return super().run(scope, args)
        return scope.results(_Run(self, scope, args).through(order))

    def equation(self, e: Equation, values: list) -> list:
        loss = self._losses.get(e.index)
        if loss is None:
            return super().equation(e, values)
        call, n = e.params["gradient"], len(loss.consts)
        known = {k + n: x for k, x in call.known.items()}
        whole = Gradient(hoisted(loss), call.closed_over + n, known)
        return gradient_p.bind(*loss.consts, *values, gradient=whole)


class _Run:
    """One run of a body: `env`, its arrays by their values, and those of all experts by their family."""

    def __init__(self, emitter: Emitter, scope: Scope, args: Any):
        self._emitter, self._scope = emitter, scope
        self.env = scope.env(args)
        self._stacks = dict[Family, Any]()
        self._makers = emitter.program.maker

    def through(self, order: Sequence[Unit]) -> dict[Value | None, Any]:
        for unit in order:
            with self._emitter.context_of(self._equation(unit)):
                self._do(unit)
        return self.env

    def _equation(self, unit: Unit) -> Equation:
        """Whose line and names a unit has."""
        if isinstance(unit, Together):
            return unit.equations[0]
        if isinstance(unit, Sum):
            return unit.root
        if isinstance(unit, Joined):
            return unit.equation
        if isinstance(unit, One):
            return self._makers[unit.value]
        if isinstance(unit, Family):
            return unit.reads[0][0] if unit.reads else self._makers[unit.values[0]]  # pyright: ignore[reportArgumentType]
        return unit

    def _do(self, unit: Unit) -> None:
        if isinstance(unit, Together):
            self._together(unit)
        elif isinstance(unit, Sum):
            self._sum(unit)
        elif isinstance(unit, Joined):
            e, stack = unit.equation, self._stacks[unit.family]
            dim = e.params.get("axis", e.params.get("dimension"))
            out = jnp.moveaxis(stack, 0, dim)
            self.env[e.outs[0]] = out.reshape(e.eqn.outvars[0].aval.shape)  # pyright: ignore[reportAttributeAccessIssue]
        elif isinstance(unit, One):
            self.env[unit.value] = lax.index_in_dim(self._stacks[unit.family], unit.expert, keepdims=False)
        elif isinstance(unit, Family):
            self._stacks[unit] = self._parts(unit) if unit.part is not None else self._put(unit)
        else:
            values = [self._read(unit, k) for k in range(len(unit.ins))]
            self.env.update(zip(unit.outs, self._emitter.equation(unit, values), strict=True))

    def _read(self, e: Equation, k: int) -> Any:
        v = e.ins[k]
        return e.eqn.invars[k].val if v is None else self.env[v]  # pyright: ignore[reportAttributeAccessIssue]

    def _together(self, unit: Together) -> None:
        first = unit.equations[0]
        values = [
            self._read(first, k) if family is None else self._stacks[family]
            for k, family in enumerate(unit.operands)
        ]
        given = [k for k, family in enumerate(unit.operands) if family is not None]

        def each(*parts: Any) -> list:
            own = dict(zip(given, parts, strict=True))
            return self._emitter.equation(first, [own.get(k, x) for k, x in enumerate(values)])

        outs = jax.vmap(each)(*(values[k] for k in given))
        self._stacks.update(zip(unit.outs, outs, strict=True))

    def _sum(self, unit: Sum) -> None:
        dtype = self._emitter.program.avals[unit.root.outs[0]].dtype
        terms = [jnp.sum(self._stacks[family], axis=0, dtype=dtype) for family in unit.families]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        for e, k in unit.others:
            total = self._read(e, k) + total
        self.env[unit.root.outs[0]] = total

    def _parts(self, unit: Family) -> Any:
        part, n = unit.part, len(unit.values)
        assert part is not None and unit.values[0] is not None
        x, shape = self.env[part.source], self._emitter.program.shapes[unit.values[0]]
        if n * part.size != x.shape[part.dim]:
            x = lax.slice_in_dim(x, part.start, part.start + n * part.size, axis=part.dim)
        x = x.reshape(*x.shape[: part.dim], n, part.size, *x.shape[part.dim + 1 :])
        return jnp.moveaxis(x, part.dim, 0).reshape(n, *shape)

    def _put(self, unit: Family) -> Any:
        e, k = unit.reads[0]
        aval: Any = e.eqn.invars[k].aval
        values = [self._read(*read) for read in unit.reads]
        if jnp.issubdtype(aval.dtype, jnp.integer) and values == list(range(len(values))):
            return lax.iota(aval.dtype, len(values))
        return jnp.stack([jnp.asarray(x, None if isinstance(x, jax.Array) else aval.dtype) for x in values])
