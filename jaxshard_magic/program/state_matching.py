"""Match the outputs of a step with the inputs whose next values they are, from the program and not from names."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from jax.tree_util import KeyPath

from .flow import Flow
from .trace import Traced

_MAX_DISTANCE = 20  # equations; larger distances are all alike
_SEARCH_LIMIT = 400  # values visited back from one output

StatePairs = dict[int, int]
ElementwiseDistances = dict[tuple[int, int], int]


def match_state(traced: Traced, flow: Flow) -> tuple[StatePairs, ElementwiseDistances]:
    """Return `{output: input}` and `{(output, input): elementwise equations in between}`, by position.

    Subtrees of arguments come first: an output subtree with equal inner paths, shapes and dtypes, and of several the
    subtree fewest elementwise equations away. Leaves follow.

    Args:
        traced: Step.
        flow: Data flow of its program.
    """
    steps = _elementwise_distances(flow, len(traced.consts))
    pairs = _match_trees(traced, flow, steps)
    used = set(pairs.values())
    for _, _, out, inp in sorted(
        (d, -_common_tail(traced.in_paths[i], traced.out_paths[o]), o, i) for (o, i), d in steps.items()
    ):
        if out not in pairs and inp not in used:
            pairs[out] = inp
            used.add(inp)
    return pairs, steps


def retyped_state(traced: Traced) -> list[tuple[int, int]]:
    """Return `(input, output)` of leaves returned in the same position with another shape or dtype.

    The position: an argument, or a part of an argument, with the same inner paths as a part of the result, and with
    most of its leaves unchanged. A part of the result that fits another argument completely belongs to that argument.
    """
    by_form = defaultdict(list)
    for members, form in subtrees(traced.out_paths, range(5)):
        by_form[form].append(members)
    trees = [(members, by_form[form]) for members, form in subtrees(traced.in_paths, (1, 2))]
    claimed = {
        tuple(p) for members, output_trees in trees for p in output_trees if all(_same_types(traced, members, p))
    }
    changed: dict[int, int] = {}
    for members, places in trees:
        fits = [_same_types(traced, members, place) for place in places]
        free = [k for k, place in enumerate(places) if tuple(place) not in claimed]
        best = max(free, key=lambda k: sum(fits[k]), default=None)
        if best is None or any(map(all, fits)) or sum(fits[best]) * 2 <= len(members):
            continue
        triples = zip(members, places[best], fits[best], strict=True)
        changed.update((i, o) for i, o, fit in triples if not fit)
    return sorted(changed.items())


def _same_types(traced: Traced, members: Sequence[int], outputs: Sequence[int]) -> list[bool]:
    """Return, for each input, whether the output at its position has the same shape and dtype."""
    ins, outs = traced.closed.in_avals, traced.closed.out_avals
    return [_has_same_type(ins[i], outs[o]) for i, o in zip(members, outputs, strict=True)]


def _has_same_type(a, b) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def shape_and_dtype(flow: Flow, value: int) -> tuple:
    """Return the shape and the dtype of a value."""
    return flow.program.shapes[value], str(flow.program.avals[value].dtype)


def _elementwise_distances(flow: Flow, closed_over: int) -> ElementwiseDistances:
    """Return the number of elementwise equations from each output back to each input of equal shape and dtype."""
    program, distances = flow.program, {}
    position = {v: i for i, v in enumerate(program.inputs) if i >= closed_over}  # closed-over arrays have no next value
    shapes = program.shapes

    def keeps_shape(v, w, e):
        return (e is None or not e.primitive.mixes_positions) and shapes[v] == shapes[w]

    for o, v in enumerate(program.outputs):
        if v is None:
            continue
        for w, distance in flow.ancestors([v], keeps_shape, _SEARCH_LIMIT).items():
            if w in position and shape_and_dtype(flow, w) == shape_and_dtype(flow, v):
                distances[o, position[w]] = distance
    return distances


def subtrees(paths: Sequence[KeyPath], depths: Sequence[int]) -> Iterator[tuple[list[int], tuple[KeyPath, ...]]]:
    """Yield the leaves below each path of the given depths, by position, with their paths relative to it.

    Args:
        paths: Key paths of all leaves.
        depths: Lengths of the paths.
    """
    trees: dict[KeyPath, list[int]] = defaultdict(list)
    for i, path in enumerate(paths):
        for k in depths:
            if len(path) > k:
                trees[path[:k]].append(i)
    return ((leaves, tuple(paths[i][len(top) :] for i in leaves)) for top, leaves in trees.items())


def _match_trees(traced: Traced, flow: Flow, steps: ElementwiseDistances) -> StatePairs:
    """Match subtrees of arguments, largest first."""
    ins, outs = flow.program.inputs, flow.program.outputs
    closed_over = len(traced.consts)
    by_form = defaultdict(list)
    for members, form in subtrees(traced.out_paths, range(5)):
        values = [v for m in members if (v := outs[m]) is not None]
        if len(values) == len(members):
            by_form[form, *(shape_and_dtype(flow, v) for v in values)].append(members)
    candidates = []
    for members, form in subtrees(traced.in_paths, (1, 2)):
        if members[0] < closed_over:
            continue
        for candidate in by_form[form, *(shape_and_dtype(flow, ins[m]) for m in members)]:
            pairs = list(zip(candidate, members, strict=True))
            distance = [steps.get(pair) for pair in pairs]
            written_back = all(traced.out_paths[o] == traced.in_paths[i] for o, i in pairs)
            idle = all(outs[o] == ins[i] for o, i in pairs)  # returned unchanged: matched after all updates
            if written_back or any(d is not None for d in distance):
                cost = sum(_MAX_DISTANCE if d is None else min(d, _MAX_DISTANCE) for d in distance)
                candidates.append((idle, -len(members), not written_back, cost, candidate, members))
    pairs, used = {}, set()
    for idle, *_, candidate, members in sorted(candidates):
        if not pairs.keys() & set(candidate) and (idle or not used & set(members)):
            pairs.update(zip(candidate, members, strict=True))
            used |= set(members)
    return pairs


def _common_tail(a: KeyPath, b: KeyPath) -> int:
    """Return the number of equal keys at the end of two paths."""
    n = 0
    while n < min(len(a), len(b)) and a[-1 - n] == b[-1 - n]:
        n += 1
    return n
