"""In which type every equation of a loss runs, and every value is held: mixed precision.

As PyTorch's autocast has it (its "CUDA op reference"), and `runs` in the table of primitives: products run in the
compute type; what is sensitive to rounding or range runs as it was written; the rest runs in the widest type of its
operands.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..program.constants import Constants, is_at_hand
from ..program.flow import Flow, closure
from ..program.ir import Equation, Program, Scope, Value
from ..program.primitives.primitive import Kind, Runs
from ..program.solver import Domain, solve

_CARRIED = None  # how a value comes through the door of a body


@dataclass(frozen=True)
class Types:
    """`of[v]`: the dtype that value `v` is held in. `runs[i]`: the dtype that the floats of equation `i` take;
    an equation that is not in it runs as traced. `changed`: how many products run in another type than they were
    written in."""

    of: list[Any]
    runs: dict[int, Any]
    changed: int


def lowered(program: Program, compute: Any) -> Types:
    """Mixed precision: products in `compute`, and what follows them as the table says.

    What no product has made yet (inputs, masks, draws, positions) stays as it is and is cast where it meets a narrower
    value. What leads to no further product (the loss, metrics, running statistics) runs as written.
    """
    equations = list(visible(program.top))
    wide = [_is(aval, WIDE) for aval in program.avals]
    products = [e for e in equations if _is_product(e, wide)]
    graph = _Graph(program, equations, wide, {e.index for e in products}, compute)
    low = graph.low()
    of = [compute if low[v] else _dtype(aval) for v, aval in enumerate(program.avals)]
    runs = {e.index: compute for e in equations if e.primitive.runs and any(low[v] for v in e.outs)}
    return Types(of, runs, sum(e.index in runs for e in products))


def raised(program: Program) -> Types:
    """All that is written in a narrow float type in float32; what the table doesn't know runs as written between two
    casts."""
    equations = list(visible(program.top))
    narrow = [_is(aval, NARROW) for aval in program.avals]
    of = [
        jnp.dtype(jnp.float32) if n else _dtype(aval) for n, aval in zip(narrow, program.avals, strict=True)
    ]
    touched = [e for e in equations if any(narrow[v] for v in (*e.ins, *e.outs) if v is not None)]
    runs = {e.index: jnp.dtype(jnp.float32) for e in touched if e.primitive.runs}
    return Types(of, runs, sum(e.primitive.runs is Runs.PRODUCT for e in touched))


def visible(scope: Scope) -> Iterator[Equation]:
    """The equations of a scope and of the bodies in it; functions with derivative rules of their own stay shut."""
    return scope.walk(lambda e: not e.primitive.custom)


_LOOKED_AT = 1 << 20  # numbers of a constant
NARROW = frozenset(jnp.dtype(t) for t in (jnp.bfloat16, jnp.float16))
WIDE = frozenset(jnp.dtype(t) for t in (jnp.float32, jnp.float64))


def _dtype(aval: Any) -> Any:
    return getattr(aval, "dtype", None)


def _is(aval: Any, kinds: Collection[Any]) -> bool:
    return _dtype(aval) in kinds


def _is_product(e: Equation, wide: list[bool]) -> bool:
    """Does mixed precision apply to it? Not to sums of squares and the like, nor where an algorithm is asked for."""
    if e.primitive.runs is not Runs.PRODUCT or not all(
        wide[v] for v in (*e.ins[:2], *e.outs) if v is not None
    ):
        return False
    precision = e.params.get("precision")
    pair = precision if isinstance(precision, tuple) else (precision,)
    return all(p is None or isinstance(p, lax.Precision) for p in pair) and not _is_inner(e)


def _is_inner(e: Equation) -> bool:
    """Has a product no free dimension on either side?"""
    c = e.contraction
    return c is not None and not (c.left or c.right or c.windowed)


class _Graph:
    """From which wide floats each value is made, and by which rule."""

    def __init__(
        self, program: Program, equations: list[Equation], wide: list[bool], products: set[int], compute: Any
    ):
        self.program, self.wide = program, wide
        self.rule: dict[Value, Runs | None] = {}
        self.sources: dict[Value, list[Value]] = {}
        self.widened: list[Value] = []
        self.unnamed: dict[Value, Value] = {}  # what a name was given to
        for e in equations:
            if e.primitive.names_value and (v := e.ins[0]) is not None:
                self.unnamed[e.outs[0]] = self.unnamed.get(v, v)
        flow = Flow(program)
        inner = [v for e in program.equations if e.primitive.runs is Runs.PRODUCT for v in e.ins]
        self.ahead = flow.back(inner)  # what leads to a product
        self.constants = Constants(program)
        self.too_large = solve(program, _TooLarge(compute), [False] * len(program.inputs))
        for e in equations:
            if e.doors and not e.primitive.custom:
                self._doors(e)
            else:
                self._plain(e, e.index in products, compute)

    def _plain(self, e: Equation, product: bool, compute: Any) -> None:
        follows = (
            _is_cheap(e) if e.primitive.custom else e.primitive.runs is Runs.FOLLOW and not self._is_square(e)
        )
        held = (self.constants.operand(e, k) for k in range(len(e.ins)))
        if follows and not all(_fits(x, compute) for x in held if x is not None):
            follows = False
        if any(self.too_large[v] for v in e.ins if v is not None):
            follows = False
        if e.primitive.casts and _is(e.eqn.invars[0].aval, NARROW):
            follows = False
            self.widened.extend(v for v in e.outs if self.wide[v])
        for k, out in enumerate(e.outs):
            ins = [e.ins[k]] if e.primitive.kind is Kind.EACH else e.ins
            self._made(out, Runs.PRODUCT if product else Runs.FOLLOW if follows else Runs.FLOAT, ins)

    def _made(self, v: Value, rule: Runs | None, ins: Collection[Value | None]) -> None:
        self.rule[v] = rule
        self.sources.setdefault(v, []).extend(i for i in ins if i is not None and self.wide[i])

    def _doors(self, e: Equation) -> None:
        for door in e.doors:
            into = {b: a for a, b, _ in door.into}
            for b, a in into.items():
                self._made(b, _CARRIED, [a])
            for last, first in door.loop:
                self._made(first, Runs.FLOAT if self._adds_up(door.scope, first, last) else _CARRIED, [last])
            for inside, outside, _ in door.out:
                self._made(outside, _CARRIED, [inside])
        ends = {a: b for b, a, _ in e.doors[0].out if b is not None}
        carried = dict(e.doors[0].loop)
        for outside, inside in ends.items():
            if inside in carried:  # what a loop carries has one type
                self.sources[outside] = [v for v in [carried[inside]] if self.wide[v]]
        if e.is_while:
            body, test = e.doors
            starts = [b for _, b in body.loop]
            for start, (_, asked) in zip(starts, test.loop, strict=True):
                self.sources[asked] = [start] if self.wide[start] else []

    def _is_square(self, e: Equation) -> bool:
        a, *b = (self._unnamed(v) for v in e.ins)
        return e.name == "mul" and a is not None and [a] == b

    def _adds_up(self, scope: Scope, first: Value, last: Value | None) -> bool:
        """Is a carried value a running sum: read once a trip, by the addition that makes its next value?"""
        readers = [
            e
            for e in scope.equations
            if not e.primitive.names_value and first in (self._unnamed(v) for v in e.ins)
        ]
        if len(readers) != 1 or first in map(self._unnamed, scope.outs):
            return False
        e = readers[0]
        once = [self._unnamed(v) for v in e.ins].count(first) == 1
        return (
            e.primitive.elementwise
            and e.primitive.linear == slice(2)
            and e.outs[0] == self._unnamed(last)
            and once
        )

    def _unnamed(self, v: Value | None) -> Value | None:
        return None if v is None else self.unnamed.get(v, v)

    def low(self) -> list[bool]:
        """Which values are held in the compute type: the most that are, so that loops carry it where they can."""
        hot = self._hot()
        low = [w and h for w, h in zip(self.wide, hot, strict=True)]
        changing = True
        while changing:
            changing = False
            for v, rule in self.rule.items():
                if low[v] and not self._stays(v, rule, hot, low):
                    low[v], changing = False, True
        return low

    def _stays(self, v: Value, rule: Runs | None, hot: list[bool], low: list[bool]) -> bool:
        if rule is Runs.PRODUCT:
            return True
        leads = rule is _CARRIED or (rule is Runs.FOLLOW and v in self.ahead)
        return leads and all(low[s] for s in self.sources[v] if hot[s])

    def _hot(self) -> list[bool]:
        """Which values a product of mixed precision, or a cast of the user's own, has made or has a part in."""
        after: dict[Value, list[Value]] = {}
        for v, sources in self.sources.items():
            for s in sources:
                after.setdefault(s, []).append(v)
        made = [v for v, rule in self.rule.items() if rule is Runs.PRODUCT]
        hot = closure([*made, *self.widened], lambda v: after.get(v, ()))
        return [v in hot for v in range(len(self.wide))]


class _TooLarge(Domain[bool]):
    """Whether a value may have a finite number that a type makes infinite, such as the least float32 of an additive
    mask: constants of the program, and what is linear in them. Facts for `solver.solve`."""

    bottom = False

    def __init__(self, compute: Any):
        self._largest = float(jnp.finfo(compute).max)

    def join(self, first: bool, second: bool) -> bool:
        """Return whether either may."""
        return first or second

    def constant(self, number: Any) -> bool:
        """Return whether a constant does; False for one whose numbers take long to look at."""
        if np.size(number) > _LOOKED_AT or jnp.result_type(number) not in WIDE or not is_at_hand(number):
            return False
        sizes = np.abs(np.asarray(number))
        return bool(np.any((sizes > self._largest) & (sizes < math.inf)))

    def transfer(self, eqn: Equation, operands: Sequence[bool]) -> list[bool]:
        """Return whether what is linear in its operands may, as one of these may."""
        known = eqn.primitive
        linear = slice(2) if known.in_each else known.linear
        may = known.runs is not Runs.PRODUCT and linear is not None and any(operands[linear])
        return [may] * len(eqn.outs)


def _fits(x: np.ndarray, dtype: Any) -> bool:
    """Does a number stay finite, and keep its digits, in a type? What is infinite or zero may."""
    if x.dtype not in WIDE:
        return True
    size, info = abs(float(x)), jnp.finfo(dtype)
    return size in (0, math.inf) or float(info.smallest_normal) <= size <= float(info.max)


def _is_cheap(e: Equation) -> bool:
    """Does a function with a derivative rule of its own hold nothing that rounding or range would hurt?"""
    return all(i.doors or i.primitive.compares or i.primitive.runs is Runs.FOLLOW for i in e.inside())
