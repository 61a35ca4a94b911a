"""Search for the dimensions that are sequence positions.

Positions are inside an example, and weights have none. Among the dimension classes of neither the batch nor a weight,
positions are those in most of the products with weights, by FLOPs. A table of learned positions is only added to
activations and so does not count as a weight.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from ..config.request import Request
from ..program.batching.batch import Batch
from ..program.facts import Facts
from ..program.flops import Product, find_products
from ..program.flow import follow_aliases
from ..program.ir import Equation, Program
from ..program.roles import InputRoles
from ..program.union_find import UnionFind
from .layout import Axes, Layout

_MIN_SHARE = 0.05  # share of the products' FLOPs below which a class is no evidence
_MIN_COVER = 0.5  # share of the products' FLOPs below which too little of the step would be sharded


def find_positions(layout: Layout) -> frozenset[int]:
    """Return the dimension classes that are positions; empty where there are none.

    Classes named in `layout.user_position_dims` are used as given. Otherwise the classes of data covering most of the
    products with weights are taken; if none cover enough (patches of an image), any classes in the products that do.
    """
    carrying = _WeightProducts(layout)
    named_classes = {
        layout.dims.classes_of(layout.program.inputs[i])[d] for i, ds in layout.user_position_dims.items() for d in ds
    }
    if named_classes:
        return frozenset().union(*map(carrying.reach, named_classes))
    carried = {c for _, classes in carrying.products for c in classes} - carrying.weight_classes
    for candidates in (carrying.data_dims, carried):
        chosen, cover = carrying.choose(c for c in candidates if carrying.is_free(c))
        if cover >= _MIN_COVER:
            return chosen
    # For a lone example of shape (1, positions) the batch search has taken the positions for the batch.
    return layout.batch.classes if is_one_example(layout.program, layout.roles, layout.batch) else frozenset()


def key_dims(layout: Layout, classes: Collection[int]) -> frozenset[int]:
    """Return the dimension numbers that stay unsharded because another dimension of their value is a position too.

    In attention scores these are the keys, which softmax sums over; the queries are sharded. Where nothing is summed,
    the keys are the dimension contracted first.

    Args:
        layout: The layout.
        classes: The dimension classes that are positions.
    """
    program, dims = layout.program, layout.dims
    groups: dict[int, list[int]] = {}
    for v, shape in enumerate(program.shapes):
        among = [
            n for n, z in zip(program.dim_numbers(v), shape, strict=True) if z > 1 and dims.class_of_dim(n) in classes
        ]
        if len(among) > 1:
            groups[v] = among
    paired = {n for among in groups.values() for n in among}
    matching = UnionFind(len(program.sizes))
    for link in dims.links.links:
        if link.same_storage and link.a in paired and link.b in paired:
            matching.union(link.a, link.b)
    summed: Counter[int] = Counter()
    contracted: dict[int, int] = {}
    for e in program.equations:
        for v, d in _summed_dims(e):
            if v in groups and (n := program.dim_number(v, d)) in paired:
                if e.primitive.is_product:
                    contracted.setdefault(matching.find(n), e.index)
                else:
                    summed[matching.find(n)] += 1

    def query_rank(n: int) -> tuple[int, int, int]:
        # Softmax sums over keys, not queries. Without a sum, the keys are the dimension contracted first.
        s = matching.find(n)
        return summed[s], -contracted.get(s, len(program.equations)), n

    return frozenset(n for among in groups.values() for n in among if n != min(among, key=query_rank))


def _summed_dims(e: Equation) -> Iterable[tuple[int | None, int]]:
    """Return the operands' dimensions that an equation sums over."""
    if (c := e.contraction) is not None:
        return [(v, d) for v, ds in zip(e.operands, zip(*c.contracted, strict=True), strict=False) for d in ds]
    if e.primitive.is_combinable:
        return [(e.operands[0], d) for d in e.params["axes"]]
    return []


def is_one_example(program: Program, roles: InputRoles, batch: Batch) -> bool:
    """Return whether each dimension taken for the batch has dimensions before it, all of size one."""
    shapes, inputs = program.shapes, program.inputs
    fronts = [shapes[inputs[i]][: ds[0]] for i, ds in batch.input_dims.items() if i in roles.data]
    return bool(fronts) and all(front and set(front) == {1} for front in fronts)


def sequence_axes(facts: Facts, request: Request) -> Axes:
    """Return the mesh axes over which positions are sharded; for a lone example the batch axes come first."""
    alone = request.batch_axes if is_one_example(facts.program, facts.roles, facts.batch) else ()
    return (*alone, *(axis for axis in request.axes.get("sp", ()) if axis not in alone))


class _WeightProducts:
    """Products of examples with weights, by the dimension classes in them.

    Attributes:
        data_dims: Position of each dimension class among the dimensions of a data input.
        products: FLOPs and dimension classes of every product.
        weight_classes: Classes of the weights in these products.
    """

    def __init__(self, layout: Layout):
        dims, inputs = layout.dims, layout.program.inputs
        weight_products = [
            p
            for p in find_products(dims, layout.storage)
            if p.weight_operands and layout.is_activation(p.equation.results[0])
        ]
        self.products = [(p.flops, frozenset(c for t in p.dim_classes for c in t)) for p in weight_products]
        self.weight_classes = {c for p in weight_products for k in p.weight_operands for c in p.dim_classes[k]}
        # Reversed, so that the first input with a class decides.
        self.data_dims = {
            c: d for i in sorted(layout.roles.data, reverse=True) for d, c in enumerate(dims.classes_of(inputs[i]))
        }
        self._total_flops = sum(flops for flops, _ in self.products) or 1
        self._excluded = {
            *layout.batch.classes,
            *layout.tensor_class_axes,
            *dims.scanned,
            *_weight_classes(layout, weight_products),
        }
        self._excluded |= _windowed_classes(layout, weight_products)
        self._dims = dims

    def is_free(self, c: int) -> bool:
        return self._dims.largest[c] > 1 and c not in self._excluded

    def reach(self, c: int) -> frozenset[int]:
        """Return `c` and the classes made of it by shifting, slicing or concatenating."""
        return self._dims.related_classes(c, self.is_free)

    def choose(self, candidates: Iterable[int]) -> tuple[frozenset[int], float]:
        """Choose the class in most products, then the class in most of the others, and so on.

        Several are chosen for the sequences of an encoder and of a decoder.

        Returns:
            The chosen classes, and the share of all FLOPs that they cover.
        """
        reached = {c: self.reach(c) for c in candidates}
        chosen: frozenset[int] = frozenset()
        left = self.products

        def cover(c: int) -> tuple[int, int, int]:
            return sum(f for f, k in left if k & reached[c]), -self.data_dims.get(c, 0), -c

        while reached:
            best = max(reached, key=cover)
            if cover(best)[0] < _MIN_SHARE * self._total_flops:
                break
            chosen |= reached.pop(best)
            left = [(f, k) for f, k in left if not k & chosen]
        return chosen, 1 - sum(f for f, _ in left) / self._total_flops


def _weight_classes(layout: Layout, weight_products: Iterable[Product]) -> set[int]:
    """Return the classes of inputs multiplied with examples as they come: parameters, frozen ones too."""
    weights = {v for i, v in enumerate(layout.program.inputs) if i not in layout.batch.input_dims}
    used = layout.flow.ancestors(
        (p.equation.operands[k] for p in weight_products for k in p.weight_operands), follow_aliases
    )
    return {c for v in weights & used.keys() for c in layout.dims.classes_of(v)}


def _windowed_classes(layout: Layout, weight_products: Iterable[Product]) -> set[int]:
    """Return the classes of image dimensions under convolution windows, except where windows cut an image into patches.

    Sharded, they would need a halo exchange.
    """
    classes: set[int] = set()
    for p in weight_products:
        e, params = p.equation, p.equation.params
        sides = e.contraction.windowed if e.contraction is not None and p.weight_operands == (1,) else ()
        for k, (left, window, out) in enumerate(sides):
            width = layout.program.shapes[e.operands[1]][window]  # pyright: ignore[reportArgumentType, reportCallIssue]
            # Windows that do not overlap cut the image into patches, and need no halo exchange.
            if not width == max(params["window_strides"][k], params["lhs_dilation"][k]) > 1:
                classes |= {p.left[left], p.out[out]}
    return classes
