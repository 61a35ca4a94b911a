"""The words of the magics' lines: what completes them, and what is said of one that can't be."""

from typing import TYPE_CHECKING, Any

from jaxshard_magic import _options
from jaxshard_magic.errors import ShardError, did_you_mean, one_of

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_LINES = {"history": _options.HISTORY_FLAGS, "explore": _options.EXPLORE_FLAGS, "code": _options.CODE_FLAGS}


def one_line(error: ShardError) -> str:
    """The error's message with its fix, where that is not in it already."""
    message = " ".join(str(error).split())
    return message if not error.fix or error.fix in message else f"{message} Fix: {error.fix}"


def no_command(word: str) -> ShardError:
    """What `%shard word` is told that is none of its commands."""
    if word.partition("+")[0].partition("@")[0] in _options.STRATEGIES:
        return ShardError(
            f"%shard {word} has no cell: write %%shard {word} as the first line of the step's cell"
        )
    return ShardError(
        f"%shard has no command {word!r}; it has {one_of(_options.COMMANDS)}, and alone it shows the last report."
        + did_you_mean(word, (*_options.COMMANDS, *_options.STRATEGIES))
    )


def completions(shell: "InteractiveShell", event: Any) -> list[str]:
    """Words for the line: functions after --step, names after --schedule, the names and options of `%shard schedule`,
    else strategies and options."""
    before = event.text_until_cursor.removesuffix(event.symbol).split()
    if before[:2] == ["%shard", "schedule"]:
        from jaxshard_magic import _schedules

        return [*_schedules.NAMES, _schedules.EVERY, *(flag.name for flag in _options.SCHEDULE_FLAGS)]
    for command, flags in _LINES.items():
        if before[:2] == ["%shard", command]:
            return [flag.name for flag in flags]
    if before[-1:] == ["--step"]:
        return [name for name, value in shell.user_ns.items() if callable(value) and not name.startswith("_")]
    if before[-1:] == ["--schedule"]:
        from jaxshard_magic.schedule import NAMES

        return [*NAMES]
    flags = [flag.name for flag in _options.FLAGS]
    commands = _options.COMMANDS if before == ["%shard"] else ()
    return flags if event.symbol.startswith("-") else [*commands, *_options.STRATEGIES, *flags]
