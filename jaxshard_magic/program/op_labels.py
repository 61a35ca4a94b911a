"""Labels of equations in the compiled program, by which operations of XLA are recognised.

A label is one more scope in an equation's name stack; every compiler keeps the name stack in `op_name`.
"""

import re
from collections.abc import Iterable, Mapping
from math import prod

from .flow import Flow, follow_aliases
from .ir import Equation, Program, Value
from .roles import PARAMS, InputRoles

UPDATE, GRADIENT, WEIGHT = "shard.update", "shard.gradient", "shard.weight"
BODY_CONSTRAINT = "shard.pin"  # a sharding constraint where a body begins or ends
DISPATCH, COMBINE = "shard.dispatch", "shard.combine"  # rows of tokens sent to their experts, and back
# Ring attention: keys and values sent to the next device; positions permuted to zigzag order, and back.
RING_SHIFT, ZIGZAG = ("shard.turn", "shard.deal")
JOB_BY_LABEL = {DISPATCH: "dispatch", COMBINE: "combine", RING_SHIFT: "turn", ZIGZAG: "zig-zag"}
_LABEL = re.compile(rf"({re.escape(GRADIENT)}|{re.escape(WEIGHT)})\.(\d+)")


def parse_label(op_name: str) -> tuple[str, int] | None:
    """Return the label of a compiled operation: `GRADIENT` or `WEIGHT`, and the number of the input.

    None without a label, and for several fused operations, `(first:second)`, with different labels.

    Args:
        op_name: Metadata of the operation.

    >>> parse_label("jit(step)/transpose(jvp())/shard.gradient.17/dot_general")
    ('shard.gradient', 17)
    >>> parse_label("jit(step)/(transpose(jvp(shard.gradient.0))/add:transpose(jvp(shard.gradient.1))/dot_general)")
    """
    labels = [(match[1], int(match[2])) for match in _LABEL.finditer(op_name)]
    if not labels or (":" in op_name and len(set(labels)) > 1):
        return None
    return labels[0]


def parse_job(op_name: str) -> str | None:
    """Return the purpose of a data movement, a value of `JOB_BY_LABEL`.

    None for other operations, and for several fused operations with different purposes.

    Args:
        op_name: Metadata of the operation.

    >>> parse_job("jit(step)/jvp(egcm,emh->egch)/shard.dispatch/sharding_constraint")
    'dispatch'
    """
    found = {job for label, job in JOB_BY_LABEL.items() if label in op_name}
    return found.pop() if len(found) == 1 else None


def weight_label(program: Program, flow: Flow, value: Value) -> str | None:
    """Return the label of a weight, or of another form or part of a weight; None where it is made of several inputs.

    Args:
        program: The step.
        flow: Dataflow of the step.
        value: The weight as it is used.
    """
    inputs = flow.input_ancestors([value], _same_or_part)
    return f"{WEIGHT}.{inputs.pop()}" if len(inputs) == 1 else None


def _same_or_part(v: Value, w: Value, e: Equation | None) -> bool:
    """Return whether an edge leads to the same array in another form, or to a part of it. An edge filter."""
    return follow_aliases(v, w, e) or bool(e and e.primitive.selects_elements)


def label_equations(program: Program, flow: Flow, roles: InputRoles, phases: Mapping[int, str]) -> dict[int, str]:
    """Return the label of each labelled equation, by index.

    Labelled are equations that make a gradient, equations that give a parameter another form (a cast before a gather),
    and the update.

    Args:
        program: The step.
        flow: Dataflow of the step.
        roles: Roles of the inputs.
        phases: Phase (forward, backward or update) of each equation, by index.
    """
    updates = (i for i, phase in phases.items() if phase == "update")
    # A loop over microbatches contains equations of all phases.
    label_by_equation = {i: UPDATE for i in updates if not program.equations[i].bodies}
    gradients = {
        v: i
        for o, i in roles.state.items()
        if roles.by_input[i] == PARAMS
        for v in _nearest_gradients(program, flow, program.outputs[o])
    }
    gradient_label_by_equation = label_gradients(program, flow, gradients)
    label_by_equation |= _label_weight_forms(program, flow, sorted(roles.weights))
    return label_by_equation | {
        i: label for i, label in gradient_label_by_equation.items() if phases.get(i) == "backward"
    }


def _label_weight_forms(program: Program, flow: Flow, params: Iterable[int]) -> dict[int, str]:
    """Return labels of the equations that give a parameter, or part of a parameter, another form."""
    input_by_form = {v: i for i in params for v in flow.descendants([program.inputs[i]], _same_or_part)}
    producers = ((program.producer.get(v), i) for v, i in input_by_form.items())
    return {e.index: f"{WEIGHT}.{i}" for e, i in producers if e is not None and not e.bodies}


def label_gradients(program: Program, flow: Flow, gradients: Mapping[Value, int]) -> dict[int, str]:
    """Return the label of each equation that makes a gradient or a summand of a gradient, by index.

    Args:
        program: The step.
        flow: Dataflow of the step.
        gradients: Input of which each value is the gradient.
    """

    def same_or_summand(v: Value, w: Value, e: Equation | None) -> bool:
        """Return whether an edge leads to the same gradient in another form, or to a summand of it. An edge filter."""
        # A sum over dimensions of size 1 changes no number.
        if e is not None and e.primitive.is_combinable and e.primitive.linear_operands:
            return prod(program.shapes[v]) == prod(program.shapes[w])
        # The gradient of one layer is written into the stack of all layers.
        if e is not None and e.primitive.resizes_dims and e.primitive.linear_operands:
            return w in e.operands[e.primitive.linear_operands]
        return follow_aliases(v, w, e) or bool(e and e.primitive.is_elementwise and e.primitive.is_additive)

    label_by_equation = {}
    for gradient, i in gradients.items():
        for value in flow.ancestors([gradient], same_or_summand):
            e = program.producer.get(value)
            if e is not None and not e.bodies:
                label_by_equation[e.index] = f"{GRADIENT}.{i}"
    return label_by_equation


def _nearest_gradients(program: Program, flow: Flow, output: Value | None) -> Iterable[Value]:
    """Return the nearest gradients from which a new parameter is made elementwise."""
    if output is None:
        return ()
    shape = program.shapes[output]

    def elementwise(v: Value, w: Value, e: Equation | None) -> bool:
        mixes = e is not None and e.primitive.mixes_positions
        return v not in flow.gradients and not mixes and program.shapes[w] == shape

    return [v for v in flow.ancestors([output], elementwise) if v in flow.gradients]
