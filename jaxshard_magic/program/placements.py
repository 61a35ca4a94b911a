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
from .trace import Traced

# Names its operand and does nothing else.
_named = jax.make_jaxpr(lambda x: checkpoint_name(x, "placed by the step"))(0.0).jaxpr.eqns[0]


def kept_to(traced: Traced, mesh: Mesh, *, whole: bool) -> tuple[Traced, tuple[str, ...]]:
    """The step without its own placements on other devices than those of `mesh`, and the lines that these stand at.

    What the step does not say by devices but by the names of axes alone is for any mesh that has them. `whole`: `mesh`
    is all that the step runs on; False for one rank of a pipeline, of which there are others.

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

    def changed(eqn: JaxprEqn) -> JaxprEqn:
        name, params = eqn.primitive.name, eqn.params
        if name == "shard_map" and not fits(params["mesh"]):
            raise ShardError(
                f"the step's jax.shard_map ({users_line(eqn) or 'in a library'}) is over {_told(params['mesh'])}, and "
                f"{'this strategy' if whole else 'a stage of the pipeline'} has {_told(mesh)}: use dp, fsdp or tp on a "
                "mesh of the same devices, or leave shard_map out"
            )
        if name == "sharding_constraint" and not _lies(params["sharding"], fits):
            left_out[users_line(eqn)] = None
            return eqn.replace(primitive=_named.primitive, params=_named.params)
        if name == "device_put" and not all(_lies(at, fits) for at in params["devices"]):
            left_out[users_line(eqn)] = None
            nowhere = (None,) * len(params["devices"])
            return eqn.replace(params={**params, "devices": nowhere, "srcs": nowhere})
        return eqn

    jaxpr = with_changed(traced.closed.jaxpr, changed)
    if not left_out:
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


def _lies(at: Any, fits: Callable[[Any], bool]) -> bool:
    """Whether a placement is one that a mesh has; None is none."""
    mesh = getattr(at, "mesh", None)
    return at is None or (mesh is not None and fits(mesh))


def _told(mesh: Mesh | AbstractMesh) -> str:
    axes = " ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"{mesh.size} device{'s' * (mesh.size != 1)} ({axes})"
