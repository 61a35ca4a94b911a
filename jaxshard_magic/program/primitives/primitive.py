"""`Primitive`: what the package knows of a primitive of jax, a row of the table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from . import sharding_rules
from .contractions import Contraction, Shape, dot_work
from .factors import Factors

if TYPE_CHECKING:
    from ..batching.examples import Label
    from ..batching.site import Site
    from ..ir import Equation


class Kind(Enum):
    """What a primitive does, in the one way that says most of it."""

    PRODUCT = auto()  # multiplies two operands and sums over dimensions
    ATTENTION = auto()  # products with a softmax between them
    ELEMENTWISE = auto()  # each number of its result is made of those at its place in the operands
    SHAPE = auto()  # the numbers of its operand, under other dimensions
    CUT = auto()  # parts of arrays, taken out, set in or put side by side
    LOOKUP = auto()  # numbers at places that another operand names
    REDUCTION = auto()  # leaves dimensions out
    RUNNING = auto()  # a reduction up to each place of a dimension
    ORDER = auto()  # sets numbers in order along a dimension
    WINDOW = auto()  # a reduction of what a window sees at each place
    MATRIX = auto()  # works on the last dimensions as a whole
    RANDOM = auto()  # draws numbers, or works on the keys of draws
    COLLECTIVE = auto()  # devices that share a named axis send each other something
    EACH = auto()  # hands on each operand as a result of its own
    SOURCE = auto()  # makes its result of nothing
    BODY = auto()  # runs equations of its own
    OPAQUE = auto()  # a kernel or a callback: nothing is known of what it does
    UNKNOWN = auto()  # stands nowhere in the table


class Runs(Enum):
    """In which type mixed precision runs a primitive, as PyTorch's autocast has it (its "CUDA op reference")."""

    PRODUCT = auto()  # the compute type; its sums are over many terms, which the hardware adds up in float32
    FOLLOW = auto()  # the widest type of the operands that a product has made; the others take that type
    FLOAT = auto()  # as written, also where the operands are narrower


class Control(Enum):
    """How often, and which of its bodies, a primitive runs."""

    SCAN = auto()  # one body, once for each element along the leading dimension of some operands
    WHILE = auto()  # one body, as long as another gives true
    COND = auto()  # one of its bodies, which an operand chooses


class Across(Enum):
    """What a collective leaves the devices of its axis with."""

    ALIKE = auto()  # all the same
    PARTS = auto()  # each its own part


@dataclass(frozen=True, slots=True, kw_only=True)
class Primitive:
    """Facts of a primitive, true of all its equations. `REQUIRED` of `tests/test_primitives.py` lists those that each
    kind has to state.

    `sharding_rule` gives the dimensions that operands and results share; `follow` says how the results follow the
    batch; `contraction` gives a product's dimensions from its parameters and its operands' shapes, and `work` its
    multiply-adds; `counts` gives those of what is several products. `factors` gives those of what keeps numbers under
    other dimensions, from its parameters and the shapes of its operand and result.

    `linear` are the operands that it is linear in, taken together; with `in_each` it is in either of the first two
    alone. Of a reduction, `joins` puts the results of two halves together, and `fill` (dtype -> number) is what changes
    no result where it stands among what is reduced.
    """

    kind: Kind
    sharding_rule: "Callable[[Equation], sharding_rules.ShardingRule]" = sharding_rules.same_positions
    follow: "Callable[[Site], Label | list[Label]] | None" = None
    contraction: Callable[[Mapping[str, Any], Sequence[Shape]], Contraction] | None = None
    factors: Callable[[Mapping[str, Any], Shape, Shape], Factors] | None = None
    work: Callable[[Contraction, Mapping[str, Any], Sequence[Shape], Shape], int] = dot_work
    counts: Callable[[Mapping[str, Any], Sequence[Shape]], int] | None = None
    linear: slice | None = None
    in_each: bool = False
    joins: Callable[[Any, Any], Any] | None = None
    fill: Callable[[Any], Any] | None = None
    # Of a running reduction: its results in a block, and the last one of all blocks before, to its results there. None:
    # one number a block is not enough.
    running: Callable[[Any, Any], Any] | None = None
    runs: Runs | None = None  # under mixed precision; None: as written, of which nothing else is known
    across: Across | None = None  # of collectives
    control: Control | None = (
        None  # of loops and branches; None for bodies that run once, and for what has none
    )
    places: int | None = (
        None  # by index, the result with places along a dimension of an operand: none is negative
    )
    inner: int | None = None  # how many dimensions a matrix, or what stands for one, has
    casts: bool = False  # gives its operand another dtype
    names_value: bool = False  # gives its operand a name (`jax.ad_checkpoint.checkpoint_name`)
    alias: bool = False  # the numbers of its first operand, or some of them, in another form
    part: bool = False  # some of its first operand's numbers, or all in another order
    moves: bool = False  # computes nothing
    along: bool = False  # works along the dimension that its parameters name
    cuts: bool = False  # a dimension of its result is a part of an operand's, or the other way round
    adds: bool = False  # a sum of operands; of updates into an array also a difference
    compares: bool = False  # gives truth values or places
    rounds: bool = False  # adds up many numbers, so that a narrow type loses by it
    mixes: bool = False  # a number of its result is made of numbers at other places
    keyed: bool = False  # uses a random key
    counted: bool = False  # what it draws depends on how much it draws
    relaid: bool = (
        False  # XLA folds it with a layout set on its operand: the layout is to be set on its result
    )
    pinned: bool = False  # XLA chooses a layout anew for its result: an activation's is set there
    kept: bool = False  # XLA keeps its result in memory, and does not compute it in what reads it
    unseen: bool = False  # may do much work of which `flops` knows nothing
    remat: bool = False  # `jax.checkpoint`
    custom: bool = False  # has a derivative rule of its own

    @property
    def product(self) -> bool:
        return self.contraction is not None

    @property
    def elementwise(self) -> bool:
        return self.kind is Kind.ELEMENTWISE

    @property
    def reduces(self) -> bool:
        """Whether it leaves dimensions out by a sum or the like, whose parts can be put together."""
        return self.joins is not None

    @property
    def gathers(self) -> bool:
        """Whether it looks up numbers of its first operand, at places that another operand names."""
        return self.kind is Kind.LOOKUP and not self.scatters

    @property
    def scatters(self) -> bool:
        """Whether it sets or adds its updates into its first operand, at places that another operand names."""
        return self.sharding_rule is sharding_rules.scatter
