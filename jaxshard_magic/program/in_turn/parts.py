"""Which values of a body are one of the equal parts of an array: `w[e]`, `gates[..., e : e + 1]`, `jnp.take(w, e, 0)`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..ir import Equation, Scope, Value
from ..primitives import bind, is_literal
from ..primitives.primitive import Kind

_FOLDED = 16  # numbers; what an index is worked out from is small


@dataclass(frozen=True)
class Part:
    """From `start`, `size` long along `dim` of `source`, and all of its other dimensions."""

    source: Value
    dim: int
    start: int
    size: int


@dataclass(frozen=True)
class _Cut:
    """A part of an operand, by its position."""

    operand: int
    dim: int
    start: int
    size: int


class Parts:
    """The parts that bodies take, with what was worked out for a function that is called again and again."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]):
        self._shapes, self._known = shapes, dict[Any, _Cut | None]()

    def of(self, scope: Scope) -> dict[Value, Part]:
        """The values of a body that are parts, but for their dimensions of size 1."""
        found: dict[Value, Part] = {}
        for e in scope.equations:
            for v, cut in self._taken(e):
                source = e.ins[cut.operand]
                if source is not None:
                    found[v] = Part(source, cut.dim, cut.start, cut.size)
        return found

    def _taken(self, e: Equation) -> Iterator[tuple[Value, _Cut]]:
        if e.name in ("split", "unstack"):
            dim, start = e.params["axis"], 0
            for v, size in zip(e.outs, e.params.get("sizes", (1,) * len(e.outs)), strict=True):
                yield v, _Cut(0, dim, start, int(size))
                start += int(size)
        elif e.primitive.kind in (Kind.CUT, Kind.LOOKUP) or e.name in ("jit", "pjit"):
            if len(e.outs) == 1 and (cut := self._cut(e)) is not None:
                yield e.outs[0], cut

    def _cut(self, e: Equation) -> _Cut | None:
        numbers = [var.val if is_literal(var) else None for var in e.eqn.invars]  # pyright: ignore[reportAttributeAccessIssue]
        if sum(x is None for x in numbers) != 1:
            return None
        if not e.doors:
            return _direct(e, numbers, self._shapes)
        body = e.params["jaxpr"]
        key = id(body), *(None if x is None else (str(np.asarray(x).dtype), np.asarray(x).item()) for x in numbers)
        if key not in self._known:
            self._known[key] = self._inside(e, numbers)
        return self._known[key]

    def _inside(self, e: Equation, numbers: list[Any]) -> _Cut | None:
        """What the function that `e` calls takes of its one array."""
        scope, operand = e.doors[0].scope, numbers.index(None)
        known = {v: x for v, x in zip(scope.ins, numbers, strict=True) if x is not None}
        known |= dict(zip(scope.const_values, scope.consts, strict=True))
        forms: dict[Value, _Cut | None] = {scope.ins[operand]: None}  # the array, whole or cut
        for inner in scope.equations:
            if _fold(inner, known):
                continue
            first = inner.ins[0] if inner.ins else None
            if first not in forms or len(inner.outs) != 1:
                return None
            if inner.name in ("squeeze", "reshape"):
                if not _same_but_for_ones(self._shapes[first], self._shapes[inner.outs[0]]):
                    return None
                cut = forms[first]
            else:
                values = [_number(inner, k, known) for k in range(len(inner.ins))]
                cut = _direct(inner, [None, *values[1:]], self._shapes) if forms[first] is None else None
                if cut is None:
                    return None
            forms[inner.outs[0]] = cut
        cut = forms.get(scope.outs[0]) if scope.outs[0] is not None else None
        return cut and _Cut(operand, cut.dim, cut.start, cut.size)


def _same_but_for_ones(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return [n for n in a if n > 1] == [n for n in b if n > 1]


def _number(e: Equation, k: int, known: Mapping[Value, Any]) -> Any:
    v, var = e.ins[k], e.eqn.invars[k]
    return var.val if v is None else known.get(v)  # pyright: ignore[reportAttributeAccessIssue]


def _fold(e: Equation, known: dict[Value, Any]) -> bool:
    """Work out an equation of known numbers."""
    values = [_number(e, k, known) for k in range(len(e.ins))]
    if any(x is None for x in values) or e.eqn.effects:
        return False
    if any(np.prod(getattr(v.aval, "shape", ()), dtype=int) > _FOLDED for v in e.eqn.outvars):
        return False
    with jax.ensure_compile_time_eval():
        known.update(zip(e.outs, bind(e.eqn, values), strict=True))
    return True


def _direct(e: Equation, numbers: list[Any], shapes: Sequence[tuple[int, ...]]) -> _Cut | None:
    """What an equation without a body takes of its first operand; `numbers`: the others."""
    source = e.ins[0]
    if source is None or any(x is None for x in numbers[1:]):
        return None
    shape = shapes[source]
    if e.name == "slice":
        if set(e.params["strides"] or (1,)) != {1}:
            return None
        starts = e.params["start_indices"]
        sizes = [b - a for a, b in zip(starts, e.params["limit_indices"], strict=True)]
    elif e.name == "dynamic_slice":
        sizes = e.params["slice_sizes"]
        limits = [n - size for n, size in zip(shape, sizes, strict=True)]
        starts = [min(max(int(x), 0), m) for x, m in zip(numbers[1:], limits, strict=True)]
    elif e.name == "gather":
        how, sizes = e.params["dimension_numbers"], e.params["slice_sizes"]
        index = np.asarray(numbers[1])
        if len(how.start_index_map) != 1 or how.operand_batching_dims or index.size != 1:
            return None
        (dim,), start = how.start_index_map, int(index.item())
        if how.collapsed_slice_dims not in ((), (dim,)) or not 0 <= start <= shape[dim] - sizes[dim]:
            return None
        starts = [start if d == dim else 0 for d in range(len(shape))]
    else:
        return None
    cut = [d for d, size in enumerate(sizes) if size != shape[d]]
    return _Cut(0, cut[0], int(starts[cut[0]]), int(sizes[cut[0]])) if len(cut) == 1 else None
