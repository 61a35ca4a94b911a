"""Parser of the lines of `%%shard` and `%shard`."""

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ...config.flags import Flag, LineOptions
from ...errors import ShardError, unknown_name
from .line_options import ShardOptions

Line = TypeVar("Line", bound=LineOptions)
_BEFORE_COMMENT = re.compile(r"""(?:"[^"]*"|'[^']*'|[^"'#]|(?<=[^\s;])#)*""")


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
