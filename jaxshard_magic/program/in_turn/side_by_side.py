"""A step whose experts a Python loop goes through, with one equation for all of them in the place of each one's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import control_flow
from ..emit import Emitter
from ..ir import Door, Equation, Program, Scope, Value
from ..losses import Losses, WithLosses, run_anew
from ..primitives import scan_counts
from ..trace import Traced
from .chains import Chosen, Family, Joined, Sum, Together
from .found import Found, One, Unit, find_in_turn, made_by
from .parts import Part


@dataclass(frozen=True)
class Loops:
    """The loops over experts of a step. `together`: the lines of those that are put side by side. `apart`: what is in
    the way of others, in a line each; `unsure`: of those of which it isn't known that something chooses among them."""

    together: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    unsure: tuple[str, ...] = ()


NONE = Loops()


def experts_together(captured: Traced) -> tuple[Traced | None, Loops]:
    """A captured step with its experts side by side, None where none is, and its loops over experts. Numbers differ
    from the step's by the order in which sums over experts are rounded."""
    together, found = run_anew(captured, find_in_turn, _SideBySide)
    loops = Loops(
        tuple(dict.fromkeys(line for f in found for line in f.together)),
        tuple(line for f in found for line in f.apart),
        tuple(line for f in found for line in f.unsure),
    )
    return together, loops


class _SideBySide(WithLosses):
    """Runs a program in the orders of `found`; `losses`: what gradient calls have in the place of theirs, by index."""

    def __init__(self, program: Program, found: Found, losses: Losses):
        super().__init__(program, losses)
        self._found = found
        self._parts = dict[Value, Any]()  # of the trip that runs

    def run(self, scope: Scope, args: Any) -> list:
        order = self._found.orders.get(scope)
        if order is None:
            return super().run(scope, args)
        return scope.results(_Run(self, scope, args).through(order))

    def _scan(self, e: Equation, values: list, door: Door) -> list:
        counted = self._found.counted.get(e.index)
        if counted is None:
            return super()._scan(e, values, door)
        (n, k), trips, at = scan_counts(e.params), e.params["length"], counted.carried
        shapes, given = self.program.shapes, dict(zip(door.scope.ins, values, strict=True))
        numbers = None if at is None else lax.iota(self.program.avals[e.outs[at]].dtype, trips)
        parts = [parts_of(given[part.source], part, trips, shapes[v]) for v, part in counted.parts.items()]

        def trip(carry: Any, x: Any) -> tuple:
            number, own, xs = x
            start = list(carry)
            if at is not None:
                start.insert(at, number)
            before = self._parts
            self._parts = before | dict(zip(counted.parts, own, strict=True))
            try:
                outs = self.body(door.scope, [*values[:n], *start, *xs])
            finally:
                self._parts = before
            following = outs[:k]
            if at is not None:
                del following[at]
            return tuple(following), tuple(outs[k:])

        start = values[n : n + k]
        if at is not None:
            del start[at]
        carry, ys = control_flow.scan(e, trip, start, (numbers, parts, values[n + k :]))
        carry = list(carry)
        if at is not None:
            carry.insert(at, jnp.asarray(trips).astype(self.program.avals[e.outs[at]].dtype))
        return [*carry, *ys]

    def equation(self, e: Equation, values: list) -> list:
        if len(e.outs) == 1 and e.outs[0] in self._parts:
            return [self._parts[e.outs[0]]]
        return super().equation(e, values)


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
        if isinstance(unit, (Sum, Joined, Chosen)):
            return made_by(unit)
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
            dim = e.params["axis" if e.name == "stack" else "dimension"]
            out = jnp.moveaxis(stack, 0, dim)
            self.env[e.outs[0]] = out.reshape(e.eqn.outvars[0].aval.shape)  # pyright: ignore[reportAttributeAccessIssue]
        elif isinstance(unit, Chosen):
            self._chosen(unit)
        elif isinstance(unit, One):
            self.env[unit.value] = lax.index_in_dim(self._stacks[unit.family], unit.expert, keepdims=False)
        elif isinstance(unit, Family):
            self._stacks[unit] = self._taken(unit) if unit.part is not None else self._put(unit)
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

    def _chosen(self, unit: Chosen) -> None:
        """No two experts count for one number: those before the last with a mask that holds do not."""
        out, made = unit.last.outs[0], self._stacks[unit.family]
        aval: Any = self._emitter.program.avals[out]
        mask = self._stacks[unit.mask]
        mask = mask if unit.where else ~mask
        mask = mask.reshape(len(mask), *(1,) * (made.ndim - mask.ndim), *mask.shape[1:])
        later = lax.cumsum(mask.astype(jnp.int32), axis=0, reverse=True) - mask.astype(jnp.int32)
        own = mask & (later == 0)
        total = jnp.sum(jnp.where(own, made, jnp.zeros((), made.dtype)), axis=0, dtype=aval.dtype)
        self.env[out] = jnp.where(mask.any(0), total, jnp.asarray(self._read(*unit.other), aval.dtype))

    def _taken(self, unit: Family) -> Any:
        assert unit.part is not None and unit.values[0] is not None
        shape = self._emitter.program.shapes[unit.values[0]]
        return parts_of(self.env[unit.part.source], unit.part, len(unit.values), shape)

    def _put(self, unit: Family) -> Any:
        e, k = unit.reads[0]
        aval: Any = e.eqn.invars[k].aval
        values = [self._read(*read) for read in unit.reads]
        literal = not any(v is not None for v in unit.values)
        if literal and jnp.issubdtype(aval.dtype, jnp.integer) and values == list(range(len(values))):
            return lax.iota(aval.dtype, len(values))
        return jnp.stack([jnp.asarray(x, None if isinstance(x, jax.Array) else aval.dtype) for x in values])


def parts_of(x: Any, part: Part, number: int, shape: tuple[int, ...]) -> Any:
    """So many parts of `x`, from `part` on, one after the other, each in this shape: `(number, *shape)`."""
    if number * part.size != x.shape[part.dim]:
        x = lax.slice_in_dim(x, part.start, part.start + number * part.size, axis=part.dim)
    x = x.reshape(*x.shape[: part.dim], number, part.size, *x.shape[part.dim + 1 :])
    return jnp.moveaxis(x, part.dim, 0).reshape(number, *shape)
