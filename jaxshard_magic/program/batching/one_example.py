"""How values of one example follow the batch.

JAX traces dimensions of size 1 into other operations: `jnp.matmul` squeezes them, `jnp.take_along_axis` and
`jnp.broadcast_to` leave them out (0.10 to 0.12). What a program of one example shows is then less than what it does, so
that its labels come from the same function traced at two examples and at as many times two as the batch has.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from ...errors import ShardError
from ..flow import Flow
from ..ir import Equation, Program
from ..primitives.primitive import Kind
from .examples import CONSTANT, Constant, Label, Unknown, fits, literal
from .follow import Followed, follow, growth, other_form, told
from .walk import held

Twice = Callable[[], tuple[Program, Program]]
Programs = tuple[Program, Program, Program, Program]  # at one example and its batch, at two and theirs


def follow_one(
    small: Program, large: Program, batch: Mapping[int, int], trained: Collection[int], twice: Twice
) -> Followed:
    """As `follow`, for a `small` that has one example.

    Args:
        twice: Traces the same function at two examples, and at twice the examples of `large`. Called only where the
            two programs at hand leave an output unknown.

    Raises ShardError where the function differs by the size of its batch, and where one example alone is another
    program than several, whose labels can't be carried over.
    """
    other = other_form(small, large)
    at_one = None if other else follow(small, large, batch, trained)
    if at_one is not None and not any(isinstance(x, Unknown) for x in at_one.outputs):
        return at_one
    try:
        at_two = follow(*twice(), batch, trained)
    except ShardError:  # of a step that can't be traced at other sizes
        if at_one is None:
            raise
        return at_one
    programs = small, large, at_two.small, at_two.large
    ratios = growth(small, large, batch), at_two.ratio
    alike = _same_numbers(programs, ratios, every=other is None)
    if at_one is not None:
        return (_carried_over(at_one, at_two) if alike else None) or at_one
    by_outputs = _by_outputs(small, at_two, batch) if alike else None
    if by_outputs is not None:
        return by_outputs
    if isinstance(at_two.outputs[0], Unknown):
        where = "".join(f" ({told(at_two.small, cause)})" for cause in at_two.causes[:1])
        raise ShardError(f"the loss is no sum over examples{where}; take parts of two examples or more")
    raise ShardError(
        f"the program of one example is another one than that of several ({other}), so that it can't be shown that "
        "such parts add up; take parts of two examples or more"
    )


def _carried_over(at_one: Followed, at_two: Followed) -> Followed | None:
    """The labels found at two examples for the programs at one, which have the same equations; None where shapes at
    one example don't follow the batch so."""
    small, large = at_one.small, at_one.large
    if other_form(small, at_two.small):
        return None
    shaped = [(v, label) for v, label in zip(small.outputs, at_two.outputs, strict=True) if v is not None]
    shaped += [(v, CONSTANT) for v in at_two.norms]
    shaped += [(v, at_two.of[v]) for i in at_two.draws for v in small.equations[i].outs]
    if not all(fits(label, small.shapes[v], large.shapes[v], at_one.ratio) for v, label in shaped):
        return None
    return replace(at_two, small=small, large=large, ratio=at_one.ratio)


def _same_numbers(programs: Programs, ratios: tuple[Fraction, Fraction], *, every: bool) -> bool:
    """Return whether two pairs of programs do the same with numbers that go with the batch alike.

    Literals, held arrays and parameters that are one number are compared: of every equation, or of all but those that
    change shapes alone.
    """
    one, two = ratios
    arrays = [[x for scope in p.scopes() for x in scope.consts] for p in programs]
    equations = [[e for e in p.equations if every or _computes(e)] for p in programs]
    if len({*map(len, arrays)}) > 1 or len({*map(len, equations)}) > 1:
        return False
    if any(held(w, x, one) != held(y, z, two) for w, x, y, z in zip(*arrays, strict=True)):
        return False
    for e, f, g, h in zip(*equations, strict=True):
        numbers = [_literals(x) for x in (e, f, g, h)]
        if (e.name, _scalars(e.params)) != (g.name, _scalars(g.params)) or len({*map(len, numbers)}) > 1:
            return False
        if any(literal(w, x) != literal(y, z) for w, x, y, z in zip(*numbers, strict=True)):
            return False
    return True


def _computes(e: Equation) -> bool:
    """Return whether an equation does more than give an array another shape."""
    return e.primitive.kind is not Kind.SHAPE or bool(_literals(e))


def _literals(e: Equation) -> list[Any]:
    return [var.val for v, var in zip(e.ins, e.eqn.invars, strict=True) if v is None]  # pyright: ignore[reportAttributeAccessIssue]


def _scalars(params: Mapping[str, Any]) -> dict[str, str]:
    """The parameters that are one number or name; as text, in which NaN equals itself."""
    return {k: repr(x) for k, x in params.items() if isinstance(x, (bool, int, float, str))}


def _by_outputs(small: Program, at_two: Followed, batch: Mapping[int, int]) -> Followed | None:
    """Labels for the outputs of `small` alone, which does other operations than `at_two`; None where these are to be
    changed inside, or where an output can't be told from the microbatch."""
    if at_two.scales or at_two.draws or at_two.norms or any(isinstance(x, Unknown) for x in at_two.outputs):
        return None
    flow, examples = Flow(small), {small.inputs[i] for i in batch}
    of: dict[int, Label] = {}
    for j, (v, label) in enumerate(zip(small.outputs, at_two.outputs, strict=True)):
        if v is None:
            if label != CONSTANT:
                return None
            continue
        if of.setdefault(v, label) != label:
            return None
        computed = isinstance(label, Constant) and j and v not in small.inputs
        if computed and not examples.isdisjoint(small.inputs[i] for i in flow.inputs_behind([v])):
            return None
    labels = tuple(of.get(v, CONSTANT) for v in range(len(small.avals)))
    return Followed(small, small, at_two.ratio, labels, at_two.outputs, (), {}, {}, {})
