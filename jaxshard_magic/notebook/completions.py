"""The words of the magics' lines: what completes them, and what is said of one that can't be."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.core import completer

from ..errors import ShardError, did_you_mean, one_of
from . import cells
from .options import (
    COMMANDS,
    STRATEGIES,
    CodeOptions,
    ExploreOptions,
    HistoryOptions,
    Options,
    ScheduleOptions,
)

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_LONGEST, _LEFT, _RIGHT = 3000, 1000, 1500  # characters of a message, and of its ends where it is cut
_LINES = {"history": HistoryOptions, "explore": ExploreOptions, "code": CodeOptions}


def one_line(error: ShardError) -> str:
    """The error's message with its fix, where that is not in it already; the middle of a very long one is left out."""
    message = " ".join(str(error).split())
    if error.fix and error.fix not in message:
        message = f"{message} Fix: {error.fix}"
    return message if len(message) <= _LONGEST else f"{message[:_LEFT]} ... {message[-_RIGHT:]}"


def no_command(word: str) -> ShardError:
    """What `%shard word` is told that is none of its commands."""
    if word.partition("+")[0].partition("@")[0] in STRATEGIES:
        return ShardError(
            f"%shard {word} has no cell: write %%shard {word} as the first line of the step's cell"
        )
    return ShardError(
        f"%shard has no command {word!r}; it has {one_of(COMMANDS)}, and alone it shows the last report."
        + did_you_mean(word, (*COMMANDS, *STRATEGIES))
    )


def completions(shell: "InteractiveShell", event: Any) -> list[str]:
    """Words for the line: functions after --step, names after --schedule, the names and options of `%shard schedule`,
    else strategies and options."""
    before = event.text_until_cursor.removesuffix(event.symbol).split()
    if before[:2] == ["%shard", "schedule"]:
        from . import schedule_line as _schedules

        return [*_schedules.NAMES, _schedules.EVERY, *(flag.name for flag in ScheduleOptions.flags())]
    for command, options in _LINES.items():
        if before[:2] == ["%shard", command]:
            return [flag.name for flag in options.flags()]
    if before[-1:] == ["--step"]:
        return [name for name, value in shell.user_ns.items() if callable(value) and not name.startswith("_")]
    if before[-1:] == ["--schedule"]:
        from ..schedule import NAMES

        return [*NAMES]
    flags = [flag.name for flag in Options.flags()]
    commands = COMMANDS if before == ["%shard"] else ()
    return flags if event.symbol.startswith("-") else [*commands, *STRATEGIES, *flags]


def functions_below(shell: "InteractiveShell") -> Callable[[Any], Any]:
    """A matcher of IPython's for `%%shard --step`: the functions of the cell below the line, those in others too."""
    offer: Any = completer

    @offer.context_matcher()
    def matcher(context: Any) -> dict[str, Any]:
        before = context.text_until_cursor.removesuffix(context.token).split()
        asked = context.cursor_line == 0 and before[:1] == ["%%shard"] and before[-1:] == ["--step"]
        body = context.full_text.partition("\n")[2]
        names = cells.functions_in(shell.transform_cell(body), shell.user_ns) if asked else []
        found = [offer.SimpleCompletion(n, type="function") for n in names if n.startswith(context.token)]
        return {"completions": found}

    return matcher
