"""Softmax in a program, in whatever way it is written: exponentials that their sum divides.

From a value back over what multiplies it to exponentials, and from what divides it to the sum of the same ones. What is
subtracted before is the same for all keys, so that it cancels: a maximum, or the logarithm of that sum itself.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp

from ..ir import Equation, Value
from .trail import Label, Labels, Trail, has, renamed

FAR = 8  # how many equations of another kind lie at most between softmax and a product
_TRIED = 256  # values that are looked at on the ways back from one


@dataclass(frozen=True)
class Weight:
    """What `equation` multiplies exponentials by, truth values or 0 and 1: `by`; `seen`: whether where it is true, or
    elsewhere."""

    equation: Equation
    by: Value
    labels: Labels
    seen: bool = True


@dataclass(frozen=True)
class Softmax:
    """The scores that a softmax is taken of, and the label that it is taken along. `weights`: what leaves out keys
    after that. `blocked`: an equation that makes something else of it."""

    scores: Value
    labels: Labels
    along: int
    weights: tuple[Weight, ...] = ()
    blocked: Equation | None = None


@dataclass(frozen=True)
class Total:
    """A sum of the exponentials `exp` along the dimension of theirs that is labelled -1. `more`: an equation that adds
    a number to it or takes the larger of both, and that number."""

    exp: Equation
    labels: Labels
    weights: tuple[Weight, ...]
    more: tuple[Equation, float] | None


@dataclass(frozen=True)
class _Way:
    """What was passed on the way back from a value."""

    total: Total | None = None
    weights: tuple[Weight, ...] = ()
    blocked: Equation | None = None
    scaled: Equation | None = None


class Softmaxes:
    """Finds them in the program of `trail`."""

    def __init__(self, trail: Trail):
        self._trail, self._program = trail, trail.program
        self._leading = dict[Value, bool]()
        self._left = 0

    def behind(self, v: Value, labels: Labels, total: Total | None = None) -> Softmax | None:
        """The softmax that `v` is; `total`: by what it is divided later."""
        self._left = _TRIED
        return self._back(v, labels, _Way(total), 2 * FAR)

    def divisor(self, e: Equation, k: int, labels: Labels) -> Total | None:
        """The sum of exponentials that `e` divides by, which is its operand `k`, or what that is 1 divided by."""
        v = e.ins[k]
        if v is None:
            return None
        return self.total(v, labels) if e.name == "div" else self._reciprocal(v, labels)

    def total(self, v: Value, labels: Labels) -> Total | None:
        """What `v`, repeated along a dimension, is the sum of."""
        trail, more = self._trail, None
        for _ in range(4 * FAR):
            e = trail.maker(v)
            if e is None or e.ins[0] is None:
                return None
            if e.name == "abs":
                v = e.ins[0]
            elif e.name in ("add", "max") and (found := self._with_number(e)) is not None:
                more, v = (e, found[0]), found[1]
            elif (back := trail.moved(e, labels, cut=True)) is not None:
                v, labels = e.ins[0], back
            else:
                break
        if e is None or e.name != "reduce_sum" or len(e.params["axes"]) != 1 or e.ins[0] is None:
            return None
        axis = int(e.params["axes"][0])
        found = self._exponentials(e.ins[0], (*labels[:axis], -1, *labels[axis:]))
        return None if found is None else Total(*found, more)

    def _with_number(self, e: Equation) -> tuple[float, Value] | None:
        for k in (1, 0):
            number, other = self._trail.scalar(e, k), e.ins[1 - k]
            if number is not None and other is not None:
                return number, other
        return None

    def _exponentials(self, v: Value, labels: Labels) -> tuple[Equation, Labels, tuple[Weight, ...]] | None:
        weights = []
        for _ in range(FAR):
            v, labels = self._trail.plain(v, labels, cut=True)
            e = self._trail.maker(v)
            if e is None or e.name == "exp":
                return None if e is None else (e, labels, tuple(weights))
            found = self._weights(e, labels)
            found = [(w, x) for w, x in found if self._exponentials(x, labels) is not None]
            if not found:
                return None
            weights.append(found[0][0])
            v = found[0][1]
        return None

    def _weights(self, e: Equation, labels: Labels) -> list[tuple[Weight, Value]]:
        """`e` as something that is multiplied by truths or numbers, in the ways that it can be that."""
        if e.name == "select_n" and len(e.ins) == 3 and e.ins[0] is not None:
            zero = next((k for k in (1, 2) if self._trail.scalar(e, k) == 0), None)
            other = None if zero is None else e.ins[3 - zero]
            return [] if other is None else [(Weight(e, self._trail.up(e.ins[0]), labels, zero == 1), other)]
        if e.name != "mul" or e.ins[0] is None or e.ins[1] is None:
            return []
        pairs = ((e.ins[0], e.ins[1]), (e.ins[1], e.ins[0]))
        return [(Weight(e, self._trail.up(by), labels), x) for x, by in pairs if self._alike(x, e)]

    def _alike(self, v: Value, e: Equation) -> bool:
        return self._program.shapes[v] == self._program.shapes[e.outs[0]]

    def _back(self, v: Value, labels: Labels, way: _Way, far: int) -> Softmax | None:
        v, labels = self._trail.plain(v, labels, cut=True)
        e = self._trail.maker(v)
        self._left -= 1
        if e is None or far == 0 or self._left < 0 or not self._leads(v, 2 * FAR):
            return None
        if e.name == "exp":
            return self._taken(e, labels, way)
        for w, further in self._ways(e, labels, way):
            found = self._back(w, labels, further, far - 1)
            if found is not None:
                return found
        return None

    def _leads(self, v: Value, far: int) -> bool:
        """Whether exponentials are behind a value, with only elementwise equations between."""
        v, _ = self._trail.plain(v, (None,) * len(self._program.shapes[v]), cut=True)
        if v not in self._leading:
            e = self._trail.maker(v)
            if e is None or far == 0 or not e.primitive.elementwise:
                return False
            self._leading[v] = e.name == "exp" or any(
                self._leads(w, far - 1) for w in e.ins if w is not None and self._alike(w, e)
            )
        return self._leading[v]

    def _ways(self, e: Equation, labels: Labels, way: _Way) -> list[tuple[Value, _Way]]:
        """From which operands on `e` may be a softmax, and what is known then."""
        found: list[tuple[Value, _Way]] = []
        for k in (1,) if e.name == "div" else (0, 1) if e.name == "mul" else ():
            other = e.ins[1 - k]
            total = None if way.total is not None or other is None else self.divisor(e, k, labels)
            if total is not None and other is not None:
                found.append((other, replace(way, total=total)))
        for weight, other in self._weights(e, labels):
            found.append((other, replace(way, weights=(*way.weights, weight))))
        for k, v in enumerate(e.ins):
            if v is None or not self._alike(v, e):
                continue
            scaled = e.name in ("mul", "div") and len(e.ins) == 2 and self._trail.scalar(e, 1 - k) is not None
            found.append((v, replace(way, scaled=e) if scaled else replace(way, blocked=e)))
        return found

    def _reciprocal(self, v: Value, labels: Labels) -> Total | None:
        trail = self._trail
        while (e := trail.maker(v)) is not None and (back := trail.moved(e, labels, cut=True)) is not None:
            if e.ins[0] is None:
                return None
            v, labels = e.ins[0], back
        if e is None:
            return None
        if e.name == "div" and e.ins[1] is not None and trail.scalar(e, 0) == 1:
            return self.total(e.ins[1], labels)
        if e.name == "integer_pow" and e.params["y"] == -1 and e.ins[0] is not None:
            return self.total(e.ins[0], labels)
        return None

    def _taken(self, exp: Equation, labels: Labels, way: _Way) -> Softmax | None:
        """The softmax whose exponentials `exp` are; None for what is none."""
        total = way.total
        within = total is None
        if total is None:  # exponentials of what their logarithm is subtracted from
            total = self._subtracted_total(exp, labels)
            if total is None:
                return None
        along = _left_out(labels, total.labels)
        if along is None:
            return None
        scores, order, constants, logs = self._without_constants(exp, labels, along)
        if len(logs) != within or (within and self._trail.maker(logs[0]) is None):
            return None
        if exp is not total.exp:
            own = self._without_constants(total.exp, labels, along)
            if own[0] != scores or own[2] != constants or own[3]:
                return None
        out = [(w.by, w.seen) for w in way.weights]
        summed = [(w.by, w.seen) for w in total.weights]
        odd = next((w for w, key in zip(way.weights, out, strict=True) if key not in summed), None)
        if odd is None and not set(summed) <= set(out):
            odd = next(w for w, key in zip(total.weights, summed, strict=True) if key not in out)
        changed = None if total.more is None or self._is_nothing(total, labels, along) else total.more[0]
        blocked = way.blocked or (odd.equation if odd else None) or changed or way.scaled
        return Softmax(scores, order, along, () if odd else way.weights, blocked)

    def _is_nothing(self, total: Total, labels: Labels, along: int) -> bool:
        """Whether what is added to a sum is lost in it: of exponentials less than their maximum, it is 1 at least."""
        assert total.more is not None
        e, number = total.more
        largest = [v for v in self._without_constants(total.exp, labels, along)[2] if self._is_maximum(v)]
        least = float(jnp.finfo(self._program.avals[e.outs[0]].dtype).eps) / 4 if e.name == "add" else 1.0
        return bool(largest) and not total.weights and 0 <= number <= least

    def _is_maximum(self, v: Value) -> bool:
        e = self._trail.maker(v)
        if (
            e is not None
            and e.name == "max"
            and self._trail.scalar(e, 0) == float("-inf")
            and e.ins[1] is not None
        ):
            e = self._trail.maker(e.ins[1])
        return e is not None and e.name == "reduce_max"

    def _subtracted_total(self, exp: Equation, labels: Labels) -> Total | None:
        v = exp.ins[0]
        for _ in range(FAR):
            if v is None:
                return None
            v, labels = self._trail.plain(v, labels, cut=True)
            e = self._trail.maker(v)
            if e is None or e.name != "sub" or e.ins[1] is None:
                return None
            for log, at in self._terms(e.ins[1], labels)[1]:
                if (total := self._logarithm(log, at)) is not None:
                    return total
            v = e.ins[0]
        return None

    def _logarithm(self, v: Value, labels: Labels) -> Total | None:
        e = self._trail.maker(v)
        return (
            self.total(e.ins[0], labels)
            if e is not None and e.name == "log" and e.ins[0] is not None
            else None
        )

    def _without_constants(
        self, exp: Equation, labels: Labels, along: int
    ) -> tuple[Value, Labels, Mapping[Value, int], list[Value]]:
        """What exponentials are taken of without what is the same for all keys; that, and logarithms of sums in it."""
        assert exp.ins[0] is not None
        v, constants, logs = exp.ins[0], Counter[Value](), list[Value]()
        while True:
            v, labels = self._trail.plain(v, labels, cut=True)
            e = self._trail.maker(v)
            if e is None or e.name != "sub" or e.ins[0] is None or e.ins[1] is None:
                return v, labels, constants, logs
            if not self._constant_along(e.ins[1], labels, along):
                return v, labels, constants, logs
            numbers, found = self._terms(e.ins[1], labels)
            constants.update(numbers)
            logs += [log for log, _ in found]
            v = e.ins[0]

    def _terms(self, v: Value, labels: Labels) -> tuple[list[Value], list[tuple[Value, Labels]]]:
        """The terms of a sum that is repeated along keys, logarithms of sums by themselves."""
        trail = self._trail
        while True:
            v = trail.up(v)
            e = trail.maker(v)
            if e is None or e.ins[0] is None:
                return [v], []
            back = labels if e.name == "stop_gradient" else trail.moved(e, labels, cut=True)
            if back is None:
                break
            v, labels = e.ins[0], back
        if e.name == "add" and e.ins[1] is not None:
            parts = [self._terms(w, labels) for w in (e.ins[0], e.ins[1])]
            return [x for p in parts for x in p[0]], [x for p in parts for x in p[1]]
        return ([], [(v, labels)]) if self._logarithm(v, labels) is not None else ([v], [])

    def _constant_along(self, v: Value, labels: Labels, along: int) -> bool:
        """Is a value the same for all places of a dimension?"""
        trail, shapes = self._trail, self._program.shapes
        while True:
            v = trail.up(v)
            if all(not has(x, along) or z == 1 for x, z in zip(labels, shapes[v], strict=True)):
                return True
            e = trail.maker(v)
            if e is None or e.ins[0] is None:
                return False
            back = labels if e.name == "stop_gradient" else trail.moved(e, labels, cut=True)
            if back is None:
                return False
            v, labels = e.ins[0], back


def with_names(softmax: Softmax, names: Mapping[int, int]) -> Softmax:
    """A softmax whose labels have other names."""

    def other(labels: Labels) -> Labels:
        return tuple(renamed(x, names) for x in labels)

    weights = tuple(replace(w, labels=other(w.labels)) for w in softmax.weights)
    return replace(softmax, labels=other(softmax.labels), along=names[softmax.along], weights=weights)


def _left_out(labels: Labels, summed: Labels) -> int | None:
    """The label of the dimension that is -1 among those of what is summed, where all others agree."""
    if len(labels) != len(summed):
        return None
    pairs: list[tuple[Label | None, Label | None]] = list(zip(labels, summed, strict=True))
    agree = all(y in (x, None) for x, y in pairs if y != -1)
    along = next((x for x, y in pairs if y == -1), None)
    return along if agree and isinstance(along, int) else None
