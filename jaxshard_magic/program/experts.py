"""Which dimensions of a step count experts: found from what it does with its weights and its tokens, not from names.

An expert is a matrix of its own that some tokens are multiplied with. So a dimension counts experts where a parameter
has it beside the two of a matrix, in a product that does not sum over it, and where tokens choose along it: a `top_k`,
an `argmax`, a sort or the maximum of a softmax works along it, or it compares what one of these chose. Heads, which
weights have as well, nobody chooses.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from .dimensions import Dimensions, Storage
from .flow import Flow, by_alias, by_no_product
from .ir import Value
from .products import Product, products
from .rankings import rankings
from .roles import PARAMS, Roles


@dataclass(frozen=True)
class Experts:
    """`classes`: the dimension classes that count experts, of which there are `numbers`: as many as products have
    matrices of them. `weights`: the parameters, by input, with a matrix for each. `places`: the classes of the places
    that experts have for the tokens of one group, where these are dispatched; `shared`: of those that they have for
    the tokens of all examples.
    """

    classes: frozenset[int]
    numbers: frozenset[int]
    weights: tuple[int, ...]
    places: frozenset[int]
    shared: frozenset[int]


def find_experts(dims: Dimensions, storage: Storage, flow: Flow, roles: Roles) -> Experts:
    """The experts of a step; no classes where it has none."""
    inputs = dims.program.inputs
    params = {i for i, role in enumerate(roles.of) if role == PARAMS}
    found = products(dims, storage)
    behind = {
        v: params & flow.inputs_behind([v], by_alias)
        for v in {p.equation.ins[k] for p in found for k in p.weights}
        if v is not None
    }
    used = [(p, k, behind.get(v)) for p in found for k in p.weights if (v := p.equation.ins[k]) is not None]
    stacks = [(p, k, inputs, d) for p, k, inputs in used if inputs for d in stacked(p, k)]
    chosen = _chosen(dims, flow, {p.tensors[k][d] for p, k, _, d in stacks})
    stacks = [(p, k, inputs, d) for p, k, inputs, d in stacks if p.tensors[k][d] in chosen]
    classes = frozenset(chosen) if stacks else frozenset()
    weights = sorted({i for _, _, inputs, _ in stacks for i in inputs})
    bound = {c for i in params for c in dims.of(inputs[i])}
    given = {c for i in roles.data for c in dims.big(inputs[i]) if c is not None}
    tokens = frozenset().union(*(dims.reach(c, lambda a: a not in bound) for c in given))
    places = {c for p, k, *_ in stacks for c in _rows(p, k)} - bound - tokens
    alone = [_rows(p, k) for p, k, *_ in stacks if (storage.batch & given).isdisjoint(p.tensors[1 - k])]
    shared = places & set().union(*alone)
    return Experts(
        classes,
        frozenset(dims.program.shapes[v][d] for p, k, _, d in stacks if (v := p.equation.ins[k]) is not None),
        tuple(weights),
        frozenset(places - shared),
        frozenset(shared),
    )


def stacked(p: Product, k: int) -> set[int]:
    """The dimensions of operand `k` of a product that go through, beside another that does and one that it sums."""
    e, c = p.equation, p.equation.contraction
    v = e.ins[k]
    if c is None or v is None or c.windowed or c.ragged is not None:
        return set()
    summed = [pair[k] for pair in c.contracted]
    free = [d for d, _ in (c.left, c.right)[k]]
    beside = [triple[k] for triple in c.batch]
    classes = p.tensors[k]
    if not summed or not free or len(free) + len(beside) < 2:
        return set()
    gone = {classes[d] for d in summed}
    return {d for d in (*free, *beside) if classes[d] not in gone}


def _rows(p: Product, k: int) -> set[int]:
    """The classes that go through from the operand that is not `k` alone."""
    c = p.equation.contraction
    return set() if c is None else {p.tensors[1 - k][d] for d, _ in (c.left, c.right)[1 - k]}


def _chosen(dims: Dimensions, flow: Flow, among: set[int]) -> set[int]:
    """Those of the classes `among` that something is chosen along, and those that something is chosen along for them:
    what a router gives need not be linked to what is made of the choice."""
    if not among:
        return set()
    found, told, by_size = set[int](), defaultdict[int, list[Value]](list), defaultdict[int, set[int]](set)
    for r in rankings(dims.program):
        c = dims.of(r.operand)[r.dim]
        found |= {c} & among
        if r.told:
            told[r.number] += r.told
            by_size[r.number].add(c)
    for size, start in told.items():
        met = _met(dims, flow, start, size) & among
        found |= met | (by_size[size] if met else set())
    return found


def _met(dims: Dimensions, flow: Flow, start: Iterable[Value], size: int) -> set[int]:
    """The classes of the dimensions of a size that what is made of certain values without another product has."""
    made = flow.forward(start, by_no_product)
    shapes = dims.program.shapes
    return {
        c for v in made if size in shapes[v] for c, z in zip(dims.of(v), shapes[v], strict=True) if z == size
    }
