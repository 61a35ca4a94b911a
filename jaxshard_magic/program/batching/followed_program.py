"""Labels for all values of a program, from the same function traced at two batch sizes and walked in lockstep."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from ...errors import ShardError
from ..flow import Flow
from ..ir import Equation, Program, Value
from ..primitives import called_body
from ..sizes import nbytes
from ..sort_analysis import SortAnalysis
from ..source_lines import user_line
from .batch_labels import CONSTANT, ONE, ExampleSum, Label, PerExample, UnknownLabel, fits_shapes, scaled
from .label_walk import GRADIENT_CALL, LabelWalk
from .rule_site import first_difference, have_same_form

MAX_FULL_BATCH_BYTES = 4096  # largest value that is computed once a step for all microbatches


@dataclass(frozen=True, eq=False)
class FollowedProgram:
    """Program with the label of each value, and the changes that its microbatches need.

    Values and equations have the same numbers in both programs. Running the small program on microbatches without these
    changes gives wrong sums, silently.

    Attributes:
        small: The function traced at the microbatch size.
        large: The same function traced at the batch size.
        ratio: Examples of the large program for each example of the small program.
        value_labels: Label of each value.
        output_labels: Label of each output.
        unknown_causes: Indices of the equations at which unknown outputs became unknown, in order.
        operand_scales: Factors for operands, by equation index and operand position; `scale_operands` applies them.
        draw_dims: By equation index, the dimension along which a random draw of the whole batch is sliced to the
            microbatch's rows.
        full_batch_values: Values replaced by the whole batch's, computed once: small value to large value.
    """

    small: Program
    large: Program
    ratio: Fraction
    value_labels: tuple[Label, ...]
    output_labels: tuple[Label, ...]
    unknown_causes: tuple[int, ...]
    operand_scales: Mapping[tuple[int, int], Fraction]
    draw_dims: Mapping[int, int]
    full_batch_values: Mapping[Value, Value]

    def scale_operands(self, e: Equation, values: Sequence[Any]) -> list:
        """Return the operands of `e` in a microbatch, scaled.

        Args:
            e: Equation of the small program.
            values: Its operands.
        """
        return [scaled(x, self.operand_scales.get((e.index, i), ONE)) for i, x in enumerate(values)]


def follow_batch(
    small: Program, large: Program, batch: Mapping[int, int | Label], trained: Collection[int] | None = None
) -> FollowedProgram:
    """Label every value of `small` by how it follows the batch.

    Both programs must be one function, traced with the same options: the same primitives on the same values, in the
    same order. The two sizes must tell dimensions apart, since another dimension that grows by the same factor in the
    same value leaves no label that fits.

    Where the first output is unknown only because of small numbers that depend on the batch alone (the count of a mask
    in a masked mean), those are taken for the whole batch and listed in `full_batch_values`.

    Args:
        small: The function traced at fewer examples.
        large: The same function traced at more examples.
        batch: For each input with examples, their dimension, or another label. Other inputs are constant, or unknown
            where their shapes differ.
        trained: Inputs that are differentiated; None for none. Without them no values of the whole batch are taken.

    Raises:
        ShardError: The programs differ by more than the size of one batch.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> def trace(n):
    ...     return Program(jax.make_jaxpr(lambda w, x: (x @ w).mean())(jnp.ones(3), jnp.ones((n, 3))))
    >>> follow_batch(trace(2), trace(8), {1: 0}).output_labels
    (ExampleSum(scale=Fraction(1, 4)),)
    """
    ratio = batch_ratio(small, large, batch)
    _require_same_form(small, large)
    orders = SortAnalysis(small), SortAnalysis(large)
    first = _label_program(LabelWalk(small, large, ratio, frozenset(), orders), batch)
    if trained is None or not first.output_labels or not isinstance(first.output_labels[0], UnknownLabel):
        return first
    # The second pass takes small values from the whole batch. It counts only if it makes the first output known.
    second = _label_program(
        LabelWalk(small, large, ratio, _full_batch_candidates(small, large, trained), orders), batch
    )
    return first if isinstance(second.output_labels[0], UnknownLabel) else second


def as_single_microbatch(program: Program) -> FollowedProgram:
    """Label `program` as a single microbatch that holds the whole batch.

    All values are sums over that one microbatch. Random keys, which no sum can hold, are constant: each is made again.
    """
    keys = (jnp.issubdtype(aval.dtype, jax.dtypes.extended) for aval in program.avals)
    of = tuple(CONSTANT if key else ExampleSum() for key in keys)
    outputs = tuple(CONSTANT if v is None else of[v] for v in program.outputs)
    return FollowedProgram(program, program, ONE, of, outputs, (), {}, {}, {})


def as_batch_independent(program: Program, microbatches: int) -> FollowedProgram:
    """Label `program` as independent of examples, such as a penalty on weights: all microbatches make the same values.

    Args:
        program: The function.
        microbatches: Number of microbatches in a batch.
    """
    of, outputs = (CONSTANT,) * len(program.avals), (CONSTANT,) * len(program.outputs)
    return FollowedProgram(program, program, Fraction(microbatches), of, outputs, (), {}, {}, {})


def describe_equation(program: Program, index: int) -> str:
    """Describe an equation by its primitive and the innermost line of the user's code that made it.

    Args:
        program: The program.
        index: Index of the equation.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> describe_equation(Program(jax.make_jaxpr(lambda x: x @ x)(jnp.ones((2, 2)))), 0).partition(" at ")[0]
    'dot_general'
    """
    e: Equation | None = program.equations[index]
    name = e.name
    while e is not None:
        if (line := user_line(e.jaxpr_eqn)) is not None:
            return f"{name} at {line}"
        e = e.parent
    return name


def batch_ratio(small: Program, large: Program, batch: Mapping[int, int | Label]) -> Fraction:
    """Return the batch size of `large` divided by the batch size of `small`.

    Args:
        small: The function traced at fewer examples.
        large: The same function traced at more examples.
        batch: As for `follow_batch`.

    Raises:
        ShardError: An input lacks the dimension, or the batches do not all grow by one factor other than 1.
    """
    ratios = {}
    for i, label in batch.items():
        dim = label.dim if isinstance(label, PerExample) else label
        if isinstance(dim, int):
            a, b = (p.shapes[p.inputs[i]] for p in (small, large))
            if dim >= len(a) or not a[dim]:
                raise ShardError(f"input {i} has no examples in dimension {dim}; its shape is {a}")
            ratios[i] = Fraction(b[dim], a[dim])
    if len(set(ratios.values())) != 1 or 1 in ratios.values():
        sizes = ", ".join(f"input {i}: {float(r):g}" for i, r in ratios.items()) or "none"
        raise ShardError(
            "a program is followed from one batch size to another: all its batches have to grow alike, and by another "
            f"factor than 1; they grow by ({sizes})"
        )
    return next(iter(ratios.values()))


def describe_difference(small: Program, large: Program) -> str | None:
    """Describe the first difference of two programs besides sizes and numbers, None without a difference."""
    if (pair := first_difference(small, large)) is not None:
        return " against ".join(describe_equation(p, e.index) for p, e in zip((small, large), pair, strict=True))
    if not have_same_form(small, large):
        return f"{len(small.equations)} operations against {len(large.equations)}"
    return None


def _require_same_form(small: Program, large: Program) -> None:
    """Raise ShardError unless both programs are the same except for sizes and numbers.

    A step that decides in Python by the size of its batch, or loops over examples, differs.
    """
    if (other := describe_difference(small, large)) is not None:
        raise ShardError(
            f"the function is another one for another batch size: {other}; it must not decide in Python by the size of "
            "the batch, nor loop over examples"
        )


def _label_program(walk: LabelWalk, batch: Mapping[int, int | Label]) -> FollowedProgram:
    """Walk both programs and return the labels and the changes that microbatches need."""
    small, ins = walk.small, []
    for i, (a, b) in enumerate(zip(small.inputs, walk.large.inputs, strict=True)):
        label_or_dim = batch.get(i, CONSTANT)
        label = PerExample(label_or_dim) if isinstance(label_or_dim, int) else label_or_dim
        is_fitting = fits_shapes(label, small.shapes[a], walk.large.shapes[b], walk.ratio)
        ins.append(label if is_fitting else UnknownLabel())
    outs = walk.output_labels(ins)
    flow = Flow(small)
    used = _values_used(walk, flow, outs)
    return FollowedProgram(
        small=small,
        large=walk.large,
        ratio=walk.ratio,
        value_labels=walk.final_labels(),
        output_labels=tuple(outs),
        unknown_causes=_unknown_causes(walk, flow, outs),
        operand_scales={
            (e.index, i): x
            for e in small.equations
            # Unknown outputs are averaged as they are, so operands behind them alone keep their numbers.
            if not used.isdisjoint(e.results)
            for i, x in walk.operand_scales.get(e.index, {}).items()
        },
        draw_dims=dict(walk.draw_dims),
        full_batch_values=dict(walk.full_batch_values),
    )


def _values_used(walk: LabelWalk, flow: Flow, outs: Sequence[Label]) -> set[Value]:
    """Return the values behind known outputs, branches and trip counts. An unknown output is averaged as it is."""
    roots = [v for v, x in zip(walk.small.outputs, outs, strict=True) if not isinstance(x, UnknownLabel)]
    for e in walk.small.equations:
        # Body 1 of a while loop is its condition.
        roots += [e.operands[0]] if e.is_cond else e.bodies[1].sub_jaxpr.outputs if e.is_while else []
    return set(flow.ancestors(roots, lambda _v, w, _e: not isinstance(walk.value_labels[w], UnknownLabel)))


def _unknown_causes(walk: LabelWalk, flow: Flow, outs: Sequence[Label]) -> tuple[int, ...]:
    """Return the indices of the equations at which unknown outputs became unknown."""
    unknown_outputs = [v for v, x in zip(walk.small.outputs, outs, strict=True) if isinstance(x, UnknownLabel)]
    unknown_values = flow.ancestors(unknown_outputs, lambda _v, w, _e: isinstance(walk.value_labels[w], UnknownLabel))
    origins = {walk.small.producer[v].index for v in unknown_values if v in walk.small.producer} & walk.unknown_origins
    return tuple(sorted(origins | {x.cause for x in outs if isinstance(x, UnknownLabel) and x.cause is not None}))


def _full_batch_candidates(small: Program, large: Program, trained: Collection[int]) -> frozenset[Value]:
    """Return the small values that are computed once a step and depend on no differentiated input."""
    reached = Flow(small).descendants(small.inputs[i] for i in trained)
    return frozenset(
        v
        for e in small.top.walk(_runs_once)
        for v in e.results
        if e.name != GRADIENT_CALL
        and v not in reached
        and small.shapes[v] == large.shapes[v]
        and nbytes(small.avals[v]) <= MAX_FULL_BATCH_BYTES
    )


def _runs_once(e: Equation) -> bool:
    """Return whether the body of an equation runs once a step and can be taken apart.

    Loops, branches and custom derivative rules can't.
    """
    return called_body(e.jaxpr_eqn) is not None and not e.primitive.custom_derivative
