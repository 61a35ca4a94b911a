"""The step of a `%%shard` cell: made from its line, called on copies, compiled with what its report advises."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ShardError
from . import cells
from .options import Options
from .progress import Progress

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from ..report import Report
    from ..step import ShardedStep
    from .session import ShardSession


# Options of the line that `api.shard` takes by the same names.
_GRADIENTS = ("microbatches", "reduce", "remat", "precision", "reduce_dtype", "pad")
_PIPELINE = ("stages", "schedule", "chunks", "balance", "cut")


def asked(options: Options) -> dict[str, Any]:
    """What a line asks of the step's gradients and of its pipeline, as `api.options_of` and `api.shard` take it."""
    return {name: getattr(options, name) for name in (*_GRADIENTS, *_PIPELINE)}


def common(options: Options) -> dict[str, Any]:
    """Of these what a line says itself: the options of all that it compares or searches."""
    return {k: v for k, v in asked(options).items() if v != getattr(Options, k)}


def preparing(
    session: "ShardSession", cell: cells.Cell, path: str, name_of: Callable[[str], str | None]
) -> "Callable[[ShardedStep], None]":
    """Makes a step of a cell tell where it is from, and what it is called there; it compiles no longer than the session
    lets it."""

    def prepare(step: "ShardedStep") -> None:
        step.compile_limit = session.compile_limit
        step.cell, step.path, step.name_of = (cell.filename, cell.text), path, name_of

    return prepare


def made(options: Options, mesh: "Mesh", path: str, function: Any) -> Any:
    """The function sharded as a line has it; one that is sharded already is taken anew."""
    from .. import api
    from ..specs import parse_assignment
    from ..step import ShardedStep

    plain = function.__wrapped__ if isinstance(function, ShardedStep) else function
    step = api.shard(
        plain,
        options.strategy,
        mesh=mesh,
        specs=cells.annotated_specs(plain) | dict(map(parse_assignment, options.specs)),
        rules=[parse_assignment(rule) for rule in options.rules],
        **asked(options),
        donate=options.donate,
        check=options.check,
        on=options.on,
        name=options.name or path,
    )
    step.keep_arguments = bool(options.repeat)
    step.read_ahead = True
    return step


def tried(rehearsal: cells.Rehearsal, report: "Report", progress: Progress) -> bool:
    """The first thing that would make a step fit is compiled as well; whether that told anything."""
    fix = next((a.fix for a in report.advice if a.code == "does-not-fit"), None)
    if fix is None or rehearsal.arguments is None:
        return False
    progress(f"does not fit; trying {fix}")
    try:
        return compiled_with(rehearsal.sharded, fix, *rehearsal.arguments)
    except ShardError:  # what is advised is for the user's own step, and need not be possible on it
        return False
    finally:
        progress("")


def compiled_with(step: "ShardedStep", fix: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Compile `step` as a fix of its report has it, for the same arguments; its reports then tell what that needs.

    False for a fix that is none of strategy (`%%shard fsdp`), mesh (`%mesh v5e:8x8 data=64`), `--donate`,
    `--microbatches N` and `--remat POLICY`. Raises `ShardError` where the changed step can't be planned or compiled.
    """
    from .. import api
    from ..strategies import parse_strategy

    strategy, mesh, donate, inside = step.strategy, step.mesh, step.donate, step.inside.asked
    match fix.split(maxsplit=1):
        case ["%%shard", text]:
            strategy = text
        case ["%mesh", text]:
            mesh = api.build_mesh(text).mesh
        case ["--donate"]:
            donate = True
        case ["--microbatches", number]:
            inside |= {"microbatches": int(number)}
        case ["--remat", what]:
            inside |= {"remat": what}
        case _:
            return False
    if step.piped is not None and "pp" in [part.name for part in parse_strategy(strategy)]:
        inside |= step.piped.asked
    same = {"specs": step.specs, "rules": step.rules, "donate": donate, **inside}
    other = api.shard(step.__wrapped__, strategy, mesh=mesh, **same)
    other.progress, other.compile_limit = step.progress, step.compile_limit
    other.prepare(*args, **kwargs)
    memory = other.report().memory
    peaks = [d.peak for d in memory.per_device if d.peak is not None] if memory else []
    if peaks:
        step.tried[fix] = max(peaks)
    return bool(peaks)


def compared(step: Any, progress: Progress, limit_s: float) -> None:
    """The step, or that of a dry run, is compiled without each option of its gradients as well, for its report."""
    from ..analysis.alternatives import alternatives

    if isinstance(step, cells.Rehearsal):
        step = step.sharded
    say, step.progress = step.progress, progress
    try:
        step.alternatives = alternatives(step, limit_s)
    finally:
        step.progress = say
        progress("")
