"""Products in which one mesh axis would shard two dimensions, such as rows and columns of a square weight.

A residual stream `x + f(x @ w)` has features that are rows of `w` and columns of `w`. An axis shards only one dimension
of an array, so it shards the rows of `w` alone. The product with the transposed `w` in the backward pass would then
contract columns sharded in the gradient and whole in `w`. Rows of one matrix that meet rows of another (`a @ b.T` in a
contrastive loss) are the same case.

The axis stays where most operands and the result have it, weights before activations. An activation sharded elsewhere
by that axis is gathered for the product.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from ..program.ir import Equation, Value
from ..program.primitives.contractions import Contraction
from .layout import Layout, Spec, without_axes

OperandDim = tuple[int, int]  # (operand of a product, or 2 for its result; its dimension)


def gather_contested_operands(layout: Layout) -> None:
    """Make products read gathered operands where one axis would shard two of their dimensions.

    Add to `layout.spec_overrides`. Run after all strategies have filled in the layout. Sharded positions and experts
    are left to the code that shards them.
    """
    reads: dict[tuple[int, Value], Spec] = {}
    for e in layout.program.equations:
        if (c := e.contraction) is None or c.ragged_dim is not None or not layout.storage.touches_batch(e):
            continue
        for v, axes in _axes_to_gather(layout, e, c).items():
            if (e.index, v) not in layout.spec_overrides.operands:
                reads[e.index, v] = without_axes(layout.activation_spec(v), axes)
    # Without a constraint XLA moves the activation in one place and the weight in another, and no plan predicts which:
    # for four layers `x + gelu(x @ w)` under tp it sent four all-gathers of activations more than planned.
    layout.spec_overrides = replace(layout.spec_overrides, operands={**layout.spec_overrides.operands, **reads})


def _axes_to_gather(layout: Layout, e: Equation, c: Contraction) -> dict[Value, set[str]]:
    """Return the activations read by `e`, with the axes over which each is gathered for `e`."""
    values = (*e.operands[:2], e.results[0])
    specs = [layout.compute_spec_in(e, v) for v in values]
    # Attention and the expert region reshard their operands over these axes themselves.
    axes_of_features = {*layout.position_axes, *(layout.experts.axes if layout.experts is not None else ())}
    axes_to_gather = defaultdict[Value, set[str]](set)
    for axis in {a for spec in specs for axes in spec for a in axes} - axes_of_features:
        divided = [
            found
            for together in _linked_dims(c)
            if (found := [(k, d) for k, d in together if specs[k] and axis in specs[k][d]])
        ]
        if len(divided) < 2:
            continue
        retained = max(
            divided, key=lambda places: (any(not layout.is_activation(values[k]) for k, _ in places), len(places))
        )
        for k, _ in (place for places in divided if places is not retained for place in places):
            if k < 2 and (v := values[k]) is not None and layout.is_activation(v):
                axes_to_gather[v].add(axis)
    return axes_to_gather


def _linked_dims(c: Contraction) -> Iterator[tuple[OperandDim, ...]]:
    """Yield the groups of operand and result dimensions that are the same logical dimension, so that one axis may shard
    them."""
    yield from (((0, i), (1, j)) for i, j in c.contracted)
    yield from (((0, i), (1, j), (2, k)) for i, j, k in c.batch)
    yield from (((0, i), (2, k)) for i, k in c.left_free)
    yield from (((1, j), (2, k)) for j, k in c.right_free)
