"""What is made of scores before softmax, read off the equations in between: a scale, masks, and what else."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..ir import Equation, Value
from ..primitives.jaxprs import is_float
from .attention import Apply, Condition, Leaf, Scores, Span, Test
from .chain import Chain, Link, factor, fill_of
from .evaluate import leaves
from .masks import UNSEEN, Masked, bounds, hides, keeps, masked, test_of
from .softmax import Softmax, Weight
from .trail import Labels, Trail, number


@dataclass(frozen=True)
class Scored:
    """The fields of an `Attention` that have these names."""

    scale: float
    span: Span
    conditions: tuple[Condition, ...]
    fill: float
    change: Test | None
    exact: bool
    factors: tuple[tuple[Test, bool], ...]


@dataclass(frozen=True)
class _Mask:
    """`fill`: what scores of other keys become, or has been `added` to them."""

    seen: Masked
    fill: float
    added: bool = False


def scored(trail: Trail, places: Mapping[int, int], softmax: Softmax, chain: Chain) -> Scored | Equation:
    """What lies between scores and softmax, whose labels have these `places`; the equation that is none of it."""
    reading = _Reading(trail, places)
    for link in reversed(chain.links):
        if not reading.take(link):
            return link.equation
    for weight in softmax.weights:
        if not reading.weigh(weight):
            return weight.equation
    found = reading.result()
    return softmax.weights[0].equation if found.exact and softmax.weights else found


class _Reading:
    """From the product of queries and keys on: `written` is what became of it, `bare` the same without masks."""

    def __init__(self, trail: Trail, places: Mapping[int, int]):
        self._trail, self._places, self._rank = trail, places, len(places)
        self._written = self._bare = Scores()
        self._scales = {"written": 1.0, "bare": 1.0}
        self._masks: list[_Mask] = []
        self._buried = False  # whether more was done to scores after a mask
        self._factors: list[tuple[Test, bool]] = []

    def take(self, link: Link) -> bool:
        """Read one equation more; False for one that can't be."""
        return self._scaled(link) or self._filled(link) or self._multiplied(link) or self._other(link)

    def weigh(self, weight: Weight) -> bool:
        """Read what exponentials were multiplied by."""
        test = test_of(self._trail, weight.by, self._at(weight.labels), self._rank, deep=True)
        where = weight.equation.name == "select_n"
        if test is None:
            return False
        conditions = [Condition(test, weight.seen)] if where else keeps(test)
        if conditions is None:
            return False
        self._masks.append(_Mask(masked(conditions, self._rank), float("-inf")))
        return True

    def result(self) -> Scored:
        span, conditions = Span(), list[Condition]()
        for mask in self._masks:
            span &= mask.seen.span
            conditions += mask.seen.conditions
        exact = self._is_exact(bool(conditions) or not span.has_zero)
        tree, scale = (self._written, "written") if exact else (self._bare, "bare")
        change = None if isinstance(tree, Scores) else tree
        fill = self._masks[-1].fill if self._masks else float("-inf")
        return Scored(self._scales[scale], span, tuple(conditions), fill, change, exact, tuple(self._factors))

    def _is_exact(self, blind: bool) -> bool:
        """Whether it counts what scores are where keys are not seen; `blind`: a query may see none."""
        fills = [mask.fill for mask in self._masks]
        if not any(map(np.isfinite, fills)):
            return False
        low, high = (
            (0.0, 0.0) if isinstance(self._bare, Scores) else bounds(self._bare, self._rank) or (-np.inf, 0)
        )
        if max(fills) + max(high, 0.0) > low + UNSEEN:
            return True
        alike = len(set(fills)) == 1 and not any(mask.added for mask in self._masks)
        return blind and not (alike and not self._buried)

    def _scaled(self, link: Link) -> bool:
        by = factor(self._trail, link.equation, link.at)
        if by is None:
            return False
        if isinstance(self._bare, Scores):
            self._scales["bare"] *= by
        else:
            self._bare = self._applied(link, {}, self._bare)
        if isinstance(self._written, Scores):
            self._scales["written"] *= by
        else:
            self._written = self._applied(link, {}, self._written)
        return True

    def _filled(self, link: Link) -> bool:
        """`where(mask, scores, a number that is very small)`."""
        fill, mask = fill_of(self._trail, link), link.equation.ins[0]
        if fill is None or mask is None:
            return False
        test = test_of(self._trail, mask, self._at(link.labels), self._rank, deep=True)
        if test is None:
            return False
        self._masks.append(_Mask(masked([Condition(test, link.at == 2)], self._rank), fill))
        self._written = self._applied(link, {0: test}, self._written)
        return True

    def _multiplied(self, link: Link) -> bool:
        """Scores times what is the same for all keys: queries can be multiplied by it as well."""
        e, other = link.equation, None
        if e.name == "mul" or (e.name == "div" and link.at == 0):
            other = e.ins[1 - link.at]
        if other is None or not (isinstance(self._bare, Scores) and isinstance(self._written, Scores)):
            return False
        test = test_of(self._trail, other, self._at(link.labels), self._rank)
        if test is None or any(self._rank - 1 in leaf.dims for leaf in leaves(test)):
            return False
        self._factors.append((test, e.name == "div"))
        return True

    def _other(self, link: Link) -> bool:
        """Whatever is made of scores, positions and what has no gradient: biases, caps, masks that are added."""
        e, labels = link.equation, self._at(link.labels)
        others = {k: v for k, v in enumerate(e.ins) if k != link.at and v is not None}
        if (
            link.after is not None
            and len(others) == 1
            and (e.name == "add" or (e.name == "sub" and link.at == 0))
        ):
            ((k, v),) = others.items()
            if self._added(link, k, v):
                return True
        tests = {k: test_of(self._trail, v, labels, self._rank) for k, v in others.items()}
        known = {k: test for k, test in tests.items() if test is not None}
        if len(known) < len(tests) or self._moves(known.values()):
            return False
        self._buried |= bool(self._masks)
        self._bare, self._written = (self._applied(link, known, tree) for tree in (self._bare, self._written))
        return True

    def _added(self, link: Link, k: int, v: Value) -> bool:
        """Scores with numbers added that are very small where keys are not seen, and maybe with others besides."""
        test = test_of(self._trail, v, self._at(link.labels), self._rank, deep=True)
        if test is None or link.after is None:
            return False
        times = link.after if link.equation.name == "add" else -link.after
        terms = [(term, hides(term, times)) for term in _terms(test)]
        rest = [term for term, hiding in terms if hiding is None]
        if len(rest) == len(terms) or self._moves(rest):
            return False
        self._written = self._applied(link, {k: test}, self._written)
        if rest:
            self._buried |= bool(self._masks)
            for term in rest:
                self._bare = self._applied(link, {k: term}, self._bare)
        for _, hiding in terms:
            if hiding is not None:
                self._masks.append(_Mask(masked(hiding[0], self._rank), hiding[1], added=True))
        return True

    def _applied(self, link: Link, others: Mapping[int, Test], tree: Test) -> Test:
        """The equation of a link on scores of which `tree` was made."""
        e, operands = link.equation, list[Test]()
        for k, var in enumerate(e.eqn.invars):
            v = e.ins[k]
            if k == link.at:
                operands.append(tree)
            elif k in others:
                operands.append(others[k])
            elif v is None:
                operands.append(Leaf(number(var), ()))
            else:  # a number, as `factor` and `fill_of` have found
                operands.append(Leaf(np.asarray(self._trail.scalar(e, k)), ()))
        return Apply(e.eqn, tuple(operands))

    def _at(self, labels: Labels) -> Labels:
        return tuple(self._places.get(x) if isinstance(x, int) else x for x in labels)

    def _moves(self, tests: Iterable[Test]) -> bool:
        """Whether one has a gradient."""
        sources: Sequence[object] = [leaf.source for test in tests for leaf in leaves(test)]
        return any(not isinstance(v, np.ndarray) and v in self._trail.moving for v in sources)


def _terms(test: Test) -> list[Test]:
    """Those of a sum, in whatever float type it is."""
    if isinstance(test, Apply) and test.eqn.primitive.name == "add":
        return [term for operand in test.operands for term in _terms(operand)]
    if isinstance(test, Apply) and test.eqn.primitive.name == "convert_element_type":
        terms = _terms(test.operands[0])
        if is_float(getattr(test.eqn.invars[0].aval, "dtype", None)) and len(terms) > 1:
            return terms
    return [test]
