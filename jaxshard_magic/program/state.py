"""Which output is the next value of which input: the step's state, found from the program, not from names."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from jax.tree_util import KeyPath

from .flow import Flow
from .trace import Traced

_FAR = 20  # a step count from which on nearness says nothing more
_SEARCH = 400  # values looked at going back from one output

Pairs = dict[int, int]
Steps = dict[tuple[int, int], int]


def match_state(traced: Traced, flow: Flow) -> tuple[Pairs, Steps]:
    """`({output: input}, {(output, input): elementwise steps between them})`, by position.

    Whole arguments first (an output subtree of the same inner paths, shapes and dtypes; of several, the one
    fewest elementwise steps away), then leaf by leaf.
    """
    steps = _elementwise_steps(flow, len(traced.consts))
    pairs = _match_trees(traced, flow, steps)
    used = set(pairs.values())
    for _, _, out, inp in sorted(
        (d, -_common_tail(traced.in_paths[i], traced.out_paths[o]), o, i) for (o, i), d in steps.items()
    ):
        if out not in pairs and inp not in used:
            pairs[out] = inp
            used.add(inp)
    return pairs, steps


def changed_state(traced: Traced) -> list[tuple[int, int]]:
    """`(input, output)` of leaves that come back at their own place with another shape or dtype.

    Their place: an argument, or a part of one, of which a part of the result has all inner paths, and most of the
    leaves as they were. What another argument fits wholly is that one's place.
    """
    by_form = defaultdict(list)
    for members, form in subtrees(traced.out_paths, range(5)):
        by_form[form].append(members)
    trees = [(members, by_form[form]) for members, form in subtrees(traced.in_paths, (1, 2))]
    taken = {tuple(p) for members, places in trees for p in places if all(_fits(traced, members, p))}
    changed: dict[int, int] = {}
    for members, places in trees:
        fits = [_fits(traced, members, place) for place in places]
        free = [k for k, place in enumerate(places) if tuple(place) not in taken]
        best = max(free, key=lambda k: sum(fits[k]), default=None)
        if best is None or any(map(all, fits)) or sum(fits[best]) * 2 <= len(members):
            continue
        triples = zip(members, places[best], fits[best], strict=True)
        changed.update((i, o) for i, o, fit in triples if not fit)
    return sorted(changed.items())


def _fits(traced: Traced, members: Sequence[int], place: Sequence[int]) -> list[bool]:
    """Of each input, whether the output at its place has its shape and dtype."""
    ins, outs = traced.closed.in_avals, traced.closed.out_avals
    return [_alike(ins[i], outs[o]) for i, o in zip(members, place, strict=True)]


def _alike(a, b) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def signature(flow: Flow, value: int) -> tuple:
    """The shape and the dtype of a value."""
    return flow.program.shapes[value], str(flow.program.avals[value].dtype)


def _elementwise_steps(flow: Flow, closed_over: int) -> Steps:
    program, found = flow.program, {}
    position = {v: i for i, v in enumerate(program.inputs) if i >= closed_over}  # others have no next value
    shapes = program.shapes

    def keeps_shape(v, w, e):
        return (e is None or not e.primitive.mixes) and shapes[v] == shapes[w]

    for o, v in enumerate(program.outputs):
        if v is None:
            continue
        for w, distance in flow.back([v], keeps_shape, _SEARCH).items():
            if w in position and signature(flow, w) == signature(flow, v):
                found[o, position[w]] = distance
    return found


def subtrees(
    paths: Sequence[KeyPath], depths: Sequence[int]
) -> Iterator[tuple[list[int], tuple[KeyPath, ...]]]:
    """The leaves below each path of one of the `depths`, by position, with their paths from there on."""
    trees: dict[KeyPath, list[int]] = defaultdict(list)
    for i, path in enumerate(paths):
        for k in depths:
            if len(path) > k:
                trees[path[:k]].append(i)
    return ((leaves, tuple(paths[i][len(top) :] for i in leaves)) for top, leaves in trees.items())


def _match_trees(traced: Traced, flow: Flow, steps: Steps) -> Pairs:
    ins, outs = flow.program.inputs, flow.program.outputs
    closed_over = len(traced.consts)
    by_form = defaultdict(list)
    for members, form in subtrees(traced.out_paths, range(5)):
        values = [v for m in members if (v := outs[m]) is not None]
        if len(values) == len(members):
            by_form[form, *(signature(flow, v) for v in values)].append(members)
    candidates = []
    for members, form in subtrees(traced.in_paths, (1, 2)):
        if members[0] < closed_over:
            continue
        for candidate in by_form[form, *(signature(flow, ins[m]) for m in members)]:
            pairs = list(zip(candidate, members, strict=True))
            distance = [steps.get(pair) for pair in pairs]
            written_back = all(traced.out_paths[o] == traced.in_paths[i] for o, i in pairs)
            idle = all(
                outs[o] == ins[i] for o, i in pairs
            )  # handed back untouched: only if nothing newer exists
            if written_back or any(d is not None for d in distance):
                cost = sum(_FAR if d is None else min(d, _FAR) for d in distance)
                candidates.append((idle, -len(members), not written_back, cost, candidate, members))
    pairs, used = {}, set()
    for idle, *_, candidate, members in sorted(candidates):
        if not pairs.keys() & set(candidate) and (idle or not used & set(members)):
            pairs.update(zip(candidate, members, strict=True))
            used |= set(members)
    return pairs


def _common_tail(a: KeyPath, b: KeyPath) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[-1 - n] == b[-1 - n]:
        n += 1
    return n
