"""The arrays of a planned step as a Report lists them, with exact bytes."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jax.sharding import Mesh, NamedSharding

from ..plan import LeafPlan
from ..program.memory_kinds import HOST_KINDS
from ..program.sizes import array_bytes
from ..report import Leaf, Spec
from ..report.parts import cut_of
from ..targets import target_of

if TYPE_CHECKING:
    from ..step import Entry


def leaves(planned: Sequence[LeafPlan], mesh: Mesh) -> tuple[Leaf, ...]:
    """One `Leaf` per planned input, in the same order."""
    return tuple(leaf(plan, mesh) for plan in planned)


def leaf(planned: LeafPlan, mesh: Mesh) -> Leaf:
    """What one planned array is, and what a device stores of it: 0 bytes where it lies on the host.

    Raises ValueError where its spec does not divide its shape.
    """
    held = NamedSharding(mesh, planned.spec).shard_shape(planned.shape)
    on_host = planned.memory is not None
    return Leaf(
        path=planned.path,
        role=planned.role,
        shape=planned.shape,
        dtype=str(planned.dtype),
        spec=as_spec(cut_of(planned.spec, len(planned.shape))),
        bytes=array_bytes(planned.shape, planned.dtype),
        bytes_per_device=0 if on_host else array_bytes(held, planned.dtype),
        why=with_memory(planned.why, planned.memory),
        wanted=planned.wanted,
        lost=planned.lost,
    )


def with_memory(why: str, memory: str | None) -> str:
    """The reason why an array lies as it does, with its memory kind where it is on the host."""
    return why if memory is None else f"{why}; in {memory} memory"


def host_bytes(entry: "Entry", inputs: Sequence[int]) -> int:
    """Bytes per device of inputs and outputs on the host that XLA's figures count as the device's.

    Its CPU compiler has one memory for both (jaxlib 0.10 to 0.12), others count them apart: 0. `inputs` are those that
    the program reads; a donated one has the memory of an output.
    """
    plan, first = entry.plan, len(entry.consts)
    if plan.mesh.devices.flat[0].platform != "cpu" or target_of(plan.mesh) is not None:
        return 0
    donated = {first + i for i in entry.donated}
    given = zip(entry.traced.closed.in_avals, plan.in_shardings, strict=True)
    arrays = [x for i, x in enumerate(given) if i in inputs and i not in donated]
    arrays += zip(entry.traced.closed.out_avals, plan.out_shardings, strict=True)
    return sum(
        array_bytes(at.shard_shape(aval.shape), aval.dtype)
        for aval, at in arrays
        if at.memory_kind in HOST_KINDS
    )


def as_spec(cut: Iterable[Sequence[str]]) -> Spec:
    """The axes of each dimension as a Leaf has them: None, one axis, or several."""
    return tuple(tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in cut)
