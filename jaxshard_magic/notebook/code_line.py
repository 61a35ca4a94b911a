"""`%shard code`: the last step as plain JAX, from the cells that it was defined in."""

import inspect
import linecache
from typing import TYPE_CHECKING, Any

from ..cell_files import is_cell_file
from ..errors import ShardError
from ..introspect import is_iterator, static_attribute
from ..places import cell_name
from ..report.written import place_for
from ..temporary import Replaced, attribute
from . import cells
from .displays import say
from .options import CodeOptions, flags_text, parse_command
from .progress import Progress, line_for

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ..codegen import Code
    from .session import ShardSession

ELSEWHERE = "my_step"  # the module that a program imports a step from whose text can't be had


def written(
    text: str, shell: "InteractiveShell", session: "ShardSession", failed: "cells.Failed"
) -> "tuple[Code | None, str | None]":
    """What a `%shard code` line returns, and the name to keep it under. Raises ShardError for a line that it can't
    be, and before there is a step."""
    import jax

    options = parse_command(text, CodeOptions)
    if options.help:
        print(help_text())
        return None, None
    if options.words:
        raise ShardError(f"%shard code takes no words; unexpected: {' '.join(options.words)}")
    step: Any = session.step
    if isinstance(step, cells.Rehearsal):
        step = step.sharded
    write = "write %%shard fsdp above a cell with a train step, then %shard code"
    if session.comparison is not None:
        raise ShardError(f"the last cell compared strategies, and none of them goes on: {write}")
    if step is None:
        raise ShardError(f"there is no step yet: {write}")
    if options.file is not None:
        place_for(options.file, over=options.force)
    draw = line_for(shell) if session.progress else None
    with Progress(draw, of=step.path) as progress, Replaced(attribute(step, "progress"), progress):
        found = _written(shell, step, failed)
    if (
        options.file is not None and jax.process_index() == 0
    ):  # hosts have the same text, and maybe the same disk
        say(f"written to {found.save(options.file)}")
    return found, options.output


def _written(shell: "InteractiveShell", step: Any, failed: "cells.Failed") -> "Code":
    """The step's program, from what the cell that runs it needs of those before it."""
    from ..codegen import Piece, code_of, last_call

    path, (every, own) = step.path, _units(shell, step, failed)
    units, calls = cells.up_to_caller(every, path, own)
    if "." in path and any(s.defines and path.partition(".")[0] in s.binds for s in units[own].statements):
        raise ShardError(
            f"%shard code writes programs of steps that stand at the top of a cell, and {path} is inside "
            f"{path.rpartition('.')[0]}: move it out, and call it there"
        )
    root = path.partition(".")[0]
    calls = calls or any(s.mentions_a_call(path) for s in units[own].statements)
    by_position, by_name = ([], []) if calls else _given(step, last_call(step)[1])
    drawing = {name for name, value in shell.user_ns.items() if _is_drawn_from(value)}
    found, missing = cells.needed(units, {root, *by_position, *by_name}, path, drawing)
    known = {
        name: cells.as_text(name, shell.user_ns[name]) for name in sorted(missing & shell.user_ns.keys())
    }
    given = {name: text for name, text in known.items() if text is not None}
    if any("display" in s.reads | s.reads_later for s in found):
        given["display"] = "display = print"  # in the place of the notebook's
    if root not in given and root in missing:
        given[root] = f"from {ELSEWHERE} import {root}"
    givers = cells.Givers(units)
    pieces = [Piece(text, "", 1, "", imports="import " in text) for text in given.values()] + [
        Piece(
            s.text,
            s.unit.file or "",
            s.first + s.unit.shift,
            s.unit.title,
            s.before,
            imports=s.is_import,
            calls=s.calls(path),
            makes=root in givers.of(s) or any(f"{path}.".startswith(f"{name}.") for name in s.sets),
            early=any(
                name.split(".")[:2] in (["os", "environ"], ["sys", "path"]) for name in (*s.sets, *s.does)
            ),
        )
        for s in found
    ]
    return code_of(
        step,
        pieces,
        path,
        missing=missing - given.keys(),
        elsewhere=ELSEWHERE if given.get(root, "").startswith(f"from {ELSEWHERE} ") else None,
        call=None
        if calls
        else f"results = {path}({', '.join([*by_position, *(f'{n}={n}' for n in by_name)])})",
    )


def _given(step: Any, call: Any) -> tuple[list[str], list[str]]:
    """The parameters of a step that its last call gave by position, and those by name."""
    positions, names = call.given
    parameters = inspect.signature(step.__wrapped__).parameters.values()
    by_position = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return by_position[:positions], list(names)


def _is_drawn_from(value: Any) -> bool:
    """Does an object give something else at each time: a generator of random numbers or keys or a method of one, an
    iterator?"""
    owner = static_attribute(value, "__self__", value)
    return is_iterator(owner) or type(owner).__name__ in (
        "Rngs",
        "Generator",
        "RandomState",
        "Random",
    )


def _units(shell: "InteractiveShell", step: Any, failed: "cells.Failed") -> "tuple[list[cells.Unit], int]":
    """The cells that ran, in order, and the position of the step's own."""
    raw = shell.history_manager.input_hist_raw if shell.history_manager is not None else []
    _, last = step.cell
    own = max((i for i, cell in enumerate(raw) if cell.strip().endswith(last.strip())), default=len(raw) - 1)
    known: dict[str, dict[int | None, tuple[str, int]]] = {}  # of one text by the cells that have it
    for file, entry in linecache.cache.items():
        number = cells.number_of(shell, file)
        if len(entry) == 4 and (number is not None or is_cell_file(file)):
            text = "".join(entry[2])
            known.setdefault(text.strip("\n"), {})[number] = file, _blank(text)
    units = []
    for number, cell in enumerate(raw):
        body = cells.below_magic(cell)
        ran, python = (shell.transform_cell(text) for text in (body, cells.untimed(body)))
        files = known.get(ran.strip("\n"), {})
        file, lead = files.get(number) or next(reversed(files.values()), (None, 0))
        shift = lead - _blank(python) if file else 0
        units.append(cells.Unit(cell_name(number), python, file, shift, failed.lines.get(number)))
    return units, own


def _blank(text: str) -> int:
    return len(text) - len(text.lstrip("\n"))


def help_text() -> str:
    return f"""The last step as a program of plain JAX: your own cells, a mesh, where every array lies, and the plan's
constraints at your own lines. It runs without jaxshard_magic.

    %shard code                    the program of the last %%shard cell's step

{flags_text(CodeOptions)}

What it moves between devices is read from the program as compiled, and stands at its beginning beside the plan's."""
