"""`%shard code`: export the last step as plain JAX, together with the cells that define what the step needs."""

import inspect
import linecache
from typing import TYPE_CHECKING, Any

from ..code_locations import cell_name, is_cell_file
from ..errors import ShardError
from ..introspect import is_iterator, static_attribute
from ..report.records import writable_path
from ..temporary import Replaced, attribute
from . import cells
from .displays import say
from .options import CodeOptions, flags_text, parse_command
from .progress import Progress, line_for

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ..codegen import Code
    from .session import ShardSession

ELSEWHERE = "my_step"  # placeholder: module that a program imports a step of unknown source from


def run_code_line(
    text: str, shell: "InteractiveShell", session: "ShardSession", failed: "cells.FailedCells"
) -> "tuple[Code | None, str | None]":
    """Run a `%shard code` line.

    Args:
        text: The line, from the word `code` on.
        shell: IPython's shell.
        session: State between cells.
        failed: Lines at which earlier cells raised.

    Returns:
        The program and the name to bind it to; None and None for `--help`.

    Raises:
        ShardError: The line is malformed, no step exists so far, or the last cell compared strategies.
    """
    import jax

    options = parse_command(text, CodeOptions)
    if options.help:
        print(help_text())
        return None, None
    if options.words:
        raise ShardError(f"%shard code takes no words; unexpected: {' '.join(options.words)}")
    step: Any = session.step
    if isinstance(step, cells.DryRunStep):
        step = step.sharded
    write = "write %%shard fsdp above a cell with a train step, then %shard code"
    if session.comparison is not None:
        raise ShardError(f"the last cell compared strategies, and none of them goes on: {write}")
    if step is None:
        raise ShardError(f"there is no step yet: {write}")
    if options.file is not None:
        writable_path(options.file, overwrite=options.force)
    draw = line_for(shell) if session.progress else None
    with Progress(draw, label=step.path) as progress, Replaced(attribute(step.programs, "progress"), progress):
        program = _export(shell, step, failed)
    # All hosts have the same text, and may share a disk: one writes.
    if options.file is not None and jax.process_index() == 0:
        say(f"written to {program.save(options.file)}")
    return program, options.output


def _export(shell: "InteractiveShell", step: Any, failed: "cells.FailedCells") -> "Code":
    """Return the program of the step, built from the statements of earlier cells that the step's cell needs."""
    from ..codegen import UserStatement, generate_code, last_call

    path, (every, own) = step.path, _executed_cells(shell, step, failed)
    units, calls = cells.cells_up_to_call(every, path, own)
    if "." in path and any(s.defines and path.partition(".")[0] in s.binds for s in units[own].statements):
        raise ShardError(
            f"%shard code writes programs of steps that stand at the top of a cell, and {path} is inside "
            f"{path.rpartition('.')[0]}: move it out, and call it there"
        )
    root = path.partition(".")[0]
    calls = calls or any(s.mentions_a_call(path) for s in units[own].statements)
    by_position, by_name = ([], []) if calls else _argument_names(step, last_call(step)[1])
    drawing = {name for name, value in shell.user_ns.items() if _changes_on_use(value)}
    statements, missing = cells.required_statements(units, {root, *by_position, *by_name}, path, drawing)
    value_texts = {name: cells.as_source(name, shell.user_ns[name]) for name in sorted(missing & shell.user_ns.keys())}
    definitions = {name: text for name, text in value_texts.items() if text is not None}
    if any("display" in s.reads | s.reads_later for s in statements):
        definitions["display"] = "display = print"  # outside IPython there is no `display`
    if root not in definitions and root in missing:
        definitions[root] = f"from {ELSEWHERE} import {root}"
    givers = cells.AssignedNames(units)
    pieces = [UserStatement(text, "", 1, "", imports="import " in text) for text in definitions.values()] + [
        UserStatement(
            s.text,
            s.unit.file or "",
            s.first + s.unit.shift,
            s.unit.title,
            s.before,
            imports=s.is_import,
            calls_step=s.calls(path),
            binds_step=root in givers.of(s) or any(f"{path}.".startswith(f"{name}.") for name in s.mutates),
            precedes_imports=any(
                name.split(".")[:2] in (["os", "environ"], ["sys", "path"]) for name in (*s.mutates, *s.effect_calls)
            ),
        )
        for s in statements
    ]
    return generate_code(
        step,
        pieces,
        path,
        missing=missing - definitions.keys(),
        elsewhere=ELSEWHERE if definitions.get(root, "").startswith(f"from {ELSEWHERE} ") else None,
        call=None if calls else f"results = {path}({', '.join([*by_position, *(f'{n}={n}' for n in by_name)])})",
    )


def _argument_names(step: Any, call: Any) -> tuple[list[str], list[str]]:
    """Return the names of the parameters passed by position and by keyword in the step's last call."""
    positions, names = call.call_signature
    parameters = inspect.signature(step.__wrapped__).parameters.values()
    by_position = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return by_position[:positions], list(names)


def _changes_on_use(value: Any) -> bool:
    """Return whether each use of an object gives a different value: a generator of random numbers or keys, a method of
    one, or an iterator."""
    owner = static_attribute(value, "__self__", value)
    return is_iterator(owner) or type(owner).__name__ in ("Rngs", "Generator", "RandomState", "Random")


def _executed_cells(
    shell: "InteractiveShell", step: Any, failed: "cells.FailedCells"
) -> "tuple[list[cells.ExecutedCell], int]":
    """Return all cells run so far, in order, and the position of the step's own cell.

    Each cell gets the file that Python knows its code by, and the line at which the cell raised, if any.
    """
    raw = shell.history_manager.input_hist_raw if shell.history_manager is not None else []
    _, last = step.cell
    own = max((i for i, cell in enumerate(raw) if cell.strip().endswith(last.strip())), default=len(raw) - 1)
    files_by_text: dict[str, dict[int | None, tuple[str, int]]] = {}  # by text, then by number of cell
    for file, entry in linecache.cache.items():
        number = cells.execution_number(shell, file)
        if len(entry) == 4 and (number is not None or is_cell_file(file)):
            text = "".join(entry[2])
            files_by_text.setdefault(text.strip("\n"), {})[number] = file, _blank(text)
    units = []
    for number, cell in enumerate(raw):
        body = cells.below_magic(cell)
        ran, python = (shell.transform_cell(text) for text in (body, cells.untimed(body)))
        # Several cells may have this text: the number tells them apart, and without a match the newest file is taken.
        files = files_by_text.get(ran.strip("\n"), {})
        file, lead = files.get(number) or next(reversed(files.values()), (None, 0))
        shift = lead - _blank(python) if file else 0
        units.append(cells.ExecutedCell(cell_name(number), python, file, shift, failed.lines.get(number)))
    return units, own


def _blank(text: str) -> int:
    """Return the number of newlines at the beginning of `text`."""
    return len(text) - len(text.lstrip("\n"))


def help_text() -> str:
    """Return the text printed by `%shard code --help`."""
    return f"""The last step as a program of plain JAX: your own cells, a mesh, where every array lies, and the plan's
constraints at your own lines. It runs without jaxshard_magic.

    %shard code                    the program of the last %%shard cell's step

{flags_text(CodeOptions)}

What it moves between devices is read from the program as compiled, and stands at its beginning beside the plan's."""
