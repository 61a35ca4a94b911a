"""Groups of consecutive rows combined by a function, as `x.reshape(-1, 2)` combines pairs of rows.

A per-example label says nothing about the positions of rows. Rows of one group have to stay together in a microbatch,
and a microbatch takes a part of the rows of each device.
"""

import math
from collections.abc import Sequence

from ..dimensions import Dimensions
from ..ir import Equation, Program, Value
from ..primitives.primitive import Kind
from ..primitives.sharding_rules import reduced_dims
from .batch_labels import Label, PerExample


def row_group_size(program: Program, labels: Sequence[Label], examples: int) -> tuple[int, Equation | None]:
    """Return the number of consecutive examples that belong together, and the first equation that groups them.

    Args:
        program: The function of the whole batch.
        labels: The label of each of its values.
        examples: The number of examples.

    Returns:
        The least common multiple of all group sizes, and the equation; 1 and None without groups.
    """
    group_size, first = 1, None
    dims: Dimensions | None = None
    for v, label in enumerate(labels):
        e = program.producer.get(v)
        if not isinstance(label, PerExample) or e is None or e.factors is None:
            continue
        # If 8 examples become a dimension of size 4, each of its positions holds 2.
        required_size = examples // math.gcd(examples, program.shapes[v][label.dim] or examples)
        if group_size % required_size == 0:
            continue
        dims = dims or Dimensions(program, (1,))
        inner = _minor_dim_classes(e, v, label.dim, dims)
        if any(
            _distinguishes_members(eqn, inner, dims, labels) or _combines_members(eqn, inner, dims)
            for eqn in program.equations
        ):
            group_size, first = math.lcm(group_size, required_size), first or e
    return group_size, first


def _minor_dim_classes(e: Equation, v: Value, leading: int, dims: Dimensions) -> frozenset[int]:
    """Return the classes of the dimensions of `v` along which `e` puts the rows of a group."""
    assert e.factors is not None
    made = next((new for _, new in e.factors.groups if leading in new), ())
    return frozenset(dims.classes_of(v)[d] for d in made if d != leading)


def _distinguishes_members(e: Equation, inner: frozenset[int], dims: Dimensions, labels: Sequence[Label]) -> bool:
    """Return whether `e` reads an operand without examples that has other numbers for each member of a group."""
    for v in e.operands:
        if v is None or isinstance(labels[v], PerExample):
            continue
        producer = dims.program.producer.get(v)
        repeated = frozenset[int]() if producer is None or producer.factors is None else producer.factors.repeated_dims
        if any(c in inner and d not in repeated for d, c in enumerate(dims.nontrivial_classes(v))):
            return True
    return False


def _combines_members(e: Equation, inner: frozenset[int], dims: Dimensions) -> bool:
    """Return whether `e` may combine several rows of a group.

    All primitives may, except elementwise ones, moves of dimensions, and products or sums along other dimensions.
    """
    classes_by_slot = [dims.nontrivial_classes(v) for v in (*e.operands, *e.results)]
    if not any(inner.intersection(classes) for classes in classes_by_slot):
        return False
    kind = e.primitive.kind
    if any(len(inner.intersection(classes)) < sum(c in inner for c in classes) for classes in classes_by_slot):
        return True  # members of a group meet each other
    if kind in (Kind.ELEMENTWISE, Kind.SHAPE, Kind.PASS_THROUGH, Kind.SOURCE):
        return False
    if e.bodies:  # equations inside a call are examined themselves
        return e.is_control_flow
    if (c := e.contraction) is not None:
        summed = [(0, i) for i, *_ in (*c.contracted, *c.windowed)] + [
            (1, j) for _, j, *_ in (*c.contracted, *c.windowed)
        ]
        return any(classes_by_slot[k][d] in inner for k, d in summed)
    if kind is Kind.REDUCTION:
        return any(classes_by_slot[0][d] in inner for d in reduced_dims(e.params))
    return True
