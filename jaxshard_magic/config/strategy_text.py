"""Parse strategies, `fsdp+tp@model`, and find the mesh axes of each part."""

from dataclasses import dataclass

from jax.sharding import Mesh

from ..errors import ShardError, list_names, unknown_name
from .mesh import axes_for, default_text
from .strategies import AUTO, AXIS_JOBS, STRATEGIES

AxisNames = tuple[str, ...]

REPLICA = "replica"  # mesh axis for copies: fsdp does not shard over it, except as fsdp@replica


@dataclass(frozen=True)
class StrategyPart:
    """Strategy in a sum.

    Attributes:
        name: Name of the strategy.
        axis: Mesh axis behind the @; None without one.
    """

    name: str
    axis: str | None = None


def parse_strategy(text: str) -> tuple[StrategyPart, ...]:
    """Return the parts of a strategy.

    Raises:
        ShardError: Unknown strategy, a strategy named twice, or strategies that exclude each other.

    >>> parse_strategy("fsdp+tp@model")
    (StrategyPart(name='fsdp', axis=None), StrategyPart(name='tp', axis='model'))
    """
    parts = []
    for word in text.replace(" ", "").split("+"):
        name, _, axis = word.partition("@")
        if name == AUTO:
            raise ShardError(
                f"'{text}': auto searches for a strategy and stands alone: %%shard auto above a cell, or "
                "jaxshard_magic.choose(step, args)",
                fix="%%shard auto",
            )
        if name not in STRATEGIES:
            they_are = f"they are {list_names(STRATEGIES)} and sums such as fsdp+tp"
            where = "%%shard --help lists them and their sums"
            raise ShardError(unknown_name(f"'{name}' is no strategy", name, STRATEGIES, they_are, where))
        if any(p.name == name for p in parts):
            raise ShardError(f"strategy '{text}' names {name} twice; once is enough")
        parts.append(StrategyPart(name, axis or None))
    names = {p.name for p in parts}
    if {"ep", "pp"} <= names:
        raise ShardError(
            f"'{text}': experts are not divided inside the stages of a pipeline; use ep with dp, fsdp or tp, or pp "
            "with these"
        )
    lone = next((p.name for p in parts if STRATEGIES[p.name].alone), None)
    if len(parts) > 1 and lone is not None:
        rules = "; for rules on top use --rule" if lone == "spmd" else ""
        raise ShardError(f"'{text}': {lone} {STRATEGIES[lone].alone} and stands alone{rules}")
    return tuple(parts)


def jobs_of(parts: tuple[StrategyPart, ...]) -> tuple[str, ...]:
    """Return the jobs of mesh axes for a default mesh, one per part; sp together with tp needs none."""
    names = [p.name for p in parts if p.name != "sp" or _beside(parts, "tp") is None]
    return tuple(jobs[0] for name in names if (jobs := STRATEGIES[name].jobs))


def part_axes(parts: tuple[StrategyPart, ...], mesh: Mesh, stages: int | None = None) -> dict[str, AxisNames]:
    """Return the mesh axes of each part.

    - dp leaves the axes of fsdp to fsdp if another axis is left for copies.
    - fsdp does not shard over an axis named `replica`.
    - sp together with tp uses the axes of tp if the mesh has none for a sequence.
    - pmap has axes only if one is named.
    - pp has one axis.

    Args:
        parts: Parts of the strategy.
        mesh: Mesh with the axes.
        stages: Required size of the pipeline's axis; None if open.

    Raises:
        ShardError: A part without an axis, or a pipeline axis that does not fit.
    """
    pipe = next((p for p in parts if p.name == "pp"), None)
    if pipe is not None and pipe.axis is None and not axes_for(mesh, "pipeline"):
        raise _no_pipeline(parts, mesh, stages)
    axes = {p.name: _axes(p, mesh, parts) for p in parts if not STRATEGIES[p.name].alone or p.axis is not None}
    copies = tuple(a for a in axes.get("dp", ()) if a not in axes.get("fsdp", ()))
    axes |= {"dp": copies} if copies else {}
    if pipe is not None:
        _pipeline_fits(parts, axes, mesh, stages)
    return axes


def batch_axes(axes: dict[str, AxisNames], mesh: Mesh) -> AxisNames:
    """Return all axes that examples are sharded over.

    These are every data and fsdp axis of the mesh and the axes of dp and fsdp, without axes that shard inside of an
    example or over layers; last the axes of ep, which shard experts as well.

    Args:
        axes: Mesh axes of each part.
        mesh: Mesh with the axes.
    """
    wanted = {*axes_for(mesh, "data"), *axes_for(mesh, "fsdp"), *axes.get("dp", ()), *axes.get("fsdp", ())}
    experts = axes.get("ep", ())
    elsewhere = {*axes.get("tp", ()), *axes.get("sp", ()), *axes.get("pp", ()), *experts}
    return (*(a for a in mesh.axis_names if a in wanted and a not in elsewhere), *experts)


def _axes(part: StrategyPart, mesh: Mesh, parts: tuple[StrategyPart, ...]) -> AxisNames:
    """Return the mesh axes of one part."""
    have = list_names(f"{a}={n}" for a, n in mesh.shape.items())
    if part.axis is not None:
        if part.axis not in mesh.axis_names:
            said = f"{part.name}@{part.axis}: the mesh has no axis '{part.axis}'"
            raise ShardError(unknown_name(said, part.axis, mesh.axis_names, f"it has {have}"))
        return (part.axis,)
    jobs = STRATEGIES[part.name].jobs
    for job in jobs:
        found = axes_for(mesh, job)
        if part.name == "fsdp":
            found = tuple(axis for axis in found if axis.lower() != REPLICA)
        if found:
            return found
    if part.name == "sp" and (beside := _beside(parts, "tp")) is not None:
        return _axes(beside, mesh, parts)
    example = default_text(mesh, jobs_of(parts))
    raise ShardError(
        f"{part.name} needs a mesh axis for it ({AXIS_JOBS[jobs[0]].axis_names[0]}); the mesh has {have}. "
        f"Use another mesh (%mesh {example}) or name one: {part.name}@{mesh.axis_names[0]}",
        fix=f"%mesh {example}",
    )


def _beside(parts: tuple[StrategyPart, ...], name: str) -> StrategyPart | None:
    """Return the part with a name; None without one."""
    return next((p for p in parts if p.name == name), None)


def _pipeline_fits(parts: tuple[StrategyPart, ...], axes: dict[str, AxisNames], mesh: Mesh, stages: int | None) -> None:
    """Raise ShardError if the pipeline has several axes, shares an axis, or has another number of stages."""
    axis, *more = axes["pp"]
    if more:
        raise ShardError(f"pp: the mesh has several pipeline axes, {list_names(axes['pp'])}; say which: pp@{axis}")
    shared = next((p.name for p in parts if p.name != "pp" and axis in axes[p.name]), None)
    if shared is not None:
        use, _ = _instead(parts, mesh, stages)
        raise ShardError(
            f"pp and {shared} both take the mesh axis {axis}; each needs its own. Leave @{axis} out and {use}",
            fix=f"%%shard {'+'.join(p.name for p in parts)}",
        )
    have = mesh.shape[axis]
    if stages is not None and stages != have:
        use, fix = _instead(parts, mesh, stages)
        raise ShardError(
            f"--stages {stages}: the mesh's pipeline axis is {axis}={have}. Leave --stages out for {have}, or {use}",
            fix=fix if stages in _counts(mesh) else f"--stages {have}",
        )


def _no_pipeline(parts: tuple[StrategyPart, ...], mesh: Mesh, stages: int | None) -> ShardError:
    """Return the error for a mesh without a pipeline axis."""
    have = list_names(f"{a}={n}" for a, n in mesh.shape.items())
    use, fix = _instead(parts, mesh, stages)
    named = next((a for a, n in mesh.shape.items() if stages in (None, n)), None)
    name_one = "" if named is None else f" or name one: pp@{named}"
    return ShardError(
        f"pp needs a mesh axis for its stages (pipe); the mesh has {have}. {use[0].upper()}{use[1:]}{name_one}", fix=fix
    )


def _instead(parts: tuple[StrategyPart, ...], mesh: Mesh, stages: int | None) -> tuple[str, str]:
    """Return a mesh of the same devices with a pipeline axis, as a sentence and as a line to paste."""
    fitting = None if stages is None else min(_counts(mesh), key=lambda n: (abs(n - stages), -n))
    line = f"%mesh {default_text(mesh, jobs_of(parts), fitting)}"
    if fitting == stages:
        return f"use {line}", line
    return (f"use --stages {fitting} and {line}, for {mesh.size} devices make no {stages} stages of one size", line)


def _counts(mesh: Mesh) -> list[int]:
    """Return the numbers of equal stages that the devices of a mesh make."""
    return [n for n in range(1, mesh.size + 1) if mesh.size % n == 0]
