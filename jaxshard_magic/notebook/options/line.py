"""The command lines of `%%shard` and `%shard` parsed, by their tables."""

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ...config.flags import Flag, LineOptions
from ...errors import ShardError, none_of
from .lines import ShardOptions

Line = TypeVar("Line", bound=LineOptions)
_BEFORE_COMMENT = re.compile(r"""(?:"[^"]*"|'[^']*'|[^"'#]|(?<=[^\s;])#)*""")


def line_text(line: str) -> tuple[str, bool]:
    """Return what a magic's line asks, and whether a semicolon closes it: then nothing is shown.

    The magic's own name, the semicolon and a comment are left out. As in Python, a comment begins at a `#` that stands
    at the start of a word, outside quotes.

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
    """`fsdp+tp --mesh "data=4 model=2"` as ShardOptions; what is no option is in `words`.

    Raises ShardError for an unknown option, a missing or impossible value, and an unclosed quote.
    """
    return _parsed(line, "%%shard", ShardOptions())


def parse_command(line: str, options: type[Line]) -> Line:
    """`history fsdp --since 7d` as HistoryOptions; `words` are those after the command. Raises as `parse` does."""
    parsed = _parsed(line, f"%shard {line.split(maxsplit=1)[0]}", options())
    return replace(parsed, words=parsed.words[1:])


def _parsed(line: str, command: str, options: Line) -> Line:
    flags = options.flags()
    by_name = {flag.name: flag for flag in flags} | {"-h": flags[-1]}
    words, given, tokens = list[str](), dict[str, Any](), deque(_tokens(line))
    while tokens:
        token = tokens.popleft()
        if not re.match(r"--?[A-Za-z]", token):
            words.append(token)
            continue
        name, equals, text = token.partition("=")
        flag = _flag(name, command, by_name)
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
    raise ShardError(
        none_of(f"{command} has no option {name}", name, by_name, f"{command} --help lists them")
    )
