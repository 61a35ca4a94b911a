"""Names that equations carry into the compiled program, so that what XLA makes of them can be told apart there.

A label is one more scope of an equation's name stack; every compiler keeps those in `op_name`.
"""

import re
from collections.abc import Iterable, Mapping
from math import prod

from .flow import Flow, by_alias
from .ir import Equation, Program, Value
from .roles import PARAMS, Roles

UPDATE, GRADIENT, WEIGHT = "shard.update", "shard.gradient", "shard.weight"
PIN = "shard.pin"  # an array that is only held in place where a body begins or ends
DISPATCH, COMBINE = "shard.dispatch", "shard.combine"  # rows of tokens to their experts, and back
TURN, DEAL = "shard.turn", "shard.deal"  # of a ring: keys on their way, positions dealt out zig-zag and back
JOBS = {DISPATCH: "dispatch", COMBINE: "combine", TURN: "turn", DEAL: "zig-zag"}
_LABEL = re.compile(rf"({re.escape(GRADIENT)}|{re.escape(WEIGHT)})\.(\d+)")


def label_of(op_name: str) -> tuple[str, int] | None:
    """`(GRADIENT or WEIGHT, input)` of a compiled operation; None where it has no label, and where it is several
    operations, `(first:second)`, of which each has another.

    >>> label_of("jit(step)/transpose(jvp())/shard.gradient.17/dot_general")
    ('shard.gradient', 17)
    >>> label_of("jit(step)/(transpose(jvp(shard.gradient.0))/add:transpose(jvp(shard.gradient.1))/dot_general)")
    """
    labels = [(match[1], int(match[2])) for match in _LABEL.finditer(op_name)]
    if not labels or (":" in op_name and len(set(labels)) > 1):
        return None
    return labels[0]


def job_of(op_name: str) -> str | None:
    """What an array on its way is moved for, one of `JOBS`; None for others, and for several operations of which each
    has another.

    >>> job_of("jit(step)/jvp(egcm,emh->egch)/shard.dispatch/sharding_constraint")
    'dispatch'
    """
    found = {job for label, job in JOBS.items() if label in op_name}
    return found.pop() if len(found) == 1 else None


def weight_label(program: Program, flow: Flow, value: Value) -> str | None:
    """The label of a weight on its way to where it is used; None where it is not one input alone."""
    inputs = flow.inputs_behind([value], _same_or_part)
    return f"{WEIGHT}.{inputs.pop()}" if len(inputs) == 1 else None


def _same_or_part(v: Value, w: Value, e: Equation | None) -> bool:
    return by_alias(v, w, e) or bool(e and e.primitive.part)


def labels(program: Program, flow: Flow, roles: Roles, phases: Mapping[int, str]) -> dict[int, str]:
    """The label of each equation that has one, by its index: those that make a gradient, those that give a parameter
    another form (a cast, after which it is gathered), and the update.

    `phases`: forward, backward or update of each equation, by its index.
    """
    updates = (i for i, phase in phases.items() if phase == "update")
    named = {
        i: UPDATE for i in updates if not program.equations[i].doors
    }  # a loop over microbatches holds all phases
    gradients = {
        v: i
        for o, i in roles.state.items()
        if roles.of[i] == PARAMS
        for v in _gradients_of(program, flow, program.outputs[o])
    }
    made = gradient_labels(program, flow, gradients)
    named |= _forms(program, flow, [i for i, role in enumerate(roles.of) if role == PARAMS])
    return named | {i: label for i, label in made.items() if phases.get(i) == "backward"}


def _forms(program: Program, flow: Flow, params: Iterable[int]) -> dict[int, str]:
    """The labels of equations that make of one parameter, or of a part of it, the same in another form."""
    made = {v: i for i in params for v in flow.forward([program.inputs[i]], _same_or_part)}
    makers = ((program.maker.get(v), i) for v, i in made.items())
    return {e.index: f"{WEIGHT}.{i}" for e, i in makers if e is not None and not e.doors}


def gradient_labels(program: Program, flow: Flow, gradients: Mapping[Value, int]) -> dict[int, str]:
    """The label of each equation that makes a gradient or a summand of it, by its index; `gradients[v]`: the input that
    v is the gradient of."""

    def same_or_summand(v: Value, w: Value, e: Equation | None) -> bool:
        if e is not None and e.primitive.reduces and e.primitive.linear:  # over dimensions of size one
            return prod(program.shapes[v]) == prod(program.shapes[w])
        if (
            e is not None and e.primitive.cuts and e.primitive.linear
        ):  # a layer's put among those of all others
            return w in e.ins[e.primitive.linear]
        return by_alias(v, w, e) or bool(e and e.primitive.elementwise and e.primitive.adds)

    named = {}
    for gradient, i in gradients.items():
        for value in flow.back([gradient], same_or_summand):
            e = program.maker.get(value)
            if e is not None and not e.doors:
                named[e.index] = f"{GRADIENT}.{i}"
    return named


def _gradients_of(program: Program, flow: Flow, output: Value | None) -> Iterable[Value]:
    """The nearest gradients that a new parameter is made of, element by element."""
    if output is None:
        return ()
    shape = program.shapes[output]

    def elementwise(v: Value, w: Value, e: Equation | None) -> bool:
        mixes = e is not None and e.primitive.mixes
        return v not in flow.gradients and not mixes and program.shapes[w] == shape

    return [v for v in flow.back([output], elementwise) if v in flow.gradients]
