"""Products of a step (matmuls, convolutions): dimension classes of the operands, FLOPs, weight operands."""

import math
from dataclasses import dataclass

from .dimensions import Dimensions, StorageClasses
from .flops import multiply_adds
from .ir import Equation
from .primitives.contractions import Contraction


@dataclass(frozen=True)
class Product:
    """Product equation.

    Attributes:
        equation: The equation.
        left: Dimension classes of the left operand.
        right: Dimension classes of the right operand.
        out: Dimension classes of the result.
        contracted: Classes summed over.
        groups: Classes that count groups of rows (experts).
        flops: FLOPs per step, loop trips multiplied in.
        out_bytes: Bytes of the result per step, loop trips multiplied in.
        weight_operands: Operands without a batch dimension: 0 left, 1 right.
    """

    equation: Equation
    left: tuple[int, ...]
    right: tuple[int, ...]
    out: tuple[int, ...]
    contracted: frozenset[int]
    groups: frozenset[int]
    flops: int
    out_bytes: int
    weight_operands: tuple[int, ...]

    @property
    def dim_classes(self) -> tuple[tuple[int, ...], ...]:
        """Dimension classes of left operand, right operand and result."""
        return self.left, self.right, self.out


def find_products(dims: Dimensions, storage: StorageClasses) -> list[Product]:
    """Return all products of the program, in order.

    Args:
        dims: Dimension classes of the program.
        storage: Batch dimensions of the program.
    """
    contractions = ((e, e.contraction) for e in dims.program.equations)
    return [_product(dims, storage, e, c) for e, c in contractions if c is not None]


def _product(dims: Dimensions, storage: StorageClasses, e: Equation, contraction: Contraction) -> Product:
    program = dims.program
    tensors = (*e.operands[:2], e.results[0])
    shapes = [() if v is None else program.shapes[v] for v in tensors]
    classes = [tuple(dims.classes_of(v)) for v in tensors]
    count = e.trip_count * math.prod(shapes[2])
    return Product(
        equation=e,
        left=classes[0],
        right=classes[1],
        out=classes[2],
        contracted=frozenset(classes[0][d] for d in contraction.summed if classes[0]),
        # `group_dims` numbers the result -1.
        groups=frozenset(
            c
            for k, d in contraction.group_dims
            for c in dims.classes_of(e.results[0] if k < 0 else e.operands[k])[d : d + 1]
        ),
        flops=2 * e.trip_count * multiply_adds(e),
        out_bytes=count * program.avals[e.results[0]].dtype.itemsize,
        weight_operands=tuple(k for k, v in enumerate(e.operands[:2]) if v is not None and not storage.has_batch(v)),
    )
