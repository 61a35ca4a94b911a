"""Assignment of dtypes to the equations and values of a loss: mixed precision.

The rules are those of PyTorch's autocast ("CUDA op reference"), a column of the table of primitives.
Products run in the compute dtype. Equations sensitive to rounding or range run as written. All others run in the
widest dtype of their operands.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..program.flow import Flow, transitive_closure
from ..program.ir import Equation, Program, SubJaxpr, Value
from ..program.primitives.primitive import AutocastPolicy, Kind
from ..program.solver import Domain, solve
from ..program.splat_constants import SplatConstants, is_readable

_CARRIED = None  # policy of values that enter, leave or are carried by a body


@dataclass(frozen=True)
class DtypeAssignment:
    """Dtypes of a program in mixed precision.

    Attributes:
        value_dtypes: Dtype in which each value is stored.
        equation_dtypes: Dtype of an equation's floats, by equation index. Missing equations run as traced.
        changed: Number of products that run in another dtype than written.
    """

    value_dtypes: list[Any]
    equation_dtypes: dict[int, Any]
    changed: int


def mixed_precision_dtypes(program: Program, compute: Any) -> DtypeAssignment:
    """Return dtypes for mixed precision: products in `compute`, and what follows them by the table of primitives.

    Values that depend on no product yet (inputs, masks, random draws, positions) stay as they are, and are cast where
    they meet a narrower value. Values that lead to no further product (loss, metrics, running statistics) run as
    written.
    """
    equations = list(visible_equations(program.top))
    wide = [_is(aval, WIDE) for aval in program.avals]
    products = [e for e in equations if _is_product(e, wide)]
    graph = _Graph(program, equations, wide, {e.index for e in products}, compute)
    low = graph.narrow_values()
    of = [compute if low[v] else _dtype(aval) for v, aval in enumerate(program.avals)]
    runs = {e.index: compute for e in equations if e.primitive.autocast and any(low[v] for v in e.results)}
    return DtypeAssignment(of, runs, sum(e.index in runs for e in products))


def float32_dtypes(program: Program) -> DtypeAssignment:
    """Return dtypes that widen all narrow floats to float32.

    Primitives unknown to the table run as written, between two casts.
    """
    equations = list(visible_equations(program.top))
    narrow = [_is(aval, NARROW) for aval in program.avals]
    of = [jnp.dtype(jnp.float32) if n else _dtype(aval) for n, aval in zip(narrow, program.avals, strict=True)]
    touched = [e for e in equations if any(narrow[v] for v in (*e.operands, *e.results) if v is not None)]
    runs = {e.index: jnp.dtype(jnp.float32) for e in touched if e.primitive.autocast}
    return DtypeAssignment(of, runs, sum(e.primitive.autocast is AutocastPolicy.COMPUTE_DTYPE for e in touched))


def visible_equations(scope: SubJaxpr) -> Iterator[Equation]:
    """Yield the equations of a jaxpr and of its bodies, but not those inside of functions with a custom derivative
    rule."""
    return scope.walk(lambda e: not e.primitive.custom_derivative)


_LOOKED_AT = 1 << 20  # elements; larger constants are not inspected
NARROW = frozenset(jnp.dtype(t) for t in (jnp.bfloat16, jnp.float16))
WIDE = frozenset(jnp.dtype(t) for t in (jnp.float32, jnp.float64))


def _dtype(aval: Any) -> Any:
    return getattr(aval, "dtype", None)


def _is(aval: Any, kinds: Collection[Any]) -> bool:
    return _dtype(aval) in kinds


def _is_product(e: Equation, wide: list[bool]) -> bool:
    """Return whether mixed precision applies to an equation.

    Excluded are inner products such as a sum of squares, and products with an explicit dot algorithm.
    """
    if e.primitive.autocast is not AutocastPolicy.COMPUTE_DTYPE or not all(
        wide[v] for v in (*e.operands[:2], *e.results) if v is not None
    ):
        return False
    precision = e.params.get("precision")
    pair = precision if isinstance(precision, tuple) else (precision,)
    return all(p is None or isinstance(p, lax.Precision) for p in pair) and not _is_inner(e)


def _is_inner(e: Equation) -> bool:
    """Return whether a product has no free dimension on either side."""
    c = e.contraction
    return c is not None and not (c.left_free or c.right_free or c.windowed)


class _Graph:
    """Dependencies between wide floats, each with the rule by which it is computed."""

    def __init__(self, program: Program, equations: list[Equation], wide: list[bool], products: set[int], compute: Any):
        self.program, self.wide = program, wide
        self.rule: dict[Value, AutocastPolicy | None] = {}
        self.sources: dict[Value, list[Value]] = {}
        self.widened: list[Value] = []
        self.unnamed: dict[Value, Value] = {}  # operand of `checkpoint_name`, by its result
        for e in equations:
            # `checkpoint_name` makes a new value of the same numbers, so the product of both is a square too.
            if e.primitive.names_value and (v := e.operands[0]) is not None:
                self.unnamed[e.results[0]] = self.unnamed.get(v, v)
        flow = Flow(program)
        inner = [
            v for e in program.equations if e.primitive.autocast is AutocastPolicy.COMPUTE_DTYPE for v in e.operands
        ]
        self.ahead = flow.ancestors(inner)  # values that a product depends on
        self.constants = SplatConstants(program)
        self.too_large = solve(program, _TooLarge(compute), [False] * len(program.inputs))
        for e in equations:
            if e.bodies and not e.primitive.custom_derivative:
                self._add_bodies(e)
            else:
                self._plain(e, e.index in products, compute)

    def _plain(self, e: Equation, product: bool, compute: Any) -> None:
        follows = (
            _is_cheap(e)
            if e.primitive.custom_derivative
            else e.primitive.autocast is AutocastPolicy.WIDEST_OPERAND and not self._is_square(e)
        )
        held = (self.constants.operand_scalar(e, k) for k in range(len(e.operands)))
        # A constant outside the range of the compute dtype, such as a small epsilon, would become 0 or infinity.
        if follows and not all(_fits(x, compute) for x in held if x is not None):
            follows = False
        # A finite additive mask would become infinite in the compute dtype.
        if any(self.too_large[v] for v in e.operands if v is not None):
            follows = False
        # The user's own cast to a wider dtype stays: from there on the program asks for wide arithmetic.
        if e.primitive.changes_dtype and _is(e.jaxpr_eqn.invars[0].aval, NARROW):
            follows = False
            self.widened.extend(v for v in e.results if self.wide[v])
        for k, out in enumerate(e.results):
            ins = [e.operands[k]] if e.primitive.kind is Kind.PASS_THROUGH else e.operands
            self._made(
                out,
                AutocastPolicy.COMPUTE_DTYPE
                if product
                else AutocastPolicy.WIDEST_OPERAND
                if follows
                else AutocastPolicy.AS_WRITTEN,
                ins,
            )

    def _made(self, v: Value, rule: AutocastPolicy | None, ins: Collection[Value | None]) -> None:
        self.rule[v] = rule
        self.sources.setdefault(v, []).extend(i for i in ins if i is not None and self.wide[i])

    def _add_bodies(self, e: Equation) -> None:
        for door in e.bodies:
            into = {b: a for a, b, _ in door.inputs}
            for b, a in into.items():
                self._made(b, _CARRIED, [a])
            for last, first in door.carries:
                self._made(
                    first,
                    # Sensitive to rounding: a running sum keeps the dtype in which the program was written.
                    AutocastPolicy.AS_WRITTEN if self._adds_up(door.sub_jaxpr, first, last) else _CARRIED,
                    [last],
                )
            for inside, outside, _ in door.outputs:
                self._made(outside, _CARRIED, [inside])
        # Initial value, carry and result of a loop need one dtype: lax.scan and lax.while_loop refuse a carry that
        # changes.
        ends = {a: b for b, a, _ in e.bodies[0].outputs if b is not None}
        carried = dict(e.bodies[0].carries)
        for outside, inside in ends.items():
            if inside in carried:
                self.sources[outside] = [v for v in [carried[inside]] if self.wide[v]]
        if e.is_while:
            body, test = e.bodies
            starts = [b for _, b in body.carries]
            # The condition reads the carry in the carry's own dtype.
            for start, (_, asked) in zip(starts, test.carries, strict=True):
                self.sources[asked] = [start] if self.wide[start] else []

    def _is_square(self, e: Equation) -> bool:
        a, *b = (self._unnamed(v) for v in e.operands)
        # `square` and `pow` run as written, and so does a square written as a product.
        return e.name == "mul" and a is not None and [a] == b

    def _adds_up(self, scope: SubJaxpr, first: Value, last: Value | None) -> bool:
        """Return whether a carry is a running sum: read once a trip, by the addition that makes its next value."""
        readers = [
            e
            for e in scope.equations
            if not e.primitive.names_value and first in (self._unnamed(v) for v in e.operands)
        ]
        if len(readers) != 1 or first in map(self._unnamed, scope.outputs):
            return False
        e = readers[0]
        once = [self._unnamed(v) for v in e.operands].count(first) == 1
        return (
            e.primitive.is_elementwise
            and e.primitive.linear_operands == slice(2)
            and e.results[0] == self._unnamed(last)
            and once
        )

    def _unnamed(self, v: Value | None) -> Value | None:
        return None if v is None else self.unnamed.get(v, v)

    def narrow_values(self) -> list[bool]:
        """Return for each value whether it is stored in the compute dtype: the largest consistent set.

        The largest set lets loops carry the narrow dtype wherever they can.
        """
        hot = self._hot()
        low = [w and h for w, h in zip(self.wide, hot, strict=True)]
        changing = True
        while changing:
            changing = False
            for v, rule in self.rule.items():
                if low[v] and not self._stays(v, rule, hot, low):
                    low[v], changing = False, True
        return low

    def _stays(self, v: Value, rule: AutocastPolicy | None, hot: list[bool], low: list[bool]) -> bool:
        if rule is AutocastPolicy.COMPUTE_DTYPE:
            return True
        leads = rule is _CARRIED or (rule is AutocastPolicy.WIDEST_OPERAND and v in self.ahead)
        return leads and all(low[s] for s in self.sources[v] if hot[s])

    def _hot(self) -> list[bool]:
        """Return for each value whether a mixed-precision product, or a cast by the user, made it or has a part in
        it."""
        after: dict[Value, list[Value]] = {}
        for v, sources in self.sources.items():
            for s in sources:
                after.setdefault(s, []).append(v)
        made = [v for v, rule in self.rule.items() if rule is AutocastPolicy.COMPUTE_DTYPE]
        hot = transitive_closure([*made, *self.widened], lambda v: after.get(v, ()))
        return [v in hot for v in range(len(self.wide))]


class _TooLarge(Domain[bool]):
    """Domain of `solver.solve`: whether a finite number in a value overflows to infinity in the compute dtype.

    Covers constants of the program, such as the lowest float32 in an additive mask, and values linear in them.
    """

    bottom = False

    def __init__(self, compute: Any):
        self._largest = float(jnp.finfo(compute).max)

    def join(self, first: bool, second: bool) -> bool:
        """Return whether either value may overflow."""
        return first or second

    def constant(self, number: Any) -> bool:
        """Return whether a constant overflows; False for a constant too large to inspect."""
        if np.size(number) > _LOOKED_AT or jnp.result_type(number) not in WIDE or not is_readable(number):
            return False
        sizes = np.abs(np.asarray(number))
        return bool(np.any((sizes > self._largest) & (sizes < math.inf)))

    def transfer(self, eqn: Equation, operands: Sequence[bool]) -> list[bool]:
        """Return for each result whether it may overflow: results linear in an operand that may."""
        known = eqn.primitive
        linear = slice(2) if known.bilinear else known.linear_operands
        may = known.autocast is not AutocastPolicy.COMPUTE_DTYPE and linear is not None and any(operands[linear])
        return [may] * len(eqn.results)


def _fits(x: np.ndarray, dtype: Any) -> bool:
    """Return whether a number stays finite and keeps its digits in a dtype. Zero and infinity always do."""
    if x.dtype not in WIDE:
        return True
    size, info = abs(float(x)), jnp.finfo(dtype)
    return size in (0, math.inf) or float(info.smallest_normal) <= size <= float(info.max)


def _is_cheap(e: Equation) -> bool:
    """Return whether a function with a custom derivative rule has no equation sensitive to rounding or range."""
    return all(
        i.bodies or i.primitive.returns_discrete or i.primitive.autocast is AutocastPolicy.WIDEST_OPERAND
        for i in e.nested()
    )
