"""Values of a body that are equal parts of an array: `w[e]`, `gates[..., e : e + 1]`, `jnp.take(w, e, 0)`.

The index `e` is a constant, or counts the trips of a loop. Index arithmetic is evaluated for all trips at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..ir import Equation, Program, SubJaxpr, Value
from ..primitives import is_literal
from ..primitives.primitive import Kind

TripNumbers = np.ndarray  # an integer or boolean scalar, in its own dtype: one element for each trip

# Index arithmetic on one number for each trip. NumPy integers wrap around on overflow, as in the step.
_SCALAR_OPS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
_VALUE_PRESERVING = (
    "convert_element_type",
    "broadcast_in_dim",
    "reshape",
    "squeeze",
    "expand_dims",
    "copy",
    "stop_gradient",
)


@dataclass(frozen=True)
class ArrayPart:
    """Slice of an array along one dimension.

    Attributes:
        source: The array.
        dim: Sliced dimension; all others are complete.
        start: First index.
        size: Number of indices.
    """

    source: Value
    dim: int
    start: int
    size: int


@dataclass(frozen=True, eq=False)
class _OperandPart:
    """Slice of an operand in each trip.

    Attributes:
        operand: Index of the operand.
        dim: Sliced dimension.
        starts: First index in each trip.
        size: Number of indices.
    """

    operand: int
    dim: int
    starts: TripNumbers
    size: int


class ArrayParts:
    """Slices of arrays in the bodies of a program, with a cache for functions called repeatedly.

    Args:
        program: The program.
    """

    def __init__(self, program: Program):
        self._avals, self._shapes = program.avals, program.shapes
        self._call_cache = dict[Any, tuple[_OperandPart | None, Any]]()

    def in_body(self, scope: SubJaxpr) -> dict[Value, ArrayPart]:
        """Return the values of a body that are slices, up to dimensions of size 1."""
        return {
            v: ArrayPart(w, cut.dim, int(cut.starts[0]), cut.size) for v, w, cut in self._iterate_parts(scope, {}, 1)
        }

    def in_loop(self, scope: SubJaxpr, counters: Sequence[Value], trips: int) -> dict[Value, ArrayPart]:
        """Return the values of a loop's body that are the next slice in each trip, each with the first slice.

        Args:
            scope: Body of the loop.
            counters: Values of the body that count trips from 0.
            trips: Number of trips.
        """
        parts: dict[Value, ArrayPart] = {}
        known = {v: np.arange(trips).astype(self._avals[v].dtype) for v in counters}
        for v, source, part in self._iterate_parts(scope, known, trips):
            if np.array_equal(part.starts, np.arange(trips) * part.size):
                parts[v] = ArrayPart(source, part.dim, 0, part.size)
        return parts

    def _iterate_parts(
        self, scope: SubJaxpr, known: dict[Value, TripNumbers], trips: int
    ) -> Iterator[tuple[Value, Value, _OperandPart]]:
        for e in scope.equations:
            if e.name in ("split", "unstack") and e.operands[0] is not None:
                start, sizes = 0, e.params.get("sizes", (1,) * len(e.results))
                for v, size in zip(e.results, map(int, sizes), strict=True):
                    yield v, e.operands[0], _OperandPart(0, e.params["axis"], np.full(trips, start), size)
                    start += size
            elif not _fold_scalars(e, known, self._avals, trips) and len(e.results) == 1:
                part = self._operand_part(e, known, trips)
                source = None if part is None else e.operands[part.operand]
                if part is not None and source is not None:
                    yield e.results[0], source, part

    def _operand_part(self, e: Equation, known: Mapping[Value, TripNumbers], trips: int) -> _OperandPart | None:
        if not (e.primitive.kind in (Kind.SLICE, Kind.LOOKUP) or e.name in ("jit", "pjit")):
            return None
        numbers = [_operand_numbers(e, k, known, trips) for k in range(len(e.operands))]
        if sum(x is None for x in numbers) != 1:
            return None
        if not e.bodies:
            return _direct_part(e, numbers, self._shapes, trips)
        body = e.params["jaxpr"]
        # JAX shares the jaxpr of a jitted function between calls. The body is stored with the result, so that its id is
        # not reused.
        key = id(body), trips, *(None if x is None else (x.dtype, x.tobytes()) for x in numbers)
        if key not in self._call_cache:
            self._call_cache[key] = self._part_in_call(e, numbers, trips), body
        return self._call_cache[key][0]

    def _part_in_call(self, e: Equation, numbers: list[TripNumbers | None], trips: int) -> _OperandPart | None:
        """Return the slice that the function called by `e` takes of its only array operand; None for any other
        function."""
        scope, operand = e.bodies[0].sub_jaxpr, numbers.index(None)
        known = {v: x for v, x in zip(scope.inputs, numbers, strict=True) if x is not None}
        part_of_value: dict[Value | None, _OperandPart | None] = {
            scope.inputs[operand]: None
        }  # None for the complete array
        for inner in scope.equations:
            if _fold_scalars(inner, known, self._avals, trips):
                continue
            first = inner.operands[0] if inner.operands else None
            if first is None or first not in part_of_value or len(inner.results) != 1:
                return None
            part = part_of_value[first]
            if inner.name in ("squeeze", "reshape"):
                if not _equal_without_ones(self._shapes[first], self._shapes[inner.results[0]]):
                    return None
            elif part is None:
                values = [None, *(_operand_numbers(inner, k, known, trips) for k in range(1, len(inner.operands)))]
                part = _direct_part(inner, values, self._shapes, trips)
            else:
                return None
            if part is None and inner.name not in ("squeeze", "reshape"):
                return None
            part_of_value[inner.results[0]] = part
        part = part_of_value.get(scope.outputs[0])
        return part and _OperandPart(operand, part.dim, part.starts, part.size)


def _equal_without_ones(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return [n for n in a if n > 1] == [n for n in b if n > 1]


def _operand_numbers(
    e: Equation, operand_index: int, known: Mapping[Value, TripNumbers], trips: int
) -> TripNumbers | None:
    v, var = e.operands[operand_index], e.jaxpr_eqn.invars[operand_index]
    if v is not None:
        return known.get(v)
    if not is_literal(var) or not _is_index_scalar(var.aval):
        return None
    return np.full(trips, np.asarray(var.val).item()).astype(var.aval.dtype)  # pyright: ignore[reportAttributeAccessIssue]


def _is_index_scalar(aval: Any) -> bool:
    """Return whether `aval` is a single integer or boolean."""
    dtype: Any = getattr(aval, "dtype", None)
    return (dtype == np.bool_ or jnp.issubdtype(dtype, jnp.integer)) and prod(aval.shape) == 1


def _fold_scalars(e: Equation, known: dict[Value, TripNumbers], avals: Sequence[Any], trips: int) -> bool:
    """Evaluate an equation of known scalars and add its results to `known`; return whether this was possible."""
    if not e.operands or any(v is not None and v not in known for v in e.operands):
        return False
    numbers = [_operand_numbers(e, k, known, trips) for k in range(len(e.operands))]
    if any(x is None for x in numbers) or not all(_is_index_scalar(avals[v]) for v in e.results):
        return False
    if e.name in ("jit", "pjit"):
        scope = e.bodies[0].sub_jaxpr
        known |= {v: x for v, x in zip(scope.inputs, numbers, strict=True) if x is not None}
        if not all(_fold_scalars(inner, known, avals, trips) for inner in scope.equations):
            return False
        outs = [None if v is None else known.get(v) for v in scope.outputs]
        if any(x is None for x in outs):
            return False
        known |= {v: x for v, x in zip(e.results, outs, strict=True) if x is not None}
    elif e.name in _VALUE_PRESERVING:
        known[e.results[0]] = numbers[0].astype(avals[e.results[0]].dtype)  # pyright: ignore[reportOptionalMemberAccess]
    elif e.name == "select_n" and len(numbers) == 3:
        known[e.results[0]] = np.where(numbers[0].astype(bool), numbers[2], numbers[1])  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType, reportCallIssue]
    elif e.name in _SCALAR_OPS:
        known[e.results[0]] = _SCALAR_OPS[e.name](*numbers)
    else:
        return False
    return True


def _direct_part(
    e: Equation, numbers: Sequence[TripNumbers | None], shapes: Sequence[tuple[int, ...]], trips: int
) -> _OperandPart | None:
    """Return the slice that an equation without a body takes of its first operand.

    Args:
        e: Slice, dynamic slice or gather.
        numbers: Known scalars of the operands; None for the first operand.
        shapes: Shapes of the program's values.
        trips: Number of trips.
    """
    source, others = e.operands[0], [x for x in numbers[1:] if x is not None]
    if source is None or len(others) != len(numbers) - 1:
        return None
    shape = shapes[source]
    if e.name == "slice":
        if set(e.params["strides"] or (1,)) != {1}:
            return None
        starts = [np.full(trips, x) for x in e.params["start_indices"]]
        sizes = [int(b - a[0]) for a, b in zip(starts, e.params["limit_indices"], strict=True)]
    elif e.name == "dynamic_slice":
        sizes = e.params["slice_sizes"]
        # `lax.dynamic_slice` clamps its start indices.
        starts = [
            np.array([min(max(int(i), 0), n - size) for i in x])  # `int`: the dtype may not hold n - size
            for x, n, size in zip(others, shape, sizes, strict=True)
        ]
    elif e.primitive.is_gather and len(e.params["dimension_numbers"].start_index_map) == 1:
        dimension_numbers, sizes = e.params["dimension_numbers"], e.params["slice_sizes"]
        (dim,) = dimension_numbers.start_index_map
        is_supported = (
            dimension_numbers.collapsed_slice_dims in ((), (dim,)) and not dimension_numbers.operand_batching_dims
        )
        # The result of an out-of-bounds index depends on the mode of the gather.
        if not is_supported or np.any(others[0] < 0) or np.any(others[0] > shape[dim] - sizes[dim]):
            return None
        starts = [others[0].astype(int) if d == dim else np.zeros(trips, int) for d in range(len(shape))]
    else:
        return None
    sliced_dims = [d for d, size in enumerate(sizes) if size != shape[d]]
    return (
        _OperandPart(0, sliced_dims[0], starts[sliced_dims[0]], int(sizes[sliced_dims[0]]))
        if len(sliced_dims) == 1
        else None
    )
