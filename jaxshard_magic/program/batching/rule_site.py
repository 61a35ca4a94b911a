"""Site of a batch rule: one equation traced at two batch sizes, with the labels and scales of its operands.

The small program is the trace of one microbatch, the large program the trace of the whole batch. A label says how the
small value relates to the large value. A batch rule reads the operands' labels and returns the results' labels. A rule
may scale operands of the small program on the way.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ..primitives import is_literal, shape_of
from .batch_labels import CONSTANT, Constant, ExampleSum, Label, PerExample, RowIndex, Shape, SizeDependent, growing_dim

if TYPE_CHECKING:
    from ..ir import Equation, Program, Value


class NotProvable(Exception):
    """Error of a batch rule: the results follow the batch in no provable way."""


@dataclass(eq=False)
class RuleSite:
    """One equation of both programs, with the labels of its operands.

    Attributes:
        eqn: The equation in the small program.
        large_eqn: The same equation in the large program.
        labels: Label of each operand.
        ratio: Batch size of the large program divided by the batch size of the small program.
        in_fixed_body: True inside a body that runs unchanged, so that no operand can be scaled.
        zero_values: Values known to be zero.
        operand_scales: Factors for operands of the small program, by position; rules fill them in.
        draw_dim: Dimension in which a random draw is sliced to rows; None for anything else.
    """

    eqn: "Equation"
    large_eqn: "Equation"
    labels: list[Label]
    ratio: Fraction
    in_fixed_body: bool
    zero_values: Collection["Value"]
    operand_scales: dict[int, Fraction] = field(default_factory=dict)
    draw_dim: int | None = None

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params

    def operand_shape(self, i: int) -> Shape:
        """Return the shape of operand `i` in the small program."""
        return shape_of(self.eqn.jaxpr_eqn.invars[i])

    @property
    def result_shape(self) -> Shape:
        """Shape of the first result in the small program."""
        return shape_of(self.eqn.jaxpr_eqn.outvars[0])

    def operand_dtype(self, i: int) -> Any:
        """Return the dtype of operand `i`, None without one."""
        return getattr(self.eqn.jaxpr_eqn.invars[i].aval, "dtype", None)

    def is_inexact(self, i: int) -> bool:
        return jnp.issubdtype(self.operand_dtype(i), jnp.inexact)

    def growing_dim(self) -> int | None:
        """Return the dimension of the first result that grows with the batch, None without exactly one."""
        return growing_dim(self.result_shape, shape_of(self.large_eqn.jaxpr_eqn.outvars[0]), self.ratio)

    def is_zero_operand(self, i: int) -> bool:
        """Return whether operand `i` is known to be zero."""
        v = self.eqn.jaxpr_eqn.invars[i]
        return is_zero(v) if is_literal(v) else self.eqn.operands[i] in self.zero_values

    def scale_operand(self, i: int, factor: Fraction) -> None:
        """Multiply operand `i` of the small program by `factor`.

        A factor of 1, or an operand known to be zero, needs nothing. Integers accept whole factors only, unless their
        label is `SizeDependent`.

        Args:
            i: Position of the operand.
            factor: Exact factor.

        Raises:
            NotProvable: The body runs unchanged, or the dtype does not allow the factor.
        """
        if factor == 1 or self.is_zero_operand(i):
            return
        whole = factor.denominator == 1 or isinstance(self.labels[i], SizeDependent)
        if self.in_fixed_body or not (
            self.is_inexact(i) or (jnp.issubdtype(self.operand_dtype(i), jnp.integer) and whole)
        ):
            raise NotProvable
        self.operand_scales[i] = factor

    def make_exact(self, i: int) -> Label:
        """Scale operand `i` to the large program's numbers, all of them or their rows, and return its new label.

        Returns:
            `CONSTANT`, or `PerExample` with scale 1.

        Raises:
            NotProvable: The label is a sum over examples, an index or unknown.
        """
        match self.labels[i]:
            case Constant():
                return CONSTANT
            case PerExample(dim, scale):
                self.scale_operand(i, scale)
                return PerExample(dim)
            case SizeDependent(factor):
                self.scale_operand(i, factor)
                return CONSTANT
        raise NotProvable

    def make_all_exact(self, positions: Iterable[int] | None = None) -> Label:
        """Make operands exact, all by default, and return their common label."""
        chosen = range(len(self.labels)) if positions is None else positions
        dim = common_dim([self.make_exact(i) for i in chosen])
        return CONSTANT if dim is None else PerExample(dim)

    def align(self, positions: Sequence[int]) -> Label:
        """Scale operands that are added or concatenated to one label, and return that label.

        Raises:
            NotProvable: Row indices among the operands, or examples in different dimensions.
        """
        labels = [self.labels[i] for i in positions]
        if any(isinstance(x, RowIndex) for x in labels):
            raise NotProvable
        target = next((x for x in labels if isinstance(x, ExampleSum)), labels[0])
        if all(x == target for x in labels):
            return target
        if not isinstance(target, ExampleSum) and not all(isinstance(x, PerExample) for x in labels):
            return self.make_all_exact(positions)
        # Raises if examples are in different dimensions.
        common_dim(labels)
        for i in positions:
            self.scale_operand(i, conversion_factor(self.labels[i], target, self.ratio))
        return target

    def has_same_params(self) -> bool:
        """Return whether both programs give the equation the same parameters: numbers, strings and tuples."""
        f = self.large_eqn.params
        return all(
            _params_equal(f.get(k), x) for k, x in self.params.items() if isinstance(x, (int, float, str, tuple))
        )


def first_difference(small: "Program", large: "Program") -> "tuple[Equation, Equation] | None":
    """Return the first pair of equations that differ in more than sizes and numbers, None without a difference.

    Compares primitives, operands and results up to the end of the shorter trace.
    """
    pairs = zip(small.equations, large.equations, strict=False)
    return next((p for p in pairs if len({(e.name, tuple(e.operands), tuple(e.results)) for e in p}) > 1), None)


def have_same_form(small: "Program", large: "Program") -> bool:
    """Return whether two traces are the same except for sizes and numbers."""
    same_length = len(small.equations) == len(large.equations)
    return same_length and small.outputs == large.outputs and first_difference(small, large) is None


def is_zero(literal: Any) -> bool:
    """Return whether a literal is zero. Values without a gradient (float0) count as zero."""
    return getattr(literal.val, "dtype", None) == jax.dtypes.float0 or bool(np.all(literal.val == 0))


def _params_equal(a: Any, b: Any) -> bool:
    """Return whether two parameters are equal."""
    # NaN equals NaN here: `jnp.take` has NaN as its fill parameter.
    return a == b or (a != a and b != b)


def common_dim(labels: Iterable[Label]) -> int | None:
    """Return the dimension of the examples in all per-example labels, None without such a label.

    Raises:
        NotProvable: The labels have different dimensions.
    """
    dims = {x.dim for x in labels if isinstance(x, PerExample)}
    if len(dims) > 1:
        raise NotProvable
    return next(iter(dims), None)


def conversion_factor(label: Label, target: Label, ratio: Fraction) -> Fraction:
    """Return the factor that turns a small value labelled `label` into a value labelled `target`.

    A constant added to a sum over examples would be counted once in each microbatch, so its factor is its part of the
    whole batch.

    Args:
        label: Label of the small value.
        target: Label to reach.
        ratio: Number of microbatches in the batch.

    Raises:
        NotProvable: No factor does it.

    >>> conversion_factor(CONSTANT, ExampleSum(), Fraction(4))
    Fraction(1, 4)
    """
    match target, label:
        case (PerExample(d, r), PerExample(c, t)) if c == d:
            return t / r
        case (ExampleSum(r), ExampleSum(t)):
            return t / r
        case (Constant() | SizeDependent() | ExampleSum(), Constant() | SizeDependent()):
            share = target.scale * ratio if isinstance(target, ExampleSum) else size_factor(target)
            return size_factor(label) / share
    raise NotProvable


def size_factor(label: Label) -> Fraction:
    """Return the factor of a `SizeDependent` label, 1 for any other label."""
    return label.factor if isinstance(label, SizeDependent) else Fraction(1)


def product_scale(labels: Sequence[Label], powers: Sequence[int]) -> Fraction:
    """Return the scale of a product of powers of values.

    Args:
        labels: Label of each value.
        powers: Exponent of each value, -1 for a divisor.

    Raises:
        NotProvable: A sum over examples has a power other than 1, or a label has no scale.
    """
    scale = Fraction(1)
    for label, power in zip(labels, powers, strict=True):
        match label:
            case Constant():
                continue
            case SizeDependent(x) | PerExample(_, x):
                scale *= x**power
            case ExampleSum(x) if power == 1:
                scale *= x
            case _:
                raise NotProvable
    return scale


def dim_after_removal(label: Label, removed: Collection[int]) -> int:
    """Return the dimension of `label` after dimensions are removed from its value; 0 for labels without a dimension.

    Args:
        label: Label of the value before.
        removed: Dimensions removed, other than the label's.
    """
    return label.dim - sum(d < label.dim for d in removed) if isinstance(label, (PerExample, RowIndex)) else 0


def with_dim(label: Label, dim: int) -> Label:
    """Return `label` for a value with reordered dimensions.

    Args:
        label: Label of the value before.
        dim: New position of the label's dimension.

    Raises:
        NotProvable: The value holds row indices in some columns only.
    """
    if isinstance(label, RowIndex) and label.columns is not None:
        raise NotProvable
    return replace(label, dim=dim) if isinstance(label, (PerExample, RowIndex)) else label
