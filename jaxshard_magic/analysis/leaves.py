"""The arrays of a planned step as a Report lists them, with exact bytes."""

from collections.abc import Iterable, Sequence

from jax.sharding import Mesh, NamedSharding

from ..plan import LeafPlan
from ..program.sizes import array_bytes
from ..report import Leaf, Spec
from ..report.parts import cut_of


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
        spec=as_spec(cut_of(planned.spec, len(planned.shape))),
        bytes=array_bytes(planned.shape, planned.dtype),
        bytes_per_device=array_bytes(held, planned.dtype),
        why=planned.why,
        wanted=planned.wanted,
        lost=planned.lost,
    )


def as_spec(cut: Iterable[Sequence[str]]) -> Spec:
    """The axes of each dimension as a Leaf has them: None, one axis, or several."""
    return tuple(tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in cut)
