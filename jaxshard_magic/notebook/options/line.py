"""The command lines of `%%shard` and `%shard` parsed, by their tables."""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ...errors import ShardError, did_you_mean, one_of
from .flags import CODE_FLAGS, EXPLORE_FLAGS, FLAGS, HISTORY_FLAGS, SCHEDULE_FLAGS, Flag

_REPEATABLE = ("specs", "rules", "vary")
_COUNTS = ("repeat", "microbatches", "stages", "chunks", "limit")


@dataclass(frozen=True)
class Options:
    """A parsed `%%shard` line; `specs` and `rules` are the texts `NAME=SPEC` and `REGEX=SPEC` in order."""

    strategy: str = ""
    mesh: str | None = None
    step: str | None = None
    specs: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    microbatches: int | None = None
    reduce: str = "each"
    remat: str | None = None
    precision: str | None = None
    reduce_dtype: str | None = None
    pad: bool = False
    stages: int | None = None
    schedule: str | None = None
    chunks: int | None = None
    balance: str | None = None
    cut: str | None = None
    check: bool = False
    on: str | None = None
    dry_run: bool = False
    repeat: int = 0
    compare: bool = False
    meshes: str | None = None
    vary: tuple[str, ...] = ()
    keep_going: bool = False
    budget: float | None = None
    among: str | None = None
    plan_only: bool = False
    donate: bool | None = None
    name: str | None = None
    output: str | None = None
    help: bool = False
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScheduleOptions:
    """A parsed `%shard schedule` line; a size that it does not say is None, `costs` is its text."""

    stages: int | None = None
    microbatches: int | None = None
    chunks: int | None = None
    costs: str | None = None
    memory_limit: float | None = None
    output: str | None = None
    help: bool = False
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class HistoryOptions:
    """A parsed `%shard history` line; what it does not say is None."""

    strategy: str | None = None
    name: str | None = None
    since: str | None = None
    limit: int | None = None
    json: str | None = None
    output: str | None = None
    help: bool = False
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExploreOptions:
    """A parsed `%shard explore` line; what it does not say is None."""

    mesh: str | None = None
    output: str | None = None
    help: bool = False
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class CodeOptions:
    """A parsed `%shard code` line; what it does not say is None."""

    file: str | None = None
    output: str | None = None
    help: bool = False
    words: tuple[str, ...] = ()


Line = TypeVar("Line", Options, ScheduleOptions, HistoryOptions, ExploreOptions, CodeOptions)


def parse(line: str) -> Options:
    """`fsdp+tp --mesh "data=4 model=2"` as Options; what is no option is in `words`.

    Raises ShardError for an unknown option, a missing or impossible value, and an unclosed quote.
    """
    return _parsed(line, "%%shard", FLAGS, Options())


def parse_schedule(line: str) -> ScheduleOptions:
    """`schedule 1f1b --stages 4` as ScheduleOptions; `words` are those after the command. Raises as `parse` does."""
    return _after_command(line, SCHEDULE_FLAGS, ScheduleOptions())


def parse_history(line: str) -> HistoryOptions:
    """`history fsdp --since 7d` as HistoryOptions; `words` are those after the command. Raises as `parse` does."""
    return _after_command(line, HISTORY_FLAGS, HistoryOptions())


def parse_explore(line: str) -> ExploreOptions:
    """`explore state` as ExploreOptions; `words` are those after the command. Raises as `parse` does."""
    return _after_command(line, EXPLORE_FLAGS, ExploreOptions())


def parse_code(line: str) -> CodeOptions:
    """`code --file train.py` as CodeOptions; `words` are those after the command. Raises as `parse` does."""
    return _after_command(line, CODE_FLAGS, CodeOptions())


def _after_command(line: str, flags: Sequence[Flag], options: Line) -> Line:
    command = f"%shard {line.split(maxsplit=1)[0]}"
    parsed = _parsed(line, command, flags, options)
    return replace(parsed, words=parsed.words[1:])


def _parsed(line: str, command: str, flags: Sequence[Flag], options: Line) -> Line:
    by_name = {flag.name: flag for flag in flags} | {"-h": flags[-1]}
    tokens = _tokens(line)
    while tokens:
        token = tokens.pop(0)
        if not re.match(r"--?[A-Za-z]", token):
            options = replace(options, words=(*options.words, token))
            continue
        name, given, value = token.partition("=")
        flag = _flag(name, command, by_name)
        if not flag.metavar:
            if given:
                raise ShardError(f"{name} takes no value, not {value!r}")
            options = replace(options, **{flag.into: flag.sets})
            continue
        if not given:
            if not tokens or tokens[0] in by_name:
                raise ShardError(f"{name} needs a value: {name} {flag.metavar}")
            value = tokens.pop(0)
        options = replace(options, **{flag.into: _value(flag, _unquoted(value), options)})
    return options


def _tokens(line: str) -> list[str]:
    """The words of the line; spaces inside quotes and brackets do not part them, inner quotes stay."""
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
    depth, at = 0, start
    while at < len(line) and not (line[at].isspace() and depth <= 0):
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
    whole = len(word) > 1 and word[0] in "\"'" and word.find(word[0], 1) == len(word) - 1
    return word[1:-1] if whole else word


def _flag(name: str, command: str, by_name: Mapping[str, Flag]) -> Flag:
    if name in by_name:
        return by_name[name]
    names = one_of(each for each in by_name if each != "-h")
    raise ShardError(f"{command} has no option {name}; it has {names}.{did_you_mean(name, by_name)}")


def _value(flag: Flag, value: str, options: Line) -> Any:
    if flag.into in _REPEATABLE:
        if "=" not in value:
            raise ShardError(f"{flag.name} {value!r} has no '='; write {flag.name} \"{flag.metavar}\"")
        return (*getattr(options, flag.into), value)
    if flag.into in _COUNTS:
        if not value.isdecimal() or int(value) < 1:
            raise ShardError(f"{flag.name} takes a whole number from 1 on, not {value!r}")
        return int(value)
    if flag.into in ("memory_limit", "budget"):
        return _number(flag.name, value)
    if flag.into == "output" and not value.isidentifier():
        raise ShardError(f"-o takes the name of a variable, not {value!r}")
    return value


def _number(what: str, value: str) -> float:
    with suppress(ValueError):
        if 0 < float(value) < math.inf:
            return float(value)
    raise ShardError(f"{what} takes a number above 0, not {value!r}")
