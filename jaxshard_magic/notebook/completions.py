"""Words of the magics' lines: tab completion, and errors for unknown words."""

import re
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from IPython.core import completer

from ..config.flags import Flag
from ..config.strategies import AXIS_JOBS, STRATEGIES, WORDS
from ..errors import ShardError, list_names, unknown_name
from . import cells
from .options import (
    COMMANDS,
    CodeOptions,
    ExploreOptions,
    HistoryOptions,
    LoadOptions,
    ProfileOptions,
    SaveOptions,
    ScheduleOptions,
    ShardOptions,
)

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

COMPLETED_MAGICS = ("%shard", "%%shard", "shard", "%mesh")  # the first words of lines that are completed
_LONGEST, _LEFT, _RIGHT = 3000, 1000, 1500  # characters of a message, and of both ends of a shortened one
MESH_OPTIONS = ("--list", "--help")  # of %mesh
_LINES = {
    "schedule": ScheduleOptions,
    "history": HistoryOptions,
    "explore": ExploreOptions,
    "code": CodeOptions,
    "profile": ProfileOptions,
    "save": SaveOptions,
    "load": LoadOptions,
}


def one_line(error: ShardError) -> str:
    """Return the error's message and its fix, unless the message has the fix already, as one line.

    The middle of a message above 3,000 characters is left out.
    """
    message = " ".join(str(error).split())
    if error.fix and error.fix not in message:
        message = f"{message} Fix: {error.fix}"
    return message if len(message) <= _LONGEST else f"{message[:_LEFT]} ... {message[-_RIGHT:]}"


def unknown_command_error(word: str) -> ShardError:
    """Return the error for `%shard word` with an unknown command: a strategy, a report number, or a misspelled word."""
    if word.partition("+")[0].partition("@")[0] in WORDS:
        return ShardError(f"%shard {word} has no cell: write %%shard {word} as the first line of the step's cell")
    said = f"%shard has no command {word!r}"
    if word.isdecimal():
        fix = f"%shard history {word}"
        return ShardError(f"{said}. Did you mean {fix}? It shows report {word}", fix=fix)
    it_has = f"it has {list_names(COMMANDS)}, and alone it shows the last report"
    names = (*COMMANDS, *WORDS)
    return ShardError(unknown_name(said, word, names, it_has, "%shard --help lists them"))


def completions(shell: "InteractiveShell", event: Any) -> list[str]:
    """Return the words that complete a line at the cursor.

    Args:
        shell: IPython's shell.
        event: IPython's event, with `text_until_cursor` and `symbol`, the word begun.

    Returns:
        For an option whose value is being typed: the possible values, none for numbers and free names. For `%mesh`:
            options, chips, slices or nodes of a chip, and axes. Otherwise strategies and commands, or options once a
            dash is typed or the strategy is complete.
    """
    before = event.text_until_cursor.removesuffix(event.symbol)
    words = before.split()
    if words[:1] == ["%mesh"]:
        return _of_mesh(before, event.symbol)
    command = words[1] if words[:1] == ["%shard"] and len(words) > 1 else ""
    options = _LINES.get(command, ShardOptions)
    asked = _VALUE.search(before)
    flag = next((f for f in options.flags() if asked and f.name == asked["flag"] and f.metavar), None)
    if flag is not None:
        return [*_VALUES.get(flag.name, lambda *_: [])(shell, before)]
    flags = [each.name for each in options.flags()]
    if command == "schedule":
        from . import schedule_line

        return [*schedule_line.NAMES, schedule_line.ALL, *flags]
    if command in _LINES or event.symbol.startswith("-"):
        return flags
    if len(words) > 1 and before[-1:].isspace():
        return flags
    return [*(COMMANDS if words == ["%shard"] else ()), *WORDS]


def _of_mesh(before: str, word: str) -> list[str]:
    """Return completions of a `%mesh` line: options and chips first, then each unused axis."""
    words = before.split()
    if word.startswith("-"):
        return [*MESH_OPTIONS] if len(words) == 1 else []
    if not before[-1:].isspace():  # after the colon of a chip; sizes of axes are numbers
        return _hardware(before) if _CHIP.search(before) else []
    axes = [f"{job.axis_names[0]}=" for job in AXIS_JOBS.values()]
    written = {each.partition("=")[0] + "=" for each in words[1:]}
    free = [axis for axis in axes if axis not in written]
    return [*_hardware(before), *free] if len(words) == 1 else free


def _functions(shell: "InteractiveShell", _: str) -> list[str]:
    """Return names of the notebook's public callables."""
    return [name for name, value in shell.user_ns.items() if callable(value) and not name.startswith("_")]


def _choices(flag: Flag, *_: Any) -> list[str]:
    return [*flag.words]


def _chips(*_: Any) -> list[str]:
    from ..hardware import chips

    return [*chips()]


def _hardware(*line: Any) -> list[str]:
    """Return device kinds for a mesh, or the slices of the chip before the cursor."""
    from ..hardware import chips

    named = _CHIP.search(line[-1])
    chip = chips().get(named[1]) if named else None
    if chip is None:
        return ["cpu", "hosts", *chips()]
    return ["x".join(map(str, each)) for each in chip.slices]


def _varied(_: Any, before: str) -> list[str]:
    """Return the options accepted by `--vary`, or values for the option before the cursor."""
    from ..search import VARIABLE_OPTIONS

    name = _VARIES.search(before)
    if name is None:
        return [f"{each}=" for each in VARIABLE_OPTIONS]
    return [*_VALUES.get("--" + name[1].replace("_", "-"), lambda *_: [])(_, before)]


# The option before the cursor whose value is still being typed.
_VALUE = re.compile(r"""(?:^|\s)(?P<flag>--?[a-z][a-z-]*)(?:\s+|=)(?:["'][^"']*|[^\s"']*)$""")
_CHIP = re.compile(r"([a-z][a-z0-9-]*):$")
_VARIES = re.compile(r"(\w+)=[^\s=]*$")
_VALUES: dict[str, Callable[..., Iterable[str]]] = {
    "--step": _functions,
    **{flag.name: partial(_choices, flag) for flag in ShardOptions.flags() if flag.choices},
    "--on": _chips,
    "--mesh": _hardware,
    "--meshes": lambda *_: ["all"],
    "--among": lambda *_: [*STRATEGIES],
    "--strategy": lambda *_: [*WORDS],
    "--vary": _varied,
}


def matcher_of(
    shell: "InteractiveShell", on_hosts: "Callable[[str, int], list[tuple[int, str]]]"
) -> Callable[[Any], Any]:
    """Return an IPython completion matcher for lines of the magics.

    On lines of the magics the matcher offers the words of `completions` and suppresses all others; after `%%shard
    --step` it offers the functions of the cell below the line in their place. On other lines the matcher offers names
    known to the hosts.

    Args:
        shell: IPython's shell.
        on_hosts: Returns completions of a text at a cursor position on the hosts, each with its start position.
    """
    offer: Any = completer

    @offer.context_matcher()
    def matcher(context: Any) -> dict[str, Any]:
        before = context.text_until_cursor.removesuffix(context.token)
        first = next(iter(before.split()), "")
        if first not in COMPLETED_MAGICS or (first.startswith("%%") and context.cursor_line):
            lines = context.full_text.split("\n")
            # IPython gives line and column of the cursor; hosts are asked with an offset in the text.
            cursor = sum(len(line) + 1 for line in lines[: context.cursor_line]) + context.cursor_position
            token = cursor - len(context.token)
            there = (context.full_text[token:start] + word for start, word in on_hosts(context.full_text, cursor))
            return {"completions": [offer.SimpleCompletion(text) for text in there]}
        event = SimpleNamespace(text_until_cursor=context.text_until_cursor, symbol=context.token)
        words = completions(shell, event)
        if before.split()[-1:] == ["--step"]:
            body = context.full_text.partition("\n")[2]
            words = cells.functions_in(shell.transform_cell(body), shell.user_ns)
        found = [offer.SimpleCompletion(word) for word in words if word.startswith(context.token)]
        # With `suppress` IPython drops the words of its other matchers.
        return {"completions": found, "suppress": bool(found)}

    return matcher
