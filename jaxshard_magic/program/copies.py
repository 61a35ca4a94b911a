"""Which inputs are copies of parameters that no gradient reaches: target networks, averages, a reference model."""

import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from itertools import takewhile

from .flow import Flow, by_alias
from .ir import Value
from .primitives.primitive import Kind
from .state import signature, subtrees
from .trace import Traced

_DEPTHS = range(1, 6)  # how deep in the arguments a whole network stands


def find_copies(
    traced: Traced, flow: Flow, params: Collection[int], others: Collection[int]
) -> dict[int, int]:
    """Of the inputs `others`, by position, those that are a copy of one of `params`, and of which.

    A copy stands in a subtree of the arguments that has all inner paths, shapes and dtypes of a subtree of parameters,
    and is multiplied or looked up in as these are: a whole argument, or several layers of one. Of several that fit, the
    nearest by its path.
    """
    originals = defaultdict(list)
    for members, form in _networks(traced, flow, params):
        originals[form].append(members)
    found: dict[int, int] = {}
    for members, form in _networks(traced, flow, others):
        near = sorted(originals[form], key=lambda tree: -_common(traced, tree[0], members[0]))
        few = 1 if len(traced.in_paths[members[0]]) - len(form[0][0]) == 1 else 2
        fitting = (t for t in near if _used_alike(flow, dict(zip(members, t, strict=True))) >= few)
        if tree := next(fitting, None):
            found.update((i, p) for i, p in zip(members, tree, strict=True) if i not in found)
    return found


def gradients_of(flow: Flow, params: Collection[int]) -> dict[Value, int]:
    """The gradients of the inputs `params`, each by its value, with its input: they lie as that does, whether the step
    updates it or returns them for others to do so. Empty where calls are not matched.

    Gradient calls mark what they differentiate and what they give back, each in the order of its leaves.
    """
    marked = [e.ins[0] for e in flow.differentiated]
    given = sorted(flow.gradients)
    shapes = flow.program.shapes
    if len(marked) != len(given) or any(
        v is None or shapes[v] != shapes[g] for v, g in zip(marked, given, strict=True)
    ):
        return {}
    behind = (flow.inputs_behind([v], by_alias) for v in marked)
    pairs = ((g, found.pop()) for g, found in zip(given, behind, strict=True) if len(found) == 1)
    return {g: i for g, i in pairs if i in params}


def _networks(traced: Traced, flow: Flow, among: Collection[int]) -> Iterator[tuple[list[int], tuple]]:
    """The subtrees whose leaves are all of `among`, with what a copy of them has: the largest first."""
    ins = flow.program.inputs
    whole = [(leaves, form) for leaves, form in subtrees(traced.in_paths, _DEPTHS) if {*leaves} <= {*among}]
    for leaves, form in sorted(whole, key=lambda tree: -len(tree[0])):
        yield leaves, (form, *(signature(flow, ins[i]) for i in leaves))


def _common(traced: Traced, a: int, b: int) -> int:
    """How many keys two paths begin with alike."""
    alike = map(operator.eq, traced.in_paths[a], traced.in_paths[b])
    return sum(takewhile(bool, alike))


def _used_alike(flow: Flow, copies: Mapping[int, int]) -> int:
    """How many leaves are multiplied, or looked up in; 0 where what does so first does not do so with the original."""
    inputs = flow.program.inputs
    uses = [(own, _uses(flow, inputs[p])) for i, p in copies.items() if (own := _uses(flow, inputs[i]))]
    return len(uses) if all(own[0] in theirs for own, theirs in uses) else 0


def _uses(flow: Flow, v: Value) -> list[tuple]:
    """The products and lookups that read an input, in order, and as which operand, with what is summed over in it."""
    seen = flow.forward([v], by_alias)
    readers = {e.index: e for w in seen for _, e in flow.after[w] if e is not None}
    uses: list[tuple] = []
    for _, e in sorted(readers.items()):
        for k in (k for k, read in enumerate(e.ins) if read in seen):
            if (c := e.contraction) is not None:
                uses.append((e.name, k, tuple(ds[k] for ds in c.contracted)))
            elif k == 0 and e.primitive.kind is Kind.LOOKUP:
                uses.append((e.name,))
    return uses
