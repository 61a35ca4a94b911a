"""The work of a step's products (matmuls, convolutions): FLOPs and bytes, counted from its equations.

Elementwise operations, reductions and `unseen` primitives are not counted, nor is what nothing uses, which XLA drops.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Any

from .flow import Flow
from .ir import Equation, Program, Scope, Value
from .phases import BACKWARD, FORWARD, UPDATE, phases
from .primitives import shape_of
from .sizes import array_bytes, nbytes

REMATTED = "rematted_computation"  # the scope that jax puts around what remat does again


@dataclass(frozen=True)
class Work:
    """One product, or attention as one primitive: what all devices together do for it in one step, loop trips
    multiplied in.

    `equation`: its index in the program. `flops`: two a multiply-add. `dtype`: of its wider operand, as numpy names it.
    `bytes`: of its operands and result. `phase`: forward, backward or update. `recomputed`: done a second time, for the
    backward pass. `exact`: False in a `while`, whose trips are not known and count as one.
    """

    equation: int
    flops: int
    dtype: str
    bytes: int
    phase: str
    recomputed: bool
    exact: bool


@dataclass(frozen=True)
class Totals:
    """FLOPs of one step on all devices. `recomputed` is part of `flops`, and in `by_phase` of the backward pass."""

    flops: int
    by_dtype: Mapping[str, int]
    by_phase: Mapping[str, int]
    recomputed: int
    exact: bool


def counted(program: Program, flow: Flow, phase: Mapping[int, str] | None = None) -> tuple[Work, ...]:
    """The work of every product, bodies included, in the order of the program. Of the branches of a `cond` the one with
    most FLOPs counts, and the others are left out. `phase`: of every equation, where that is known.

    >>> import jax, jax.numpy as jnp
    >>> program = Program(jax.make_jaxpr(jnp.matmul)(jnp.ones((8, 4)), jnp.ones((4, 2))))
    >>> [(w.flops, w.dtype, w.bytes, w.phase) for w in counted(program, Flow(program))]
    [(128, 'float32', 224, 'forward')]
    """
    return tuple(_inside(program.top, phase or phases(program, flow), flow.used))


def totals(works: Iterable[Work]) -> Totals:
    """The sums of `counted`."""
    works = tuple(works)
    by_dtype: Counter[str] = Counter()
    by_phase: Counter[str] = Counter(dict.fromkeys((FORWARD, BACKWARD, UPDATE), 0))
    for w in works:
        by_dtype[w.dtype] += w.flops
        by_phase[w.phase] += w.flops
    return Totals(
        flops=_flops(works),
        by_dtype=dict(by_dtype),
        by_phase=dict(by_phase),
        recomputed=_flops(w for w in works if w.recomputed),
        exact=all(w.exact for w in works),
    )


def parts(e: Equation, axes_of: Callable[[Value], Sequence[Sequence[str]]], sizes: Mapping[str, int]) -> int:
    """Over how many devices the work of a product is divided: along every mesh axis that divides a dimension of its
    operands or its result, each once (a dimension that is summed over divides the sum).

    `axes_of`: the mesh axes of every dimension of a value. `sizes`: devices along each mesh axis.
    """
    specs = (axes_of(v) for v in (*e.ins[:2], e.outs[0]) if v is not None)
    return prod(sizes[a] for a in {a for dims in specs for axes in dims for a in axes})


def multiply_adds(e: Equation) -> int:
    """The multiply-adds of a product, or of several that are one primitive, each time that it runs."""
    contraction, shapes = e.contraction, [shape_of(v) for v in e.eqn.invars]
    if e.primitive.counts is not None:
        return e.primitive.counts(e.params, shapes)
    assert contraction is not None
    return e.primitive.work(contraction, e.params, shapes, shape_of(e.eqn.outvars[0]))


def unseen(program: Program) -> tuple[str, ...]:
    """The names of the step's primitives that may do much work of which `counted` knows nothing: kernels, callbacks,
    what a `shard_map` holds, decompositions, Fourier transforms."""
    return tuple(sorted({e.name for e in program.equations if e.primitive.unseen}))


def _inside(
    scope: Scope,
    phase: Mapping[int, str],
    used: Set[Value],
    recomputed: bool = False,
    exact: bool = True,
) -> list[Work]:
    works = []
    for e in scope.equations:
        again = recomputed or REMATTED in str(e.eqn.source_info.name_stack)
        if (e.primitive.product or e.primitive.counts) and not used.isdisjoint(e.outs):
            works.append(_work(e, phase[e.index], again, exact))
        known = exact and not e.is_while
        bodies = [_inside(door.scope, phase, used, again, known) for door in e.doors]
        for body in [max(bodies, key=_flops)] if e.is_cond else bodies:
            works += body
    return works


def _work(e: Equation, phase: str, recomputed: bool, exact: bool) -> Work:
    avals: list[Any] = [v.aval for v in (*e.eqn.invars, *e.eqn.outvars)]
    dtype = max((a.dtype for a in avals[:2]), key=lambda d: array_bytes((8,), d))
    return Work(
        equation=e.index,
        flops=2 * e.trips * multiply_adds(e),
        dtype=dtype.name,
        bytes=e.trips * sum(map(nbytes, avals)),
        phase=phase,
        recomputed=recomputed,
        exact=exact,
    )


def _flops(works: Iterable[Work]) -> int:
    return sum(w.flops for w in works)
