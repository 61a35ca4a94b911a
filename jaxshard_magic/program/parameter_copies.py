"""Inputs that copy parameters and receive no gradient: target networks, averages, reference models."""

import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from itertools import takewhile

from .flow import Flow, follow_aliases
from .ir import Value
from .primitives.primitive import Kind
from .state_matching import shape_and_dtype, subtrees
from .trace import Traced

_DEPTHS = range(1, 6)  # lengths of the paths at which a network may be found


def find_copies(traced: Traced, flow: Flow, params: Collection[int], others: Collection[int]) -> dict[int, int]:
    """Return the copies of parameters among the inputs `others`, each with the input copied, by position.

    A copy is in a subtree of the arguments with the inner paths, shapes and dtypes of a subtree of parameters, and is
    multiplied or looked up in the same way: a whole argument, or several layers of an argument. Among several
    candidates the one with the nearest path is chosen.

    Args:
        traced: The step.
        flow: Dataflow of its program.
        params: Inputs that are parameters.
        others: Inputs that may be copies.
    """
    originals = defaultdict(list)
    for members, form in _subtrees_within(traced, flow, params):
        originals[form].append(members)
    original_by_copy: dict[int, int] = {}
    for members, form in _subtrees_within(traced, flow, others):
        candidates = sorted(originals[form], key=lambda tree: -_common_prefix_length(traced, tree[0], members[0]))
        # A whole argument needs one matching product or look-up; part of an argument needs two.
        min_uses = 1 if len(traced.in_paths[members[0]]) - len(form[0][0]) == 1 else 2
        fitting = (t for t in candidates if _num_matching_uses(flow, dict(zip(members, t, strict=True))) >= min_uses)
        if tree := next(fitting, None):
            original_by_copy.update((i, p) for i, p in zip(members, tree, strict=True) if i not in original_by_copy)
    return original_by_copy


def match_gradients(flow: Flow, params: Collection[int]) -> dict[Value, int]:
    """Return the input differentiated by each gradient, by the gradient's value; empty where calls can't be matched.

    A gradient is to be stored like its input, whether the step applies the update or returns the gradient to the
    caller.

    Args:
        flow: Dataflow of a marked step.
        params: Inputs of interest, by position.
    """
    # Gradient calls mark their arguments and their gradients in the order of their leaves, so both lists correspond.
    marked = [e.operands[0] for e in flow.differentiation_marks]
    gradients = sorted(flow.gradients)
    shapes = flow.program.shapes
    if len(marked) != len(gradients) or any(
        v is None or shapes[v] != shapes[g] for v, g in zip(marked, gradients, strict=True)
    ):
        return {}
    inputs_of_marks = (flow.input_ancestors([v], follow_aliases) for v in marked)
    pairs = ((g, found.pop()) for g, found in zip(gradients, inputs_of_marks, strict=True) if len(found) == 1)
    return {g: i for g, i in pairs if i in params}


def _subtrees_within(traced: Traced, flow: Flow, among: Collection[int]) -> Iterator[tuple[list[int], tuple]]:
    """Yield the subtrees with all leaves in `among`, largest first, each with the signature that a copy shares."""
    ins = flow.program.inputs
    whole = [(leaves, form) for leaves, form in subtrees(traced.in_paths, _DEPTHS) if {*leaves} <= {*among}]
    for leaves, form in sorted(whole, key=lambda tree: -len(tree[0])):
        yield leaves, (form, *(shape_and_dtype(flow, ins[i]) for i in leaves))


def _common_prefix_length(traced: Traced, a: int, b: int) -> int:
    """Return the length of the common prefix of two input paths."""
    alike = map(operator.eq, traced.in_paths[a], traced.in_paths[b])
    return sum(takewhile(bool, alike))


def _num_matching_uses(flow: Flow, copies: Mapping[int, int]) -> int:
    """Return the number of copied leaves with a product or look-up; 0 if a first use is not the original's."""
    inputs = flow.program.inputs
    uses = [(own, _product_uses(flow, inputs[p])) for i, p in copies.items() if (own := _product_uses(flow, inputs[i]))]
    return len(uses) if all(own[0] in theirs for own, theirs in uses) else 0


def _product_uses(flow: Flow, v: Value) -> list[tuple]:
    """Return products and look-ups that read an input, in order: name, operand position, contracted dimensions."""
    seen = flow.descendants([v], follow_aliases)
    readers = {e.index: e for w in seen for _, e in flow.successors[w] if e is not None}
    uses: list[tuple] = []
    for _, e in sorted(readers.items()):
        for k in (k for k, read in enumerate(e.operands) if read in seen):
            if (c := e.contraction) is not None:
                uses.append((e.name, k, tuple(ds[k] for ds in c.contracted)))
            elif k == 0 and e.primitive.kind is Kind.LOOKUP:
                uses.append((e.name,))
    return uses
