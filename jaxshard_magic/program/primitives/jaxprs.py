"""What differs between versions of jax in how equations hold their bodies and counts, in one place."""

from collections.abc import Mapping
from types import FunctionType
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax._src.core import NamedAxisEffect, Trace  # jax has no public names for these
from jax._src.linear_util import DebugInfo, EqualStore, Store
from jax._src.linear_util import WrappedFun as WrappedFun
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

BODIES = {  # of primitives that run one body exactly once: the parameter that holds it
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def is_literal(v: Any) -> bool:
    return isinstance(v, Literal)


def shape_of(v: Any) -> tuple[int, ...]:
    return getattr(v.aval, "shape", ())


def opened(body: Any) -> tuple[Any, tuple]:
    """The jaxpr of a body and the constants it holds."""
    return (body.jaxpr, tuple(body.consts)) if isinstance(body, ClosedJaxpr) else (body, ())


def called(eqn: JaxprEqn) -> Any | None:
    """The one body that an equation runs exactly once on its own operands (jit, remat, custom rules)."""
    name = BODIES.get(eqn.primitive.name)
    return eqn.params.get(name) if name else None


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a scan are constants and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def axis_names(eqn: JaxprEqn) -> tuple[Any, ...]:
    """The names of mapped axes that a collective runs over; none for other equations, whose axes are numbers."""
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(a for a in (named if isinstance(named, tuple) else (named,)) if type(a) is not int)


def over_axes(eqn: JaxprEqn, axes: Mapping[Any, tuple[str, ...]]) -> JaxprEqn:
    """A collective with the names of mesh axes in the place of its own."""
    key = "axes" if "axes" in eqn.params else "axis_name"
    named = eqn.params[key]
    found = [axes.get(a, (a,)) for a in (named if isinstance(named, tuple) else (named,))]
    return eqn.replace(params=eqn.params | {key: tuple(a for names in found for a in names)})


def bind_as(eqn: JaxprEqn, values: list, dtype: Any) -> list:
    """Run one equation on `values` with its own floats in another type; the results as a list."""
    if (
        eqn.primitive.name == "scatter-add"
    ):  # its parameters hold an addition of the type that it was traced in
        kept = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        return [lax.scatter_add(*values, **{name: eqn.params[name] for name in kept})]
    named = [k for k in ("new_dtype", "preferred_element_type") if is_float(eqn.params.get(k))]
    return bind(eqn.replace(params={**eqn.params, **dict.fromkeys(named, dtype)}), values)


def is_float(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def shows(eqn: JaxprEqn) -> bool:
    """Would it be seen if an equation ran twice? A print or a callback would; that a collective needs its axis is an
    effect to jax, too."""
    return any(not isinstance(effect, NamedAxisEffect) for effect in eqn.effects)


def noted_by_jax(x: Any) -> bool:
    """Is it what jax itself notes while it traces a function, none of what the function does?"""
    return isinstance(x, (Store, EqualStore, DebugInfo, Trace)) or type(x) is object


def made_of(function: FunctionType) -> tuple[Any, ...]:
    """What a function is made of: its code, defaults and what it closes over; of one whose results jax remembers, that
    one alone."""
    closed = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if function.__qualname__ == "_memoize.<locals>.memoized" and "fn" in closed:
        return (closed["fn"],)
    return function.__code__, function.__defaults__, function.__kwdefaults__, (*closed.values(),)


def bind(eqn: JaxprEqn, values: list) -> list:
    """Run one equation on `values`; the results as a list."""
    given = eqn.primitive.get_bind_params(eqn.params)
    subfuns, params = given if isinstance(given, tuple) else ((), given)
    out = eqn.primitive.bind(*subfuns, *values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]
