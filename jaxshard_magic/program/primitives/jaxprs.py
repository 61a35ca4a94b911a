"""Access to jaxprs and equations that hides differences between JAX versions.

JAX offers no public names for several of the internals used here.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.core import NamedAxisEffect, Trace  # jax has no public names for these
from jax._src.effects import ordered_effects, shardable_ordered_effects
from jax._src.lax.control_flow.conditionals import _switch_internal
from jax._src.linear_util import DebugInfo, EqualStore, Store, wrap_init
from jax._src.linear_util import WrappedFun as WrappedFun
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

BODY_PARAMS = {  # parameter with the body, for primitives that run one body exactly once
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


def is_literal(v: Any) -> TypeGuard[Literal]:
    """Return whether an operand is a literal, as opposed to a variable."""
    return isinstance(v, Literal)


def shape_of(v: Any) -> tuple[int, ...]:
    """Return the shape of a variable or literal; `()` for avals without a shape."""
    return getattr(v.aval, "shape", ())


def wrapped_like(fun: Callable[..., Any], other: WrappedFun) -> WrappedFun:
    """Return a function as JAX keeps one in the parameters of an equation, in the place of `other`."""
    return wrap_init(fun, debug_info=other.debug_info)


def open_jaxpr(body: Any) -> tuple[Any, tuple]:
    """Return the jaxpr of a body and the constants that it holds."""
    return (body.jaxpr, tuple(body.consts)) if isinstance(body, ClosedJaxpr) else (body, ())


def hoist_constants(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return `closed` with its constants as first inputs."""
    jaxpr = closed.jaxpr
    if not jaxpr.constvars:
        return closed
    return _replace_jaxpr(closed, [], constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def without_inputs(closed: ClosedJaxpr, unread: Container[int]) -> ClosedJaxpr:
    """Return `closed` without some inputs.

    Args:
        closed: Jaxpr to change.
        unread: Positions of the inputs to drop; nothing may read them.
    """
    remaining = [v for i, v in enumerate(closed.jaxpr.invars) if i not in unread]
    return _replace_jaxpr(closed, closed.consts, invars=remaining)


def with_outputs(closed: ClosedJaxpr, extra: Iterable[Any]) -> ClosedJaxpr:
    """Return `closed` with further outputs.

    Args:
        closed: Jaxpr to change.
        extra: Variables to append to its outputs.
    """
    return _replace_jaxpr(closed, closed.consts, outvars=[*closed.jaxpr.outvars, *extra])


def _replace_jaxpr(closed: ClosedJaxpr, consts: Sequence[Any], **parts: Any) -> ClosedJaxpr:
    """Return `closed` with other inputs or outputs, without debug names."""
    debug = closed.jaxpr.debug_info
    # Debug info names every input and output: its names no longer match.
    if hasattr(debug, "_replace"):
        debug = debug._replace(arg_names=None, result_paths=None)
    return ClosedJaxpr(closed.jaxpr.replace(**parts, debug_info=debug), consts)


def called_body(eqn: JaxprEqn) -> Any | None:
    """Return the body that an equation runs exactly once on its own operands (jit, remat, custom rules), else None."""
    name = BODY_PARAMS.get(eqn.primitive.name)
    return eqn.params.get(name) if name else None


def bind_cond(eqn: JaxprEqn, branches: Sequence[Any], index: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Run one of `branches` in place of the `cond` equation `eqn`.

    Args:
        eqn: The equation to follow.
        branches: A function for each branch.
        index: Index of the branch.
        operands: Operands of the branch.
    """
    # `jax.lax.switch` would clamp `index` once more, and forget the platform of each branch
    # (`jax.lax.platform_dependent`).
    return _switch_internal(index, branches, operands, branches_platforms=eqn.params.get("branches_platforms"))


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and of carries among a scan's operands.

    Args:
        params: Parameters of the scan.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # Some JAX versions describe the operands by one flat tree instead of counts.
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def axis_names(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Return the names of the mapped axes of a collective; none for other equations, whose axes are numbers."""
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(a for a in (named if isinstance(named, tuple) else (named,)) if type(a) is not int)


_OVER_DIMENSIONS = {
    "psum": lax.reduce_sum,
    "psum_invariant": lax.reduce_sum,
    "pmax": lax.reduce_max,
    "pmin": lax.reduce_min,
}


def reduce_mapped_axes(eqn: JaxprEqn) -> list[JaxprEqn]:
    """Return `eqn`, or the reduction over dimensions that it is after `jax.vmap` mapped its axes.

    `jax.vmap(axis_name=...)` leaves `psum`, `pmax` and `pmin` in a jaxpr with dimensions, by number, among their axes.
    JAX reduces over those when it lowers them. Axes named by a mesh are left to a collective of its own.

    Returns:
        The reduction, the collective, or the reduction followed by the collective.
    """
    reduce = _OVER_DIMENSIONS.get(eqn.primitive.name)
    if reduce is None:
        return [eqn]
    axes = eqn.params["axes"]
    dims = tuple(a for a in axes if type(a) is int)
    named = tuple(a for a in axes if type(a) is not int)
    if named and not dims:
        return [eqn]
    (traced,) = jax.make_jaxpr(lambda x: reduce(x, dims))(eqn.invars[0].aval).eqns
    out = Var(traced.outvars[0].aval) if named else eqn.outvars[0]
    reduction = traced.replace(invars=eqn.invars, outvars=[out], source_info=eqn.source_info, ctx=eqn.ctx)
    return [reduction, eqn.replace(invars=[out], params={**eqn.params, "axes": named})] if named else [reduction]


def rename_axes(eqn: JaxprEqn, axes: Mapping[Any, tuple[str, ...]]) -> JaxprEqn:
    """Return a collective with the mesh axes of `axes` in place of its own axis names.

    Args:
        eqn: The collective.
        axes: Mesh axes for each axis name; names without an entry stay.
    """
    key = "axes" if "axes" in eqn.params else "axis_name"
    named = eqn.params[key]
    mesh_axes = [axes.get(a, (a,)) for a in (named if isinstance(named, tuple) else (named,))]
    return eqn.replace(params=eqn.params | {key: tuple(a for names in mesh_axes for a in names)})


def bind_with_dtype(eqn: JaxprEqn, values: list, dtype: Any) -> list:
    """Run one equation on `values` with its own floats in another dtype, and return the results as a list.

    Args:
        eqn: The equation.
        values: Its operands.
        dtype: Floating-point dtype to use for dtypes in its parameters.
    """
    if eqn.primitive.name == "scatter-add":  # its parameters include an addition traced in the old dtype
        copied_params = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        return [lax.scatter_add(*values, **{name: eqn.params[name] for name in copied_params})]
    dtype_params = [k for k in ("new_dtype", "preferred_element_type") if is_float(eqn.params.get(k))]
    return bind(eqn.replace(params={**eqn.params, **dict.fromkeys(dtype_params, dtype)}), values)


def is_float(dtype: Any) -> bool:
    """Return whether `dtype` is a floating-point dtype; False for None."""
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def has_visible_effects(eqn: JaxprEqn) -> bool:
    """Return whether running an equation twice would be visible, as of a print or a callback."""
    # JAX also counts it as an effect that a collective needs its named axis.
    return any(not isinstance(effect, NamedAxisEffect) for effect in eqn.effects)


def has_unresolved_checks(of: Any) -> bool:
    """Return whether a jaxpr, or an equation, has a `checkify.check` not yet turned into a result."""
    return any(
        # By name, so that checkify need not be loaded.
        type(effect).__name__ == "ErrorEffect"
        for effect in of.effects
    )


def has_single_device_effects(of: Any) -> bool:
    """Return whether a jaxpr, or an equation, calls Python in an order that JAX keeps on one device alone.

    Example: `jax.debug.print(..., ordered=True)`.
    """
    ordered = ordered_effects.filter_in(of.effects)
    return bool(shardable_ordered_effects.filter_not_in(ordered))


def is_tracing_state(x: Any) -> bool:
    """Return whether `x` is bookkeeping of a trace, and none of what the traced function does."""
    return isinstance(x, (Store, EqualStore, DebugInfo, Trace)) or type(x) is object


def function_parts(function: FunctionType) -> tuple[Any, ...]:
    """Return what a function is made of: its code, its defaults and its closure."""
    closed = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    # JAX wraps functions to memoise their results; only the wrapped function counts.
    if function.__qualname__ == "_memoize.<locals>.memoized" and "fn" in closed:
        return (closed["fn"],)
    return function.__code__, function.__defaults__, function.__kwdefaults__, (*closed.values(),)


def bind(eqn: JaxprEqn, values: list) -> list:
    """Run one equation on `values` and return the results as a list."""
    given = eqn.primitive.get_bind_params(eqn.params)
    subfuns, params = given if isinstance(given, tuple) else ((), given)
    out = eqn.primitive.bind(*subfuns, *values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]
