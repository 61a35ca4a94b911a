"""What differs between versions of jax in how equations hold their bodies and counts, in one place."""

from collections.abc import Container, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.core import NamedAxisEffect, Trace  # jax has no public names for these
from jax._src.effects import ordered_effects, shardable_ordered_effects
from jax._src.lax.control_flow.conditionals import _switch_internal
from jax._src.linear_util import DebugInfo, EqualStore, Store
from jax._src.linear_util import WrappedFun as WrappedFun
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

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


def is_literal(v: Any) -> TypeGuard[Literal]:
    return isinstance(v, Literal)


def shape_of(v: Any) -> tuple[int, ...]:
    return getattr(v.aval, "shape", ())


def opened(body: Any) -> tuple[Any, tuple]:
    """The jaxpr of a body and the constants it holds."""
    return (body.jaxpr, tuple(body.consts)) if isinstance(body, ClosedJaxpr) else (body, ())


def hoisted(closed: ClosedJaxpr) -> ClosedJaxpr:
    """`closed` with its constants as its first inputs."""
    jaxpr = closed.jaxpr
    if not jaxpr.constvars:
        return closed
    return _replaced(closed, [], constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def without_inputs(closed: ClosedJaxpr, unread: Container[int]) -> ClosedJaxpr:
    """`closed` without some of its inputs, by position, that nothing reads."""
    kept = [v for i, v in enumerate(closed.jaxpr.invars) if i not in unread]
    return _replaced(closed, closed.consts, invars=kept)


def with_outputs(closed: ClosedJaxpr, more: Iterable[Any]) -> ClosedJaxpr:
    """`closed` that gives some of its variables as well, after its outputs."""
    return _replaced(closed, closed.consts, outvars=[*closed.jaxpr.outvars, *more])


def _replaced(closed: ClosedJaxpr, consts: Sequence[Any], **parts: Any) -> ClosedJaxpr:
    """`closed` with other inputs or outputs, which have no names then."""
    debug = closed.jaxpr.debug_info
    if hasattr(debug, "_replace"):
        debug = debug._replace(arg_names=None, result_paths=None)
    return ClosedJaxpr(closed.jaxpr.replace(**parts, debug_info=debug), consts)


def called(eqn: JaxprEqn) -> Any | None:
    """The one body that an equation runs exactly once on its own operands (jit, remat, custom rules)."""
    name = BODIES.get(eqn.primitive.name)
    return eqn.params.get(name) if name else None


def conditional(eqn: JaxprEqn, branches: Sequence[Any], index: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Run one of `branches` as the `cond` that `eqn` is.

    `jax.lax.switch` would clamp `index` once more, and forget which platform a branch is for
    (`jax.lax.platform_dependent`).
    """
    return _switch_internal(
        index, branches, operands, branches_platforms=eqn.params.get("branches_platforms")
    )


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


_OVER_DIMENSIONS = {
    "psum": lax.reduce_sum,
    "psum_invariant": lax.reduce_sum,
    "pmax": lax.reduce_max,
    "pmin": lax.reduce_min,
}


def without_mapped_axes(eqn: JaxprEqn) -> list[JaxprEqn]:
    """Return `eqn`, or the reduction that it is where `jax.vmap` has mapped axes that it reduces over.

    `jax.vmap(axis_name=...)` leaves `psum`, `pmax` and `pmin` in a jaxpr with dimensions, by number, among their axes.
    JAX reduces over those first when it lowers them; axes that a mesh names are left to a collective of its own.
    """
    reduce = _OVER_DIMENSIONS.get(eqn.primitive.name)
    if reduce is None:
        return [eqn]
    axes = eqn.params["axes"]
    dims = tuple(a for a in axes if type(a) is int)
    named = tuple(a for a in axes if type(a) is not int)
    if named and not dims:
        return [eqn]
    (found,) = jax.make_jaxpr(lambda x: reduce(x, dims))(eqn.invars[0].aval).eqns
    out = Var(found.outvars[0].aval) if named else eqn.outvars[0]
    reduction = found.replace(invars=eqn.invars, outvars=[out], source_info=eqn.source_info, ctx=eqn.ctx)
    return (
        [reduction, eqn.replace(invars=[out], params={**eqn.params, "axes": named})] if named else [reduction]
    )


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


def has_checks(of: Any) -> bool:
    """Return whether a jaxpr, or an equation, has a `checkify.check` that nobody has turned into a result yet."""
    return any(
        type(effect).__name__ == "ErrorEffect" for effect in of.effects
    )  # of checkify, which is not loaded


def runs_on_one_device(of: Any) -> bool:
    """Return whether a jaxpr, or an equation, calls Python in an order that jax keeps on one device alone, as
    `jax.debug.print(..., ordered=True)` does."""
    ordered = ordered_effects.filter_in(of.effects)
    return bool(shardable_ordered_effects.filter_not_in(ordered))


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
