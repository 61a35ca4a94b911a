"""Intermediate representation of a traced step: all bodies opened, all values and dimensions numbered.

All code that reads or rewrites a step goes over `Program`.

Footguns:
- A literal operand is None in `operands` and `outputs`; the number is in `jaxpr_eqn.invars` or `jaxpr.outvars`.
- A jaxpr called twice is two sub-jaxprs with values of their own.
- A program has no references (their contents are passed from equation to equation), and no axes of a `jax.vmap`
  (`psum`, `pmax` and `pmin` over them are reductions over dimensions). Axes named by a mesh stay.
- A traced step has no constants: closed-over arrays are its first inputs. A retraced program may have constants of its
  jits.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, JaxprEqn

from .primitives import called_body, is_literal, open_jaxpr, reduce_mapped_axes, scan_counts, shape_of
from .primitives.contractions import Contraction
from .primitives.factors import Factors
from .primitives.primitive import Control, Primitive
from .primitives.sharding_rules import ShardingRule
from .primitives.table import primitive_of

Value = int  # number of a value; dimensions are numbered as well: `Program.dim_number`


@dataclass(eq=False, slots=True)
class SubJaxpr:
    """One jaxpr at one call site.

    In a sub-jaxpr that other code cuts out of another, `jaxpr` has `outvars` alone, for `read_outputs`.

    Attributes:
        jaxpr: The open jaxpr.
        consts: Constants of the jaxpr.
        inputs: Values of the inputs.
        outputs: Values of the outputs; None for literals.
        const_values: Values of the constants.
        equations: Equations, in order, without those of nested bodies.
    """

    jaxpr: Any
    consts: tuple
    inputs: list[Value]
    outputs: list[Value | None]
    const_values: list[Value]
    equations: list["Equation"] = field(default_factory=list)

    def walk(self, enter: Callable[["Equation"], bool] = lambda e: True) -> Iterator["Equation"]:
        """Yield the equations, each before the equations of its bodies.

        Args:
            enter: Predicate of the equations whose bodies to visit; all by default.
        """
        for e in self.equations:
            yield e
            if enter(e):
                yield from e.nested(enter)

    def bind_inputs(self, args: Sequence[Any]) -> dict[Value | None, Any]:
        """Return the arrays by value at the start of a run.

        Args:
            args: One array for each input.
        """
        return dict(zip((*self.inputs, *self.const_values), (*args, *self.consts), strict=True))

    def read_outputs(self, env: dict[Value | None, Any]) -> list:
        """Return the outputs of a run.

        Args:
            env: Arrays by value at the end of the run.
        """
        outs = zip(self.outputs, self.jaxpr.outvars, strict=True)
        return [var.val if v is None else env[v] for v, var in outs]


@dataclass(eq=False, slots=True)
class Equation:
    """One equation: `results = primitive(operands)`.

    Attributes:
        index: Position in `Program.equations`.
        jaxpr_eqn: The equation of the jaxpr.
        operands: Values of the operands; None for literals.
        results: Values of the results.
        trip_count: Number of runs in one step, the trips of all loops around it multiplied; a `while` around it counts
            as one trip, as the number is not known.
        parent: Equation in whose body this one is; None at the top.
        bodies: Bodies of the equation.
        primitive: Facts about the primitive, a row of the table of primitives.
        shapes: Shapes of operands, then of results.
        contraction: Correspondence of dimensions in a product; None for other equations.
    """

    index: int
    jaxpr_eqn: JaxprEqn
    operands: list[Value | None]
    results: list[Value]
    trip_count: int
    parent: "Equation | None"
    bodies: list["Body"] = field(default_factory=list)
    primitive: Primitive = field(init=False)
    shapes: list[tuple[int, ...]] = field(init=False)
    contraction: Contraction | None = field(init=False)

    def __post_init__(self) -> None:
        self.primitive = primitive_of(self.jaxpr_eqn.primitive.name)
        self.shapes = [shape_of(v) for v in (*self.jaxpr_eqn.invars, *self.jaxpr_eqn.outvars)]
        rule = self.primitive.contraction
        self.contraction = None if rule is None else rule(self.params, self.shapes[: len(self.operands)])

    @property
    def name(self) -> str:
        """Name of the primitive."""
        return self.jaxpr_eqn.primitive.name

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
        """True if a body may run more than once."""
        return self.is_scan or self.is_while

    @property
    def is_control_flow(self) -> bool:
        """True for a loop or a branch: bodies need not run exactly once each."""
        return self.primitive.control is not None

    @property
    def sharding_rule(self) -> ShardingRule:
        """Dimensions shared by operands and results, and the positions along them."""
        return self.primitive.sharding_rule(self)

    @property
    def factors(self) -> Factors | None:
        """Correspondence of operand and result dimensions, for equations that change only the dimensions; else None."""
        rule = self.primitive.factors
        return None if rule is None else rule(self.params, self.shapes[0], self.shapes[-1])

    @property
    def params(self) -> dict[str, Any]:
        return self.jaxpr_eqn.params

    def nested(self, enter: Callable[["Equation"], bool] = lambda e: True) -> Iterator["Equation"]:
        """Yield the equations of all bodies, in the order of `SubJaxpr.walk`.

        Args:
            enter: Predicate of the equations whose bodies to visit; all by default.
        """
        for body in self.bodies:
            yield from body.sub_jaxpr.walk(enter)


@dataclass(eq=False, slots=True)
class Body:
    """Bind an equation's operands and results to the inputs and outputs of one sub-jaxpr.

    A pair has `lead` = 1 where the outer value has a leading loop dimension that the inner value lacks, else 0.

    Attributes:
        sub_jaxpr: The body.
        operand_positions: For each input of the body the position of an operand of the equation.
        inputs: Inputs: (outer value, inner value, lead).
        outputs: Outputs: (inner value, outer value, lead).
        carries: Carries: (output of the body, input of the next trip).
        zero_trip: Values passed through when the body runs zero times: (operand, result).
    """

    sub_jaxpr: SubJaxpr
    operand_positions: Sequence[int]
    inputs: list[tuple[Value | None, Value, int]]
    outputs: list[tuple[Value | None, Value, int]]
    carries: list[tuple[Value | None, Value]]
    zero_trip: list[tuple[Value | None, Value]]


class BodyInput(NamedTuple):
    """Entry of a value into a body.

    Attributes:
        equation: Equation of the body.
        outer_value: Outer value; None for a literal.
        lead: Number of leading loop dimensions, 0 or 1, of the outer value that the inner value lacks.
    """

    equation: Equation
    outer_value: Value | None
    lead: int


class Program:
    """Values, equations and sub-jaxprs of a closed jaxpr.

    Values are numbered from 0, and so are the dimensions of all values: dimension `d` of value `v` is `dim_number(v,
    d)`.

    Args:
        closed: A jaxpr without references.

    Attributes:
        closed: The jaxpr.
        avals: Abstract value of each value.
        shapes: Shape of each value.
        first_dim: Number of dimension 0 of each value.
        sizes: Size of each numbered dimension.
        equations: All equations, those of bodies included, each before those of its own bodies.
        producer: Equation that produces each value.
        top: The outermost jaxpr.
    """

    def __init__(self, closed: ClosedJaxpr):
        self.closed = closed
        self.avals: list[Any] = []
        self.shapes: list[tuple[int, ...]] = []
        self.first_dim: list[int] = []
        self.sizes: list[int] = []
        self.equations: list[Equation] = []
        self.producer: dict[Value, Equation] = {}
        self.top = self._open(closed.jaxpr, tuple(closed.consts), 1, None)

    @property
    def inputs(self) -> list[Value]:
        """Values of the inputs."""
        return self.top.inputs

    @property
    def outputs(self) -> list[Value | None]:
        """Values of the outputs; None for literals."""
        return self.top.outputs

    def dim_number(self, value: Value, dim: int) -> int:
        """Return the number of dimension `dim` of `value`."""
        return self.first_dim[value] + dim

    def dim_numbers(self, value: Value) -> range:
        """Return the numbers of all dimensions of `value`."""
        start = self.first_dim[value]
        return range(start, start + len(self.shapes[value]))

    @cached_property
    def body_inputs(self) -> dict[Value, BodyInput]:
        """Entries of values into bodies, by inner value, without carries that change from trip to trip."""
        bodies = [(e, body) for e in self.equations for body in e.bodies]
        changed = {inside for _, door in bodies for _, inside in door.carries}
        return {
            inside: BodyInput(e, outside, lead)
            for e, door in bodies
            for outside, inside, lead in door.inputs
            if inside not in changed
        }

    def outer_value(self, value: Value) -> Value | None:
        """Return the outer value that enters a body as `value`, unsliced.

        None for carries, for slices of scanned operands, and for literals.

        Args:
            value: A value of a body.
        """
        entrance = self.body_inputs.get(value)
        return None if entrance is None or entrance.lead else entrance.outer_value

    def sub_jaxprs(self) -> Iterator[SubJaxpr]:
        """Yield the outermost jaxpr and all bodies."""
        yield self.top
        for e in self.equations:
            for body in e.bodies:
                yield body.sub_jaxpr

    def _add_value(self, var: Any) -> Value:
        """Number a variable and its dimensions, and return the value."""
        number, shape = len(self.avals), shape_of(var)
        self.avals.append(var.aval)
        self.shapes.append(shape)
        self.first_dim.append(len(self.sizes))
        self.sizes.extend(shape)
        return number

    def _open(self, jaxpr: Any, consts: tuple, trips: int, outer: Equation | None) -> SubJaxpr:
        """Return the sub-jaxpr of a call site, with its values and equations numbered."""
        known: dict[Any, Value] = {v: self._add_value(v) for v in (*jaxpr.constvars, *jaxpr.invars)}

        def read(v):
            return None if is_literal(v) else known[v]

        scope = SubJaxpr(jaxpr, consts, [known[v] for v in jaxpr.invars], [], [known[v] for v in jaxpr.constvars])
        # psum, pmax and pmin over an axis of jax.vmap become reductions over dimensions, so no reader needs to know
        # mapped axes.
        for eqn in itertools.chain.from_iterable(map(reduce_mapped_axes, jaxpr.eqns)):
            outs = [self._add_value(v) for v in eqn.outvars]
            e = Equation(len(self.equations), eqn, [read(v) for v in eqn.invars], outs, trips, outer)
            known.update(zip(eqn.outvars, outs, strict=True))
            self.producer.update(dict.fromkeys(outs, e))
            # Added before its bodies are opened, as an equation comes before those of its bodies.
            self.equations.append(e)
            scope.equations.append(e)
            e.bodies = self._open_bodies(e)
        scope.outputs = [read(v) for v in jaxpr.outvars]
        return scope

    def _open_bodies(self, e: Equation) -> list[Body]:
        """Open the bodies of an equation."""
        params, ins, outs = e.params, e.operands, e.results
        all_positions = range(len(ins))
        if e.is_scan:
            n, k = scan_counts(params)
            body = self._open(*open_jaxpr(params["jaxpr"]), e.trip_count * params["length"], e)
            into = [(a, b, int(i >= n + k)) for i, (a, b) in enumerate(zip(ins, body.inputs, strict=True))]
            out = [(a, b, int(i >= k)) for i, (a, b) in enumerate(zip(body.outputs, outs, strict=True))]
            loop = list(zip(body.outputs[:k], body.inputs[n : n + k], strict=True))
            skip = list(zip(ins[n : n + k], outs[:k], strict=True)) if params["length"] == 0 else []
            return [Body(body, all_positions, into, out, loop, skip)]
        if e.is_while:
            num_condition_constants, num_body_constants = params["cond_nconsts"], params["body_nconsts"]
            body = self._open(*open_jaxpr(params["body_jaxpr"]), e.trip_count, e)
            condition = self._open(*open_jaxpr(params["cond_jaxpr"]), e.trip_count, e)
            condition_positions = [
                *all_positions[:num_condition_constants],
                *all_positions[num_condition_constants + num_body_constants :],
            ]
            # The number of trips is unknown and may be zero.
            skip = list(zip(ins[num_condition_constants + num_body_constants :], outs, strict=True))
            # The condition reads the carries after each trip too. Other modules expect it as the second body.
            condition_carries = list(zip(body.outputs, condition.inputs[num_condition_constants:], strict=True))
            return [
                replace(
                    self._plain_body(body, e, all_positions[num_condition_constants:]),
                    carries=list(zip(body.outputs, body.inputs[num_body_constants:], strict=True)),
                    zero_trip=skip,
                ),
                Body(
                    condition,
                    condition_positions,
                    _body_input_pairs(condition, e, condition_positions),
                    [],
                    condition_carries,
                    [],
                ),
            ]
        if e.is_cond:
            bodies = [self._open(*open_jaxpr(b), e.trip_count, e) for b in params["branches"]]
            return [self._plain_body(body, e, all_positions[1:]) for body in bodies]
        body = called_body(e.jaxpr_eqn)
        return (
            [] if body is None else [self._plain_body(self._open(*open_jaxpr(body), e.trip_count, e), e, all_positions)]
        )

    @staticmethod
    def _plain_body(body: SubJaxpr, e: Equation, operands: Sequence[int]) -> Body:
        """Return a body whose outputs are the results of the equation, without loop dimensions."""
        out = [(a, b, 0) for a, b in zip(body.outputs, e.results, strict=True)]
        return Body(body, operands, _body_input_pairs(body, e, operands), out, [], [])


def _body_input_pairs(body: SubJaxpr, e: Equation, operands: Sequence[int]) -> list[tuple[Value | None, Value, int]]:
    """Return the inputs of a body that reads the given operands of `e`."""
    return [(e.operands[i], inside, 0) for i, inside in zip(operands, body.inputs, strict=True)]
