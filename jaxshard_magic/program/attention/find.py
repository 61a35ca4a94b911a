"""Attentions found in a program, in whatever form they are written.

From each product that could be one with values back over the softmax of its other operand, over masks and scales, to a
product of queries and keys. Dimensions are followed by name, so that any order of them, grouped queries and dimensions
of size 1 that come and go make no difference.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..dimensions import Dimensions
from ..ir import Equation, Program, Value
from ..primitives import shape_of
from .attention import Attention, Found, Unrecognised
from .making import Chain, Mask, Softmax, is_product, made, roles_of
from .trail import Labels, Trail

_UNSEEN = -1e4  # scores from here down are none: their exponentials are 0 beside another
_FAR = 8  # how many equations of another kind lie at most between softmax and a product


def find(program: Program, known: Mapping[Value, Any] | None = None) -> Found:
    """The attentions of a program among its own positions, in the order in which they are run.

    Args:
        program: a loss that isn't differentiated yet.
        known: inputs that are constants, such as masks that the step closes over.

    What is an attention but for an operation in between is `Unrecognised`. Time grows with the number of equations.
    """
    search = _Search(program, Trail(program, known))
    hidden = {inner.index for e in program.equations if e.primitive.custom for inner in e.inside()}
    open_ = [e for e in program.equations if e.index not in hidden]
    found = [search.ending_in(e) for e in open_ if is_product(e) or e.name == "div"]
    return [f for f in found if f is not None]


class _Search:
    def __init__(self, program: Program, trail: Trail):
        self._program, self._trail = program, trail
        self._dims: Dimensions | None = None

    def ending_in(self, e: Equation) -> Attention | Unrecognised | None:
        """The attention whose product with the values `e` is, or what that is divided by."""
        if e.name == "div":
            return self._divided_later(e)
        for side in (0, 1):
            v = e.ins[side]
            if v is None or e.ins[1 - side] is None:
                continue
            labels = tuple(range(len(self._program.shapes[v])))
            found = self._softmax(v, labels, None, _FAR)
            if found is not None:
                return self._attention(e, side, *found)
        return None

    def _softmax(
        self, v: Value, labels: Labels, blocked: Equation | None, far: int
    ) -> tuple[Softmax, Equation | None] | None:
        """The softmax that `v` is, and the first equation, from behind, that makes something else of it."""
        v, labels = self._trail.plain(v, labels)
        e = self._trail.maker(v)
        if e is None or far == 0:
            return None
        if e.name == "div" and (found := self._normalised(e, labels)) is not None:
            return found, blocked
        if not e.primitive.elementwise:
            return None
        for w in e.ins:
            if w is None or self._program.shapes[w] != self._program.shapes[v]:
                continue
            found = self._softmax(w, labels, e if blocked is None else blocked, far - 1)
            if found is not None:
                return found
        return None

    def _normalised(self, div: Equation, labels: Labels) -> Softmax | None:
        """`div` as exponentials divided by their sum."""
        above, below = div.ins
        if above is None or below is None:
            return None
        v, at = self._trail.plain(above, labels)
        summed = self._summed(below, labels)
        along = None if summed is None or summed[0] != v else _left_out(at, summed[1])
        return None if along is None else self._taken_of(v, at, along)

    def _divided_later(self, div: Equation) -> Attention | Unrecognised | None:
        """The attention whose exponentials meet the values before `div` divides by their sum."""
        trail, (above, below) = self._trail, div.ins
        if above is None or below is None:
            return None
        product, labels = trail.plain(above, tuple(range(len(self._program.shapes[above]))))
        out = trail.maker(product)
        if out is None or not is_product(out) or (summed := self._summed(below, _labels_of(div))) is None:
            return None
        weigh = out.contraction
        assert weigh is not None
        for side in (0, 1):
            v = out.ins[side]
            if v is None:
                continue
            names: list[int | None] = [None] * len(self._program.shapes[v])
            for place, o in (*((t[side], t[2]) for t in weigh.batch), *(weigh.left, weigh.right)[side]):
                names[place] = labels[o]
            source, at = trail.plain(v, tuple(range(len(names))))
            contracted = {pair[side]: -2 for pair in weigh.contracted}
            named = tuple(contracted.get(x, names[x]) if x is not None else None for x in at)
            if source != summed[0] or _left_out(named, summed[1]) != -2:
                continue
            along = next(iter(contracted))
            softmax = self._taken_of(source, at, along)
            made = None if softmax is None else self._attention(out, side, softmax, None)
            if isinstance(made, Attention):
                order = {d: place for d, place in zip(labels, made.order, strict=True) if d is not None}
                places = tuple(order.get(d) for d in _labels_of(div))
                return replace(made, equation=div.index, order=places)
            return made
        return None

    def _summed(self, total: Value, labels: Labels) -> tuple[Value, Labels] | None:
        """What `total`, repeated along a dimension, is the sum of along that one, which is labelled -1."""
        trail = self._trail
        while (e := trail.maker(total)) is not None and (back := trail.moved(e, labels)) is not None:
            if e.ins[0] is None:
                return None
            total, labels = e.ins[0], back
        if e is None or e.name != "reduce_sum" or len(e.params["axes"]) != 1 or e.ins[0] is None:
            return None
        axis = int(e.params["axes"][0])
        return trail.plain(e.ins[0], (*labels[:axis], -1, *labels[axis:]))

    def _taken_of(self, exponentials: Value, labels: Labels, along: int) -> Softmax | None:
        """The softmax whose exponentials these are; None for what are none."""
        exp = self._trail.maker(exponentials)
        if exp is None or exp.name != "exp" or exp.ins[0] is None:
            return None
        scores, order = self._trail.plain(exp.ins[0], labels)
        sub = self._trail.maker(scores)
        if sub is not None and sub.name == "sub" and self._constant_along(sub, order, along):
            if sub.ins[0] is None:
                return None
            scores = sub.ins[0]
        return Softmax(exp, scores, order, along)

    def _constant_along(self, sub: Equation, labels: Labels, along: int) -> bool:
        """Is what `sub` subtracts the same for all places of a dimension?"""
        trail, shapes = self._trail, self._program.shapes
        v = sub.ins[1]
        if v is None:
            return True
        while True:
            v = trail.up(v)
            if all(x != along or z == 1 for x, z in zip(labels, shapes[v], strict=True)):
                return True
            e = trail.maker(v)
            if e is None or e.ins[0] is None:
                return False
            back = labels if e.name == "stop_gradient" else trail.moved(e, labels)
            if back is None:
                return False
            v, labels = e.ins[0], back

    def _attention(
        self, out: Equation, side: int, softmax: Softmax, blocked: Equation | None
    ) -> Attention | Unrecognised | None:
        chain = self._back_to_scores(softmax)
        scores = self._trail.maker(chain.value)
        if scores is None or not is_product(scores):
            return None
        roles = roles_of(self._program, self.dims, out, side, softmax, scores, chain)
        if roles is None:
            return None
        found = blocked or chain.blocked or made(self._trail, roles, softmax, chain)
        if isinstance(found, Equation):
            return Unrecognised(out.index, found.name, self._trail.line(found))
        return found

    @property
    def dims(self) -> Dimensions:
        if self._dims is None:
            self._dims = Dimensions(self._program, (1,))
        return self._dims

    def _back_to_scores(self, softmax: Softmax) -> Chain:
        """From what softmax is taken of back to a product; `blocked`: the first equation that is no mask and no scale,
        behind which the way goes on to see whether there is one."""
        trail, shapes = self._trail, self._program.shapes
        chain = Chain(softmax.scores, softmax.labels)
        for _ in range(4 * _FAR):
            chain.value, chain.labels = trail.plain(chain.value, chain.labels)
            e = trail.maker(chain.value)
            if e is None or not e.primitive.elementwise:
                return chain
            if self._mask(e, chain) or self._scaled(e, chain) or self._added(e, chain):
                continue
            chain.blocked = chain.blocked or e
            same = [w for w in e.ins if w is not None and shapes[w] == shapes[chain.value]]
            if not same:
                return chain
            chain.value = next((w for w in same if self._leads_to_product(w)), same[0])
        return chain

    def _leads_to_product(self, v: Value, far: int = _FAR) -> bool:
        trail = self._trail
        v, _ = trail.plain(v, (None,) * len(self._program.shapes[v]))
        e = trail.maker(v)
        if e is None or far == 0:
            return False
        if is_product(e):
            return True
        same = (w for w in e.ins if w is not None and self._program.shapes[w] == self._program.shapes[v])
        return e.primitive.elementwise and any(self._leads_to_product(w, far - 1) for w in same)

    def _mask(self, e: Equation, chain: Chain) -> bool:
        """`where(mask, scores, a number that is very small)`."""
        if e.name != "select_n" or len(e.ins) != 3 or e.ins[0] is None:
            return False
        for k in (1, 2):
            fill, other = self._trail.scalar(e, k), e.ins[3 - k]
            if fill is not None and fill * chain.scale <= _UNSEEN and other is not None:
                chain.masks.append(Mask(e, e.ins[0], chain.labels, k == 1, fill * chain.scale))
                chain.value = other
                return True
        return False

    def _added(self, e: Equation, chain: Chain) -> bool:
        """`scores + where(mask, 0, a number that is very small)`."""
        if e.name != "add":
            return False
        for k in (0, 1):
            v, scores = e.ins[k], e.ins[1 - k]
            if v is None or scores is None:
                continue
            labels = chain.labels
            while (maker := self._trail.maker(v)) is not None and (
                back := self._trail.moved(maker, labels)
            ) is not None:
                if maker.ins[0] is None:
                    break
                v, labels = maker.ins[0], back
            if maker is None or maker.name != "select_n" or len(maker.ins) != 3 or maker.ins[0] is None:
                continue
            numbers = [self._trail.scalar(maker, j) for j in (1, 2)]
            low = [j for j, x in enumerate(numbers) if x is not None and x * chain.scale <= -(_UNSEEN**2)]
            if len(low) == 1 and numbers[1 - low[0]] == 0:
                fill = numbers[low[0]] or 0.0
                chain.masks.append(Mask(e, maker.ins[0], labels, low[0] == 0, fill * chain.scale, added=True))
                chain.value = scores
                return True
        return False

    def _scaled(self, e: Equation, chain: Chain) -> bool:
        if e.name not in ("mul", "div"):
            return False
        for k in (1, 0) if e.name == "mul" else (1,):
            number, other = self._trail.scalar(e, k), e.ins[1 - k]
            if number is not None and number > 0 and other is not None:
                chain.scale *= number if e.name == "mul" else 1 / number
                chain.value = other
                return True
        return False


def _labels_of(e: Equation) -> tuple[int, ...]:
    """The dimensions of its result, each its own label."""
    return tuple(range(len(shape_of(e.eqn.outvars[0]))))


def _left_out(labels: Labels, summed: Labels) -> int | None:
    """The label of the dimension that is -1 among those of what is summed, where all others agree."""
    if len(labels) != len(summed):
        return None
    pairs = list(zip(labels, summed, strict=True))
    agree = all(y in (x, None) for x, y in pairs if y != -1)
    return next((x for x, y in pairs if y == -1), None) if agree else None
