"""The products of a step (matmuls, convolutions): their operands' dimensions, FLOPs, and which one is a weight."""

import math
from dataclasses import dataclass

from .dimensions import Dimensions, Storage
from .flops import multiply_adds
from .ir import Equation
from .primitives.contractions import Contraction


@dataclass(frozen=True)
class Product:
    """`left`, `right`, `out`: dimension classes; `contracted`: those summed over; `groups`:
    those that count groups of rows (experts).

    `flops` and `out_bytes` are of one step, loop trips multiplied in. `weights`: which operands have no batch
    dimension (0 left, 1 right).
    """

    equation: Equation
    left: tuple[int, ...]
    right: tuple[int, ...]
    out: tuple[int, ...]
    contracted: frozenset[int]
    groups: frozenset[int]
    flops: int
    out_bytes: int
    weights: tuple[int, ...]

    @property
    def tensors(self) -> tuple[tuple[int, ...], ...]:
        return self.left, self.right, self.out


def products(dims: Dimensions, storage: Storage) -> list[Product]:
    """Every product of the program, in order."""
    contractions = ((e, e.contraction) for e in dims.program.equations)
    return [_product(dims, storage, e, c) for e, c in contractions if c is not None]


def _product(dims: Dimensions, storage: Storage, e: Equation, contraction: Contraction) -> Product:
    program = dims.program
    tensors = (*e.ins[:2], e.outs[0])
    shapes = [() if v is None else program.shapes[v] for v in tensors]
    classes = [tuple(dims.of(v)) for v in tensors]
    count = e.trips * math.prod(shapes[2])
    return Product(
        equation=e,
        left=classes[0],
        right=classes[1],
        out=classes[2],
        contracted=frozenset(classes[0][d] for d in contraction.summed if classes[0]),
        groups=frozenset(
            c for k, d in contraction.by_group for c in dims.of(e.outs[0] if k < 0 else e.ins[k])[d : d + 1]
        ),
        flops=2 * e.trips * multiply_adds(e),
        out_bytes=count * program.avals[e.outs[0]].dtype.itemsize,
        weights=tuple(k for k, v in enumerate(e.ins[:2]) if v is not None and not storage.batchy(v)),
    )
