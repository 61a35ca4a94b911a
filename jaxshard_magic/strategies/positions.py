"""Which dimensions are positions in a sequence, worked out from what the step does with them.

Positions are inside an example, and weights have none: of the dimensions that neither the batch nor a weight has, they
are those that most of the products with weights carry. A table of learned positions meets activations by addition
alone, and so does not count as a weight.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from ..config.request import Request
from ..program.batching.batch import Batch
from ..program.facts import Facts
from ..program.flow import by_alias
from ..program.ir import Equation, Program
from ..program.products import Product, products
from ..program.roles import Roles
from ..program.unionfind import UnionFind
from .layout import Axes, Layout

_ENOUGH = 0.05  # of the products' FLOPs: less says nothing
_MOST = 0.5  # of them: with fewer, too little of the step would be divided


def find_positions(layout: Layout) -> frozenset[int]:
    """The dimension classes that are positions: the ones that `layout.positions` names, or the classes of data that
    cover most of the products with weights; where those are no such dimension of data (patches of an image), any
    classes that do. Empty where none do.

    Of one example alone, shaped (1, positions), the positions were taken for the batch.
    """
    carrying = _Carried(layout)
    named = {layout.dims.of(layout.program.inputs[i])[d] for i, ds in layout.positions.items() for d in ds}
    if named:
        return frozenset().union(*map(carrying.reach, named))
    carried = {c for _, classes in carrying.products for c in classes} - carrying.multiplied
    for names in (carrying.leaves, carried):
        found, cover = carrying.choose(c for c in names if carrying.free(c))
        if cover >= _MOST:
            return found
    return layout.batch.classes if one_example(layout.program, layout.roles, layout.batch) else frozenset()


def keys_of(layout: Layout, classes: Collection[int]) -> frozenset[int]:
    """The dimensions, by number, that stay whole because their value has another one of `classes`: of attention's
    scores the keys, which softmax sums over, and not the queries.

    Where nothing is summed, the keys are what a product contracts first.
    """
    program, dims = layout.program, layout.dims
    groups: dict[int, list[int]] = {}
    for v, shape in enumerate(program.shapes):
        among = [
            n for n, z in zip(program.nodes(v), shape, strict=True) if z > 1 and dims.of_node(n) in classes
        ]
        if len(among) > 1:
            groups[v] = among
    paired = {n for among in groups.values() for n in among}
    sets = UnionFind(len(program.sizes))
    for link in dims.links.links:
        if link.alike and link.a in paired and link.b in paired:
            sets.union(link.a, link.b)
    summed: Counter[int] = Counter()
    contracted: dict[int, int] = {}
    for e in program.equations:
        for v, d in _gone(e):
            if v in groups and (n := program.node(v, d)) in paired:
                if e.primitive.product:
                    contracted.setdefault(sets.find(n), e.index)
                else:
                    summed[sets.find(n)] += 1

    def query(n: int) -> tuple[int, int, int]:
        s = sets.find(n)
        return summed[s], -contracted.get(s, len(program.equations)), n

    return frozenset(n for among in groups.values() for n in among if n != min(among, key=query))


def _gone(e: Equation) -> Iterable[tuple[int | None, int]]:
    """The operands' dimensions that an equation sums over."""
    if (c := e.contraction) is not None:
        return [(v, d) for v, ds in zip(e.ins, zip(*c.contracted, strict=True), strict=False) for d in ds]
    if e.primitive.reduces:
        return [(e.ins[0], d) for d in e.params["axes"]]
    return []


def one_example(program: Program, roles: Roles, batch: Batch) -> bool:
    """Return whether all that was taken for the batch stands behind a dimension of one."""
    shapes, inputs = program.shapes, program.inputs
    fronts = [shapes[inputs[i]][: ds[0]] for i, ds in batch.dims.items() if i in roles.data]
    return bool(fronts) and all(front and set(front) == {1} for front in fronts)


def sequence_axes(facts: Facts, request: Request) -> Axes:
    """The mesh axes that positions are divided over; those of the batch, too, where it is one example."""
    alone = request.batch_axes if one_example(facts.program, facts.roles, facts.batch) else ()
    return (*alone, *(axis for axis in request.axes.get("sp", ()) if axis not in alone))


class _Carried:
    """`leaves`: the classes of data, `products`: the FLOPs and the classes of every product of examples with a
    weight, `multiplied`: the classes of these weights."""

    def __init__(self, layout: Layout):
        dims, inputs = layout.dims, layout.program.inputs
        found = [p for p in products(dims, layout.storage) if p.weights and layout.batchy(p.equation.outs[0])]
        self.products = [(p.flops, frozenset(c for t in p.tensors for c in t)) for p in found]
        self.multiplied = {c for p in found for k in p.weights for c in p.tensors[k]}
        self.leaves = {
            c: d for i in sorted(layout.roles.data, reverse=True) for d, c in enumerate(dims.of(inputs[i]))
        }
        self._total = sum(flops for flops, _ in self.products) or 1
        self._taken = {*layout.batch.classes, *layout.tensor, *dims.looped, *_weight_classes(layout, found)}
        self._taken |= _windowed(layout, found)
        self._dims = dims

    def free(self, c: int) -> bool:
        return self._dims.largest[c] > 1 and c not in self._taken

    def reach(self, c: int) -> frozenset[int]:
        """`c` and what shifting, slicing or concatenating makes of it."""
        return self._dims.reach(c, self.free)

    def choose(self, names: Iterable[int]) -> tuple[frozenset[int], float]:
        """The class that most products carry, then of the other products, and so on (the sequences of an encoder and
        of a decoder); and the share of all that these cover."""
        reached = {c: self.reach(c) for c in names}
        chosen: frozenset[int] = frozenset()
        left = self.products

        def cover(c: int) -> tuple[int, int, int]:
            return sum(f for f, k in left if k & reached[c]), -self.leaves.get(c, 0), -c

        while reached:
            best = max(reached, key=cover)
            if cover(best)[0] < _ENOUGH * self._total:
                break
            chosen |= reached.pop(best)
            left = [(f, k) for f, k in left if not k & chosen]
        return chosen, 1 - sum(f for f, _ in left) / self._total


def _weight_classes(layout: Layout, found: Iterable[Product]) -> set[int]:
    """The classes of what is multiplied with examples and comes as it is: parameters, frozen ones too."""
    weights = {v for i, v in enumerate(layout.program.inputs) if i not in layout.batch.dims}
    used = layout.flow.back((p.equation.ins[k] for p in found for k in p.weights), by_alias)
    return {c for v in weights & used.keys() for c in layout.dims.of(v)}


def _windowed(layout: Layout, found: Iterable[Product]) -> set[int]:
    """The sides of images under convolutions, whose neighbours would have to exchange their edges; but not where
    windows lie side by side and cut an image into patches."""
    classes: set[int] = set()
    for p in found:
        e, params = p.equation, p.equation.params
        sides = e.contraction.windowed if e.contraction is not None and p.weights == (1,) else ()
        for k, (left, window, out) in enumerate(sides):
            width = layout.program.shapes[e.ins[1]][window]  # pyright: ignore[reportArgumentType, reportCallIssue]
            if not width == max(params["window_strides"][k], params["lhs_dilation"][k]) > 1:
                classes |= {p.left[left], p.out[out]}
    return classes
