"""List the input arrays of a planned step as rows of a report, with exact bytes."""

from collections.abc import Iterable, Sequence

from jax.sharding import Mesh, NamedSharding

from ..compilation.compiled_step import CompiledStep
from ..plan import LeafPlan
from ..program.memory_kinds import HOST_KINDS
from ..program.sizes import array_bytes
from ..report import Leaf, Spec
from ..report.parts import dim_axes
from ..targets import target_of


def leaves(planned: Sequence[LeafPlan], mesh: Mesh) -> tuple[Leaf, ...]:
    """Return one row for each planned input, in the same order."""
    return tuple(leaf(plan, mesh) for plan in planned)


def leaf(planned: LeafPlan, mesh: Mesh) -> Leaf:
    """Return the description of one planned array, with the bytes stored on a device: 0 for an array on the host.

    Args:
        planned: Planned array.
        mesh: Mesh of the plan.

    Raises:
        ValueError: The spec does not divide the shape.
    """
    held = NamedSharding(mesh, planned.spec).shard_shape(planned.shape)
    on_host = planned.memory is not None
    return Leaf(
        path=planned.path,
        role=planned.role,
        shape=planned.shape,
        dtype=str(planned.dtype),
        spec=as_spec(dim_axes(planned.spec, len(planned.shape))),
        bytes=array_bytes(planned.shape, planned.dtype),
        bytes_per_device=0 if on_host else array_bytes(held, planned.dtype),
        why=with_memory_kind(planned.reason, planned.memory),
        wanted=planned.unsharded_axes,
        lost=planned.replicated_bytes,
    )


def with_memory_kind(why: str, memory: str | None) -> str:
    """Return the reason for a spec, with the memory kind appended for an array on the host."""
    return why if memory is None else f"{why}; in {memory} memory"


def host_bytes(entry: CompiledStep, inputs: Sequence[int]) -> int:
    """Return the bytes per device of inputs and outputs on the host that XLA counts as device memory.

    Args:
        entry: Compiled step.
        inputs: Positions of the inputs read by the program.

    Returns:
        0 except for XLA's CPU compiler. Donated inputs share the memory of an output and are not counted again.
    """
    plan, first = entry.plan, len(entry.consts)
    if plan.mesh.devices.flat[0].platform != "cpu" or target_of(plan.mesh) is not None:
        # XLA's CPU compiler has one memory for host and device (jaxlib 0.10 to 0.12); other compilers count the two
        # separately.
        return 0
    donated = {first + i for i in entry.donated}
    given = zip(entry.traced.closed.in_avals, plan.in_shardings, strict=True)
    arrays = [x for i, x in enumerate(given) if i in inputs and i not in donated]
    arrays += zip(entry.traced.closed.out_avals, plan.out_shardings, strict=True)
    return sum(
        array_bytes(at.shard_shape(aval.shape), aval.dtype) for aval, at in arrays if at.memory_kind in HOST_KINDS
    )


def as_spec(cut: Iterable[Sequence[str]]) -> Spec:
    """Return the axes of each dimension as stored in a report: None, one axis, or several."""
    return tuple(tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in cut)
