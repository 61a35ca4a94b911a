"""Resolution of a step's axis names, as in `jax.lax.pmean(x, "batch")`, to mesh axes."""

from collections.abc import Sequence
from typing import NoReturn

from jax.sharding import Mesh

from ..config.strategies import job_of
from ..config.strategy_text import batch_axes
from ..errors import ShardError, list_names
from ..program.per_device import AxisName
from .layout import Axes


def mesh_axes(
    step: str, names: Sequence[AxisName], mesh: Mesh, pmap_axes: Axes = ()
) -> tuple[dict[AxisName, Axes], tuple[AxisName, ...]]:
    """Return the mesh axes behind each axis name of a step, and the names over which arrays are split.

    A name equal to a mesh axis means that axis. At most one other name is allowed, for all of `pmap_axes`, or by
    default for the batch axes of the mesh. A step without axis names is split over the same axes.

    Args:
        step: Name of the step, for messages.
        names: Axis names in the step's collectives.
        mesh: The mesh.
        pmap_axes: Mesh axes given after `pmap@`; empty for the batch axes.

    Returns:
        The mesh axes by name, and the names to split over in the order of the mesh.

    Raises:
        ShardError: The mesh has no axis for a name, or none for the batch.
    """
    axes_by_name: dict[AxisName, Axes] = {n: (str(n),) for n in names if n in mesh.axis_names}
    unmatched = [n for n in names if n not in axes_by_name]
    free = tuple(a for a in pmap_axes or default_batch_axes(mesh) if a not in axes_by_name)
    # Of two unmatched names nothing says which of the free axes each stands for.
    if len(unmatched) > 1 or (unmatched and not free):
        _raise_unknown_names(step, names, mesh)
    if unmatched:
        axes_by_name[unmatched[0]] = free
    examples = [n for n, axes in axes_by_name.items() if job_of(axes[0]) in ("data", "fsdp", None)]
    split_names = [n for n, axes in axes_by_name.items() if n in unmatched or axes[0] in pmap_axes or n in examples]
    if not split_names:
        if not free:
            _raise_no_batch_axis(mesh)
        axes_by_name |= {a: (a,) for a in free}
        split_names = list(free)
    order = {a: i for i, a in enumerate(mesh.axis_names)}
    return axes_by_name, tuple(sorted(split_names, key=lambda n: order[axes_by_name[n][0]]))


def default_batch_axes(mesh: Mesh) -> Axes:
    """Return the mesh axes named for the batch, or by default the axes with names of no known meaning."""
    return batch_axes({}, mesh) or tuple(a for a in mesh.axis_names if job_of(a) is None)


def _raise_unknown_names(step: str, names: Sequence[AxisName], mesh: Mesh) -> NoReturn:
    """Raise ShardError for axis names without a mesh axis; the fix is a mesh with those names."""
    several = len(names) > 1
    sizes = [max(1, mesh.size // 2), 2, *([1] * (len(names) - 2))] if several else [mesh.size]
    line = "%mesh " + " ".join(f"{n}={size}" for n, size in zip(names, sizes, strict=True))
    what = f"the ax{'es' if several else 'is'} {list_names(map(str, names))}"
    other = "" if several else f", or name the axis for it, pmap@{mesh.axis_names[0]}"
    raise ShardError(f"{step} works along {what}, and the mesh has {_axis_sizes(mesh)}: use {line}{other}", fix=line)


def _raise_no_batch_axis(mesh: Mesh) -> NoReturn:
    """Raise ShardError for a mesh without an axis for the batch; the fix is a `data` axis."""
    line = f"%mesh data={mesh.size}"
    raise ShardError(
        f"pmap needs a mesh axis for the batch; the mesh has {_axis_sizes(mesh)}. Use another mesh "
        f"({line}) or name one: "
        f"pmap@{mesh.axis_names[0]}",
        fix=line,
    )


def _axis_sizes(mesh: Mesh) -> str:
    """Return the mesh axes with sizes as text, such as `data=4 or model=2`."""
    return list_names(f"{a}={n}" for a, n in mesh.shape.items())
