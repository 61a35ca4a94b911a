"""One equation of two traces, and how its operands are brought to where its results follow the batch."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ..primitives import is_literal, shape_of
from .examples import CONSTANT, Constant, Label, Places, Rows, Shape, Size, Sum, varying

if TYPE_CHECKING:
    from ..ir import Equation, Program, Value


class Lost(Exception):
    """What a rule raises where the results follow the batch in no known way."""


@dataclass(eq=False)
class Site:
    """One equation of both programs, with the labels of its operands.

    `scales`: what operands of the small program are to be multiplied by. `rigid`: none can be, for the body that it is
    in runs as it is. `zeros`: values known to be zero. `draw`: the dimension in which a random draw is cut to rows.
    """

    e: "Equation"
    f: "Equation"
    labels: list[Label]
    ratio: Fraction
    rigid: bool
    zeros: Collection["Value"]
    scales: dict[int, Fraction] = field(default_factory=dict)
    draw: int | None = None

    @property
    def params(self) -> dict[str, Any]:
        return self.e.params

    def shape(self, i: int) -> Shape:
        return shape_of(self.e.eqn.invars[i])

    @property
    def out(self) -> Shape:
        return shape_of(self.e.eqn.outvars[0])

    def dtype(self, i: int) -> Any:
        return getattr(self.e.eqn.invars[i].aval, "dtype", None)

    def inexact(self, i: int) -> bool:
        return jnp.issubdtype(self.dtype(i), jnp.inexact)

    def varying(self) -> int | None:
        """The dimension of the first result that follows the batch."""
        return varying(self.out, shape_of(self.f.eqn.outvars[0]), self.ratio)

    def zero(self, i: int) -> bool:
        v = self.e.eqn.invars[i]
        return is_zero(v) if is_literal(v) else self.e.ins[i] in self.zeros

    def scale(self, i: int, factor: Fraction) -> None:
        """Operand `i` of the small program times `factor`; whole numbers only where that is whole too."""
        if factor == 1 or self.zero(i):
            return
        whole = factor.denominator == 1 or isinstance(self.labels[i], Size)
        if self.rigid or not (self.inexact(i) or (jnp.issubdtype(self.dtype(i), jnp.integer) and whole)):
            raise Lost
        self.scales[i] = factor

    def exact(self, i: int) -> Label:
        """Operand `i` made what the large program has there: rows of it, or all."""
        match self.labels[i]:
            case Constant():
                return CONSTANT
            case Rows(dim, scale):
                self.scale(i, scale)
                return Rows(dim)
            case Size(factor):
                self.scale(i, factor)
                return CONSTANT
        raise Lost

    def all_exact(self, positions: Iterable[int] | None = None) -> Label:
        """The label that these operands (all) have in common, each made exact."""
        chosen = range(len(self.labels)) if positions is None else positions
        dim = common([self.exact(i) for i in chosen])
        return CONSTANT if dim is None else Rows(dim)

    def aligned(self, positions: Sequence[int]) -> Label:
        """Operands that are added or set side by side, brought to one label."""
        labels = [self.labels[i] for i in positions]
        if any(isinstance(x, Places) for x in labels):
            raise Lost
        lead = next((x for x in labels if isinstance(x, Sum)), labels[0])
        if all(x == lead for x in labels):
            return lead
        if not isinstance(lead, Sum) and not all(isinstance(x, Rows) for x in labels):
            return self.all_exact(positions)
        common(labels)
        for i in positions:
            self.scale(i, factor(self.labels[i], lead, self.ratio))
        return lead

    def same_params(self) -> bool:
        """Do both programs give the equation the same numbers beside its operands?"""
        f = self.f.params
        return all(
            _same(f.get(k), x) for k, x in self.params.items() if isinstance(x, (int, float, str, tuple))
        )


def differing(small: "Program", large: "Program") -> "tuple[Equation, Equation] | None":
    """Return the first equations of two traces that differ in more than sizes and numbers, None where none do."""
    pairs = zip(small.equations, large.equations, strict=False)
    return next((p for p in pairs if len({(e.name, tuple(e.ins), tuple(e.outs)) for e in p}) > 1), None)


def same_form(small: "Program", large: "Program") -> bool:
    """Return whether two traces are the same but for sizes and numbers."""
    same_length = len(small.equations) == len(large.equations)
    return same_length and small.outputs == large.outputs and differing(small, large) is None


def is_zero(literal: Any) -> bool:
    """Return whether a number that is written into a program is zero, as what has no gradient (float0) is."""
    return getattr(literal.val, "dtype", None) == jax.dtypes.float0 or bool(np.all(literal.val == 0))


def _same(a: Any, b: Any) -> bool:
    """Return whether two parameters are equal. NaN is one: `jnp.take` fills with it."""
    return a == b or (a != a and b != b)


def common(labels: Iterable[Label]) -> int | None:
    """The dimension along which all example-wise ones of `labels` are so."""
    dims = {x.dim for x in labels if isinstance(x, Rows)}
    if len(dims) > 1:
        raise Lost
    return next(iter(dims), None)


def factor(label: Label, lead: Label, ratio: Fraction) -> Fraction:
    """What a small value that follows the batch as `label` is multiplied by to follow it as `lead`.

    A constant that is added to a sum over examples counts once in each microbatch: as its part of the whole.

    >>> factor(CONSTANT, Sum(), Fraction(4))
    Fraction(1, 4)
    """
    match lead, label:
        case (Rows(d, r), Rows(c, t)) if c == d:
            return t / r
        case (Sum(r), Sum(t)):
            return t / r
        case (Constant() | Size() | Sum(), Constant() | Size()):
            part = lead.scale * ratio if isinstance(lead, Sum) else number(lead)
            return number(label) / part
    raise Lost


def number(label: Label) -> Fraction:
    return label.factor if isinstance(label, Size) else Fraction(1)


def scale_of(labels: Sequence[Label], powers: Sequence[int]) -> Fraction:
    """The scale of a product of values."""
    scale = Fraction(1)
    for label, power in zip(labels, powers, strict=True):
        match label:
            case Constant():
                continue
            case Size(x) | Rows(_, x):
                scale *= x**power
            case Sum(x) if power == 1:
                scale *= x
            case _:
                raise Lost
    return scale


def left_of(label: Label, gone: Collection[int]) -> int:
    """Where the dimension of `label` is when others are gone."""
    return label.dim - sum(d < label.dim for d in gone) if isinstance(label, (Rows, Places)) else 0


def moved(label: Label, dim: int) -> Label:
    """`label` of a value whose dimensions were set in another order."""
    if isinstance(label, Places) and label.at is not None:
        raise Lost
    return replace(label, dim=dim) if isinstance(label, (Rows, Places)) else label
