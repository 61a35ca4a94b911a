"""Command lines of the magics: a table of options for each command, the parser, checks, and help texts.

A table is a dataclass whose fields have the option's help text, the reader of its value and its conflicts. A `%%shard`
line is of one of several kinds (one step, comparison, search, command), and each kind refuses options of the others.
"""

import re
from collections import deque
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

from ..config.flags import Flag, LineOptions, assignment, count, file_name, folder, number, option, variable
from ..config.options import DATA, FLAGS
from ..config.strategies import AUTO, AUTO_HELP, STRATEGIES, WORDS
from ..errors import ShardError, list_names, unknown_name

COMMANDS = (
    "doctor",
    "abstract",
    "schedule",
    "compare",
    "history",
    "explore",
    "code",
    "profile",
    "save",
    "load",
    "rescue",
)
Line = TypeVar("Line", bound=LineOptions)
_BEFORE_COMMENT = re.compile(r"""(?:"[^"]*"|'[^']*'|[^"'#]|(?<=[^\s;])#)*""")


@dataclass(frozen=True)
class ShardOptions(LineOptions):
    """Options of a `%%shard` line.

    Fields with a flag are documented by their help texts.

    Attributes:
        strategy: The strategy, a word of the line.
        step_options: Options that change the step, by the parameter names of `shard`; only options on the line.
    """

    strategy: str = ""
    mesh: str | None = option("--mesh", "TEXT", 'the mesh, for this cell only: --mesh "data=4 model=2"')
    step: str | None = option("--step", "NAME", "which function is the train step; trainer.step and main.step too")
    specs: tuple[str, ...] = option(
        "--spec", "NAME=SPEC", "PartitionSpec of an argument: --spec \"batch=P('data')\"", (), assignment
    )
    rules: tuple[str, ...] = option(
        "--rule", "REGEX=SPEC", "PartitionSpec of leaves: --rule \".*kernel=P(None,'tp')\"", (), assignment
    )
    step_options: Mapping[str, Any] = field(default_factory=dict, metadata={"flags": tuple(FLAGS.values())})
    check: bool = option(
        "--check",
        "",
        "compare with the plain step on the same inputs",
        False,
        calls=True,
        refused={"compare": "each is checked anyway"},
    )
    on: str | None = option("--on", "CHIP", "predict the step's time on this chip: --on v5e, --on h100")
    dry_run: bool = option("--dry-run", "", "trace, plan and compile; run no step", False)
    repeat: int = option("--repeat", "N", "call the step N more times on copies, for its timing", 0, count, calls=True)
    profile: int = option(
        "--profile",
        "[N]",
        "record N more steps on copies, 5 unless said: where their time goes",
        0,
        count,
        bare=5,
        calls=True,
        refused={
            "auto": "many are tried; %shard profile records the step that was chosen",
            "compare": "none is recorded; record one of them with %%shard and its name",
            "dry_run": "it records steps that run, and --dry-run runs none",
        },
    )
    trace: str | None = option(
        "--trace", "DIR", "of --profile: keep the files that xprof and Perfetto read", read=folder, needs="profile"
    )
    checkpoint: str | None = option(
        "--checkpoint",
        "DIR",
        "save the loop's state there between its steps, while it runs",
        read=folder,
        calls=True,
        refused={
            "auto": "the steps of many are tried; save with the one that was chosen",
            "compare": "none trains; save with one of them, %%shard and its name",
            "dry_run": "it saves what steps return, and --dry-run runs none",
        },
    )
    every: str | None = option(
        "--every", "N", "of --checkpoint: steps from save to save, 100 unless said, or 10m", needs="checkpoint"
    )
    keep: int | None = option(
        "--keep",
        "N",
        "of --checkpoint: so many checkpoints stay, the newest, 3 unless said",
        read=count,
        needs="checkpoint",
    )
    resume: bool = option("--resume", "", "of --checkpoint: go on from the newest one there", False, needs="checkpoint")
    compare: bool = option(
        "--compare",
        "",
        "try several strategies, the usual ones unless said, side by side",
        False,
        refused={"auto": "what it compiles is compared in any case"},
        command="compare",
    )
    meshes: str | None = option(
        "--meshes", "AXES", 'compared on these: all, or "data=8; data=4 model=2"', command="compare"
    )
    vary: tuple[str, ...] = option(
        "--vary", "NAME=A,B", "compared with each value: --vary microbatches=1,4,16", (), assignment, command="compare"
    )
    keep_going: bool = option(
        "--keep-going",
        "",
        "compare the others where a strategy of the list is none",
        False,
        refused={"auto": "it goes on in any case"},
        command="compare",
    )
    budget: float | None = option(
        "--budget", "SECONDS", "of auto: search no longer than this, 300 unless said", read=number, command="auto"
    )
    among: str | None = option("--among", "A,B", "of auto: search only these strategies", command="auto")
    plan_only: bool = option(
        "--plan-only", "", "of auto: compile nothing, choose by what plans say", False, command="auto"
    )
    donate: bool | None = option(
        "--donate",
        "",
        "let the step reuse the memory of its own earlier results",
        negative="keep every array that the step was given",
        refused={"compare": "each runs on copies"},
    )
    data: str = option(
        "--data", "WHAT", "of several hosts: each has the whole batch, or its own rows: per-host", "whole", choices=DATA
    )
    feed: bool = option("--feed", "", "take the batches of the cell's loop ahead, in a thread", False)
    name: str | None = option("--name", "LABEL", "the Report's name")
    output: str | None = option("-o", "VAR", "keep the Report under this name", read=variable)

    def value(self, flag: Flag) -> Any:
        """Return the value of a flag, or its default if the line does not have the flag."""
        if flag.parameter in FLAGS:
            return self.step_options.get(flag.parameter, flag.default)
        return super().value(flag)

    def has(self, flag: Flag) -> bool:
        """Return whether the line has a flag; a flag that changes the step counts even with its default value."""
        return flag.parameter in self.step_options if flag.parameter in FLAGS else super().has(flag)

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with other values, by field or by name of an option of the step."""
        step = {name: value for name, value in values.items() if name in FLAGS}
        own = {name: value for name, value in values.items() if name not in FLAGS}
        return replace(self, step_options={**self.step_options, **step}, **own)


@dataclass(frozen=True)
class ScheduleOptions(LineOptions):
    """Options of a `%shard schedule` line. Sizes missing on the line are None; `costs` is text."""

    stages: int | None = option(
        "--stages", "P", "ranks of the pipeline; else those of the mesh's pipeline axis, or 4", read=count
    )
    microbatches: int | None = option("--microbatches", "M", "parts of the batch; else 4 for each stage", read=count)
    chunks: int | None = option(
        "--chunks", "V", "parts of the model that a rank holds, where the schedule has no number", read=count
    )
    costs: str | None = option("--costs", "TEXT", "of a microbatch: F,I,W or F,I,W,transfer, or with names, as below")
    memory_limit: float | None = option(
        "--memory-limit", "N", "for those that search: most microbatches that a rank holds", read=number
    )


@dataclass(frozen=True)
class HistoryOptions(LineOptions):
    """Options of a `%shard history` line; None for what is missing."""

    strategy: str | None = option("--strategy", "NAME", "those of this strategy: --strategy fsdp+tp")
    name: str | None = option("--name", "NAME", "those of the step, or the label, of this name")
    since: str | None = option("--since", "WHEN", "from then on: 3h, 7d, 2w, or a day, 2026-11-01")
    limit: int | None = option("--limit", "N", "show so many of the newest, 50 unless said", read=count)
    json: str | None = option("--json", "FILE", "write them with their reports in full to a new file", read=file_name)
    force: bool = option("--force", "", "write over the file where there is one", False)
    calibration: bool = option("--calibration", "", "measured over predicted step times, by chip", False)


@dataclass(frozen=True)
class ExploreOptions(LineOptions):
    """Options of a `%shard explore` line; None for what is missing."""

    mesh: str | None = option(
        "--mesh", "TEXT", 'the mesh to begin with: --mesh "data=4 model=2"; else the last step\'s'
    )
    output: str | None = option("-o", "VAR", "keep the explorer under this name", read=variable)


@dataclass(frozen=True)
class CodeOptions(LineOptions):
    """Options of a `%shard code` line; None for what is missing."""

    file: str | None = option("--file", "FILE", "write the program to a new file as well", read=file_name)
    force: bool = option("--force", "", "write over the file where there is one", False)


@dataclass(frozen=True)
class ProfileOptions(LineOptions):
    """Options of a `%shard profile` line; None for what is missing."""

    trace: str | None = option(
        "--trace", "DIR", "keep the files that xprof, TensorBoard and Perfetto read", read=folder
    )


@dataclass(frozen=True)
class SaveOptions(LineOptions):
    """Options of a `%shard save` line."""

    rename: tuple[str, ...] = option(
        "--rename", "THERE=HERE", 'names in a file of weights: --rename "fc.weight=fc.kernel:T"', (), assignment
    )
    force: bool = option("--force", "", "write over a file of weights where there is one", False)


@dataclass(frozen=True)
class LoadOptions(LineOptions):
    """Options of a `%shard load` line; None for what is missing."""

    number: int | None = option("--number", "N", "this checkpoint; the newest by default", read=count)
    cast: bool = option("--cast", "", "convert to the dtypes that the names have now", False)
    rename: tuple[str, ...] = option(
        "--rename", "THERE=HERE", 'names in a file of weights: --rename "fc.weight=fc.kernel:T"', (), assignment
    )
    part: str | None = option("--part", "NAME", "the part of the checkpoint, where several fit the name")


def flags_text(options: type[LineOptions]) -> str:
    """Return a help text of the options of a line, one line each."""
    return "\n".join(f"    {flag.name + ' ' + flag.metavar:<21}{flag.help}" for flag in options.flags())


def line_text(line: str) -> tuple[str, bool]:
    """Return the request in a magic's line, and whether a semicolon at its end suppresses the display.

    The magic's name, the semicolon and a comment are removed. As in Python a comment begins at a `#` at the start of a
    word, outside of quotes.

    >>> line_text("%%shard fsdp -o found;  # one word changed")
    ('fsdp -o found', True)
    """
    text = line.strip().removeprefix("%%shard")
    read = _BEFORE_COMMENT.match(text)
    if read is not None and text[read.end() :].startswith("#"):
        text = text[: read.end()]
    text = text.strip()
    return text.rstrip("; "), text.endswith(";")


def parse(line: str) -> ShardOptions:
    """Parse `fsdp+tp --mesh "data=4 model=2"`; words that belong to no option are in `words`.

    Raises:
        ShardError: An option is unknown, a value is missing or impossible, or a quote is not closed.
    """
    return _parsed(line, "%%shard", ShardOptions())


def parse_command(line: str, options: type[Line]) -> Line:
    """Parse the line of a command, `history fsdp --since 7d`.

    Args:
        line: The line, from the command on.
        options: Options of the command.

    Returns:
        The options; `words` are the words after the command.

    Raises:
        ShardError: As for `parse`.
    """
    parsed = _parsed(line, f"%shard {line.split(maxsplit=1)[0]}", options())
    return replace(parsed, words=parsed.words[1:])


def _parsed(line: str, command: str, options: Line) -> Line:
    """Parse the options of a line into a copy of `options`; `command` is named in errors."""
    flags = options.flags()
    by_name = {flag.name: flag for flag in flags} | {"-h": flags[-1]}  # --help is the last one
    words, given, tokens = list[str](), dict[str, Any](), deque(_tokens(line))
    while tokens:
        token = tokens.popleft()
        if not re.match(r"--?[A-Za-z]", token):
            words.append(token)
            continue
        name, equals, text = token.partition("=")
        flag = _flag(name, command, by_name)
        # `--profile 10`: an option with an optional value takes the next word only if the word is a number.
        bare = flag.bare is not None and not equals and (not tokens or not tokens[0].isdecimal())
        if flag.metavar and not equals and not bare:
            if not tokens or tokens[0] in by_name:
                raise ShardError(f"{name} needs a value: {name} {flag.metavar}")
            text = tokens.popleft()
        elif equals and not flag.metavar:
            raise ShardError(f"{name} takes no value, not {text!r}")
        given_text = flag.metavar and not bare
        value = flag.read(flag, _unquoted(text)) if given_text else flag.bare if bare else flag.constant
        if flag.repeatable:
            given.setdefault(flag.parameter, []).append(value)
        else:
            given[flag.parameter] = value
    many = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return options.with_values({"words": tuple(words), **given, **many})


def _tokens(line: str) -> list[str]:
    """Return the words of a line. Spaces inside of quotes and brackets do not separate words; inner quotes stay."""
    words, start, end = [], 0, 0
    while start < len(line):
        if line[start].isspace():
            start += 1
            continue
        end = _end_of_word(line, start)
        words.append(_unquoted(line[start:end]))
        start = end
    return words


def _end_of_word(line: str, start: int) -> int:
    """Return the index after the word that begins at `start`."""
    depth, at = 0, start
    while at < len(line) and not (line[at].isspace() and depth <= 0):
        # A quote or bracket may contain spaces, as in `--spec batch=P('data', None)`.
        if line[at] in "\"'":
            at = line.find(line[at], at + 1)
            if at < 0:
                raise ShardError(f"a quote is not closed in: {line.strip()}")
        depth += (line[at] in "([{") - (line[at] in ")]}")
        at += 1
    if depth > 0:
        raise ShardError(f"a bracket is not closed in: {line.strip()}")
    return at


def _unquoted(word: str) -> str:
    """Return a word without quotes around all of it."""
    whole = len(word) > 1 and word[0] in "\"'" and word.find(word[0], 1) == len(word) - 1
    return word[1:-1] if whole else word


def _flag(name: str, command: str, by_name: Mapping[str, Flag]) -> Flag:
    """Return the flag of a name; raise `ShardError` with a suggestion for an unknown name."""
    if name in by_name:
        return by_name[name]
    raise ShardError(unknown_name(f"{command} has no option {name}", name, by_name, f"{command} --help lists them"))


_BY_PARAMETER = {flag.parameter: flag for flag in ShardOptions.flags()}


def is_search(options: ShardOptions) -> bool:
    """Return whether a `%%shard` line asks for a search."""
    return options.words[:1] == (AUTO,)


def check_kind(options: ShardOptions) -> None:
    """Check that a `%%shard` line has no options of another kind of line.

    Raises:
        ShardError: A search has options that it refuses, or more words; another line has options of a search, options
            that `--dry-run` refuses, or an option without the one that it needs.
    """
    if is_search(options):
        if options.words[1:]:
            raise ShardError(f"%%shard auto takes options alone; unexpected: {' '.join(options.words[1:])}")
        _refuse(options, "auto", "under auto ")
        return
    if options.dry_run:
        _refuse(options, "dry_run")
    for flag in _given(options):
        if flag.needs and not options.has(need := _BY_PARAMETER[flag.needs]):
            value = "" if need.bare is not None else f" {need.metavar}"
            raise ShardError(f"{flag.name} is of {need.name}: add {need.name}{value}")
        if flag.command == AUTO:
            raise ShardError(f"{flag.name} is for a search: %%shard auto")


def is_comparison(options: ShardOptions) -> bool:
    """Return whether a `%%shard` line asks for a comparison of several candidates."""
    several = any("," in word for word in options.words)
    return several or options.compare or options.meshes is not None or bool(options.vary)


def with_strategies(options: ShardOptions) -> tuple[ShardOptions, list[str]]:
    """Return the options of a comparison, and the strategies on the line.

    Raises:
        ShardError: An option is for single steps only.
    """
    _refuse(options, "compare", "in a comparison ")
    words = [word for text in options.words for word in text.split(",") if word]
    return replace(options, words=(), strategy=",".join(words)), words


def with_strategy(options: ShardOptions) -> ShardOptions:
    """Return the options of a line with one word, with the word as the strategy.

    Raises:
        ShardError: The line has no word or several, or `--keep-going`.
    """
    if options.keep_going:
        raise ShardError("--keep-going is for a comparison: name several strategies, as in %%shard dp,fsdp,tp")
    if not options.words:
        raise ShardError(f"%%shard needs a strategy: {list_names(WORDS)}, or a sum such as fsdp+tp")
    strategy, *rest = options.words
    if rest:
        # In a mesh without quotes, axes after the first are read as words of the line.
        quote = f'; quote the mesh: --mesh "{options.mesh} {" ".join(rest)}"' if options.mesh else ""
        raise ShardError(f"%%shard takes one strategy, then options; unexpected: {' '.join(rest)}{quote}")
    return replace(options, strategy=strategy)


def compiled_only(options: ShardOptions, target: str) -> ShardOptions:
    """Return the options of a cell whose step is compiled for hardware not attached, with `dry_run` set.

    Raises:
        ShardError: An option calls the step, or `--on` names a chip, which the mesh names already.
    """
    for flag in _given(options):
        if flag.calls:
            raise ShardError(
                f"{flag.name} runs the step, and {target} is not attached: it only compiles. Leave {flag.name} out, "
                "or take a mesh of simulated devices"
            )
    if options.on is not None:
        raise ShardError(f"--on {options.on}: the mesh names the chip, {target}. Leave --on out")
    return replace(options, dry_run=True)


def check_output(name: str | None, used: Container[str], user: str) -> None:
    """Raise `ShardError` if `-o` would overwrite a name that `user` needs.

    Args:
        name: Name given by `-o`; None if the line has none.
        used: Names needed.
        user: Words for the user of the names, for the message.
    """
    if name is not None and name in used:
        raise ShardError(f"-o {name}: {user} has that name, and would lose it; take another: -o found")


def check_only(options: ShardOptions, command: str, *allowed: str) -> None:
    """Raise `ShardError` if a line of `%shard command` has other words or options than allowed.

    Args:
        options: Parsed options of the line.
        command: The command, the only word allowed.
        *allowed: Fields of the allowed options.
    """
    others = [flag.name for flag in _given(options) if flag.parameter not in allowed]
    if options.words == (command,) and not others:
        return
    takes = list_names(f"{flag.name} {flag.metavar}" for flag in ShardOptions.flags() if flag.parameter in allowed)
    given = " ".join(options.words[1:]) or list_names(others)
    quote = f'; quote the mesh: --mesh "{options.mesh} {given}"' if options.mesh and options.words[1:] else ""
    raise ShardError(f"%shard {command} takes {takes} and nothing else; unexpected: {given}{quote}")


def _given(options: ShardOptions) -> list[Flag]:
    """Return the flags present on a line."""
    return [flag for flag in ShardOptions.flags() if options.has(flag)]


def _refuse(options: ShardOptions, kind: str, words: str = "") -> None:
    """Raise `ShardError` for an option refused by this kind of line."""
    for flag in _given(options):
        if why := flag.refused.get(kind):
            raise ShardError(f"{flag.name}: {words}{why}; leave {flag.name} out")


def _help() -> str:
    helps = ((row.name, row.help) for row in STRATEGIES.values())
    strategies = "\n".join(f"    {name:<21}{text}" for name, text in (*helps, (AUTO, AUTO_HELP)))
    flags = flags_text(ShardOptions)
    return f"""Run this cell's train step sharded over the mesh, with the same numbers, and return the Report.

    %%shard STRATEGY [options]     above a cell that defines the train step, or calls one
    %%shard dp,fsdp,fsdp+tp        several, side by side: each compiled, run on copies and checked
    %%shard auto                   the fastest that fits, with what ruled the others out
    %shard                         the last report, with all calls since
    %shard compare 3 5             reports of the past side by side, by number or name; alone it lists them
    %shard history WORDS           the reports of all notebooks so far; --help has more
    %shard profile N               where the time of the last step goes: N more are recorded; --help has more
    %shard doctor                  what is installed, which devices answer, whether they reach each other,
                                   and the same of hosts
    %shard abstract NAME...        make shapes of what the notebook holds under these names, and free it
    %shard rescue NAME...          bring what a host that is left after a death has whole to this kernel
    %shard schedule NAMES          a pipeline schedule in time, or several compared; --help has more
    %shard explore                 try meshes and PartitionSpecs on the arrays of the last step; --help has more
    %shard code                    the last step as plain JAX, to take home; --help has more

Strategies, or a sum of them such as fsdp+tp; fsdp@data says which mesh axis:
{strategies}

Options:
{flags}

While a cell trains its curves are drawn below it; they stay in the report, report.metrics.
train_step.on_metrics(write), below the step, hands each row of them to a writer.
A PartitionSpec may also annotate the step's argument: def train_step(state, batch: P('data')).
A cell that only defines the step runs it once, on copies of what the notebook holds under its
parameters' names; the next cells then train with the sharded step.
A comment, # and what follows, may stand at the end of any of these lines."""


HELP = _help()
