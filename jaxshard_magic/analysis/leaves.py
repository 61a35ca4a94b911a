"""The arrays of a planned step as a Report lists them, with exact bytes."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..plan import LeafPlan
from ..program.sizes import array_bytes
from ..report import Leaf, Spec


def leaves(planned: Sequence[LeafPlan], mesh: Mesh) -> tuple[Leaf, ...]:
    """One `Leaf` per planned input, in the same order."""
    return tuple(leaf(plan, mesh) for plan in planned)


def leaf(planned: LeafPlan, mesh: Mesh) -> Leaf:
    """What one planned array is and stores. Raises ValueError where its spec does not divide its shape."""
    held = NamedSharding(mesh, planned.spec).shard_shape(planned.shape)
    return Leaf(
        path=planned.path,
        role=planned.role,
        shape=planned.shape,
        dtype=str(planned.dtype),
        spec=_spec(planned.spec, len(planned.shape)),
        bytes=array_bytes(planned.shape, planned.dtype),
        bytes_per_device=array_bytes(held, planned.dtype),
        why=planned.why,
        wanted=planned.wanted,
        lost=planned.lost,
    )


def _spec(spec: PartitionSpec, rank: int) -> Spec:
    """One entry per dimension: None, one axis, or several."""

    def entry(axes: Any) -> str | tuple[str, ...] | None:
        names = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        return names if len(names) > 1 else names[0] if names else None

    entries = tuple(entry(axes) for axes in spec)
    return entries + (None,) * (rank - len(entries))
