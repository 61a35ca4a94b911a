"""Meshes of the same devices to try a strategy on, as axes and as text."""

from collections.abc import Iterator, Sequence

import jax
from jax.sharding import Mesh

from ..config.mesh import Axes, MeshSpec, arranged, axes_for, axes_text, default_spec
from ..config.strategy_text import StrategyPart, jobs_of, part_axes
from ..errors import ShardError
from ..targets import devices as devices_of
from ..targets import target_of

ALL_MESHES = "all"


def reshaped(mesh: Mesh, axes: Axes) -> Mesh:
    """Return a mesh of the same devices with other axes, ordered for fast links."""
    target = target_of(mesh)
    devices = list(mesh.devices.flat) if target is None else devices_of(target)
    # Sorted: the given mesh has its devices in an order chosen for its own axes.
    return arranged(axes, sorted(devices, key=lambda d: d.id))[0]


def text_of(mesh: Mesh, axes: Axes | None = None) -> str:
    """Return mesh text for the devices of `mesh`: "v5e:4x4 data=16".

    Args:
        mesh: Mesh with the devices.
        axes: Axes to write; None for the mesh's own.
    """
    axes = tuple(mesh.shape.items()) if axes is None else axes
    target, platform = target_of(mesh), mesh.devices.flat[0].platform
    if target is not None:
        return f"{target.name} {axes_text(axes)}"
    # Text without a platform means devices of the default backend.
    beside = platform == "cpu" and jax.default_backend() != "cpu"
    return f"cpu:{mesh.size} {axes_text(axes)}" if beside else axes_text(axes)


def suitable_axes(
    parts: Sequence[StrategyPart], mesh: Mesh, meshes: str | Sequence[str] | None, stages: int | None
) -> list[Axes]:
    """Return the axes of each mesh to try a strategy on.

    Args:
        parts: Parts of the strategy.
        mesh: Mesh with the devices.
        meshes: As in `Requests`.
        stages: Number of pipeline stages; None if open.
    """
    own = tuple(mesh.shape.items())
    jobs = jobs_of(tuple(parts))
    # A strategy without axes of its own, or one that names them (`fsdp@data`), takes the mesh as it is.
    if not jobs or any(part.axis is not None for part in parts):
        return [own]
    if meshes == ALL_MESHES:
        return factorisations(parts, mesh, stages) or [default_spec(jobs, mesh.size, "", stages).axes]
    if meshes is not None:
        return [_resolved(text, mesh) for text in ([meshes] if isinstance(meshes, str) else meshes)]
    serves = _serves(parts, mesh) and (stages is None or stages in _stages(mesh))
    return [own if serves else default_spec(jobs, mesh.size, "", stages).axes]


def parse_meshes(text: str | None) -> str | list[str] | None:
    """Return the value of `--meshes "data=8; data=4 model=2"`, as `Requests` takes it.

    >>> parse_meshes("data=8; data=4 model=2")
    ['data=8', 'data=4 model=2']
    """
    several = None if text is None else [each.strip() for each in text.split(";") if each.strip()]
    return ALL_MESHES if several == [ALL_MESHES] else several


def _stages(mesh: Mesh) -> list[int]:
    return [mesh.shape[axis] for axis in axes_for(mesh, "pipeline")]


def _serves(parts: Sequence[StrategyPart], mesh: Mesh) -> bool:
    """Return whether a mesh has an axis for each part, and no unused axis."""
    try:
        axes = part_axes(tuple(parts), mesh)
    except ShardError:
        return False
    used = {axis for each in axes.values() for axis in each}
    used |= {*axes_for(mesh, "data"), *axes_for(mesh, "fsdp")}  # the batch is sharded over these under any strategy
    return all(size == 1 or axis in used for axis, size in mesh.shape.items())


def factorisations(parts: Sequence[StrategyPart], mesh: Mesh, stages: int | None = None) -> list[Axes]:
    """Return all ways to divide the devices of a mesh over the axes of a strategy, 2 or more along each axis.

    Args:
        parts: Parts of the strategy.
        mesh: Mesh with the devices.
        stages: Number of pipeline stages; None if open.
    """
    jobs = jobs_of(tuple(parts))
    # Only the names of the axes are used: any number of devices will do that each axis can divide.
    names = [name for name, _ in default_spec(jobs, 2 ** len(jobs), "").axes]
    pipe = next((i for i, name in enumerate(names) if name == "pipe"), None)
    return [
        tuple(zip(names, sizes, strict=True))
        for sizes in _divided(mesh.size, len(names))
        if stages is None or pipe is None or sizes[pipe] == stages
    ]


def _divided(count: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Yield the ordered factorizations of `count` into `axes` factors of 2 or more."""
    if axes == 1:
        if count > 1:
            yield (count,)
        return
    for first in range(2, count // 2 + 1):
        if count % first == 0:
            for rest in _divided(count // first, axes - 1):
                yield (first, *rest)


def _resolved(text: str, mesh: Mesh) -> Axes:
    """Return the axes written in `text`; raise ShardError for text that names devices, or too few."""
    spec = MeshSpec.parse(text)
    if spec.source != "attached":
        raise ShardError(
            f"--meshes {text}: all of a comparison are on the same devices; name them once, with %mesh or --mesh"
        )
    axes = spec.resolve(mesh.size)
    if spec.size not in (None, mesh.size):
        raise ShardError(f"--meshes {text} takes {spec.size} devices; this comparison is on {mesh.size}")
    return axes
