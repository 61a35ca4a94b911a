"""Type of a row in the primitive table: `Primitive`, the facts known of one JAX primitive."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from . import sharding_rules
from .contractions import Contraction, Shape, dot_multiply_adds
from .factors import Factors

if TYPE_CHECKING:
    from ..batching.batch_labels import Label
    from ..batching.rule_site import RuleSite
    from ..ir import Equation


class Kind(Enum):
    """Kind of a primitive, by its most telling behaviour."""

    PRODUCT = auto()  # multiplies two operands and sums over dimensions
    ATTENTION = auto()  # two products with a softmax in between
    ELEMENTWISE = auto()  # a number of the result depends on the operands' numbers at its position
    SHAPE = auto()  # the operand's numbers in another shape
    SLICE = auto()  # takes out, sets or joins parts of arrays
    LOOKUP = auto()  # gathers and scatters: another operand names the positions
    REDUCTION = auto()  # removes dimensions
    CUMULATIVE = auto()  # a running reduction along a dimension
    SORT = auto()  # sorts along a dimension
    WINDOW = auto()  # reduces a window at each position
    MATRIX = auto()  # works on the last dimensions as a whole
    RANDOM = auto()  # draws numbers, or works on random keys
    COLLECTIVE = auto()  # communicates between devices along a named axis
    PASS_THROUGH = auto()  # returns each operand as a result
    SOURCE = auto()  # has no operands
    BODY = auto()  # runs equations of its own
    OPAQUE = auto()  # a kernel or a callback: nothing is known of it
    UNKNOWN = auto()  # not in the table


class AutocastPolicy(Enum):
    """Dtype of a primitive under mixed precision, after PyTorch's autocast (see "CUDA op reference" there)."""

    COMPUTE_DTYPE = auto()  # the compute dtype; the hardware accumulates such sums in float32
    WIDEST_OPERAND = auto()  # the widest dtype of operands made by products; other operands are cast to it
    AS_WRITTEN = auto()  # the dtypes of the program, also where operands are narrower


class Control(Enum):
    """Control flow of a primitive: trip counts and choice of bodies."""

    SCAN = auto()  # one body, once for each element along the leading dimension of some operands
    WHILE = auto()  # one body, as long as another returns true
    COND = auto()  # one of its bodies, chosen by an operand


class CollectiveOutput(Enum):
    """Results of a collective on the devices of its axis."""

    REPLICATED = auto()  # equal on all devices
    PER_DEVICE = auto()  # another one on each device


@dataclass(frozen=True, slots=True, kw_only=True)
class Primitive:
    """Facts of a primitive, true of all its equations.

    `REQUIRED` of `tests/program/test_primitives.py` lists the facts that each kind has to state.

    Attributes:
        kind: Kind of the primitive.
        sharding_rule: Gives the dimensions shared by operands and results of an equation.
        batch_rule: Gives the batch labels of the results from those of the operands.
        contraction: Gives the dimensions of a product from its parameters and operand shapes.
        factors: Gives the dimensions of a change of shape from its parameters and the shapes of operand and result.
        multiply_adds: Gives the multiply-adds of a product from its contraction, parameters, operand and result shapes.
        fused_multiply_adds: Gives the multiply-adds of several products in one primitive, from parameters and operand
            shapes.
        linear_operands: Operands in which the primitive is linear, taken together.
        bilinear: Linear in each of the first two operands alone.
        combiner: Combines the results of a reduction over two halves.
        identity: Neutral element of a reduction: dtype to a number that changes no result.
        block_combiner: Of a running reduction: combines the results in a block with the last result of all blocks
            before. None if one number for each block is not enough.
        autocast: Dtype under mixed precision. None: as written, and nothing else is known.
        collective_output: Results of a collective on the devices of its axis.
        control: Kind of loop or branch. None for bodies that run once, and for primitives without bodies.
        index_result: Position of the result with indices along a dimension of an operand, none of them negative.
        matrix_dims: Number of dimensions that the primitive works on together: 2 for a matrix, 1 for a vector.
        changes_dtype: Casts its operand.
        names_value: Names its operand (`jax.ad_checkpoint.checkpoint_name`).
        alias: The result has all or some numbers of the first operand, in another form.
        selects_elements: The result has some numbers of the first operand, or all in another order.
        data_movement: Computes nothing.
        has_axis: Works along the dimension that its parameters name.
        resizes_dims: A dimension of its result is a part of an operand's dimension, or the other way round.
        is_additive: Sum of operands; for updates into an array also a difference.
        returns_discrete: Returns truth values or indices.
        sums_many: Adds up many numbers, so that a narrow dtype loses precision.
        mixes_positions: A number of its result depends on numbers at other positions.
        uses_key: Uses a random key.
        size_dependent_draw: Its draws depend on the number of draws.
        folds_layout: XLA folds it with a layout set on its operand, so the layout is set on its result.
        constrain_output: XLA chooses a new layout for its result, so activations are constrained there.
        materialized: XLA keeps its result in memory, instead of computing it in its readers.
        unknown_flops: May do much work unknown to the FLOP count.
        remat: `jax.checkpoint`.
        custom_derivative: Has a derivative rule of its own.
    """

    kind: Kind
    sharding_rule: "Callable[[Equation], sharding_rules.ShardingRule]" = sharding_rules.same_positions
    batch_rule: "Callable[[RuleSite], Label | list[Label]] | None" = None
    contraction: Callable[[Mapping[str, Any], Sequence[Shape]], Contraction] | None = None
    factors: Callable[[Mapping[str, Any], Shape, Shape], Factors] | None = None
    multiply_adds: Callable[[Contraction, Mapping[str, Any], Sequence[Shape], Shape], int] = dot_multiply_adds
    fused_multiply_adds: Callable[[Mapping[str, Any], Sequence[Shape]], int] | None = None
    linear_operands: slice | None = None
    bilinear: bool = False
    combiner: Callable[[Any, Any], Any] | None = None
    identity: Callable[[Any], Any] | None = None
    block_combiner: Callable[[Any, Any], Any] | None = None
    autocast: AutocastPolicy | None = None
    collective_output: CollectiveOutput | None = None
    control: Control | None = None
    index_result: int | None = None
    matrix_dims: int | None = None
    changes_dtype: bool = False
    names_value: bool = False
    alias: bool = False
    selects_elements: bool = False
    data_movement: bool = False
    has_axis: bool = False
    resizes_dims: bool = False
    is_additive: bool = False
    returns_discrete: bool = False
    sums_many: bool = False
    mixes_positions: bool = False
    uses_key: bool = False
    size_dependent_draw: bool = False
    folds_layout: bool = False
    constrain_output: bool = False
    materialized: bool = False
    unknown_flops: bool = False
    remat: bool = False
    custom_derivative: bool = False

    @property
    def is_product(self) -> bool:
        """True for primitives with a contraction."""
        return self.contraction is not None

    @property
    def is_elementwise(self) -> bool:
        return self.kind is Kind.ELEMENTWISE

    @property
    def is_combinable(self) -> bool:
        """True for reductions with partial results that can be combined."""
        return self.combiner is not None

    @property
    def is_gather(self) -> bool:
        """True for lookups in the first operand, at positions named by another operand."""
        return self.kind is Kind.LOOKUP and not self.is_scatter

    @property
    def is_scatter(self) -> bool:
        """True for scatters: updates set in or added to the first operand, at positions named by another operand."""
        return self.sharding_rule is sharding_rules.scatter
