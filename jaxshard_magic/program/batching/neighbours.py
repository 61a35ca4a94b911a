"""Rows that a function takes together with those that follow them, as `x.reshape(-1, 2)` takes pairs of rows."""

import math
from collections.abc import Sequence

from ..dimensions import Dimensions
from ..ir import Equation, Program, Value
from ..primitives.primitive import Kind
from ..primitives.sharding_rules import reduced
from .examples import Label, Rows


def taken_together(program: Program, of: Sequence[Label], examples: int) -> tuple[int, Equation | None]:
    """Return how many examples that follow one another belong together, and the first equation that says so.

    Args:
        program: the function of the whole batch.
        of: the label of each of its values.
        examples: how many there are.
    """
    together, first = 1, None
    dims: Dimensions | None = None
    for v, label in enumerate(of):
        e = program.maker.get(v)
        if not isinstance(label, Rows) or e is None or e.factors is None:
            continue
        group = examples // math.gcd(examples, program.shapes[v][label.dim] or examples)
        if together % group == 0:
            continue
        dims = dims or Dimensions(program, (1,))
        inner = _beside(e, v, label.dim, dims)
        if any(
            _tells_apart(inside, inner, dims, of) or _meet(inside, inner, dims)
            for inside in program.equations
        ):
            together, first = math.lcm(together, group), first or e
    return together, first


def _beside(e: Equation, v: Value, leading: int, dims: Dimensions) -> frozenset[int]:
    """Return the classes of the dimensions of `v` along which `e` puts the rows of a group beside each other."""
    assert e.factors is not None
    made = next((new for _, new in e.factors.groups if leading in new), ())
    return frozenset(dims.of(v)[d] for d in made if d != leading)


def _tells_apart(e: Equation, inner: frozenset[int], dims: Dimensions, of: Sequence[Label]) -> bool:
    """Return whether `e` reads what is no example's and has other numbers for each place in a group."""
    for v in e.ins:
        if v is None or isinstance(of[v], Rows):
            continue
        made = dims.program.maker.get(v)
        same = frozenset[int]() if made is None or made.factors is None else made.factors.repeated
        if any(c in inner and d not in same for d, c in enumerate(dims.big(v))):
            return True
    return False


def _meet(e: Equation, inner: frozenset[int], dims: Dimensions) -> bool:
    """Return whether `e` may make something of several rows of a group, as all may but what works on each number, moves
    dimensions, or multiplies or sums along others."""
    ends = [dims.big(v) for v in (*e.ins, *e.outs)]
    if not any(inner.intersection(classes) for classes in ends):
        return False
    kind = e.primitive.kind
    if any(len(inner.intersection(classes)) < sum(c in inner for c in classes) for classes in ends):
        return True  # a group beside itself
    if kind in (Kind.ELEMENTWISE, Kind.SHAPE, Kind.EACH, Kind.SOURCE):
        return False
    if e.doors:  # what a function is called with is met inside
        return e.is_control_flow
    if (c := e.contraction) is not None:
        summed = [(0, i) for i, *_ in (*c.contracted, *c.windowed)] + [
            (1, j) for _, j, *_ in (*c.contracted, *c.windowed)
        ]
        return any(ends[k][d] in inner for k, d in summed)
    if kind is Kind.REDUCTION:
        return any(ends[0][d] in inner for d in reduced(e.params))
    return True
