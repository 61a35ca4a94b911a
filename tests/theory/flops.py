"""The FLOPs of each of the steps, derived by hand: two for every multiply-add, over all devices and examples."""

from collections.abc import Sequence
from typing import NamedTuple

from .steps import CHANNELS, CLASSES, EXAMPLES, HIDDEN, LAYERS, SIDE, TIME, VOCAB, WIDTH


class Product(NamedTuple):
    """A product of the forward pass. Its backward pass is one of the same size for each operand's gradient: `gradients`
    is 1 where an operand is data. `again`: the backward pass of a rematerialised block needs its result."""

    multiply_adds: int
    gradients: int = 2
    again: bool = False


class Flops(NamedTuple):
    """`backward` has `recomputed` in it."""

    forward: int
    backward: int
    recomputed: int


def _sum(products: Sequence[Product]) -> Flops:
    forward = sum(2 * p.multiply_adds for p in products)
    gradients = sum(2 * p.multiply_adds * p.gradients for p in products)
    recomputed = sum(2 * p.multiply_adds for p in products if p.again)
    return Flops(forward, gradients + recomputed, recomputed)


def _mlp(gates: int) -> Flops:
    """`gates` projections up and one down in each block; the input of the first block is data."""
    size = EXAMPLES * WIDTH * HIDDEN
    first = [Product(size, gradients=1)] * gates + [Product(size)]
    return _sum(first + [Product(size)] * (gates + 1) * (LAYERS - 1))


def _cnn() -> Flops:
    """Of the 3 x 3 elements of a window those that meet the image: along a side all three, but two at either end."""
    a, b, c = CHANNELS
    meetings = (3 * SIDE - 2) ** 2
    return _sum(
        [
            Product(EXAMPLES * meetings * a * b, gradients=1),
            Product(EXAMPLES * meetings * b * c),
            Product(EXAMPLES * c * CLASSES),
        ]
    )


def _transformer(*, remat: bool = False) -> Flops:
    """The embedding is a lookup, whose gradient is a scatter-add; the input of the first block has a gradient.

    Heads times head size is the width, so scores and mixing are TIME * TIME * WIDTH for each example. A block ends in
    `x + hidden @ down`: nothing in its backward pass needs that product's result.
    """
    tokens = EXAMPLES * TIME
    block = [
        *[Product(tokens * WIDTH * WIDTH, again=remat)] * 3,  # q, k, v; in one weight just as many
        *[Product(tokens * TIME * WIDTH, again=remat)] * 2,  # scores, mixed
        Product(tokens * WIDTH * WIDTH, again=remat),  # out
        Product(tokens * WIDTH * HIDDEN, again=remat),  # up
        Product(tokens * HIDDEN * WIDTH),  # down
    ]
    return _sum([*block * LAYERS, Product(tokens * WIDTH * VOCAB)])


STEPS = {
    "mlp": _mlp(gates=1),
    "gated mlp": _mlp(gates=2),
    "cnn": _cnn(),
    "transformer": _transformer(),
    "transformer, fused qkv": _transformer(),
    "transformer, tied": _transformer(),
    "transformer, scanned": _transformer(),
    "transformer, fused qkv, scanned": _transformer(),
    "transformer, tied, scanned": _transformer(),
    "transformer, remat": _transformer(remat=True),
}
