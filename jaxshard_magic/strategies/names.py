"""The words of a strategy, `fsdp+tp@model`, and the mesh axes that each part works on."""

from dataclasses import dataclass

from jax.sharding import Mesh

from ..errors import ShardError, did_you_mean, one_of
from ..mesh import axes_for
from .layout import Axes

JOBS = {"dp": ("data", "fsdp"), "fsdp": ("fsdp", "data"), "tp": ("tensor",), "spmd": ()}
LATER = ("sp", "pp", "pmap", "auto")
_EXAMPLE = {"data": "data=8", "fsdp": "fsdp=8", "tensor": "model=8"}


@dataclass(frozen=True)
class Part:
    """One strategy of a sum; `axis` is what stands after the @."""

    name: str
    axis: str | None = None


def parse_strategy(text: str) -> tuple[Part, ...]:
    """`fsdp+tp@model` -> its parts. Raises `ShardError` for a word that is no strategy.

    >>> parse_strategy("fsdp+tp@model")
    (Part(name='fsdp', axis=None), Part(name='tp', axis='model'))
    """
    parts = []
    for word in text.replace(" ", "").split("+"):
        name, _, axis = word.partition("@")
        if name in LATER:
            raise ShardError(
                f"strategy '{name}' comes in a later version; today: {one_of(JOBS)} and their sums"
            )
        if name not in JOBS:
            hint = did_you_mean(name, JOBS)
            raise ShardError(
                f"'{name}' is no strategy; they are {one_of(JOBS)} and sums such as fsdp+tp.{hint}"
            )
        if any(p.name == name for p in parts):
            raise ShardError(f"strategy '{text}' names {name} twice; once is enough")
        parts.append(Part(name, axis or None))
    if len(parts) > 1 and any(p.name == "spmd" for p in parts):
        raise ShardError(
            f"'{text}': spmd uses only your own specs and stands alone; for rules on top use --rule"
        )
    return tuple(parts)


def jobs_of(parts: tuple[Part, ...]) -> tuple[str, ...]:
    """The mesh jobs that a strategy asks for, one per part: what a default mesh is chosen by."""
    return tuple(JOBS[p.name][0] for p in parts if JOBS[p.name])


def part_axes(parts: tuple[Part, ...], mesh: Mesh) -> dict[str, Axes]:
    """The mesh axes of every part. dp leaves an axis named fsdp to fsdp when both are there."""
    return {p.name: _axes(p, mesh, parts) for p in parts if p.name != "spmd"}


def batch_axes(axes: dict[str, Axes], mesh: Mesh) -> Axes:
    """All axes that the examples are divided over: every data and fsdp axis, and what dp and fsdp were given."""
    wanted = {*axes_for(mesh, "data"), *axes_for(mesh, "fsdp"), *axes.get("dp", ()), *axes.get("fsdp", ())}
    return tuple(a for a in mesh.axis_names if a in wanted and a not in axes.get("tp", ()))


def _axes(part: Part, mesh: Mesh, parts: tuple[Part, ...]) -> Axes:
    have = one_of(f"{a}={n}" for a, n in mesh.shape.items())
    if part.axis is not None:
        if part.axis not in mesh.axis_names:
            hint = did_you_mean(part.axis, mesh.axis_names)
            raise ShardError(
                f"{part.name}@{part.axis}: the mesh has no axis '{part.axis}'; it has {have}.{hint}"
            )
        return (part.axis,)
    jobs = JOBS[part.name]
    for job in jobs:
        if found := axes_for(mesh, job):
            return found
    example = _EXAMPLE[jobs[0]]
    raise ShardError(
        f"{part.name} needs a mesh axis for it ({example.split('=')[0]}); the mesh has {have}. "
        f"Use another mesh (%mesh {example}) or name one: {part.name}@{mesh.axis_names[0]}",
        fix=f"%mesh {example}",
    )
