"""Labels for all values of a program, from the same function traced at two batch sizes and walked in lockstep.

JAX traces dimensions of size 1 into other operations: `jnp.matmul` squeezes them, `jnp.take_along_axis` and
`jnp.broadcast_to` leave them out (jax 0.10 to 0.12). The program of one example then shows less than the function
does. Its labels therefore come from the same function traced at two examples, and at twice the examples of the batch
(`follow_single_example`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from ...errors import ShardError
from ..flow import Flow
from ..ir import Equation, Program, Value
from ..primitives import called_body
from ..primitives.primitive import Kind
from ..sizes import nbytes
from ..sort_analysis import SortAnalysis
from ..source_lines import user_line
from .batch_labels import (
    CONSTANT,
    ONE,
    Constant,
    ExampleSum,
    Label,
    PerExample,
    UnknownLabel,
    fits_shapes,
    literal_label,
    scaled,
)
from .label_walk import GRADIENT_CALL, LabelWalk, constant_label
from .rule_site import first_difference, have_same_form

MAX_FULL_BATCH_BYTES = 4096  # largest value that is computed once a step for all microbatches
_TraceAtTwo = Callable[[], tuple[Program, Program]]
_Programs = tuple[Program, Program, Program, Program]  # small and large at one example, then at two


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
    ratio = _batch_ratio(small, large, batch)
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


def _batch_ratio(small: Program, large: Program, batch: Mapping[int, int | Label]) -> Fraction:
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


def follow_single_example(
    small: Program, large: Program, batch: Mapping[int, int], trained: Collection[int], trace_at_two: _TraceAtTwo
) -> FollowedProgram:
    """Return the labels of a program of one example, as `follow_batch` does for larger microbatches.

    Args:
        small: The function traced at one example.
        large: The function traced at the whole batch.
        batch: Batch dimension of each input with examples.
        trained: Inputs that are differentiated.
        trace_at_two: Traces the same function at two examples, and at twice the examples of `large`. Called only if the
            first two programs leave an output unknown.

    Raises:
        ShardError: The function differs by the size of its batch, or the program of one example differs from the
            program of several in a way that prevents a transfer of labels.
    """
    difference = describe_difference(small, large)
    at_one = None if difference else follow_batch(small, large, batch, trained)
    if at_one is not None and not any(isinstance(x, UnknownLabel) for x in at_one.output_labels):
        return at_one
    try:
        at_two = follow_batch(*trace_at_two(), batch, trained)
    except ShardError:  # some steps can't be traced at other sizes
        if at_one is None:
            raise
        return at_one
    programs = small, large, at_two.small, at_two.large
    ratios = _batch_ratio(small, large, batch), at_two.ratio
    # A trace at one example may compute other numbers than a trace at two. Labels are transferred only if all equations
    # that compute something are the same, with the same numbers.
    have_same_numbers = _have_same_numbers(programs, ratios, every=difference is None)
    if at_one is not None:
        return (_transfer_labels(at_one, at_two) if have_same_numbers else None) or at_one
    outputs_only = _label_outputs_only(small, at_two, batch) if have_same_numbers else None
    if outputs_only is not None:
        return outputs_only
    if isinstance(at_two.output_labels[0], UnknownLabel):
        location = "".join(f" ({describe_equation(at_two.small, cause)})" for cause in at_two.unknown_causes[:1])
        raise ShardError(f"the loss is no sum over examples{location}; take parts of two examples or more")
    raise ShardError(
        f"the program of one example is another one than that of several ({difference}), so that it can't "
        "be shown that "
        "such parts add up; take parts of two examples or more"
    )


def _transfer_labels(at_one: FollowedProgram, at_two: FollowedProgram) -> FollowedProgram | None:
    """Return the labels of the programs at two examples for the programs at one example.

    None if the equations differ, or if shapes at one example do not grow with the batch as the labels say.
    """
    small, large = at_one.small, at_one.large
    if describe_difference(small, at_two.small):
        return None
    labelled_values = [
        (v, label) for v, label in zip(small.outputs, at_two.output_labels, strict=True) if v is not None
    ]
    labelled_values += [(v, CONSTANT) for v in at_two.full_batch_values]
    labelled_values += [(v, at_two.value_labels[v]) for i in at_two.draw_dims for v in small.equations[i].results]
    if not all(fits_shapes(label, small.shapes[v], large.shapes[v], at_one.ratio) for v, label in labelled_values):
        return None
    return replace(at_two, small=small, large=large, ratio=at_one.ratio)


def _have_same_numbers(programs: _Programs, ratios: tuple[Fraction, Fraction], *, every: bool) -> bool:
    """Return whether two pairs of programs compute the same, with numbers that grow alike with the batch.

    Compares literals, constant arrays and scalar parameters: of every equation, or of all but pure changes of shape.

    Args:
        programs: Small and large program at one example, then at two examples.
        ratios: Large batch size divided by small batch size, of each pair.
        every: Also compare equations that only change shapes.
    """
    one, two = ratios
    arrays = [[x for scope in p.sub_jaxprs() for x in scope.consts] for p in programs]
    equations = [[e for e in p.equations if every or _is_computation(e)] for p in programs]
    if len({*map(len, arrays)}) > 1 or len({*map(len, equations)}) > 1:
        return False
    if any(constant_label(w, x, one) != constant_label(y, z, two) for w, x, y, z in zip(*arrays, strict=True)):
        return False
    for e, f, g, h in zip(*equations, strict=True):
        numbers = [_literals(x) for x in (e, f, g, h)]
        if (e.name, _scalars(e.params)) != (g.name, _scalars(g.params)) or len({*map(len, numbers)}) > 1:
            return False
        if any(literal_label(w, x) != literal_label(y, z) for w, x, y, z in zip(*numbers, strict=True)):
            return False
    return True


def _is_computation(e: Equation) -> bool:
    """Return whether an equation does more than change the shape of an array."""
    return e.primitive.kind is not Kind.SHAPE or bool(_literals(e))


def _literals(e: Equation) -> list[Any]:
    """Return the literal operands of an equation."""
    return [var.val for v, var in zip(e.operands, e.jaxpr_eqn.invars, strict=True) if v is None]  # pyright: ignore[reportAttributeAccessIssue]


def _scalars(params: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters that are a number, a bool or a name, as text."""
    # As text NaN equals itself.
    return {k: repr(x) for k, x in params.items() if isinstance(x, (bool, int, float, str))}


def _label_outputs_only(small: Program, at_two: FollowedProgram, batch: Mapping[int, int]) -> FollowedProgram | None:
    """Label only the outputs of `small`, whose operations differ from those of `at_two`.

    None if values have to be changed inside of the program (scaled operands, draws, values of the whole batch), if an
    output is unknown, or if a constant output other than the first is computed from examples.
    """
    if (
        at_two.operand_scales
        or at_two.draw_dims
        or at_two.full_batch_values
        or any(isinstance(x, UnknownLabel) for x in at_two.output_labels)
    ):
        return None
    flow, examples = Flow(small), {small.inputs[i] for i in batch}
    labels_by_value: dict[int, Label] = {}
    for j, (v, label) in enumerate(zip(small.outputs, at_two.output_labels, strict=True)):
        if v is None:
            if label != CONSTANT:
                return None
            continue
        if labels_by_value.setdefault(v, label) != label:
            return None
        computed = isinstance(label, Constant) and j and v not in small.inputs
        if computed and not examples.isdisjoint(small.inputs[i] for i in flow.input_ancestors([v])):
            return None
    labels = tuple(labels_by_value.get(v, CONSTANT) for v in range(len(small.avals)))
    return FollowedProgram(small, small, at_two.ratio, labels, at_two.output_labels, (), {}, {}, {})
