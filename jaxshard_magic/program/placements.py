"""Where the step itself says that arrays lie: constraints, puts and `jax.shard_map`, and on which devices."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import AbstractMesh, Mesh

from ..errors import ShardError
from .each_equation import changed as with_changed
from .each_equation import every
from .lines import users_line
from .memory_kinds import MemorySpace, space_of
from .trace import Traced

# Names its operand and does nothing else.
_named = jax.make_jaxpr(lambda x: checkpoint_name(x, "placed by the step"))(0.0).jaxpr.eqns[0]

_OF_EACH = (
    "devices",
    "srcs",
    "copy_semantics",
)  # the parameters of device_put that have an entry for each operand


def kept_to(traced: Traced, mesh: Mesh, *, whole: bool) -> tuple[Traced, tuple[str, ...]]:
    """The step without its own placements on other devices than those of `mesh`, and the lines that these stand at.

    What the step does not say by devices but by the names of axes alone is for any mesh that has them. Between the
    memories of devices and hosts it moves arrays as it says, and the strategy says how they lie in each.
    `whole`: `mesh` is all that the step runs on; False for one rank of a pipeline, of which there are others.

    Raises `ShardError` for a `jax.shard_map` over other devices: what it computes depends on them.
    """
    if not _places(traced):
        return traced, ()
    own = frozenset(mesh.devices.flat) if whole else frozenset()
    left_out: dict[str | None, None] = {}

    def fits(other: Any) -> bool:
        if isinstance(other, AbstractMesh):
            return dict(other.shape) == dict(mesh.shape)
        return other.empty or frozenset(other.devices.flat) == own

    def changed(eqn: JaxprEqn) -> tuple[JaxprEqn, ...]:
        name, params = eqn.primitive.name, eqn.params
        if name == "shard_map" and not fits(params["mesh"]):
            raise ShardError(
                f"the step's jax.shard_map ({users_line(eqn) or 'in a library'}) is over {_told(params['mesh'])}, and "
                f"{'this strategy' if whole else 'a stage of the pipeline'} has {_told(mesh)}: use dp, fsdp or tp on a "
                "mesh of the same devices, or leave shard_map out"
            )
        if name == "sharding_constraint" and not _lies(params["sharding"], fits):
            left_out[users_line(eqn)] = None
            return (eqn.replace(primitive=_named.primitive, params=_named.params),)
        if name == "device_put":
            return tuple(map(put, _one_by_one(eqn)))
        return (eqn,)

    def put(eqn: JaxprEqn) -> JaxprEqn:
        [operand], [at] = eqn.invars, eqn.params["devices"]
        to = _new_space(operand, at) or (at if _lies(at, fits) else None)
        if to is None and at is not None:
            left_out[users_line(eqn)] = None
        return eqn if to is at else eqn.replace(params={**eqn.params, "devices": (to,), "srcs": (None,)})

    jaxpr = with_changed(traced.closed.jaxpr, changed)
    if jaxpr is traced.closed.jaxpr:
        return traced, ()
    lines = tuple(line or "a library's line" for line in left_out)
    return replace(traced, closed=ClosedJaxpr(jaxpr, traced.closed.consts)), lines


def _places(traced: Traced) -> bool:
    """Whether the step places anything itself."""
    known = traced.known
    if "places" not in known:
        names = {eqn.primitive.name for eqn in every(traced.closed.jaxpr)}
        known["places"] = not names.isdisjoint(("shard_map", "sharding_constraint", "device_put"))
    return known["places"]


def _one_by_one(eqn: JaxprEqn) -> list[JaxprEqn]:
    """A `device_put` of several arrays as one of each: a pipeline has each where its own readers are."""
    if len(eqn.invars) == 1:
        return [eqn]
    each = zip(eqn.invars, eqn.outvars, *(eqn.params[key] for key in _OF_EACH), strict=True)
    return [
        eqn.replace(
            invars=[given],
            outvars=[result],
            params={**eqn.params, **{key: (x,) for key, x in zip(_OF_EACH, own, strict=True)}},
        )
        for given, result, *own in each
    ]


def _new_space(v: Any, at: Any) -> MemorySpace | None:
    """The memory that a put moves its operand to, where that is another one; how it lies there is the strategy's."""
    if at is None:
        return None
    space = at if isinstance(at, MemorySpace) else space_of(getattr(at, "memory_kind", None))
    return space if space is not getattr(v.aval, "memory_space", space) else None


def _lies(at: Any, fits: Callable[[Any], bool]) -> bool:
    """Whether a placement is one that a mesh has; None is none, and a memory is on any devices."""
    mesh = getattr(at, "mesh", None)
    return at is None or isinstance(at, MemorySpace) or (mesh is not None and fits(mesh))


def _told(mesh: Mesh | AbstractMesh) -> str:
    axes = " ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"{mesh.size} device{'s' * (mesh.size != 1)} ({axes})"
