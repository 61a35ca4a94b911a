"""Flags of command lines: an option as it is typed, the readers of its value, and dataclasses made of such fields.

No jax is imported here: `%load_ext` has to be quick, and must not fix the number of simulated devices.
"""

import builtins
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache
from keyword import iskeyword
from typing import Any, Self
from unicodedata import normalize

from ..errors import ShardError, list_names, parse_count, quoted, unknown_name

MOST = 1_000_000  # largest count that an option takes
# Names that IPython sets in a notebook, and Python's own, such as `__name__`.
_SHELL_NAMES = re.compile(r"__.*__|_{1,3}|_i{1,3}|_i?\d+|_[dio]h|In|Out")


@dataclass(frozen=True)
class Flag:
    """One option as it is typed.

    Attributes:
        name: With its dashes.
        metavar: Placeholder of its value in the help text; empty for a switch, which sets `constant`.
        help: One line.
        parameter: Name of the dataclass field that it sets, and of the parameter of `shard`.
        read: Function from the flag and a text to the value. Raises `ShardError`.
        constant: Value set by a switch.
        repeatable: Whether it may be given several times; values are collected in a tuple.
        bare: Value where no number follows; None for an option that always takes a value.
        choices: Words that it takes, and that complete it; or a function that returns them.
        open: Whether it takes other values than `choices`.
        varies: Whether a comparison or a search may give it several values (`--vary`).
        strategy: Strategy that it belongs to (`pp`, `sp`); empty for all.
        command: Kind of line that it belongs to: `auto` (a search) or `compare`; empty for all.
        needs: Field of another option without which it does nothing.
        calls: Whether it needs calls of the step: impossible on hardware that isn't attached, and with `--dry-run`.
        without: Effect of leaving it out of the program to take home; empty where it changes no program.
        refused: Reasons for refusal, by what excludes it: a strategy, `auto`, `compare` (a comparison), `dry_run`.
        default: Of the dataclass field.
    """

    name: str
    metavar: str
    help: str
    parameter: str
    read: "Callable[[Flag, str], Any]"
    constant: Any = True
    repeatable: bool = False
    bare: Any = None
    choices: "tuple[str, ...] | Callable[[], tuple[str, ...]]" = ()
    open: bool = False
    varies: bool = False
    strategy: str = ""
    command: str = ""
    needs: str = ""
    calls: bool = False
    without: str = ""
    refused: dict[str, str] = field(default_factory=dict, hash=False)
    default: Any = None

    @property
    def words(self) -> tuple[str, ...]:
        """The words of `choices`."""
        return self.choices() if callable(self.choices) else self.choices

    @property
    def is_count(self) -> bool:
        """True if values are whole numbers."""
        return self.read is count

    def check(self, value: Any) -> None:
        """Raise `ShardError` for a value from Python that the option does not take."""
        if self.is_count:
            check_count(self.name, value)
        elif self.choices and not self.open and value not in self.words:
            problem = f"{self.name} does not take {value!r}"
            raise ShardError(unknown_name(problem, str(value), self.words, f"it takes {list_names(self.words)}"))

    def typed(self, value: Any) -> str:
        """Return the option with a value as it is written on a command line, in quotes where it needs them."""
        return self.name if value is True else f"{self.name} {quoted_value(value)}"


# Readers of values ----------------------------------------------------------------------------------------------------


def as_text(_: Flag, text: str) -> str:
    """Return the text as it is."""
    return text


def count(flag: Flag, text: str) -> int:
    """Return a whole number from 1 to a million."""
    value = parse_count(text, MOST)
    if value is None:
        most = " and a million at most" if text.isdecimal() and len(text) > 1 else ""
        raise ShardError(f"{flag.name} takes a whole number from 1 on{most}, not {quoted(text)}")
    return value


def number(flag: Flag, text: str) -> float:
    """Return a finite number above 0."""
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise ShardError(f"{flag.name} takes a number above 0, not {quoted(text)}")


def variable(flag: Flag, text: str) -> str:
    """Return a name that a variable can have, as Python reads it, and that is neither Python's own nor IPython's."""
    name = normalize("NFKC", text)
    if not name.isidentifier() or iskeyword(name):
        raise ShardError(f"{flag.name} takes the name of a variable, not {quoted(text)}")
    if hasattr(builtins, name) or _SHELL_NAMES.fullmatch(name):
        raise ShardError(f"{flag.name} {name}: Python or IPython needs that name; take another: {flag.name} found")
    return name


def folder(flag: Flag, text: str) -> str:
    """Return the path of a folder, which need not exist."""
    if not text.strip():
        raise ShardError(f"{flag.name} takes the path of a folder, not {quoted(text)}")
    return text


def file_name(flag: Flag, text: str) -> str:
    """Return a path, which need not exist."""
    if not text.strip():
        raise ShardError(f"{flag.name} takes the path of a file, not {quoted(text)}")
    return text


def assignment(flag: Flag, text: str) -> str:
    """Return text with an equals sign."""
    if "=" not in text:
        raise ShardError(f"{flag.name} {text!r} has no '='; write {flag.name} \"{flag.metavar}\"")
    return text


def check_count(flag: str, value: Any) -> None:
    """Raise `ShardError` for a value that is no whole number from 1 to `MOST`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ShardError(f"{flag} takes a whole number from 1 on, not {value!r}")
    if value > MOST:
        raise ShardError(f"{flag} takes {MOST:,} at most")


def quoted_value(value: Any) -> str:
    """Return a value as text of a command line, in quotes where spaces or brackets need them."""
    text = str(value)
    if re.fullmatch(r"[\w.+-]+", text) or {"'", '"'} <= set(text):
        return text
    return f"'{text}'" if '"' in text else f'"{text}"'


# Dataclass fields with flags ------------------------------------------------------------------------------------------


def option(
    name: str,
    metavar: str,
    help: str,
    default: Any = None,
    read: Callable[[Flag, str], Any] = as_text,
    *,
    negative: str = "",
    **row: Any,
) -> Any:
    """Return a dataclass field with its flag.

    Args:
        name, metavar, help, read: As in `Flag`.
        default: Of the field.
        negative: Help of the switch `--no-...`, which sets the field to False; empty where there is none.
        row: Further fields of `Flag`.
    """
    return field(default=default, metadata={"flag": (name, metavar, help, read, row), "negative": negative})


@cache
def flags_of(options: type) -> tuple[Flag, ...]:
    """Return the flags of a dataclass whose fields are made by `option`, in the order of its fields."""
    return tuple(flag for each in fields(options) for flag in _flags(each))


def _flags(each: Any) -> Iterable[Flag]:
    yield from each.metadata.get("flags", ())  # a field with the options of another class
    if "flag" not in each.metadata:
        return
    name, metavar, help, read, row = each.metadata["flag"]
    repeatable = isinstance(each.default, tuple)
    yield Flag(name, metavar, help, each.name, read, repeatable=repeatable, default=each.default, **row)
    if negative := each.metadata["negative"]:
        yield Flag(f"--no-{name[2:]}", "", negative, each.name, read, False, default=each.default)


@dataclass(frozen=True)
class LineOptions:
    """Options of every command line.

    Attributes:
        words: What is no option, in order.
    """

    words: tuple[str, ...] = ()
    output: str | None = option("-o", "VAR", "keep what is returned under this name", read=variable)
    help: bool = option("--help", "", "this text", False)

    @classmethod
    def flags(cls) -> tuple[Flag, ...]:
        """Return the line's own flags in the order of its fields, then those of every line."""
        shared = {each.name for each in fields(LineOptions)}
        flags = flags_of(cls)
        return (
            *(flag for flag in flags if flag.parameter not in shared),
            *(flag for flag in flags if flag.parameter in shared),
        )

    def value(self, flag: Flag) -> Any:
        """Return the value of a flag; its default where the line does not have it."""
        return getattr(self, flag.parameter)

    def has(self, flag: Flag) -> bool:
        """Return whether the line gives this flag a value other than its default."""
        value = self.value(flag)
        return value != flag.default and (bool(flag.metavar) or value == flag.constant)

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Return the options with other values, by field."""
        return replace(self, **values)
