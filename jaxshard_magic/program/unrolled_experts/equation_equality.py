"""Equality of equations: primitives, parameters, bodies, and functions among the parameters."""

import functools
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..primitives import WrappedFun, function_parts, is_literal, is_tracing_state, shape_of

_MAX_DEPTH = 12  # levels of nested objects; deeper ones count as different


class EquationComparison:
    """Comparison of equations; each pair of bodies is compared once."""

    def __init__(self) -> None:
        self._compared_bodies: dict[tuple[int, int], tuple[bool, Any, Any]] = {}

    def are_equivalent(self, a: JaxprEqn, b: JaxprEqn) -> bool:
        """Return whether two equations compute the same function of operands of the same shapes and dtypes.

        False for equations with effects. The identity of the operands is not compared.

        Args:
            a: First equation.
            b: Second equation.
        """
        return (
            a.primitive is b.primitive
            and len(a.invars) == len(b.invars)
            and [*map(_shape_and_dtype, a.invars)] == [*map(_shape_and_dtype, b.invars)]
            and [str(v.aval) for v in a.outvars] == [str(v.aval) for v in b.outvars]
            and not a.effects
            and not b.effects
            and a.params.keys() == b.params.keys()
            and all(self._equal_params(x, b.params[key], 0) for key, x in a.params.items())
        )

    def _equal_params(self, a: Any, b: Any, depth: int) -> bool:
        if a is b:
            return True
        if type(a) is not type(b) or depth > _MAX_DEPTH:
            return False
        # Objects that JAX creates at each trace of a function say nothing about what the function does.
        if is_tracing_state(a):
            return True
        if isinstance(a, ClosedJaxpr):
            equal_consts = len(a.consts) == len(b.consts) and all(map(_equal_arrays, a.consts, b.consts))
            return equal_consts and self._equal_bodies(a.jaxpr, b.jaxpr)
        if hasattr(a, "eqns"):
            return self._equal_bodies(a, b)
        if isinstance(a, (tuple, list)):
            return len(a) == len(b) and all(self._equal_params(x, y, depth + 1) for x, y in zip(a, b, strict=True))
        if isinstance(a, (np.ndarray, np.generic)):
            return _equal_arrays(a, b)
        if isinstance(a, FunctionType):
            return self._equal_params(function_parts(a), function_parts(b), depth)
        if isinstance(a, WrappedFun):
            return self._equal_params((a.f, a.transforms, a.params), (b.f, b.transforms, b.params), depth)
        if isinstance(a, MethodType):
            return a.__func__ is b.__func__ and self._equal_params(a.__self__, b.__self__, depth + 1)
        if isinstance(a, functools.partial):
            return self._equal_params(
                (a.func, a.args, [*a.keywords.items()]), (b.func, b.args, [*b.keywords.items()]), depth
            )
        try:
            if isinstance(a, CellType):
                return self._equal_params(a.cell_contents, b.cell_contents, depth)
            return bool(a == b)
        except (TypeError, ValueError):
            return False

    def _equal_bodies(self, a: Any, b: Any) -> bool:
        key = id(a), id(b)
        if key not in self._compared_bodies:
            # The bodies are stored as well: an id is unique only among living objects.
            self._compared_bodies[key] = self._compare_bodies(a, b), a, b
        return self._compared_bodies[key][0]

    def _compare_bodies(self, a: Any, b: Any) -> bool:
        if len(a.eqns) != len(b.eqns) or len(a.invars) != len(b.invars):
            return False
        corresponding = dict(zip((*a.invars, *a.constvars), (*b.invars, *b.constvars), strict=True))

        def same_operand(x: Any, y: Any) -> bool:
            if is_literal(x) or is_literal(y):
                return is_literal(x) and is_literal(y) and str(x.aval) == str(y.aval) and _equal_arrays(x.val, y.val)
            return corresponding.get(x) is y

        for p, q in zip(a.eqns, b.eqns, strict=True):
            if not self.are_equivalent(p, q) or not all(map(same_operand, p.invars, q.invars)):
                return False
            corresponding |= zip(p.outvars, q.outvars, strict=True)
        return len(a.outvars) == len(b.outvars) and all(map(same_operand, a.outvars, b.outvars))


def _shape_and_dtype(v: Any) -> tuple[Any, ...]:
    return shape_of(v), getattr(v.aval, "dtype", None)


def _equal_arrays(a: Any, b: Any) -> bool:
    if a is b:
        return True
    return (
        isinstance(a, (np.ndarray, np.generic, int, float, bool))
        and isinstance(b, (np.ndarray, np.generic, int, float, bool))
        and np.asarray(a).dtype == np.asarray(b).dtype
        and np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(a).dtype.kind == "f")
    )
