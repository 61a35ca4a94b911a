"""`%shard explore`: the last step, or arrays that the notebook holds, as an Explorer."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ShardError
from . import cells
from .options import ExploreOptions, ShardOptions, flags_text, line_text, parse, parse_command, with_strategy
from .shard_cell import sharded

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from ..explorer import Explorer
    from ..step import ShardedStep
    from .mesh_line import Meshes
    from .session import ShardSession

_NOT_KEPT = {"mesh", "rules", "help", "output"}  # the explorer has its own
NOTHING = (
    "nothing to explore yet: run a %%shard cell first, or name arrays of the notebook (%shard explore state) or types "
    '(%shard explore "wte=f32[50257,768]")'
)


def explored(
    line: str,
    namespace: Mapping[str, Any],
    session: "ShardSession",
    meshes: "Meshes",
    elsewhere: Callable[[Iterable[str]], Mapping[str, Any]],
) -> "tuple[Explorer | None, str | None]":
    """What `%shard explore state --mesh "data=4 model=2"` asks for, and the name to keep it under; None where that was
    help. `elsewhere` gives what names that the notebook lacks are on hosts. Raises ShardError for a line that can't be
    answered, and where there is nothing to explore."""
    options = parse_command(line, ExploreOptions)
    if options.help:
        print(help_text())
        return None, None
    step = session.step.sharded if isinstance(session.step, cells.Rehearsal) else session.step
    if options.words:
        roots = (word.partition(".")[0] for word in options.words if word.partition(".")[0].isidentifier())
        found = _named(options, {**namespace, **elsewhere(roots)}, meshes)
    elif step is None or step.entry is None:
        raise ShardError(NOTHING)
    else:
        found = _of_step(step, meshes)
    if options.mesh is not None:
        found.mesh = options.mesh
    return found, options.output


def _named(options: ExploreOptions, namespace: Mapping[str, Any], meshes: "Meshes") -> "Explorer":
    from ..config.mesh import DEFAULT_SIMULATED, MeshSpec, default_spec
    from ..explorer import Explorer, Line, Place, arrays_of

    arrays = arrays_of(options.words, namespace)
    if (current := None if options.mesh else meshes.current()) is not None:
        axes, place = dict(current.mesh.shape), Place.of_mesh(current.mesh)
        return Explorer(arrays, axes, place=place, line=Line(home=place.text(axes)))
    place = Place() if options.mesh is None else Place.of_spec(MeshSpec.parse(options.mesh))
    axes = dict(default_spec(["data", "tensor"], place.count or DEFAULT_SIMULATED, "").axes)
    return Explorer(arrays, axes, place=place, line=Line())


def _of_step(step: "ShardedStep", meshes: "Meshes") -> "Explorer":
    from ..config.strategy_text import parse_strategy
    from ..explorer import Explorer, Line, Place, stepped

    own = _own_options(step)
    current = None if own.mesh else meshes.current()
    home = None if current is None else Place.of_mesh(current.mesh).text(dict(current.mesh.shape))
    parts = parse_strategy(step.strategy)
    words = [f"{p.name}@{p.axis}" if p.axis else p.name for p in parts if p.name != "pp"]
    note = (
        "" if step.request.pipeline is None else "of a pipeline the stages are not explored: pp is left out"
    )
    return Explorer(
        (found := stepped(step, partial(_made, step))).arrays,
        dict(step.mesh.shape),
        place=Place.of_mesh(step.mesh),
        line=Line(tuple(_kept(own)), own.rules, home),
        strategy="+".join(words) or "dp",
        stepped=found,
        note=note,
    )


def _made(step: "ShardedStep", line: str, mesh: "Mesh") -> "ShardedStep":
    """The step of an explorer's line: the same function, its call shown as that of the same cell."""
    options = with_strategy(parse(line.removeprefix("%%shard ")))
    other = sharded(options, mesh, step.name, step.__wrapped__)
    other.cell, other.compile_limit = step.cell, step.compile_limit
    return other


def _own_options(step: "ShardedStep") -> ShardOptions:
    """What the step's own line said, and what a search chose for it."""
    said = "" if step.cell is None else step.cell[1].partition("\n")[0]
    options = parse(line_text(said)[0])
    return options.with_values(step.request.gradients.given)


def _kept(options: ShardOptions) -> Iterator[str]:
    """The options that every line of the explorer has as well, each as it is typed."""
    for flag in ShardOptions.flags():
        elsewhere = flag.parameter in _NOT_KEPT or flag.command or flag.strategy == "pp"
        if elsewhere or not options.has(flag):
            continue
        value = options.value(flag)
        if flag.metavar:
            yield from (flag.typed(each) for each in (value if isinstance(value, tuple) else (value,)))
        elif value == flag.constant:
            yield flag.name


def help_text() -> str:
    return f"""Try meshes and PartitionSpecs: bytes per device, copies and the %%shard line change with every edit, from
shapes alone. Nothing runs.

    %shard explore                                 the arrays of the last step, as they lie
    %shard explore state params.w                  those that the notebook holds under these names
    %shard explore "wte=f32[50257,768]"            an array by its type alone

{flags_text(ExploreOptions)}

In Python: ex.mesh = "data=2 model=4", ex["wte.embedding"] = P(None, "model"), ex.line, ex.compile()."""
