"""How often each number occurs among some keys: `bincount`, sums of `one_hot`, `segment_sum` of ones."""

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import jax.numpy as jnp

from .constants import Constants
from .ir import Equation, Program, Value
from .primitives import called, shape_of
from .primitives.primitive import Kind
from .rankings import rankings


@dataclass(frozen=True, eq=False)
class Counts:
    """What values of `program` count.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> def f(x):
    ...     keys = jnp.argmax(x, -1)
    ...     return keys, jnp.bincount(keys, length=4), jnp.bincount(keys + 1, length=4)
    >>> program = Program(jax.make_jaxpr(f)(jnp.ones((6, 4))))
    >>> keys, counts, others = program.outputs
    >>> Counts(program).keys(counts) == Counts(program).root(keys), Counts(program).keys(others)
    (True, None)
    """

    program: Program

    def root(self, value: Value | None) -> Value | None:
        """The value whose numbers `value` has, in another form, or in another body; None for a literal."""
        found, lead = value, 0  # stacks of loops that the value is in
        while value is not None:
            e = self.program.maker.get(value)
            before, more = self._outside(value) if e is None else self._through(e, value)
            if before is None or (before, more) == (value, 0) or lead + more < 0:
                break
            value, lead = before, lead + more
            found = found if lead else value
        return found

    def same(self, a: Value | None, b: Value | None) -> bool:
        """Are two values made of the same in the same way, as what remat computes again is?"""
        first, second = (self.root(v) for v in (a, b))
        if first is None or second is None or first == second:
            return first == second is not None
        if (first, second) not in self._same:
            self._same[first, second] = False
            self._same[first, second] = self._made_alike(first, second)
        return self._same[first, second]

    def _made_alike(self, a: Value, b: Value) -> bool:
        e, f = (self.program.maker.get(v) for v in (a, b))
        if e is None or f is None or e.doors or f.doors or e.name != f.name or e.eqn.effects:
            return False
        if e.outs.index(a) != f.outs.index(b) or str(e.params) != str(f.params):
            return False
        return all(self._same_operand(e, f, k) for k in range(len(e.ins)))

    def _same_operand(self, e: Equation, f: Equation, k: int) -> bool:
        if e.ins[k] is None or f.ins[k] is None:
            numbers = (self._number(e, k), self._number(f, k))
            return None not in numbers and bool(numbers[0] == numbers[1])
        return self.same(e.ins[k], f.ins[k])

    @cached_property
    def _same(self) -> dict[tuple[Value, Value], bool]:
        return {}

    def keys(self, value: Value | None) -> Value | None:
        """The root of the keys of which `value` tells how often each of its places occurs, keys beyond them left out;
        None where it is no such count."""
        e = self._maker(value)
        if e is not None and e.primitive.casts:  # of a sum of floats, exact up to 2**24
            e = self._maker(e.ins[0])
        if e is None:
            return None
        root = self.root(self._added(e) if e.primitive.adds else self._summed(e))
        return root if self.choosing(root) is not None or self._kept_above_zero(root) else None

    def choosing(self, value: Value | None) -> Equation | None:
        """What gave all numbers that a value has as places along a dimension: none of them is negative. None where that
        isn't known."""
        value, e = self._source(value)
        given = None if e is None else e.primitive.places
        return e if e is not None and given is not None and e.outs[given] == value else None

    def _kept_above_zero(self, value: Value | None) -> bool:
        """Is it clipped to numbers that are not negative?"""
        _, e = self._source(value)
        if e is None or e.name != "min":
            return False
        for k in (0, 1):
            inner, most = self.inner(e.ins[k]), self._number(e, 1 - k)
            below = None if inner is None else self.program.maker.get(inner)
            if below is not None and below.name == "max" and most is not None and most >= 0:
                return 0 in (self._number(below, 0), self._number(below, 1))
        return False

    def _source(self, value: Value | None) -> tuple[Value | None, Equation | None]:
        """What has all numbers of a value, which is a part of it, or repeats it, and what makes that."""
        e = self._maker(value)
        while e is not None and (e.primitive.part or e.factors is not None):
            value = e.ins[0]
            e = self._maker(value)
        return self.root(value), e

    def _maker(self, value: Value | None) -> Equation | None:
        root = self.root(value)
        return None if root is None else self.program.maker.get(root)

    def _outside(self, value: Value) -> tuple[Value | None, int]:
        entrance = self.program.entrances.get(value)
        return (None, 0) if entrance is None else entrance[1:]

    def _through(self, e: Equation, value: Value) -> tuple[Value | None, int]:
        """The operand, or the result of its body, whose numbers the result `value` of `e` has."""
        if e.is_scan or called(e.eqn) is not None:
            found = ((a, -lead) for a, b, lead in e.doors[0].out if b == value)
            carried = {out for out, _ in e.doors[0].loop}
            inside, lead = next(found)
            return (None, 0) if e.is_scan and (inside in carried and not lead) else (inside, lead)
        if e.primitive.kind is Kind.EACH:
            return e.ins[e.outs.index(value)], 0
        same = e.primitive.elementwise and e.primitive.alias and (e.primitive.moves or self._whole(e))
        if same or (e.factors is not None and not e.factors.repeats):
            return e.ins[0], 0
        if e.name == "max":  # with 0: keys are not negative
            zero = next((k for k in (0, 1) if self._number(e, k) == 0), None)
            return (None, 0) if zero is None else (e.ins[1 - zero], 0)
        if e.name == "select_n" and self._negative(e):
            return e.ins[1], 0
        return None, 0

    def relaid_from(self, e: Equation) -> Value | None:
        """The operand of which the result of `e` has each number as often: under other dimensions, or where it is not
        negative; None of other equations."""
        return None if e.doors or e.primitive.kind is Kind.EACH else self._through(e, e.outs[0])[0]

    def _whole(self, e: Equation) -> bool:
        """Are its numbers whole ones, before and after, and the same?"""
        dtypes = [self.program.avals[v].dtype for v in (*e.ins, *e.outs) if v is not None]
        if not all(jnp.issubdtype(d, jnp.integer) for d in dtypes):
            return False
        before, after = (jnp.iinfo(dtypes[k]).max for k in (0, -1))
        return after >= before or after >= self._largest(e.ins[0])

    def _largest(self, value: Value | None) -> float:
        """The largest number that keys can have, as far as that is known."""
        made = self.choosing(value)
        return inf if made is None else self.last_places[made.index]

    @cached_property
    def last_places(self) -> dict[int, int]:
        """Of equations that give places along a dimension, by index, the last one."""
        return {r.equation.index: r.number - 1 for r in rankings(self.program) if r.chosen is not None}

    def _negative(self, e: Equation) -> bool:
        """Does `e` choose its second operand unless that is negative?"""
        test = self._maker(e.ins[0])
        return (
            test is not None
            and test.name == "lt"
            and self._number(test, 1) == 0
            and e.ins[1] is not None
            and self.inner(test.ins[0]) == self.inner(e.ins[1])
        )

    def inner(self, value: Value | None) -> Value | None:
        """`value` where it is made, whatever calls it was handed into, or comes out of."""
        while value is not None:
            e = self.program.maker.get(value)
            if e is None:
                before = self.program.outside(value)
            elif called(e.eqn) is not None:
                before = next(a for a, b, _ in e.doors[0].out if b == value)
            else:
                break
            if before is None:
                break
            value = before
        return value

    def unwrapped(self, value: Value | None) -> Value | None:
        """The same, before numbers below 0 were counted from the end."""
        while (found := self.inner(value)) is not None:
            e = self.program.maker.get(found)
            if e is None or e.name != "select_n" or not self._negative(e):
                break
            value = e.ins[1]
        return found

    @cached_property
    def constants(self) -> Constants:
        """The numbers that whole values have."""
        return Constants(self.program)

    def _number(self, e: Equation, k: int) -> Any:
        """The number that all of operand `k` of `e` is; None where it has several."""
        return self.constants.operand(e, k)

    def _added(self, e: Equation) -> Value | None:
        """The keys at which ones are added to zeros."""
        if not e.primitive.scatters or len(self.program.shapes[e.outs[0]]) != 1:
            return None
        ones = self._number(e, 0) == 0 and self._number(e, 2) == 1
        index = None if e.ins[1] is None else self.inner(e.ins[1])
        return index if ones else None

    def _summed(self, e: Equation) -> Value | None:
        """The keys that are compared with each number, where only the numbers are not summed over."""
        if len(self.program.shapes[e.outs[0]]) != 1:
            return None
        found: Equation | None = e
        place = 0
        while found is not None and found.name == "reduce_sum":
            kept = [d for d in range(len(shape_of(found.eqn.invars[0]))) if d not in found.params["axes"]]
            value, place = self._along(found.ins[0], kept[place])
            while (found := self._made(value)) is not None and found.primitive.casts:
                value, place = self._along(found.ins[0], place)  # of truth values
        if found is None or found.name != "eq":
            return None
        numbers = [k for k in (0, 1) if self._counts_along(found.ins[k], place)]
        return self._spread(found.ins[1 - numbers[0]], place) if len(numbers) == 1 else None

    def _counts_along(self, value: Value | None, place: int) -> bool:
        """Is the number at each place of a dimension the place's, whatever the others?"""
        value, place = self._along(value, place, repeated=True)
        e = self._made(value)
        return e is not None and e.name == "iota" and e.params["dimension"] == place

    def _spread(self, value: Value | None, place: int) -> Value | None:
        """What is repeated along one dimension alone to make `value`."""
        value, place = self._along(value, place)
        e = self._made(value)
        if e is None or e.factors is None or place not in e.factors.repeated:
            return None
        return e.ins[0] if all(e.factors.result[d] == 1 for d in e.factors.repeated - {place}) else None

    def _along(self, value: Value | None, place: int, *, repeated: bool = False) -> tuple[Value | None, int]:
        """What a value is another form of, as far back as its dimension `place` stays one, and that dimension there.
        `repeated`: also where it is repeated along others."""
        while (e := self._made(value := self.inner(value))) is not None and value is not None:
            before, lead, d = *self._through(e, value), place
            if (factors := e.factors) is not None:
                others = any(factors.result[k] > 1 for k in factors.repeated)
                before = e.ins[0] if repeated or not others else None
                d = factors.inverse.whole(place)
            if before is None or lead or d is None:
                break
            value, place = before, d
        return value, place

    def _made(self, value: Value | None) -> Equation | None:
        return None if value is None else self.program.maker.get(value)
