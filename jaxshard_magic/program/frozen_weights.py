"""Frozen weights: inputs that act as weights and that no gradient reaches.

In a training step these are the base of a LoRA, a teacher, a reference model, packed integers of a quantized model; in
an evaluation or a decoding step, all weights. They are told by what they do: examples are multiplied with them, and no
dimension of them holds examples. Their neighbours in the arguments (a bias, a scale, an embedding) that the batch does
not reach either are of the same model. Rows that are looked up alone say nothing: a data set in memory is read so.

Without a gradient the batch itself is not known yet: any matrix may be examples. There an argument is a model if it is
multiplied with what was made of another argument and of itself (`guess_weights`), as all layers but the first do.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from .batching.batch import Batch
from .dimensions import Dimensions
from .flow import Flow, follow_aliases
from .ir import Equation, Value
from .roles import BATCH, FROZEN, OTHER, PARAMS, WEIGHTS, InputRoles
from .trace import Traced


def find_frozen_weights(
    traced: Traced, dims: Dimensions, flow: Flow, roles: InputRoles, batch: Batch
) -> frozenset[int]:
    """Return the inputs that are frozen weights, by position; none for a step without a batch.

    Args:
        traced: The step.
        dims: Dimension classes of the step.
        flow: Data flow of its program.
        roles: Role of each input, those of frozen weights unknown.
        batch: Dimensions that hold examples.
    """
    if not batch.classes:
        return frozenset()
    program = dims.program
    changed = _changed_inputs(flow, roles)
    candidates = {
        i
        for i, role in enumerate(roles.by_input)
        if role in (BATCH, OTHER)
        and i not in batch.input_dims
        and i not in changed
        and program.shapes[program.inputs[i]]
    }
    made_of_examples = flow.descendants(program.inputs[i] for i in batch.input_dims)
    weights = {i for i in candidates if _acts_as_weight(program.inputs[i], dims, flow, batch, made_of_examples)}
    # Arrays that the step closes over are no neighbours: a model and a data set may stand side by side.
    others = {i for i in candidates - weights if i >= len(traced.consts)}
    return frozenset(weights | _neighbours(traced, others, weights, roles))


def guess_weights(traced: Traced, flow: Flow, roles: InputRoles) -> frozenset[int]:
    """Return the inputs of a step without a gradient that are weights, by position; none if a gradient is taken.

    Args:
        traced: The step.
        flow: Data flow of its program.
        roles: Role of each input.
    """
    if PARAMS in roles.by_input:
        return frozenset()
    program, paths = flow.program, traced.in_paths
    # The arguments, or the parts of a single one.
    depth = 1 if len({path[:1] for path in paths}) > 1 else 2
    groups = [path[:depth] for path in paths]
    origins = _origins(flow, groups, roles)
    uses = defaultdict[Any, int](int)
    for e in program.equations:
        if e.contraction is None or e.contraction.batch:
            continue
        sides = [origins[v] if v is not None else frozenset() for v in e.operands[:2]]
        for k, (own, other) in enumerate((sides, sides[::-1])):
            if len(own) == 1 and own < other and _keeps_features(e, k):
                uses.update({group: uses[group] + 1 for group in own})
    most = max(uses.values(), default=0)
    models = {group for group, count in uses.items() if 2 * count >= most}
    changed = _changed_inputs(flow, roles)
    return frozenset(
        i
        for i, (role, group) in enumerate(zip(roles.by_input, groups, strict=True))
        if group in models
        and role in (BATCH, OTHER)
        and i not in changed
        and program.shapes[program.inputs[i]]
        and (i >= len(traced.consts) or _is_multiplied(flow, program.inputs[i]))
    )


def _is_multiplied(flow: Flow, value: Value) -> bool:
    """Return whether a product reads an array itself."""
    forms = flow.descendants([value], follow_aliases)
    return any(e is not None and e.contraction is not None for v in forms for _, e in flow.successors[v])


def _origins(flow: Flow, groups: Sequence[Any], roles: InputRoles) -> list[frozenset[Any]]:
    """Return the groups of inputs that each value is made of; random keys count for none."""
    origins: list[set[Any]] = [set() for _ in flow.program.avals]
    members = defaultdict[Any, list[Value]](list)
    for i, group in enumerate(groups):
        if i not in roles.random_keys:
            members[group].append(flow.program.inputs[i])
    for group, values in members.items():
        for v in flow.descendants(values):
            origins[v].add(group)
    return [frozenset(each) for each in origins]


def _changed_inputs(flow: Flow, roles: InputRoles) -> set[int]:
    """Return the inputs that the step returns with other values."""
    program = flow.program
    return {i for o, i in roles.state.items() if program.outputs[o] != program.inputs[i]}


def _acts_as_weight(
    value: Value, dims: Dimensions, flow: Flow, batch: Batch, made_of_examples: Collection[Value]
) -> bool:
    """Return whether examples are multiplied with an array.

    Args:
        value: Value of the array.
        dims: Dimension classes of the step.
        flow: Data flow of its program.
        batch: Dimensions that hold examples.
        made_of_examples: Values that depend on an input with examples.
    """

    def has_examples(v: Value | None) -> bool:
        return v is not None and not batch.classes.isdisjoint(dims.classes_of(v))

    def stays_apart(made: Value, _read: Value, e: Equation | None) -> bool:
        """Return whether an edge leads to the same array in another form, such as its numbers unpacked and scaled."""
        return made not in made_of_examples and (e is None or not (e.primitive.is_product or e.primitive.is_gather))

    own_forms = flow.descendants([value], stays_apart)
    readers = {e.index: e for v in own_forms for _, e in flow.successors[v] if e is not None}
    for e in readers.values():
        if e.contraction is not None:
            mine = [k for k, v in enumerate(e.operands[:2]) if v in own_forms]
            if len(mine) == 1 and has_examples(e.operands[1 - mine[0]]) and _keeps_features(e, mine[0]):
                return True
    return False


def _keeps_features(e: Equation, k: int) -> bool:
    """Return whether a product contracts some of an operand's dimensions and passes others on, as with a weight."""
    assert e.contraction is not None
    free = e.contraction.right_free if k else e.contraction.left_free
    return bool(e.contraction.contracted and free)


def _neighbours(traced: Traced, others: Collection[int], weights: Collection[int], roles: InputRoles) -> set[int]:
    """Return the inputs whose nearest neighbours in the nesting of arguments are all weights, some of them frozen."""
    # By the path of a part of the arguments, the kinds of its other inputs: frozen, another weight, or neither (None).
    kinds = defaultdict[Any, set[str | None]](set)
    for i, path in enumerate(traced.in_paths):
        if i not in others:
            role = FROZEN if i in weights else roles.by_input[i]
            for depth in range(1, len(path)):
                kinds[path[:depth]].add(role if role in WEIGHTS else None)
    found = set[int]()
    for i in others:
        path = traced.in_paths[i]
        around = next((kinds[path[:d]] for d in range(len(path) - 1, 0, -1) if path[:d] in kinds), ())
        if FROZEN in around and None not in around:
            found.add(i)
    return found
