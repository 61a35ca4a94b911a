"""Labels for how a value follows the batch, and forms in which microbatches combine to the value of the whole batch.

Small values belong to a microbatch, large values to the whole batch. A label is proved, for any numbers in the arrays,
or the value is `UnknownLabel`.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax.numpy as jnp

Shape = tuple[int, ...]
ONE = Fraction(1)


@dataclass(frozen=True, slots=True)
class Constant:
    """Label of a value that is the same for any batch."""


@dataclass(frozen=True, slots=True)
class SizeDependent:
    """Label of a number that depends on the batch size alone.

    Attributes:
        factor: The large number divided by the small number.
    """

    factor: Fraction


@dataclass(frozen=True, slots=True)
class PerExample:
    """Label of a value with rows for examples.

    Attributes:
        dim: The dimension of the examples.
        scale: The rows of the large value are `scale` times the small value of the same examples.
    """

    dim: int
    scale: Fraction = ONE


@dataclass(frozen=True, slots=True)
class ExampleSum:
    """Label of a sum over examples.

    Attributes:
        scale: The large value is `scale` times the sum of the small values of all microbatches.
    """

    scale: Fraction = ONE


@dataclass(frozen=True, slots=True)
class UnknownLabel:
    """Label of a value for which no other label is proved.

    Attributes:
        cause: Index of the equation that made the value unknown; None if no equation of the program did.
    """

    cause: int | None = None


@dataclass(frozen=True, slots=True)
class RowIndex:
    """Label of an index array whose row i holds the number i. Exact only in a lookup in the rows that it counts.

    Attributes:
        dim: The dimension of the rows.
        columns: Positions of these indices along the last dimension, next to other indices; None for all positions.
    """

    dim: int
    columns: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class SortedIndex:
    """Label of numbers of rows, or of positions, in the order of a sort. `program.sort_analysis` knows which sort.

    Attributes:
        dim: The dimension of the rows.
    """

    dim: int


Label = Constant | SizeDependent | PerExample | ExampleSum | UnknownLabel | RowIndex | SortedIndex
CONSTANT = Constant()


@dataclass(frozen=True, slots=True)
class Identical:
    """Output of any microbatch, equal to the output of the whole batch.

    Attributes:
        exact: False for a guess.
    """

    exact: bool = True


@dataclass(frozen=True, slots=True)
class Concatenated:
    """Outputs of the microbatches, concatenated.

    Attributes:
        dim: The dimension of the concatenation.
        scale: Factor of the result.
        exact: False for a guess.
    """

    dim: int
    scale: Fraction = ONE
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Summed:
    """Sum of the outputs of the microbatches.

    Attributes:
        scale: Factor of the result.
        exact: False for a guess.
    """

    scale: Fraction
    exact: bool = True


def output_combination(label: Label, ratio: Fraction, small: Any, large: Any) -> Identical | Concatenated | Summed:
    """Return how the values of the microbatches combine to the value of the whole batch.

    For an unknown label it is a guess (`exact` is False): arrays with the batch's dimension are concatenated, other
    numbers averaged, anything else is taken from any microbatch.

    Args:
        label: Label of the value.
        ratio: Number of microbatches in a batch.
        small: Abstract value in a microbatch.
        large: Abstract value in the whole batch.

    >>> output_combination(ExampleSum(), Fraction(4), jnp.ones(()), jnp.ones(()))
    Summed(scale=Fraction(1, 1), exact=True)
    """
    match label:
        case Constant():
            return Identical()
        case SizeDependent(factor):
            return Summed(factor / ratio)
        case PerExample(dim, scale):
            return Concatenated(dim, scale)
        case ExampleSum(scale):
            return Summed(scale)
    dim = growing_dim(small.shape, large.shape, ratio)
    if dim is not None:
        return Concatenated(dim, exact=False)
    return Summed(1 / ratio, exact=False) if jnp.issubdtype(small.dtype, jnp.number) else Identical(exact=False)


def growing_dim(small: Shape, large: Shape, ratio: Fraction) -> int | None:
    """Return the dimension in which two shapes differ, if only one does, and by `ratio`; else None.

    >>> growing_dim((3, 2, 5), (3, 8, 5), Fraction(4))
    1
    """
    if len(small) != len(large):
        return None
    dims = [d for d, (a, b) in enumerate(zip(small, large, strict=True)) if a != b]
    return dims[0] if len(dims) == 1 and small[dims[0]] * ratio == large[dims[0]] else None


def fits_shapes(label: Label, small: Shape, large: Shape, ratio: Fraction) -> bool:
    """Return whether a value with these shapes can have this label. A shape can refute a label, never prove one.

    Args:
        label: Label to check.
        small: Shape in a microbatch.
        large: Shape in the whole batch.
        ratio: Number of microbatches in a batch.
    """
    if isinstance(label, UnknownLabel):
        return True
    if isinstance(label, (PerExample, RowIndex, SortedIndex)):
        return growing_dim(small, large, ratio) == label.dim
    return small == large


def size_label(factor: Fraction) -> Label:
    """Return the label of a number that is `factor` times as large in the large program."""
    return CONSTANT if factor == 1 else SizeDependent(factor)


def scaled(x: Any, factor: Fraction) -> Any:
    """Return `x` times `factor` in the dtype of `x`; integers are rounded down."""
    if factor == 1:
        return x
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x * jnp.asarray(float(factor), x.dtype)
    # Multiply first, as the division drops a remainder.
    return x * factor.numerator // factor.denominator


def literal_label(small: Any, large: Any) -> Label:
    """Return the label of a number written into both programs, from its value in each.

    Args:
        small: The number in the small program.
        large: The number in the large program.
    """
    # NaN, such as the fill value of `jnp.take`, is unequal to itself.
    if small == large or (small != small and large != large):
        return CONSTANT
    try:
        a, b = Fraction(float(small)), Fraction(float(large))
    except (TypeError, ValueError, OverflowError):
        return UnknownLabel()
    if isinstance(small, bool) or not a or not b:
        return UnknownLabel()
    # Numbers in a program are rounded to its dtypes, so the factor is the simplest fraction near their quotient.
    return size_label(_simplest_fraction(b / a) if b > a else 1 / _simplest_fraction(a / b))


def _simplest_fraction(x: Fraction) -> Fraction:
    """Return the simplest fraction that rounding to the program's dtypes can have turned into `x`."""
    return x.limit_denominator(2**16)
