"""Which values of a body are one of the equal parts of an array: `w[e]`, `gates[..., e : e + 1]`, `jnp.take(w, e, 0)`,
where `e` is a number, or counts the trips of a loop."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..ir import Equation, Program, Scope, Value
from ..primitives import is_literal
from ..primitives.primitive import Kind

Numbers = np.ndarray  # a whole number or truth value of the program, in each trip, in its own type

# What indices are made with, trip by trip; what no longer fits into its type goes round as in the step.
_SCALAR = {
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
_SAME = (
    "convert_element_type",
    "broadcast_in_dim",
    "reshape",
    "squeeze",
    "expand_dims",
    "copy",
    "stop_gradient",
)


@dataclass(frozen=True)
class Part:
    """From `start`, `size` long along `dim` of `source`, and all of its other dimensions."""

    source: Value
    dim: int
    start: int
    size: int


@dataclass(frozen=True, eq=False)
class _Cut:
    """A part of an operand, by its position; `starts` in each trip."""

    operand: int
    dim: int
    starts: Numbers
    size: int


class Parts:
    """The parts that bodies take, with what was worked out for a function that is called again and again."""

    def __init__(self, program: Program):
        self._avals, self._shapes = program.avals, program.shapes
        self._known = dict[Any, tuple[_Cut | None, Any]]()

    def of(self, scope: Scope) -> dict[Value, Part]:
        """The values of a body that are parts, but for their dimensions of size 1."""
        return {v: Part(w, cut.dim, int(cut.starts[0]), cut.size) for v, w, cut in self._all(scope, {}, 1)}

    def by_trip(self, scope: Scope, counters: Sequence[Value], trips: int) -> dict[Value, Part]:
        """The values of a loop's body that are, in each trip, the next part; `counters`: what counts the trips from 0
        on. Each with its first."""
        found: dict[Value, Part] = {}
        known = {v: np.arange(trips).astype(self._avals[v].dtype) for v in counters}
        for v, source, cut in self._all(scope, known, trips):
            if np.array_equal(cut.starts, np.arange(trips) * cut.size):
                found[v] = Part(source, cut.dim, 0, cut.size)
        return found

    def _all(
        self, scope: Scope, known: dict[Value, Numbers], trips: int
    ) -> Iterator[tuple[Value, Value, _Cut]]:
        for e in scope.equations:
            if e.name in ("split", "unstack") and e.ins[0] is not None:
                start, sizes = 0, e.params.get("sizes", (1,) * len(e.outs))
                for v, size in zip(e.outs, map(int, sizes), strict=True):
                    yield v, e.ins[0], _Cut(0, e.params["axis"], np.full(trips, start), size)
                    start += size
            elif not _fold(e, known, self._avals, trips) and len(e.outs) == 1:
                cut = self._cut(e, known, trips)
                source = None if cut is None else e.ins[cut.operand]
                if cut is not None and source is not None:
                    yield e.outs[0], source, cut

    def _cut(self, e: Equation, known: Mapping[Value, Numbers], trips: int) -> _Cut | None:
        if not (e.primitive.kind in (Kind.CUT, Kind.LOOKUP) or e.name in ("jit", "pjit")):
            return None
        numbers = [_number(e, k, known, trips) for k in range(len(e.ins))]
        if sum(x is None for x in numbers) != 1:
            return None
        if not e.doors:
            return _direct(e, numbers, self._shapes, trips)
        body = e.params["jaxpr"]
        key = id(body), trips, *(None if x is None else (x.dtype, x.tobytes()) for x in numbers)
        if key not in self._known:
            self._known[key] = self._inside(e, numbers, trips), body
        return self._known[key][0]

    def _inside(self, e: Equation, numbers: list[Numbers | None], trips: int) -> _Cut | None:
        """What the function that `e` calls takes of its one array."""
        scope, operand = e.doors[0].scope, numbers.index(None)
        known = {v: x for v, x in zip(scope.ins, numbers, strict=True) if x is not None}
        forms: dict[Value | None, _Cut | None] = {scope.ins[operand]: None}  # the array, whole or cut
        for inner in scope.equations:
            if _fold(inner, known, self._avals, trips):
                continue
            first = inner.ins[0] if inner.ins else None
            if first is None or first not in forms or len(inner.outs) != 1:
                return None
            cut = forms[first]
            if inner.name in ("squeeze", "reshape"):
                if not _same_but_for_ones(self._shapes[first], self._shapes[inner.outs[0]]):
                    return None
            elif cut is None:
                values = [None, *(_number(inner, k, known, trips) for k in range(1, len(inner.ins)))]
                cut = _direct(inner, values, self._shapes, trips)
            else:
                return None
            if cut is None and inner.name not in ("squeeze", "reshape"):
                return None
            forms[inner.outs[0]] = cut
        cut = forms.get(scope.outs[0])
        return cut and _Cut(operand, cut.dim, cut.starts, cut.size)


def _same_but_for_ones(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return [n for n in a if n > 1] == [n for n in b if n > 1]


def _number(e: Equation, k: int, known: Mapping[Value, Numbers], trips: int) -> Numbers | None:
    v, var = e.ins[k], e.eqn.invars[k]
    if v is not None:
        return known.get(v)
    if not is_literal(var) or not _is_index(var.aval):
        return None
    return np.full(trips, np.asarray(var.val).item()).astype(var.aval.dtype)  # pyright: ignore[reportAttributeAccessIssue]


def _is_index(aval: Any) -> bool:
    """Is it one whole number, or one truth value?"""
    dtype: Any = getattr(aval, "dtype", None)
    return (dtype == np.bool_ or jnp.issubdtype(dtype, jnp.integer)) and prod(aval.shape) == 1


def _fold(e: Equation, known: dict[Value, Numbers], avals: Sequence[Any], trips: int) -> bool:
    """Work out an equation of known scalars."""
    if not e.ins or any(v is not None and v not in known for v in e.ins):
        return False
    numbers = [_number(e, k, known, trips) for k in range(len(e.ins))]
    if any(x is None for x in numbers) or not all(_is_index(avals[v]) for v in e.outs):
        return False
    if e.name in ("jit", "pjit"):
        scope = e.doors[0].scope
        known |= {v: x for v, x in zip(scope.ins, numbers, strict=True) if x is not None}
        if not all(_fold(inner, known, avals, trips) for inner in scope.equations):
            return False
        outs = [None if v is None else known.get(v) for v in scope.outs]
        if any(x is None for x in outs):
            return False
        known |= {v: x for v, x in zip(e.outs, outs, strict=True) if x is not None}
    elif e.name in _SAME:
        known[e.outs[0]] = numbers[0].astype(avals[e.outs[0]].dtype)  # pyright: ignore[reportOptionalMemberAccess]
    elif e.name == "select_n" and len(numbers) == 3:
        known[e.outs[0]] = np.where(numbers[0].astype(bool), numbers[2], numbers[1])  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType, reportCallIssue]
    elif e.name in _SCALAR:
        known[e.outs[0]] = _SCALAR[e.name](*numbers)
    else:
        return False
    return True


def _direct(
    e: Equation, numbers: Sequence[Numbers | None], shapes: Sequence[tuple[int, ...]], trips: int
) -> _Cut | None:
    """What an equation without a body takes of its first operand; `numbers`: the others."""
    source, others = e.ins[0], [x for x in numbers[1:] if x is not None]
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
        starts = [
            np.array([min(max(int(i), 0), n - size) for i in x])  # which may have no such numbers
            for x, n, size in zip(others, shape, sizes, strict=True)
        ]
    elif e.primitive.gathers and len(e.params["dimension_numbers"].start_index_map) == 1:
        how, sizes = e.params["dimension_numbers"], e.params["slice_sizes"]
        (dim,) = how.start_index_map
        known = how.collapsed_slice_dims in ((), (dim,)) and not how.operand_batching_dims
        if not known or np.any(others[0] < 0) or np.any(others[0] > shape[dim] - sizes[dim]):
            return None
        starts = [others[0].astype(int) if d == dim else np.zeros(trips, int) for d in range(len(shape))]
    else:
        return None
    cut = [d for d, size in enumerate(sizes) if size != shape[d]]
    return _Cut(0, cut[0], starts[cut[0]], int(sizes[cut[0]])) if len(cut) == 1 else None
