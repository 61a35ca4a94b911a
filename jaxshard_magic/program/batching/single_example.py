"""Labels for the values of a program of one example.

JAX traces dimensions of size 1 into other operations: `jnp.matmul` squeezes them, `jnp.take_along_axis` and
`jnp.broadcast_to` leave them out (jax 0.10 to 0.12). The program of one example then shows less than the function
does. Its labels therefore come from the same function traced at two examples, and at twice the examples of the batch.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from ...errors import ShardError
from ..flow import Flow
from ..ir import Equation, Program
from ..primitives.primitive import Kind
from .batch_labels import CONSTANT, Constant, Label, UnknownLabel, fits_shapes, literal_label
from .followed_program import FollowedProgram, batch_ratio, describe_difference, describe_equation, follow_batch
from .label_walk import constant_label

TraceAtTwo = Callable[[], tuple[Program, Program]]
Programs = tuple[Program, Program, Program, Program]  # small and large at one example, then at two


def follow_single_example(
    small: Program, large: Program, batch: Mapping[int, int], trained: Collection[int], trace_at_two: TraceAtTwo
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
    ratios = batch_ratio(small, large, batch), at_two.ratio
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


def _have_same_numbers(programs: Programs, ratios: tuple[Fraction, Fraction], *, every: bool) -> bool:
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
