"""The mesh axes that the axis names of a step stand for, as it has them in `jax.lax.pmean(x, "batch")`."""

from collections.abc import Sequence
from typing import NoReturn

from jax.sharding import Mesh

from ..config.strategies import job_of
from ..config.strategy_text import batch_axes
from ..errors import ShardError, one_of
from ..program.mapped import Name
from .layout import Axes


def mesh_axes(
    step: str, names: Sequence[Name], mesh: Mesh, own: Axes = ()
) -> tuple[dict[Name, Axes], tuple[Name, ...]]:
    """The mesh axes that each axis name of a step stands for, and the names that arrays are cut along.

    A name that the mesh has stands for that axis; one other stands for all axes of `own`, or of the batch. Raises
    `ShardError` where the mesh has none for it.
    """
    found: dict[Name, Axes] = {n: (str(n),) for n in names if n in mesh.axis_names}
    others = [n for n in names if n not in found]
    free = tuple(a for a in own or spare_axes(mesh) if a not in found)
    if len(others) > 1 or (others and not free):
        _refuse_names(step, names, mesh)
    if others:
        found[others[0]] = free
    examples = [n for n, axes in found.items() if job_of(axes[0]) in ("data", "fsdp", None)]
    over = [n for n, axes in found.items() if n in others or axes[0] in own or n in examples]
    if not over:
        if not free:
            _refuse_mesh(mesh)
        found |= {a: (a,) for a in free}
        over = list(free)
    order = {a: i for i, a in enumerate(mesh.axis_names)}
    return found, tuple(sorted(over, key=lambda n: order[found[n][0]]))


def spare_axes(mesh: Mesh) -> Axes:
    """The mesh axes for the batch by their names, else those whose names say nothing."""
    return batch_axes({}, mesh) or tuple(a for a in mesh.axis_names if job_of(a) is None)


def _refuse_names(step: str, names: Sequence[Name], mesh: Mesh) -> NoReturn:
    several = len(names) > 1
    sizes = [max(1, mesh.size // 2), 2, *([1] * (len(names) - 2))] if several else [mesh.size]
    line = "%mesh " + " ".join(f"{n}={size}" for n, size in zip(names, sizes, strict=True))
    what = f"the ax{'es' if several else 'is'} {one_of(map(str, names))}"
    other = "" if several else f", or name the axis for it, pmap@{mesh.axis_names[0]}"
    raise ShardError(
        f"{step} works along {what}, and the mesh has {_sizes(mesh)}: use {line}{other}", fix=line
    )


def _refuse_mesh(mesh: Mesh) -> NoReturn:
    line = f"%mesh data={mesh.size}"
    raise ShardError(
        f"pmap needs a mesh axis for the batch; the mesh has {_sizes(mesh)}. Use another mesh ({line}) or name one: "
        f"pmap@{mesh.axis_names[0]}",
        fix=line,
    )


def _sizes(mesh: Mesh) -> str:
    return one_of(f"{a}={n}" for a, n in mesh.shape.items())
