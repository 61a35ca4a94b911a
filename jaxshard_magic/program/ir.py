"""`Program`: a traced step with every body opened, its values and their dimensions numbered.

All that reads or rewrites a step (links, roles, strategies, re-emission) goes over this one form.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, JaxprEqn

from .primitives import called, is_literal, opened, scan_counts, shape_of, without_mapped_axes
from .primitives.contractions import Contraction
from .primitives.factors import Factors
from .primitives.primitive import Control, Primitive
from .primitives.sharding_rules import ShardingRule
from .primitives.table import primitive_of

Value = int  # the number of a value; a dimension is numbered Program.node(value, dim)


@dataclass(eq=False, slots=True)
class Scope:
    """One jaxpr in the place where it is called; the same jaxpr called twice is two scopes."""

    jaxpr: Any
    consts: tuple
    ins: list[Value]
    outs: list[Value | None]
    const_values: list[Value]
    equations: list["Equation"] = field(default_factory=list)

    def walk(self, into: Callable[["Equation"], bool] = lambda e: True) -> Iterator["Equation"]:
        """Its equations, each before those of its bodies; of the bodies, those of equations that `into` holds for."""
        for e in self.equations:
            yield e
            if into(e):
                yield from e.inside(into)

    def env(self, args: Sequence[Any]) -> dict[Value | None, Any]:
        """The arrays by their values where a run on `args` begins."""
        return dict(zip((*self.ins, *self.const_values), (*args, *self.consts), strict=True))

    def results(self, env: dict[Value | None, Any]) -> list:
        """What a run that ends with the arrays `env` gives."""
        outs = zip(self.outs, self.jaxpr.outvars, strict=True)
        return [var.val if v is None else env[v] for v, var in outs]


@dataclass(eq=False, slots=True)
class Equation:
    """`outs = primitive_of(ins)`; a literal operand is None. `trips`: how often one step runs it
    (a `while` counts once, its trips are not known). `outer`: the equation
    whose body it is in. `primitive`: the row of its primitive. `shapes`: those of operands, then of results.
    `contraction`: which dimensions correspond; None for what is no product."""

    index: int
    eqn: JaxprEqn
    ins: list[Value | None]
    outs: list[Value]
    trips: int
    outer: "Equation | None"
    doors: list["Door"] = field(default_factory=list)
    primitive: Primitive = field(init=False)
    shapes: list[tuple[int, ...]] = field(init=False)
    contraction: Contraction | None = field(init=False)

    def __post_init__(self) -> None:
        self.primitive = primitive_of(self.eqn.primitive.name)
        self.shapes = [shape_of(v) for v in (*self.eqn.invars, *self.eqn.outvars)]
        rule = self.primitive.contraction
        self.contraction = None if rule is None else rule(self.params, self.shapes[: len(self.ins)])

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def is_scan(self) -> bool:
        return self.primitive.control is Control.SCAN

    @property
    def is_while(self) -> bool:
        return self.primitive.control is Control.WHILE

    @property
    def is_cond(self) -> bool:
        return self.primitive.control is Control.COND

    @property
    def is_loop(self) -> bool:
        """Whether it may run a body more than once."""
        return self.is_scan or self.is_while

    @property
    def is_control_flow(self) -> bool:
        """Whether it is a loop or a branch: its bodies do not run exactly once each."""
        return self.primitive.control is not None

    @property
    def sharding_rule(self) -> ShardingRule:
        """The dimensions that its operands and results share, and what becomes of their places."""
        return self.primitive.sharding_rule(self)

    @property
    def factors(self) -> Factors | None:
        """The dimensions of its operand by those of its result, for what changes these alone; None for all others."""
        rule = self.primitive.factors
        return None if rule is None else rule(self.params, self.shapes[0], self.shapes[-1])

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params

    def inside(self, into: Callable[["Equation"], bool] = lambda e: True) -> Iterator["Equation"]:
        """The equations of its bodies, as `Scope.walk` gives them."""
        for door in self.doors:
            yield from door.scope.walk(into)


@dataclass(eq=False, slots=True)
class Door:
    """How values enter and leave one body of an equation.

    `operands`: the position, among those of the equation, of each input of the body. `into`: (outside, inside, lead);
    `out`: (inside, outside, lead); lead = 1 where the outside value has a leading loop dimension that the inside one
    lacks. `loop`: (body's output, body's input of the next trip). `skip`: (input, output) of the equation when the body
    runs no times.
    """

    scope: Scope
    operands: Sequence[int]
    into: list[tuple[Value | None, Value, int]]
    out: list[tuple[Value | None, Value, int]]
    loop: list[tuple[Value | None, Value]]
    skip: list[tuple[Value | None, Value]]


class Entrance(NamedTuple):
    """How a value enters a body: the equation of the body; the value outside, None for a literal; and the loop
    dimensions, 0 or 1, that it has there and not inside."""

    equation: Equation
    outside: Value | None
    lead: int


class Program:
    """The values, equations and scopes of a closed jaxpr without constants. `maker[v]`: the equation that makes v."""

    def __init__(self, closed: ClosedJaxpr):
        self.closed = closed
        self.avals: list[Any] = []
        self.shapes: list[tuple[int, ...]] = []
        self.first: list[int] = []  # the number of a value's dimension 0
        self.sizes: list[int] = []  # of every dimension
        self.equations: list[Equation] = []
        self.maker: dict[Value, Equation] = {}
        self.top = self._open(closed.jaxpr, tuple(closed.consts), 1, None)

    @property
    def inputs(self) -> list[Value]:
        return self.top.ins

    @property
    def outputs(self) -> list[Value | None]:
        return self.top.outs

    def node(self, value: Value, dim: int) -> int:
        return self.first[value] + dim

    def nodes(self, value: Value) -> range:
        start = self.first[value]
        return range(start, start + len(self.shapes[value]))

    @cached_property
    def entrances(self) -> dict[Value, Entrance]:
        """How values enter bodies, by their numbers inside; without those that a loop changes from trip to trip."""
        doors = [(e, door) for e in self.equations for door in e.doors]
        changed = {inside for _, door in doors for _, inside in door.loop}
        return {
            inside: Entrance(e, outside, lead)
            for e, door in doors
            for outside, inside, lead in door.into
            if inside not in changed
        }

    def outside(self, value: Value) -> Value | None:
        """Return what enters a body as `value`, whole; None for what a loop changes or steps over, and for literals."""
        entrance = self.entrances.get(value)
        return None if entrance is None or entrance.lead else entrance.outside

    def scopes(self) -> Iterator[Scope]:
        yield self.top
        for e in self.equations:
            for door in e.doors:
                yield door.scope

    def _value(self, var: Any) -> Value:
        number, shape = len(self.avals), shape_of(var)
        self.avals.append(var.aval)
        self.shapes.append(shape)
        self.first.append(len(self.sizes))
        self.sizes.extend(shape)
        return number

    def _open(self, jaxpr: Any, consts: tuple, trips: int, outer: Equation | None) -> Scope:
        known: dict[Any, Value] = {v: self._value(v) for v in (*jaxpr.constvars, *jaxpr.invars)}

        def read(v):
            return None if is_literal(v) else known[v]

        scope = Scope(
            jaxpr, consts, [known[v] for v in jaxpr.invars], [], [known[v] for v in jaxpr.constvars]
        )
        for eqn in itertools.chain.from_iterable(map(without_mapped_axes, jaxpr.eqns)):
            outs = [self._value(v) for v in eqn.outvars]
            e = Equation(len(self.equations), eqn, [read(v) for v in eqn.invars], outs, trips, outer)
            known.update(zip(eqn.outvars, outs, strict=True))
            self.maker.update(dict.fromkeys(outs, e))
            self.equations.append(e)
            scope.equations.append(e)
            e.doors = self._doors(e)
        scope.outs = [read(v) for v in jaxpr.outvars]
        return scope

    def _doors(self, e: Equation) -> list[Door]:
        params, ins, outs = e.params, e.ins, e.outs
        every = range(len(ins))
        if e.is_scan:
            n, k = scan_counts(params)
            body = self._open(*opened(params["jaxpr"]), e.trips * params["length"], e)
            into = [(a, b, int(i >= n + k)) for i, (a, b) in enumerate(zip(ins, body.ins, strict=True))]
            out = [(a, b, int(i >= k)) for i, (a, b) in enumerate(zip(body.outs, outs, strict=True))]
            loop = list(zip(body.outs[:k], body.ins[n : n + k], strict=True))
            skip = list(zip(ins[n : n + k], outs[:k], strict=True)) if params["length"] == 0 else []
            return [Door(body, every, into, out, loop, skip)]
        if e.is_while:
            nc, nb = params["cond_nconsts"], params["body_nconsts"]
            body = self._open(*opened(params["body_jaxpr"]), e.trips, e)
            test = self._open(*opened(params["cond_jaxpr"]), e.trips, e)
            of_test = [*every[:nc], *every[nc + nb :]]
            skip = list(zip(ins[nc + nb :], outs, strict=True))
            again = list(zip(body.outs, test.ins[nc:], strict=True))
            return [
                replace(
                    self._plain_door(body, e, every[nc:]),
                    loop=list(zip(body.outs, body.ins[nb:], strict=True)),
                    skip=skip,
                ),
                Door(test, of_test, _into(test, e, of_test), [], again, []),
            ]
        if e.is_cond:
            bodies = [self._open(*opened(b), e.trips, e) for b in params["branches"]]
            return [self._plain_door(body, e, every[1:]) for body in bodies]
        body = called(e.eqn)
        return [] if body is None else [self._plain_door(self._open(*opened(body), e.trips, e), e, every)]

    @staticmethod
    def _plain_door(body: Scope, e: Equation, operands: Sequence[int]) -> Door:
        out = [(a, b, 0) for a, b in zip(body.outs, e.outs, strict=True)]
        return Door(body, operands, _into(body, e, operands), out, [], [])


def _into(body: Scope, e: Equation, operands: Sequence[int]) -> list[tuple[Value | None, Value, int]]:
    """What enters a body whose inputs are these operands of `e`."""
    return [(e.ins[i], inside, 0) for i, inside in zip(operands, body.ins, strict=True)]
