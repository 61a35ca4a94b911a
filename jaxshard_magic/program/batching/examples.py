"""How a value follows the examples of a batch, and how the values of microbatches are put together again."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax.numpy as jnp

Shape = tuple[int, ...]
ONE = Fraction(1)


@dataclass(frozen=True, slots=True)
class Constant:
    """The same for any batch."""


@dataclass(frozen=True, slots=True)
class Size:
    """A number that goes with the batch size: the large one is `factor` times the small one."""

    factor: Fraction


@dataclass(frozen=True, slots=True)
class Rows:
    """Example-wise: the rows of the large value along `dim` are `scale` times the small value of these examples."""

    dim: int
    scale: Fraction = ONE


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum over examples: the large value is `scale` times the sum of the small ones of all microbatches."""

    scale: Fraction = ONE


@dataclass(frozen=True, slots=True)
class Unknown:
    """None of these; `cause` is the equation where it became so, None where no equation of the program did it."""

    cause: int | None = None


@dataclass(frozen=True, slots=True)
class Places:
    """Row i of `dim` is the number i: indices of an array's own rows. `at`: where they stand along the last dimension,
    beside other indices; None: everywhere."""

    dim: int
    at: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Ordered:
    """Numbers of rows along `dim`, or of places, in the order that a sort put them in: `program.orders` knows which."""

    dim: int


Label = Constant | Size | Rows | Sum | Unknown | Places | Ordered
CONSTANT = Constant()


@dataclass(frozen=True, slots=True)
class Kept:
    """The value of any microbatch is that of the whole batch."""

    exact: bool = True


@dataclass(frozen=True, slots=True)
class Joined:
    """The values of the microbatches side by side along `dim`, times `scale`."""

    dim: int
    scale: Fraction = ONE
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Summed:
    """The sum over the microbatches, times `scale`."""

    scale: Fraction
    exact: bool = True


def combine(label: Label, ratio: Fraction, small: Any, large: Any) -> Kept | Joined | Summed:
    """How the values of the microbatches make the whole batch's; `exact` is False where that is a guess.

    `ratio`: microbatches in a batch. `small`, `large`: the value's abstract values. Of what is unknown, arrays with the
    batch's dimension are joined, other numbers averaged.

    >>> combine(Sum(), Fraction(4), jnp.ones(()), jnp.ones(()))
    Summed(scale=Fraction(1, 1), exact=True)
    """
    match label:
        case Constant():
            return Kept()
        case Size(factor):
            return Summed(factor / ratio)
        case Rows(dim, scale):
            return Joined(dim, scale)
        case Sum(scale):
            return Summed(scale)
    dim = varying(small.shape, large.shape, ratio)
    if dim is not None:
        return Joined(dim, exact=False)
    return Summed(1 / ratio, exact=False) if jnp.issubdtype(small.dtype, jnp.number) else Kept(exact=False)


def varying(small: Shape, large: Shape, ratio: Fraction) -> int | None:
    """The one dimension in which two shapes differ, if that is by `ratio`.

    >>> varying((3, 2, 5), (3, 8, 5), Fraction(4))
    1
    """
    if len(small) != len(large):
        return None
    dims = [d for d, (a, b) in enumerate(zip(small, large, strict=True)) if a != b]
    return dims[0] if len(dims) == 1 and small[dims[0]] * ratio == large[dims[0]] else None


def fits(label: Label, small: Shape, large: Shape, ratio: Fraction) -> bool:
    """Can a value with these shapes follow the batch like this?"""
    if isinstance(label, Unknown):
        return True
    if isinstance(label, (Rows, Places, Ordered)):
        return varying(small, large, ratio) == label.dim
    return small == large


def sized(factor: Fraction) -> Label:
    """A number that is `factor` times as large in the large program."""
    return CONSTANT if factor == 1 else Size(factor)


def times(x: Any, factor: Fraction) -> Any:
    """`x` times a factor, in its own type; whole numbers are rounded down."""
    if factor == 1:
        return x
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x * jnp.asarray(float(factor), x.dtype)
    return x * factor.numerator // factor.denominator


def literal(small: Any, large: Any) -> Label:
    """How two numbers written into the programs differ."""
    if small == large or (small != small and large != large):
        return CONSTANT
    try:
        a, b = Fraction(float(small)), Fraction(float(large))
    except (TypeError, ValueError, OverflowError):
        return Unknown()
    if isinstance(small, bool) or not a or not b:
        return Unknown()
    return sized(_simple(b / a) if b > a else 1 / _simple(a / b))


def _simple(x: Fraction) -> Fraction:
    """The simplest fraction that rounding to the program's types can have made `x` of."""
    return x.limit_denominator(2**16)
