"""Attentions found in a program, in whatever form they are written.

From each product that could be one with values back over the softmax of its other operand, over masks and scales, to a
product of queries and keys. Dimensions are followed by name, so that any order of them, grouped queries and dimensions
of size 1 that come and go make no difference.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ..dimensions import Dimensions
from ..ir import Equation, Program, Value
from ..primitives import shape_of
from .attention import Attention, Found, Unrecognised
from .chain import chain_of, is_product
from .making import made, roles_of
from .other import in_the_way
from .softmax import Softmax, Softmaxes, Total, with_names
from .trail import Label, Labels, Trail

_CONTRACTED = -2  # the name of a dimension that a product sums over


def find(
    program: Program, known: Mapping[Value, Any] | None = None, moving: Collection[Value] | None = None
) -> Found:
    """The attentions of a program among its own positions, in the order in which they are run.

    Args:
        program: a loss that isn't differentiated yet.
        known: inputs that are constants, such as masks that the step closes over.
        moving: inputs that it is differentiated by; None for all that are not known. What depends on them is nothing
            that a ring gives a gradient of, unless it is queries, keys or values.

    What is an attention but for an operation in between is `Unrecognised`. Time grows with the number of equations.
    """
    known = known or {}
    by = [v for v in program.inputs if v not in known] if moving is None else moving
    search = _Search(program, Trail(program, known, by))
    hidden = {inner.index for e in program.equations if e.primitive.custom for inner in e.inside()}
    open_ = [e for e in program.equations if e.index not in hidden]
    found = [search.ending_in(e) for e in open_ if is_product(e) or e.name in ("div", "mul")]
    return [f for f in found if f is not None]


class _Search:
    def __init__(self, program: Program, trail: Trail):
        self._program, self._trail = program, trail
        self._softmaxes = Softmaxes(trail)
        self._exponentials = any(
            e.name == "exp" and len(shape_of(e.eqn.outvars[0])) > 1 for e in program.equations
        )
        self._dims: Dimensions | None = None

    def ending_in(self, e: Equation) -> Attention | Unrecognised | None:
        """The attention whose product with the values `e` is, or what that is divided by."""
        if not is_product(e):
            return self._divided_later(e)
        for side in (0, 1):
            v = e.ins[side]
            if v is None or e.ins[1 - side] is None:
                continue
            softmax = self._softmaxes.behind(v, tuple(range(len(self._program.shapes[v]))))
            found = None if softmax is None else self._attention(e, side, softmax)
            if found is not None:
                return found
        return self._other(e)

    def _other(self, e: Equation) -> Unrecognised | None:
        """A product of values with something else than a softmax, as far as there is one behind it."""
        for v in e.ins:
            if v is None or not self._exponentials or len(self._program.shapes[v]) < 2:
                continue
            found = in_the_way(self._trail, self.dims, v)
            if found is not None:
                return self._named(found)
        return None

    def _divided_later(self, e: Equation) -> Attention | Unrecognised | None:
        """The attention whose exponentials meet the values before `e` divides by their sum."""
        for k in (0,) if e.name == "div" else (0, 1):
            above, below = e.ins[k], e.ins[1 - k]
            if above is None or below is None:
                continue
            product, labels = self._trail.plain(above, _labels_of(e))
            out = self._trail.maker(product)
            if out is None or not is_product(out):
                continue
            total = self._softmaxes.divisor(e, 1 - k, _labels_of(e))
            if total is None:
                continue
            for side in (0, 1):
                found = self._with_total(out, side, labels, total)
                if isinstance(found, Attention):
                    order = {d: place for d, place in zip(labels, found.order, strict=True) if d is not None}
                    return replace(found, equation=e.index, order=tuple(order.get(d) for d in _labels_of(e)))
                if found is not None:
                    return found
        return None

    def _with_total(
        self, out: Equation, side: int, labels: Labels, total: Total
    ) -> Attention | Unrecognised | None:
        """The attention of a product `out`, its result labelled, whose operand `side` is exponentials of this sum."""
        v, weigh = out.ins[side], out.contraction
        if v is None or weigh is None:
            return None
        names: list[Label | None] = [None] * len(self._program.shapes[v])
        for place, o in (*((t[side], t[2]) for t in weigh.batch), *(weigh.left, weigh.right)[side]):
            names[place] = labels[o]
        for pair in weigh.contracted:
            names[pair[side]] = _CONTRACTED
        softmax = self._softmaxes.behind(v, tuple(names), total)
        if softmax is None:
            return None
        places = {x: d for d, x in enumerate(names) if isinstance(x, int)}
        return self._attention(out, side, with_names(softmax, places))

    def _attention(self, out: Equation, side: int, softmax: Softmax) -> Attention | Unrecognised | None:
        chain = chain_of(self._trail, softmax)
        scores = self._trail.maker(chain.value)
        if scores is None or not is_product(scores):
            return None
        roles = roles_of(self._program, self.dims, out, side, softmax, scores, chain.labels)
        if roles is None:
            return None
        found = softmax.blocked or chain.blocked or made(self._trail, roles, softmax, chain)
        return self._named(found) if isinstance(found, Equation) else found

    def _named(self, e: Equation) -> Unrecognised:
        name = "checkpoint" if e.primitive.remat else e.name
        return Unrecognised(name, self._trail.line(e))

    @property
    def dims(self) -> Dimensions:
        if self._dims is None:
            self._dims = Dimensions(self._program, (1,))
        return self._dims


def _labels_of(e: Equation) -> tuple[int, ...]:
    """The dimensions of its result, each its own label."""
    return tuple(range(len(shape_of(e.eqn.outvars[0]))))
