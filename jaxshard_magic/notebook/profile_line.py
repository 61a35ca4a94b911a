"""`%shard profile`: record more calls of the last step, and return its report with the time of each part."""

from typing import TYPE_CHECKING, Any

from ..errors import ShardError, parse_count, quoted
from ..temporary import Replaced, attribute
from . import cells
from .options import ProfileOptions, flags_text, parse_command
from .progress import Progress, line_for

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ..report import Report
    from .session import ShardSession


def run_profile_line(
    text: str, shell: "InteractiveShell", session: "ShardSession"
) -> "tuple[Report | None, str | None]":
    """Run a `%shard profile` line.

    Args:
        text: The line, from the word `profile` on.
        shell: IPython's shell; the namespace gives the step's arguments.
        session: State between cells.

    Returns:
        The report and the name to bind it to; None and None for `--help`.

    Raises:
        ShardError: The line is malformed, or no step has run so far.
    """
    from ..step.profiler_recording import DEFAULT_CALLS

    options = parse_command(text, ProfileOptions)
    if options.help:
        print(help_text())
        return None, None
    n = _count(options.words, DEFAULT_CALLS)
    step: Any = session.step
    write = "write %%shard fsdp above a cell with a train step, then %shard profile"
    if session.comparison is not None:
        raise ShardError(f"the last cell compared strategies, and none of them goes on: {write}")
    if step is None:
        raise ShardError(f"there is no step yet: {write}")
    step = step.sharded if isinstance(step, cells.DryRunStep) else step
    if step.calls == 0:
        raise ShardError(f"{step.name} was compiled and has not run: call it, then %shard profile")
    given = None
    # `--profile` and `--repeat` keep the inputs of the last call. Otherwise the arguments are read from the notebook.
    if not step.has_inputs:
        function, path = step.__wrapped__, step.path or step.name
        call = step.entry.call_shapes
        given = cells.like_before(function, shell.user_ns, path, *call.call_signature)
    draw = line_for(shell) if session.progress else None
    with Progress(draw, label=step.path) as progress, Replaced(attribute(step.programs, "progress"), progress):
        args, kwargs = given or (None, None)
        step.profile(n, args=args, kwargs=kwargs, trace=options.trace)
    return session.report(), options.output


def _count(words: tuple[str, ...], usual: int) -> int:
    """Return the number of steps on the line, or `usual`."""
    if len(words) > 1:
        raise ShardError(f"%shard profile takes one number, of steps; unexpected: {' '.join(words[1:])}")
    for word in words:
        n = parse_count(word)
        if n is None:
            raise ShardError(f"%shard profile takes a whole number of steps from 1 on, not {quoted(word)}")
        return n
    return usual


def help_text() -> str:
    """Return the text printed by `%shard profile --help`."""
    return f"""Record more steps of the last %%shard cell's, on copies; its Report then says where their time went.

    %shard profile                 5 steps more; nothing is updated
    %shard profile 10              10 of them
    %shard profile --trace DIR     and the files that xprof, TensorBoard and Perfetto read

The step is given what it was given last, each argument as the notebook holds it under its name now, or what %%shard
--profile or --repeat kept. Each line of the cell gets its measured time: compute, moving data between devices,
waiting for other devices or for Python.

Options:
{flags_text(ProfileOptions)}
"""
