"""Placements written in the step itself (sharding constraints, `device_put`, `jax.shard_map`), and their devices."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ..errors import ShardError
from .ir import Program
from .jaxpr_rewrite import IDENTITY_EQUATION, all_equations, constraint_like
from .jaxpr_rewrite import rewrite_equations as with_changed
from .memory_kinds import MemorySpace, memory_space
from .primitives import shape_of
from .source_lines import user_line
from .trace import Traced

# Parameters of `device_put` with one entry for each operand.
_PER_OPERAND_PARAMS = (
    "devices",
    "srcs",
    "copy_semantics",
)


def drop_foreign_placements(traced: Traced, mesh: Mesh, *, covers_all_devices: bool) -> tuple[Traced, tuple[str, ...]]:
    """Remove a step's placements on devices outside of a mesh.

    A placement by axis names alone (an abstract mesh) stays along the axes that `mesh` has, where they divide the
    array. Moves between device and host memory stay, but the strategy decides on the sharding in each.

    Args:
        traced: Step.
        mesh: Mesh to keep placements on.
        covers_all_devices: The step runs on `mesh` alone. False for a single rank of a pipeline, where no placement
            by devices stays.

    Returns:
        The step, and the source lines of placements that were removed, whole or along some axes.

    Raises:
        ShardError: A `jax.shard_map` is over other devices: its result depends on them.
    """
    if not _has_placements(traced):
        return traced, ()
    mesh_devices = frozenset(mesh.devices.flat) if covers_all_devices else frozenset()
    removed_lines: dict[str | None, None] = {}

    def fits_mesh(other: Any) -> bool:
        # An abstract mesh has no devices to compare.
        if isinstance(other, AbstractMesh):
            return dict(other.shape) == dict(mesh.shape)
        return other.empty or frozenset(other.devices.flat) == mesh_devices

    def without_foreign(eqn: JaxprEqn) -> tuple[JaxprEqn, ...]:
        name, params = eqn.primitive.name, eqn.params
        if name == "shard_map" and not fits_mesh(params["mesh"]):
            raise ShardError(
                f"the step's jax.shard_map ({user_line(eqn) or 'in a library'}) is over "
                f"{_describe_mesh(params['mesh'])}, and "
                f"{'this strategy' if covers_all_devices else 'a stage of the pipeline'} has "
                f"{_describe_mesh(mesh)}: use dp, fsdp or tp on a "
                "mesh of the same devices, or leave shard_map out"
            )
        sharding: Any = params.get("sharding")
        if name == "sharding_constraint" and _is_abstract(sharding) and fits_mesh(sharding.mesh):
            # By devices: a program for one device, as `--check` makes, knows no abstract mesh.
            return (constraint_like(eqn, NamedSharding(mesh, sharding.spec)),)
        if name == "sharding_constraint" and not _is_on_mesh(sharding, fits_mesh):
            spec = _spec_on_mesh(sharding, mesh, shape_of(eqn.invars[0]))
            if _axes_in(spec) != _axes_in(sharding.spec):
                removed_lines[user_line(eqn)] = None
            if _axes_in(spec):
                return (constraint_like(eqn, NamedSharding(mesh, spec)),)
            # Not dropped but replaced by an identity, since later equations read its result.
            return (eqn.replace(primitive=IDENTITY_EQUATION.primitive, params=IDENTITY_EQUATION.params),)
        if name == "device_put":
            return tuple(map(put, _split_device_put(eqn)))
        return (eqn,)

    def put(eqn: JaxprEqn) -> JaxprEqn:
        [operand], [target] = eqn.invars, eqn.params["devices"]
        new_target = _new_memory_space(operand, target) or (target if _is_on_mesh(target, fits_mesh) else None)
        if new_target is None and target is not None:
            removed_lines[user_line(eqn)] = None
        return (
            eqn
            if new_target is target
            else eqn.replace(params={**eqn.params, "devices": (new_target,), "srcs": (None,)})
        )

    jaxpr = with_changed(traced.closed.jaxpr, without_foreign)
    if jaxpr is traced.closed.jaxpr:
        return traced, ()
    lines = tuple(line or "a library's line" for line in removed_lines)
    return replace(traced, closed=ClosedJaxpr(jaxpr, traced.closed.consts)), lines


def _spec_on_mesh(sharding: NamedSharding, mesh: Mesh, shape: Sequence[int]) -> PartitionSpec:
    """Return a spec by axis names with the axes that `mesh` has; dimensions without any are left to the strategy.

    Placements by devices have no names in common with a strategy's mesh, and lose all axes.
    """
    entries = []
    if _is_abstract(sharding):
        for n, entry in zip(shape, sharding.spec, strict=False):
            axes = tuple(axis for axis in _entry_axes(entry) if axis in mesh.shape)
            divides = n % prod(mesh.shape[axis] for axis in axes) == 0
            entries.append(axes if axes and divides else PartitionSpec.UNCONSTRAINED)
    return PartitionSpec(*entries)


def _is_abstract(sharding: Any) -> bool:
    """Return whether a sharding names axes of a mesh and no devices."""
    return isinstance(getattr(sharding, "mesh", None), AbstractMesh)


def _axes_in(spec: Iterable[Any]) -> set[str]:
    """Return the mesh axes in a spec."""
    return {axis for entry in spec for axis in _entry_axes(entry)}


def _entry_axes(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes in an entry of a spec; none in None and `UNCONSTRAINED`."""
    return entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else ()


def placement_axes(program: Program) -> set[str]:
    """Return the mesh axes over which the step itself places arrays, by constraint, `device_put` or `jax.shard_map`."""
    specs = []
    for e in program.equations:
        if e.name == "sharding_constraint":
            specs.append(getattr(e.params["sharding"], "spec", ()))
        elif e.name == "device_put":
            specs += [getattr(at, "spec", ()) for at in e.params["devices"]]
        elif e.name == "shard_map":
            specs += [*e.params["in_specs"], *e.params["out_specs"]]
    return {axis for spec in specs for axis in _axes_in(spec)}


def _has_placements(traced: Traced) -> bool:
    """Return whether the step places anything itself."""
    known = traced.cache
    if "places" not in known:
        names = {eqn.primitive.name for eqn in all_equations(traced.closed.jaxpr)}
        known["places"] = not names.isdisjoint(("shard_map", "sharding_constraint", "device_put"))
    return known["places"]


def _split_device_put(eqn: JaxprEqn) -> list[JaxprEqn]:
    """Split a `device_put` of several arrays."""
    if len(eqn.invars) == 1:
        return [eqn]
    # A pipeline puts each array into the stage that reads it, so arrays of a single put must be separable.
    operands = zip(eqn.invars, eqn.outvars, *(eqn.params[key] for key in _PER_OPERAND_PARAMS), strict=True)
    return [
        eqn.replace(
            invars=[given],
            outvars=[result],
            params={**eqn.params, **{key: (x,) for key, x in zip(_PER_OPERAND_PARAMS, own, strict=True)}},
        )
        for given, result, *own in operands
    ]


def _new_memory_space(v: Any, target: Any) -> MemorySpace | None:
    """Return the memory space to which a put moves its operand; None if unchanged.

    The strategy decides on the sharding there.
    """
    if target is None:
        return None
    space = target if isinstance(target, MemorySpace) else memory_space(getattr(target, "memory_kind", None))
    return space if space is not getattr(v.aval, "memory_space", space) else None


def _is_on_mesh(placement: Any, fits_mesh: Callable[[Any], bool]) -> bool:
    """Return whether a placement is on the mesh; True for none (None), and for a memory space, as on any devices."""
    mesh = getattr(placement, "mesh", None)
    return placement is None or isinstance(placement, MemorySpace) or (mesh is not None and fits_mesh(mesh))


def _describe_mesh(mesh: Mesh | AbstractMesh) -> str:
    """Return a mesh in words: number of devices and axes."""
    axes = " ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"{mesh.size} device{'s' * (mesh.size != 1)} ({axes})"
