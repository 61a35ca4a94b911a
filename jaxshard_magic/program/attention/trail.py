"""From a value of a program back to what it was made from, with its dimensions named on the way."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..constants import Constants
from ..flow import Flow
from ..ir import Equation, Program, Value
from ..lines import users_line
from ..primitives import bind, scan_counts
from ..primitives.factors import Factors
from ..primitives.primitive import Kind


@dataclass(frozen=True)
class Part:
    """Number `at` of the parts of these `sizes` that a dimension named `of` is cut into."""

    of: "Label"
    sizes: tuple[int, ...]
    at: int


@dataclass(frozen=True)
class Merged:
    """Dimensions of these `names` and `sizes` as one."""

    names: tuple["Label | None", ...]
    sizes: tuple[int, ...]


Label = int | Part | Merged
Labels = tuple[Label | None, ...]  # the name of each dimension; None: of size 1, or of no name
_CALLED = ("jit", "pjit", "closed_call", "core_call")  # run in the place where they are called
_LARGEST = 1 << 26  # numbers of a constant that is evaluated


class Trail:
    """Walks back through a program. `known`: inputs that are constants, by their value; `moving`: inputs that it is
    differentiated by."""

    def __init__(
        self, program: Program, known: Mapping[Value, Any] | None = None, moving: Collection[Value] = ()
    ):
        self.program, self._by = program, moving
        self._same: dict[Value, Value] = {}
        self._known = dict(known or {})
        self._numbers = Constants(program, known)
        self._constants: dict[Value, np.ndarray | None] = {}
        for e in program.equations:
            if not e.primitive.custom and not e.is_while:
                self._through(e)

    def _through(self, e: Equation) -> None:
        """What goes into a body and is the same in all its runs; what comes out of one that is run in place."""
        for door in e.doors:
            alike = scan_counts(e.params)[0] if e.is_scan else len(door.into)
            given = e.eqn.invars[len(e.ins) - len(door.into) :]
            for (outside, inside, _), var in zip(door.into[:alike], given, strict=False):
                if outside is None:
                    self._constants[inside] = number(var)
                else:
                    self._same[inside] = outside
            if e.name in _CALLED:
                self._same |= {b: a for a, b, _ in door.out if a is not None and b is not None}

    def up(self, v: Value) -> Value:
        """The value that `v` is by another name."""
        while v in self._same:
            v = self._same[v]
        return v

    def maker(self, v: Value) -> Equation | None:
        """What makes `v`; None for an input, and for what comes out of a loop, of remat or of a derivative rule."""
        e = self.program.maker.get(self.up(v))
        return None if e is None or e.doors else e

    def moved(self, e: Equation, labels: Labels, *, cut: bool = False) -> Labels | None:
        """The labels of an operand of which `e` makes another form, from those of its result: no number is left out or
        computed. None for what is no such equation; `cut`: dimensions may be cut and merged."""
        if not e.ins or e.ins[0] is None:
            return None
        if e.primitive.kind is Kind.ELEMENTWISE and e.primitive.alias:
            return None if e.name == "stop_gradient" else labels
        factors = e.factors
        if factors is None or not (cut or all(len(group) <= 1 for pair in factors.groups for group in pair)):
            return None
        return _relaid(factors, labels)

    def plain(self, v: Value, labels: Labels, *, cut: bool = False) -> tuple[Value, Labels]:
        """What `v` is another form of, as far back as nothing is computed or repeated; `cut` as of `moved`."""
        shapes = self.program.shapes
        while (e := self.maker(v)) is not None and (back := self.moved(e, labels, cut=cut)) is not None:
            (source,) = e.ins
            if source is None or _elements(shapes[source]) != _elements(shapes[e.outs[0]]):
                break
            v, labels = source, back
        return self.up(v), labels

    def scalar(self, e: Equation, k: int) -> float | None:
        """The number that operand `k` of `e` has everywhere; None for what is no constant, or has several."""
        v, found = e.ins[k], self._numbers.operand(e, k)
        if found is None and v is not None:
            source = self._repeated(v)
            found = self.constant(source) if _elements(self.program.shapes[source]) == 1 else None
        return None if found is None else float(found.reshape(()))

    def _repeated(self, v: Value) -> Value:
        """The value that is repeated to make `v`, or cast."""
        forms = (Kind.SHAPE, Kind.ELEMENTWISE)
        while (e := self.maker(v)) is not None and e.primitive.alias and e.primitive.kind in forms:
            if e.ins[0] is None:
                break
            v = e.ins[0]
        return self.up(v)

    def constant(self, v: Value) -> np.ndarray | None:
        """The numbers of a value that is made of no input; None for one that is, or is very large."""
        v = self.up(v)
        if v not in self._constants:
            self._constants[v] = self._evaluated(v)
        return self._constants[v]

    def _evaluated(self, v: Value) -> np.ndarray | None:
        if _elements(self.program.shapes[v]) > _LARGEST:
            return None
        if v in self._known:
            return np.asarray(self._known[v])
        e = self.maker(v)
        if e is None or e.primitive.keyed or e.eqn.effects:
            return None
        operands: list[Any] = []
        for k, w in enumerate(e.ins):
            known = number(e.eqn.invars[k]) if w is None else self.constant(w)
            if known is None:
                return None
            operands.append(known)
        with jax.ensure_compile_time_eval(), e.eqn.ctx.manager:
            outs = bind(e.eqn, operands)
        return np.asarray(outs[e.outs.index(v)])

    @cached_property
    def moving(self) -> Collection[Value]:
        """The values that a gradient has to go through."""

        avals = self.program.avals

        def is_smooth(v: Value) -> bool:
            return jnp.issubdtype(avals[v].dtype, jnp.inexact)

        def goes_on(made: Value, _of: Value, e: Equation | None) -> bool:
            return is_smooth(made) and (e is None or e.name != "stop_gradient")

        return Flow(self.program).forward(filter(is_smooth, self._by), goes_on)

    def line(self, e: Equation | None) -> str | None:
        """The user's line that an equation comes from, or the call whose body it is in."""
        while e is not None and (line := users_line(e.eqn)) is None:
            e = e.outer
        return None if e is None else line


def has(label: Label | None, name: int) -> bool:
    """Whether a dimension is the one of this name, or has to do with it."""
    if isinstance(label, Part):
        return has(label.of, name)
    if isinstance(label, Merged):
        return any(has(x, name) for x in label.names)
    return label == name


def renamed(label: Label | None, names: Mapping[int, int]) -> Label | None:
    """A label with other names."""
    if isinstance(label, Part):
        of = renamed(label.of, names)
        return None if of is None else Part(of, label.sizes, label.at)
    if isinstance(label, Merged):
        return Merged(tuple(renamed(x, names) for x in label.names), label.sizes)
    return None if label is None else names.get(label)


def _relaid(factors: Factors, labels: Labels) -> Labels | None:
    """The labels of an operand from those of the result; None where several dimensions become several others."""
    found: list[Label | None] = [None] * len(factors.operand)
    for old, new in factors.groups:
        names = tuple(labels[d] for d in new)
        if len(new) == 1:
            apart = names if len(old) == 1 else _apart(names[0], tuple(factors.operand[d] for d in old))
        elif len(old) == 1:
            apart = [_together(names, tuple(factors.result[d] for d in new))] if new else [None]
        elif new:
            return None
        else:
            apart = [None] * len(old)
        for d, x in zip(old, apart, strict=True):
            found[d] = x
    return tuple(found)


def _apart(label: Label | None, sizes: tuple[int, ...]) -> Sequence[Label | None]:
    if isinstance(label, Merged) and label.sizes == sizes:
        return label.names
    return [None if label is None else Part(label, sizes, k) for k in range(len(sizes))]


def _together(labels: tuple[Label | None, ...], sizes: tuple[int, ...]) -> Label | None:
    first = labels[0]
    if isinstance(first, Part) and labels == tuple(Part(first.of, sizes, k) for k in range(len(sizes))):
        return first.of
    return None if all(x is None for x in labels) else Merged(labels, sizes)


def number(literal: Any) -> np.ndarray:
    """The number that a literal operand is."""
    return np.asarray(literal.val)


def _elements(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))
