"""The words of the magics' lines: what completes them, and what is said of one that can't be."""

from typing import TYPE_CHECKING, Any

from ..errors import ShardError, did_you_mean, one_of
from .options import CODE_FLAGS, COMMANDS, EXPLORE_FLAGS, FLAGS, HISTORY_FLAGS, SCHEDULE_FLAGS, STRATEGIES

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_LINES = {"history": HISTORY_FLAGS, "explore": EXPLORE_FLAGS, "code": CODE_FLAGS}


def one_line(error: ShardError) -> str:
    """The error's message with its fix, where that is not in it already."""
    message = " ".join(str(error).split())
    return message if not error.fix or error.fix in message else f"{message} Fix: {error.fix}"


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

        return [*_schedules.NAMES, _schedules.EVERY, *(flag.name for flag in SCHEDULE_FLAGS)]
    for command, flags in _LINES.items():
        if before[:2] == ["%shard", command]:
            return [flag.name for flag in flags]
    if before[-1:] == ["--step"]:
        return [name for name, value in shell.user_ns.items() if callable(value) and not name.startswith("_")]
    if before[-1:] == ["--schedule"]:
        from ..schedule import NAMES

        return [*NAMES]
    flags = [flag.name for flag in FLAGS]
    commands = COMMANDS if before == ["%shard"] else ()
    return flags if event.symbol.startswith("-") else [*commands, *STRATEGIES, *flags]
