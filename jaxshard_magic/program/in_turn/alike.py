"""Whether two equations do the same: their primitives, parameters, bodies, and functions among these."""

import functools
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..primitives import WrappedFun, is_literal, made_of, noted_by_jax, shape_of

_DEPTH = 12  # of objects in objects; deeper they are taken for different ones


class Alike:
    """Compares equations, each pair of bodies once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[bool, Any, Any]] = {}  # with what the ids are of

    def equations(self, a: JaxprEqn, b: JaxprEqn) -> bool:
        """Do they make the same of operands of the same shapes and types? Which operands these are is not asked."""
        return (
            a.primitive is b.primitive
            and len(a.invars) == len(b.invars)
            and [*map(_taken, a.invars)] == [*map(_taken, b.invars)]
            and [str(v.aval) for v in a.outvars] == [str(v.aval) for v in b.outvars]
            and not a.effects
            and not b.effects
            and a.params.keys() == b.params.keys()
            and all(self._same(x, b.params[key], 0) for key, x in a.params.items())
        )

    def _same(self, a: Any, b: Any, depth: int) -> bool:
        if a is b:
            return True
        if type(a) is not type(b) or depth > _DEPTH:
            return False
        if noted_by_jax(a):
            return True
        if isinstance(a, ClosedJaxpr):
            consts = len(a.consts) == len(b.consts) and all(map(_equal, a.consts, b.consts))
            return consts and self._bodies(a.jaxpr, b.jaxpr)
        if hasattr(a, "eqns"):
            return self._bodies(a, b)
        if isinstance(a, (tuple, list)):
            return len(a) == len(b) and all(self._same(x, y, depth + 1) for x, y in zip(a, b, strict=True))
        if isinstance(a, (np.ndarray, np.generic)):
            return _equal(a, b)
        if isinstance(a, FunctionType):
            return self._same(made_of(a), made_of(b), depth)
        if isinstance(a, WrappedFun):
            return self._same((a.f, a.transforms, a.params), (b.f, b.transforms, b.params), depth)
        if isinstance(a, MethodType):
            return a.__func__ is b.__func__ and self._same(a.__self__, b.__self__, depth + 1)
        if isinstance(a, functools.partial):
            return self._same(
                (a.func, a.args, [*a.keywords.items()]), (b.func, b.args, [*b.keywords.items()]), depth
            )
        try:
            if isinstance(a, CellType):
                return self._same(a.cell_contents, b.cell_contents, depth)
            return bool(a == b)
        except (TypeError, ValueError):
            return False

    def _bodies(self, a: Any, b: Any) -> bool:
        key = id(a), id(b)
        if key not in self._known:
            self._known[key] = self._compared(a, b), a, b
        return self._known[key][0]

    def _compared(self, a: Any, b: Any) -> bool:
        if len(a.eqns) != len(b.eqns) or len(a.invars) != len(b.invars):
            return False
        named = dict(zip((*a.invars, *a.constvars), (*b.invars, *b.constvars), strict=True))

        def reads(x: Any, y: Any) -> bool:
            if is_literal(x) or is_literal(y):
                return is_literal(x) and is_literal(y) and str(x.aval) == str(y.aval) and _equal(x.val, y.val)
            return named.get(x) is y

        for p, q in zip(a.eqns, b.eqns, strict=True):
            if not self.equations(p, q) or not all(map(reads, p.invars, q.invars)):
                return False
            named |= zip(p.outvars, q.outvars, strict=True)
        return len(a.outvars) == len(b.outvars) and all(map(reads, a.outvars, b.outvars))


def _taken(v: Any) -> tuple[Any, ...]:
    return shape_of(v), getattr(v.aval, "dtype", None)


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    return (
        isinstance(a, (np.ndarray, np.generic, int, float, bool))
        and isinstance(b, (np.ndarray, np.generic, int, float, bool))
        and np.asarray(a).dtype == np.asarray(b).dtype
        and np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(a).dtype.kind == "f")
    )
