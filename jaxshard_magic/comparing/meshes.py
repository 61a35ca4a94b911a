"""The meshes that a comparison tries a strategy on: of the same devices all of them, as axes and as text."""

from collections.abc import Iterator, Sequence

import jax
from jax.sharding import Mesh

from ..config.mesh import MeshSpec, arranged, axes_for, default_spec
from ..config.mesh_text import Axes, axes_text
from ..config.strategy_text import Part, jobs_of, part_axes
from ..errors import ShardError
from ..targets import devices as devices_of
from ..targets import target_of

EVERY = "all"


def reshaped(mesh: Mesh, axes: Axes) -> Mesh:
    """A mesh of the same devices with other axes, in the order that their links make best."""
    target = target_of(mesh)
    devices = list(mesh.devices.flat) if target is None else devices_of(target)
    return arranged(axes, sorted(devices, key=lambda d: d.id))[0]


def text_of(mesh: Mesh, axes: Axes | None = None) -> str:
    """The text of a mesh of the same devices as `mesh`, with its axes or others: "v5e:4x4 data=16"."""
    axes = tuple(mesh.shape.items()) if axes is None else axes
    target, platform = target_of(mesh), mesh.devices.flat[0].platform
    if target is not None:
        return f"{target.name} {axes_text(axes)}"
    beside = platform == "cpu" and jax.default_backend() != "cpu"
    return f"cpu:{mesh.size} {axes_text(axes)}" if beside else axes_text(axes)


def suited(
    parts: Sequence[Part], mesh: Mesh, meshes: str | Sequence[str] | None, stages: int | None
) -> list[Axes]:
    """The axes of every mesh of these devices that a strategy is tried on: `meshes` as `candidates` takes it, `stages`
    those of a pipeline where they are said."""
    own = tuple(mesh.shape.items())
    jobs = jobs_of(tuple(parts))
    if not jobs or any(part.axis is not None for part in parts):
        return [own]
    if meshes == EVERY:
        return factorisations(parts, mesh, stages) or [default_spec(jobs, mesh.size, "", stages).axes]
    if meshes is not None:
        return [_resolved(text, mesh) for text in ([meshes] if isinstance(meshes, str) else meshes)]
    serves = _serves(parts, mesh) and (stages is None or stages in _stages(mesh))
    return [own if serves else default_spec(jobs, mesh.size, "", stages).axes]


def meshes_of(text: str | None) -> str | list[str] | None:
    """What `--meshes "data=8; data=4 model=2"` says, as `candidates` takes it.

    >>> meshes_of("data=8; data=4 model=2")
    ['data=8', 'data=4 model=2']
    """
    several = None if text is None else [each.strip() for each in text.split(";") if each.strip()]
    return EVERY if several == [EVERY] else several


def _stages(mesh: Mesh) -> list[int]:
    return [mesh.shape[axis] for axis in axes_for(mesh, "pipeline")]


def _serves(parts: Sequence[Part], mesh: Mesh) -> bool:
    """Whether a mesh has an axis for every part, and no axis that none of them uses."""
    try:
        axes = part_axes(tuple(parts), mesh)
    except ShardError:
        return False
    used = {axis for each in axes.values() for axis in each}
    used |= {*axes_for(mesh, "data"), *axes_for(mesh, "fsdp")}  # the batch is divided over these in any case
    return all(size == 1 or axis in used for axis, size in mesh.shape.items())


def factorisations(parts: Sequence[Part], mesh: Mesh, stages: int | None = None) -> list[Axes]:
    """Every way to divide the devices of `mesh` over the axes of a strategy, 2 or more along each."""
    jobs = jobs_of(tuple(parts))
    names = [name for name, _ in default_spec(jobs, 2 ** len(jobs), "").axes]
    pipe = next((i for i, name in enumerate(names) if name == "pipe"), None)
    return [
        tuple(zip(names, sizes, strict=True))
        for sizes in _divided(mesh.size, len(names))
        if stages is None or pipe is None or sizes[pipe] == stages
    ]


def _divided(count: int, axes: int) -> Iterator[tuple[int, ...]]:
    if axes == 1:
        if count > 1:
            yield (count,)
        return
    for first in range(2, count // 2 + 1):
        if count % first == 0:
            for rest in _divided(count // first, axes - 1):
                yield (first, *rest)


def _resolved(text: str, mesh: Mesh) -> Axes:
    spec = MeshSpec.parse(text)
    if spec.source != "attached":
        raise ShardError(
            f"--meshes {text}: all of a comparison are on the same devices; name them once, with %mesh or --mesh"
        )
    axes = spec.resolve(mesh.size)
    if spec.size not in (None, mesh.size):
        raise ShardError(f"--meshes {text} takes {spec.size} devices; this comparison is on {mesh.size}")
    return axes
