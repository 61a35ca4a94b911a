"""Frozen weights of a training step: inputs that act as weights and that no gradient reaches.

Examples are the base of a LoRA, a teacher, a reference model, packed integers of a quantized model. They are told by
what they do: examples are multiplied with them, or look up their rows, and no dimension of them holds examples. Their
neighbours in the arguments (a bias, a scale) that the batch does not reach either are of the same model.
"""

from collections.abc import Collection

import jax.numpy as jnp

from .batching.batch import Batch
from .dimensions import Dimensions
from .flow import Flow
from .ir import Equation, Value
from .roles import BATCH, OTHER, PARAMS, WEIGHTS, InputRoles
from .trace import Traced


def find_frozen_weights(
    traced: Traced, dims: Dimensions, flow: Flow, roles: InputRoles, batch: Batch
) -> frozenset[int]:
    """Return the inputs that are frozen weights, by position; none for a step without parameters or without a batch.

    Args:
        traced: The step.
        dims: Dimension classes of the step.
        flow: Data flow of its program.
        roles: Role of each input, those of frozen weights unknown.
        batch: Dimensions that hold examples.
    """
    if not batch.classes or PARAMS not in roles.by_input:
        return frozenset()
    program = dims.program
    changed = {i for o, i in roles.state.items() if program.outputs[o] != program.inputs[i]}
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
    return frozenset(weights | _neighbours(traced, candidates - weights, weights, roles, batch))


def _acts_as_weight(
    value: Value, dims: Dimensions, flow: Flow, batch: Batch, made_of_examples: Collection[Value]
) -> bool:
    """Return whether examples are multiplied with an array, or look up rows of it.

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
    floats = jnp.issubdtype(dims.program.avals[value].dtype, jnp.inexact)
    readers = {e.index: e for v in own_forms for _, e in flow.successors[v] if e is not None}
    for e in readers.values():
        if e.primitive.is_gather:
            if floats and e.operands[0] in own_forms and has_examples(e.operands[1]):
                return True
        elif e.contraction is not None:
            mine = [k for k, v in enumerate(e.operands[:2]) if v in own_forms]
            if len(mine) == 1 and has_examples(e.operands[1 - mine[0]]) and _keeps_features(e, mine[0]):
                return True
    return False


def _keeps_features(e: Equation, k: int) -> bool:
    """Return whether a product contracts some of an operand's dimensions and passes others on, as with a weight."""
    assert e.contraction is not None
    free = e.contraction.right_free if k else e.contraction.left_free
    return bool(e.contraction.contracted and free)


def _neighbours(
    traced: Traced, others: Collection[int], weights: Collection[int], roles: InputRoles, batch: Batch
) -> set[int]:
    """Return the inputs whose nearest neighbours in the nesting of arguments are all weights, some of them frozen."""
    found, paths = set[int](), traced.in_paths
    for i in others:
        for depth in range(len(paths[i]) - 1, 0, -1):
            around = [j for j, p in enumerate(paths) if j != i and j not in others and p[:depth] == paths[i][:depth]]
            if around:
                if all(j in weights or roles.by_input[j] in WEIGHTS for j in around) and not {*around}.isdisjoint(
                    weights
                ):
                    found.add(i)
                break
    return found
