"""`%shard explore`: open the last step, or arrays of the notebook, in an Explorer."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ShardError
from . import cells
from .options import ExploreOptions, ShardOptions, flags_text, line_text, parse, parse_command, with_strategy
from .shard_cell import shard_function

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from ..explorer import Explorer
    from ..step import ShardedStep
    from .mesh_line import Meshes
    from .session import ShardSession

_NOT_KEPT = {"mesh", "rules", "help", "output"}  # the explorer sets these itself
NOTHING = (
    "nothing to explore yet: run a %%shard cell first, or name arrays of the notebook (%shard explore state) or types "
    '(%shard explore "wte=f32[50257,768]")'
)


def run_explore_line(
    line: str,
    namespace: Mapping[str, Any],
    session: "ShardSession",
    meshes: "Meshes",
    shapes_on_hosts: Callable[[Iterable[str]], Mapping[str, Any]],
) -> "tuple[Explorer | None, str | None]":
    """Run a `%shard explore` line.

    Args:
        line: The line, from the word `explore` on.
        namespace: The notebook's namespace.
        session: State between cells.
        meshes: Source of the notebook's mesh.
        shapes_on_hosts: Returns shapes of arrays on the hosts for names missing in the notebook.

    Returns:
        The explorer and the name to bind it to; None and None for `--help`.

    Raises:
        ShardError: The line is malformed, or neither a step nor arrays are there to explore.
    """
    options = parse_command(line, ExploreOptions)
    if options.help:
        print(help_text())
        return None, None
    step = session.step.sharded if isinstance(session.step, cells.DryRunStep) else session.step
    if options.words:
        roots = (word.partition(".")[0] for word in options.words if word.partition(".")[0].isidentifier())
        found = _named(options, {**namespace, **shapes_on_hosts(roots)}, meshes)
    elif step is None or step.entry is None:
        raise ShardError(NOTHING)
    else:
        found = _explore_step(step, meshes)
    if options.mesh is not None:
        found.mesh = options.mesh
    return found, options.output


def _named(options: ExploreOptions, namespace: Mapping[str, Any], meshes: "Meshes") -> "Explorer":
    """Return an explorer of named arrays or array types, on the mesh of the line, the notebook's, or a simulated
    one."""
    from ..config.mesh import DEFAULT_SIMULATED, MeshSpec, default_spec
    from ..explorer import DeviceSource, Explorer, ShardLine, find_arrays

    arrays = find_arrays(options.words, namespace)
    if (current := None if options.mesh else meshes.current()) is not None:
        axes, place = dict(current.mesh.shape), DeviceSource.of_mesh(current.mesh)
        return Explorer(arrays, axes, place=place, line=ShardLine(default_mesh=place.text(axes)))
    place = DeviceSource() if options.mesh is None else DeviceSource.of_spec(MeshSpec.parse(options.mesh))
    axes = dict(default_spec(["data", "tensor"], place.count or DEFAULT_SIMULATED, "").axes)
    return Explorer(arrays, axes, place=place, line=ShardLine())


def _explore_step(step: "ShardedStep", meshes: "Meshes") -> "Explorer":
    """Return an explorer of the arrays of a step, on the step's mesh and with its options."""
    from ..config.strategy_text import parse_strategy
    from ..explorer import DeviceSource, Explorer, ShardLine, explore_step

    own = _own_options(step)
    current = None if own.mesh else meshes.current()
    home = None if current is None else DeviceSource.of_mesh(current.mesh).text(dict(current.mesh.shape))
    parts = parse_strategy(step.strategy)
    words = [f"{p.name}@{p.axis}" if p.axis else p.name for p in parts if p.name != "pp"]
    note = "" if step.request.pipeline is None else "of a pipeline the stages are not explored: pp is left out"
    return Explorer(
        (found := explore_step(step, partial(_shard_as, step))).arrays,
        dict(step.mesh.shape),
        place=DeviceSource.of_mesh(step.mesh),
        line=ShardLine(tuple(_kept(own)), own.rules, home),
        strategy="+".join(words) or "dp",
        stepped=found,
        note=note,
    )


def _shard_as(step: "ShardedStep", line: str, mesh: "Mesh") -> "ShardedStep":
    """Shard the function of `step` as a line of the explorer asks; the new step has the same cell."""
    options = with_strategy(parse(line.removeprefix("%%shard ")))
    other = shard_function(options, mesh, step.name, step.__wrapped__)
    other.cell, other.programs.compile_limit = step.cell, step.programs.compile_limit
    return other


def _own_options(step: "ShardedStep") -> ShardOptions:
    """Return the options of the step's own line, with the values chosen by a search."""
    said = "" if step.cell is None else step.cell[1].partition("\n")[0]
    options = parse(line_text(said)[0])
    return options.with_values(step.request.gradients.given)


def _kept(options: ShardOptions) -> Iterator[str]:
    """Yield the options of the step's line, as typed, that every line of the explorer repeats."""
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
    """Return the text printed by `%shard explore --help`."""
    return f"""Try meshes and PartitionSpecs: bytes per device, copies and the %%shard line change with every edit, from
shapes alone. Nothing runs.

    %shard explore                                 the arrays of the last step, as they lie
    %shard explore state params.w                  those that the notebook holds under these names
    %shard explore "wte=f32[50257,768]"            an array by its type alone

{flags_text(ExploreOptions)}

In Python: ex.mesh = "data=2 model=4", ex["wte.embedding"] = P(None, "model"), ex.line, ex.compile()."""
