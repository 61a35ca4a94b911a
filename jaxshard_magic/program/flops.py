"""Products of a step (matmuls, convolutions, attention): FLOPs and bytes, dimension classes, weight operands.

Elementwise operations, reductions and the primitives listed by `uncounted_primitives` are not counted. Products without
a use are left out, as XLA drops them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Any

from .dimensions import Dimensions, StorageClasses
from .flow import Flow
from .ir import Equation, Program, SubJaxpr, Value
from .phases import BACKWARD, FORWARD, UPDATE, equation_phases
from .primitives import shape_of
from .primitives.contractions import Contraction
from .sizes import element_bits, nbytes

REMAT_SCOPE = "rematted_computation"  # JAX's name scope around recomputed equations


@dataclass(frozen=True)
class Work:
    """Work of one product, or of attention as one primitive: all devices together in one step, times the loop trips.

    Attributes:
        equation: Index in the program.
        flops: FLOPs, two for each multiply-add.
        dtype: NumPy name of the wider operand's dtype.
        bytes: Bytes of operands and result.
        phase: Forward, backward or update.
        recomputed: Whether the product is computed a second time, for the backward pass.
        exact: False in a `while`, whose trips are not known and count as one.
    """

    equation: int
    flops: int
    dtype: str
    bytes: int
    phase: str
    recomputed: bool
    exact: bool


@dataclass(frozen=True)
class WorkTotals:
    """FLOPs of one step on all devices.

    Attributes:
        flops: All FLOPs.
        by_dtype: FLOPs by dtype.
        by_phase: FLOPs by phase; recomputation counts as backward.
        recomputed: FLOPs of recomputation, included in `flops`.
        exact: False where a `while` counts as one trip.
    """

    flops: int
    by_dtype: Mapping[str, int]
    by_phase: Mapping[str, int]
    recomputed: int
    exact: bool


def count_work(program: Program, flow: Flow, phase: Mapping[int, str] | None = None) -> tuple[Work, ...]:
    """Return the work of every product, bodies included, in program order.

    Of the branches of a `cond` only the branch with most FLOPs counts.

    Args:
        program: The step.
        flow: Dataflow of `program`.
        phase: Phase of every equation, by index; None to derive the phases.

    >>> import jax, jax.numpy as jnp
    >>> program = Program(jax.make_jaxpr(jnp.matmul)(jnp.ones((8, 4)), jnp.ones((4, 2))))
    >>> [(w.flops, w.dtype, w.bytes, w.phase) for w in count_work(program, Flow(program))]
    [(128, 'float32', 224, 'forward')]
    """
    return tuple(_count_body(program.top, phase or equation_phases(program, flow), flow.live_values))


def total_work(works: Iterable[Work]) -> WorkTotals:
    """Return the sums over `works`."""
    works = tuple(works)
    by_dtype: Counter[str] = Counter()
    by_phase: Counter[str] = Counter(dict.fromkeys((FORWARD, BACKWARD, UPDATE), 0))
    for w in works:
        by_dtype[w.dtype] += w.flops
        by_phase[w.phase] += w.flops
    return WorkTotals(
        flops=_flops(works),
        by_dtype=dict(by_dtype),
        by_phase=dict(by_phase),
        recomputed=_flops(w for w in works if w.recomputed),
        exact=all(w.exact for w in works),
    )


def num_shards(e: Equation, axes_of: Callable[[Value], Sequence[Sequence[str]]], sizes: Mapping[str, int]) -> int:
    """Return the number of devices over which the work of a product is divided.

    The product of the sizes of all mesh axes that divide a dimension of an operand or the result, each axis counted
    once; an axis on a contracted dimension divides the sum.

    Args:
        e: The product.
        axes_of: Function from a value to the mesh axes of each dimension.
        sizes: Devices along each mesh axis.
    """
    specs = (axes_of(v) for v in (*e.operands[:2], e.results[0]) if v is not None)
    return prod(sizes[a] for a in {a for dims in specs for axes in dims for a in axes})


def multiply_adds(e: Equation) -> int:
    """Return the multiply-adds of one run of a product, or of a primitive that consists of several products."""
    contraction, shapes = e.contraction, [shape_of(v) for v in e.jaxpr_eqn.invars]
    if e.primitive.fused_multiply_adds is not None:
        return e.primitive.fused_multiply_adds(e.params, shapes)
    assert contraction is not None
    return e.primitive.multiply_adds(contraction, e.params, shapes, shape_of(e.jaxpr_eqn.outvars[0]))


def uncounted_primitives(program: Program) -> tuple[str, ...]:
    """Return the sorted names of the step's primitives that may do much work not counted here.

    Kernels, callbacks, the bodies of `shard_map`, decompositions, Fourier transforms.
    """
    return tuple(sorted({e.name for e in program.equations if e.primitive.unknown_flops}))


def _count_body(
    scope: SubJaxpr, phase: Mapping[int, str], used: Set[Value], recomputed: bool = False, exact: bool = True
) -> list[Work]:
    """Return the work of the products in a body and in the bodies within."""
    works = []
    for e in scope.equations:
        in_remat = recomputed or REMAT_SCOPE in str(e.jaxpr_eqn.source_info.name_stack)
        # XLA drops products whose results nothing uses.
        if (e.primitive.is_product or e.primitive.fused_multiply_adds) and not used.isdisjoint(e.results):
            works.append(_work(e, phase[e.index], in_remat, exact))
        exact_bodies = exact and not e.is_while
        bodies = [_count_body(door.sub_jaxpr, phase, used, in_remat, exact_bodies) for door in e.bodies]
        # One branch runs; the largest is an upper bound.
        for body in [max(bodies, key=_flops)] if e.is_cond else bodies:
            works += body
    return works


def _work(e: Equation, phase: str, recomputed: bool, exact: bool) -> Work:
    """Return the work of one product."""
    avals: list[Any] = [v.aval for v in (*e.jaxpr_eqn.invars, *e.jaxpr_eqn.outvars)]
    dtype = max((a.dtype for a in avals[:2]), key=element_bits)
    return Work(
        equation=e.index,
        flops=_equation_flops(e),
        dtype=dtype.name,
        bytes=e.trip_count * sum(map(nbytes, avals)),
        phase=phase,
        recomputed=recomputed,
        exact=exact,
    )


def _equation_flops(e: Equation) -> int:
    """Return the FLOPs of a product in one step, two for each multiply-add, loop trips multiplied in."""
    return 2 * e.trip_count * multiply_adds(e)


def _flops(works: Iterable[Work]) -> int:
    return sum(w.flops for w in works)


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
    count = e.trip_count * prod(shapes[2])
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
        flops=_equation_flops(e),
        out_bytes=count * program.avals[e.results[0]].dtype.itemsize,
        weight_operands=tuple(k for k, v in enumerate(e.operands[:2]) if v is not None and not storage.has_batch(v)),
    )
