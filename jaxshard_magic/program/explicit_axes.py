"""Steps written for explicit mesh axes, whose arrays have their sharding in their type: as steps without such types.

JAX checks these types while it traces (`out_sharding=`, `jax.reshard`, `jax.typeof(x).sharding`), so a step is traced
under the mesh it is written for. A strategy decides on layouts itself, often on another mesh. `ExplicitAxes`
therefore rewrites the trace once, right behind tracing: no value has a sharding type, and what the user has written
becomes a sharding constraint over an abstract mesh, as `jax.lax.with_sharding_constraint(x, P(...))` under
`jax.set_mesh` gives. All later analysis knows these.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar

import jax
from jax._src.core import ShapedArray  # untyped in jax.core
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.interpreters.ad import Zero
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .gradient_calls import GradientCall
from .jaxpr_rewrite import IDENTITY_EQUATION, constraint_like
from .memory_kinds import aval_for_tracing
from .primitives import WrappedFun, is_literal, shape_of, wrapped_like
from .thread_state import JaxContexts

# Parameters with the sharding type of an equation's result.
_RESULT_PARAMS = ("out_sharding", "sharding", "dst_sharding")
# Parameters with a derivative rule that JAX traces later.
_RULE_PARAMS = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk")
_UNTYPED_MESH = AbstractMesh((), ())
# Parts of the messages of JAX's errors about explicit axes; most have the class ValueError alone.
_MESSAGES = (
    "cannot contain axis names that are of type Auto",
    "Using PartitionSpec when you are not under a mesh context",
    "should match the aval mesh",
    "should match the mesh of sharding",
    "acts as an assert when all axes of mesh are of type `Explicit`",
    "does not match the specs of the input",
    "Mesh for all inputs should be equal",
)

AnyMesh = Mesh | AbstractMesh
_Traced = TypeVar("_Traced")


def has_explicit_axes(mesh: Any) -> bool:
    """Return whether some axis of a mesh is explicit; False for no mesh."""
    return AxisType.Explicit in (getattr(mesh, "axis_types", None) or ())


def explicit_mesh_in_context() -> Mesh | None:
    """Return the mesh of `jax.set_mesh` in this thread; None without one, or without an explicit axis."""
    mesh = jax.sharding.get_mesh()
    return mesh if has_explicit_axes(mesh) else None


def without_explicit_mesh() -> AbstractContextManager[Any]:
    """Return a context without the caller's mesh if an axis of it is explicit: arrays on a strategy's mesh have other
    axes, and JAX works with them under no mesh alone."""
    return nullcontext() if explicit_mesh_in_context() is None else JaxContexts(partial(jax.set_mesh, None))


def with_explicit_axes(mesh: Mesh) -> Mesh:
    """Return the mesh with all axes explicit."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * len(mesh.axis_names))


def explicit_mesh_of(mesh: Mesh, explicit: AnyMesh | None) -> Mesh | None:
    """Return `mesh` with the axis types of `explicit`; None if the two differ in axes, sizes or devices."""
    if not isinstance(explicit, Mesh) or explicit.axis_names != mesh.axis_names:
        return None
    same_devices = explicit.devices.shape == mesh.devices.shape and (explicit.devices == mesh.devices).all()
    return Mesh(mesh.devices, mesh.axis_names, axis_types=explicit.axis_types) if same_devices else None


def _as_auto(mesh: AnyMesh) -> Any:
    """Return the mesh with its explicit axes as Auto axes; manual axes stay."""
    if not has_explicit_axes(mesh):
        return mesh
    types = tuple(AxisType.Auto if kind is AxisType.Explicit else kind for kind in mesh.axis_types)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    return mesh.update(axis_types=types)


class KeptPlacements(Enum):
    """Choice of the sharding types that become sharding constraints.

    Attributes:
        NONE: None.
        WRITTEN: Those that the user has written, in the forward pass (`out_sharding=`, `jax.reshard`).
        ALL: The type of each result, as JAX lowers a step, so that the layout is the plain step's.
    """

    NONE = auto()
    WRITTEN = auto()
    ALL = auto()


@dataclass(frozen=True)
class ExplicitAxes:
    """Way to trace a step that may be written for explicit mesh axes.

    Attributes:
        mesh: Mesh with explicit axes, of the caller's context or arguments; None without.
        fallback: Mesh whose axes are taken as explicit if the step can't be traced otherwise; None for none.
        kept: Which sharding types are kept as constraints.
    """

    mesh: AnyMesh | None
    fallback: Mesh | None = None
    kept: KeptPlacements = KeptPlacements.WRITTEN

    def trace(
        self,
        trace: Callable[[Sequence[Any]], _Traced],
        avals: Sequence[Any],
        shardings: Sequence[NamedSharding | None],
    ) -> tuple[_Traced, AnyMesh | None]:
        """Return the result of `trace(avals)` under the mesh that the step is written for, and that mesh.

        Args:
            trace: Traces the step for flat avals; called again where JAX refuses the explicit axes.
            avals: Avals of the flat inputs, without sharding types.
            shardings: Sharding of each input, as the caller passes it.
        """
        *attempts, last = self._attempts(avals, shardings)
        for mesh, typed in attempts:
            try:
                with _use_mesh(mesh):
                    return trace(typed), mesh
            except Exception as error:
                if not _is_explicit_axes_error(error):
                    raise
        mesh, typed = last
        with _use_mesh(mesh):
            return trace(typed), mesh

    def untyped(
        self, closed: ClosedJaxpr, consts: Iterable[Any], mesh: AnyMesh | None
    ) -> tuple[ClosedJaxpr, AnyMesh | None]:
        """Return a traced step without sharding types, and the mesh with explicit axes, None if it has none.

        Derivative rules that JAX traces later are traced under that mesh and rewritten then.

        Args:
            closed: The step, as traced.
            consts: Arrays that it closes over, which may have the only types.
            mesh: Mesh that `trace` returned with it.
        """
        shardings = (getattr(x, "sharding", None) for x in consts)
        meshes = (at.mesh for at in shardings if isinstance(at, NamedSharding))
        mesh = mesh or next(filter(has_explicit_axes, meshes), None)
        if mesh is None:
            return closed, None
        return ClosedJaxpr(_Untyped(mesh, self.kept).jaxpr(closed.jaxpr), closed.consts), mesh

    def _attempts(
        self, avals: Sequence[Any], shardings: Sequence[NamedSharding | None]
    ) -> list[tuple[AnyMesh | None, Sequence[Any]]]:
        """Return meshes to trace under, each with avals."""
        if self.mesh is None:
            explicit = [] if self.fallback is None else [(with_explicit_axes(self.fallback), avals)]
            return [(None, avals), *explicit]
        pairs = zip(avals, shardings, strict=True)
        typed = [_typed_aval(x, at) if at is not None and has_explicit_axes(at.mesh) else x for x, at in pairs]
        # A strategy's own layout of the arguments may be one that the step's operations refuse as types.
        untyped = [] if self.kept is KeptPlacements.ALL else [(self.mesh, avals)]
        return [(self.mesh, typed), *untyped]


NO_EXPLICIT_AXES = ExplicitAxes(None)


def _is_explicit_axes_error(error: BaseException | None) -> bool:
    """Return whether JAX refuses an operation because of explicit axes, or for want of them."""
    while error is not None:
        if type(error).__name__ == "ShardingTypeError" or any(text in str(error) for text in _MESSAGES):
            return True
        error = error.__cause__
    return False


def _use_mesh(mesh: AnyMesh | None) -> AbstractContextManager[Any]:
    """Return a context for tracing under a mesh; None leaves the current one."""
    if mesh is None:
        return nullcontext()
    return JaxContexts(partial(jax.set_mesh, mesh)) if isinstance(mesh, Mesh) else _use_abstract_mesh(mesh)


def _use_abstract_mesh(mesh: AbstractMesh) -> AbstractContextManager[Any]:
    """Return a context with a mesh of any size; JAX refuses another size directly inside of a mesh."""
    use = jax.sharding.use_abstract_mesh
    return JaxContexts(partial(use, _UNTYPED_MESH), partial(use, mesh))


def _typed_aval(x: Any, sharding: NamedSharding) -> Any:
    aval, mesh = _shaped(x), sharding.mesh
    entries = (*sharding.spec, *(None,) * (len(aval.shape) - len(sharding.spec)))
    spec = [e if n % _axes_size(mesh, e) == 0 else None for n, e in zip(aval.shape, entries, strict=True)]
    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    return aval.update(sharding=NamedSharding(abstract, PartitionSpec(*spec)))


def _shaped(x: Any) -> Any:
    """Return the aval of a shape, in the memory of the shape."""
    aval = aval_for_tracing(x)
    if isinstance(aval, jax.ShapeDtypeStruct):
        aval = ShapedArray(aval.shape, aval.dtype, weak_type=bool(aval.weak_type))
    return aval


def _axes_size(mesh: AnyMesh, entry: Any) -> int:
    """Return the number of shards that an entry of a spec makes."""
    size = 1
    for axis in entry if isinstance(entry, tuple) else (entry,):
        size *= mesh.shape.get(axis, 1)
    return size


def _is_typed(v: Any) -> bool:
    return _is_global(getattr(_type_of(v), "mesh", None))


def _is_global(mesh: Any) -> bool:
    """Return whether some axis of a mesh is not manual: JAX also makes its own functions' axes Auto for a while."""
    return any(kind is not AxisType.Manual for kind in getattr(mesh, "axis_types", None) or ())


def _type_of(v: Any) -> Any:
    """Return the sharding type of a variable or literal; None without one."""
    return getattr(v.aval, "sharding", None)


class _Untyped:
    """Rewrite of jaxprs of one step; under the mesh of the step, with the types to keep."""

    def __init__(self, mesh: AnyMesh, kept: KeptPlacements):
        self._abstract: AbstractMesh = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
        self._mesh, self._kept = mesh, kept
        self._contexts: dict[int, tuple[Any, Any]] = {}

    def jaxpr(self, jaxpr: Any) -> Any:
        """Return an open jaxpr without sharding types."""
        variables: dict[Any, Any] = {}

        def untyped(v: Any) -> Any:
            if is_literal(v):
                return Literal(v.val, _untyped_aval(v.aval)) if _is_typed(v) else v
            if v not in variables:
                variables[v] = type(v)(_untyped_aval(v.aval)) if _is_typed(v) else v
            return variables[v]

        constants, inputs = list(map(untyped, jaxpr.constvars)), list(map(untyped, jaxpr.invars))
        eqns = [new for eqn in jaxpr.eqns for new in self._equation(eqn, untyped)]
        outputs = list(map(untyped, jaxpr.outvars))
        return jaxpr.replace(constvars=constants, invars=inputs, eqns=eqns, outvars=outputs)

    def _equation(self, eqn: JaxprEqn, untyped: Callable[[Any], Any]) -> list[JaxprEqn]:
        """Return an equation without types, and constraints of its results."""
        targets = [self._constraint(eqn, v) for v in eqn.outvars]
        outvars = list(map(untyped, eqn.outvars))
        results = [v if at is None else Var(v.aval) for v, at in zip(outvars, targets, strict=True)]
        primitive, params = eqn.primitive, self._params(eqn)
        if primitive.name in ("reshard", "mesh_cast"):
            primitive, params = IDENTITY_EQUATION.primitive, IDENTITY_EQUATION.params
        new = eqn.replace(
            primitive=primitive,
            invars=list(map(untyped, eqn.invars)),
            outvars=results,
            params=params,
            ctx=self._context(eqn.ctx),
        )
        constraints = []
        for result, outvar, at in zip(results, outvars, targets, strict=True):
            if at is not None:
                constraints.append(constraint_like(new.replace(invars=[result], outvars=[outvar]), at))
        return [new, *constraints]

    def _constraint(self, eqn: JaxprEqn, v: Any) -> NamedSharding | None:
        """Return the sharding to constrain a result to; None for none."""
        if not _is_typed(v) or not shape_of(v) or type(v) is not Var:
            return None
        sharding = _type_of(v)
        if self._kept is KeptPlacements.NONE or (self._kept is KeptPlacements.WRITTEN and not _is_written(eqn)):
            return None
        mesh = sharding.mesh
        if AxisType.Manual in mesh.axis_types or not has_explicit_axes(mesh):
            return None
        # An Auto axis of a mixed mesh may divide any dimension that has no entry.
        free = PartitionSpec.UNCONSTRAINED if AxisType.Auto in mesh.axis_types else None
        spec = PartitionSpec(*(free if entry is None else entry for entry in sharding.spec))
        return NamedSharding(_as_auto(mesh), spec)

    def _params(self, eqn: JaxprEqn) -> dict[str, Any]:
        params = {key: self._param(value) for key, value in eqn.params.items()}
        if eqn.primitive.name not in ("sharding_constraint", "device_put"):
            params |= dict.fromkeys(params.keys() & set(_RESULT_PARAMS))
        # Without a strategy no mesh comes later, on whose devices a `jax.shard_map` would run.
        if eqn.primitive.name == "shard_map" and self._kept is KeptPlacements.NONE and isinstance(self._mesh, Mesh):
            params["mesh"] = _as_auto(self._mesh)
        if _is_global(eqn.params.get("ctx_mesh")):
            params["ctx_mesh"] = _context_mesh(eqn.params["ctx_mesh"])
        for key in params.keys() & set(_RULE_PARAMS):
            params[key] = self._rule(params[key])
        if eqn.primitive.name == "custom_vjp_call":
            params["bwd"] = self._backward_rule(params["bwd"])
        return params

    def _param(self, value: Any) -> Any:
        """Return a parameter with the jaxprs, meshes, shardings and avals in it without explicit axes."""
        if isinstance(value, ClosedJaxpr):
            return ClosedJaxpr(self.jaxpr(value.jaxpr), value.consts)
        if hasattr(value, "eqns"):
            return self.jaxpr(value)
        if isinstance(value, GradientCall):
            return replace(value, loss=self._param(value.loss))
        if type(value) is tuple:
            return tuple(map(self._param, value))
        if isinstance(value, Mesh | AbstractMesh):
            return _as_auto(value)
        if isinstance(value, NamedSharding) and has_explicit_axes(value.mesh):
            return NamedSharding(_as_auto(value.mesh), value.spec, memory_kind=value.memory_kind)
        return value

    def _context(self, context: Any) -> Any:
        """Return the JAX context of an equation, under a mesh without explicit axes."""
        mesh = context.cur_abstract_mesh
        if not _is_global(mesh):
            return context
        if id(context) not in self._contexts:
            # A context reads JAX's settings of the thread when it is made.
            with context.manager, _use_abstract_mesh(_context_mesh(mesh)):
                self._contexts[id(context)] = context, type(context)()
        return self._contexts[id(context)][1]

    def _rule(self, rule: WrappedFun) -> WrappedFun:
        """Return a rule that JAX asks for a jaxpr later: traced under the explicit mesh then, and rewritten."""

        def untyped(*zeros: bool) -> tuple[Any, ...]:
            with _use_abstract_mesh(self._abstract):
                jaxpr, *rest = rule.call_wrapped(*zeros)
            return self.jaxpr(jaxpr), *rest

        return wrapped_like(untyped, rule)

    def _backward_rule(self, rule: WrappedFun) -> WrappedFun:
        """Return the backward rule of a `jax.custom_vjp`, traced under the explicit mesh and rewritten."""

        def untyped(*residuals_and_cotangents: Any) -> Any:
            arrays, tree = jax.tree.flatten(residuals_and_cotangents)
            leaves: list[Any] = []
            structure: Any = None

            def flat(*xs: Any) -> list[Any]:
                nonlocal structure
                # A list; since jax 0.12 a list beside what the rule logs.
                leaves[:], structure = jax.tree.flatten(rule.call_wrapped(*tree.unflatten(xs)))
                return [x for x in leaves if not isinstance(x, Zero)]

            avals = [jax.typeof(x).update(sharding=None) for x in arrays]
            with _use_abstract_mesh(self._abstract):
                closed = jax.make_jaxpr(flat)(*avals)
            outs = iter(jaxpr_as_fun(ClosedJaxpr(self.jaxpr(closed.jaxpr), closed.consts))(*arrays))
            return structure.unflatten([_untyped_zero(x) if isinstance(x, Zero) else next(outs) for x in leaves])

        return wrapped_like(untyped, rule)


def _untyped_zero(x: Any) -> Any:
    """Return a cotangent of zeros without a sharding type."""
    return Zero(_untyped_aval(x.aval)) if _is_typed(x) else x


def _untyped_aval(aval: Any) -> Any:
    """Return an aval without a sharding over explicit axes; inside of a `jax.shard_map` manual axes stay."""
    sharding = aval.sharding
    mesh = _context_mesh(sharding.mesh)
    if mesh.empty:
        return aval.update(sharding=None)
    return aval.update(sharding=NamedSharding(mesh, PartitionSpec(*(None for _ in aval.shape))))


def _context_mesh(mesh: AnyMesh) -> AbstractMesh:
    """Return the mesh under which a rewritten equation is bound: none, and in a `jax.shard_map` that of its body."""
    if AxisType.Manual not in mesh.axis_types:
        return _UNTYPED_MESH
    return _as_auto(mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh)


def _is_written(eqn: JaxprEqn) -> bool:
    """Return whether the user has written the sharding of an equation's result.

    JAX writes it itself in the backward pass, and for arrays of one number (`jnp.zeros_like(x)`).
    """
    written = next((eqn.params[key] for key in _RESULT_PARAMS if eqn.params.get(key) is not None), None)
    if written is None or eqn.primitive.name in ("sharding_constraint", "convert_element_type", "iota"):
        return False
    if eqn.primitive.name == "broadcast_in_dim" and not shape_of(eqn.invars[0]):
        return False
    return has_explicit_axes(written.mesh) and "transpose" not in str(eqn.source_info.name_stack)
