"""Base classes of plain data with text, HTML and JSON forms, conversion to JSON and back, and writing of files.

Errors in JSON data have the path of the invalid field.
"""

import dataclasses
import json
import math
import numbers
import os
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from shlex import quote
from typing import Any, ClassVar, Self, overload

from ..display import renderer, writable
from ..errors import ShardError, did_you_mean, list_names, unknown_name
from ..files import write_atomic
from ..packages import upgrade_command


class Displayable(ABC):
    """Base of classes with text and HTML forms. Subclasses define `_summary_line`; their renderers are registered."""

    @abstractmethod
    def _summary_line(self) -> str:
        """Return a line in angle brackets."""

    def to_text(self, width: int | None = None) -> str:
        """Return text for a terminal.

        Args:
            width: Columns, clipped to 60 to 100; the width of the terminal by default.
        """
        return renderer(self, "text")(self, width)

    @overload
    def to_html(self, path: None = None) -> str: ...
    @overload
    def to_html(self, path: str | os.PathLike[str]) -> Path: ...

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str | Path:
        """Return HTML without script: a fragment to embed, or a complete document written to `path`.

        Args:
            path: The file; `~` is the home folder.

        Returns:
            The fragment, or the path of the file.

        Raises:
            ShardError: The file can't be written.
        """
        if path is None:
            return renderer(self, "html")(self)
        return write_file(path, renderer(self, "page")(self))

    # In the same class as `_repr_pretty_`: IPython uses the one from the class that defines either.
    def __repr__(self) -> str:
        return self._summary_line()

    def _repr_html_(self) -> str:
        return self.to_html()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # The pretty printer passes `cycle` for an object that contains itself.
        printer.text(writable(repr(self) if cycle else self.to_text()))


@dataclass(frozen=True, repr=False)
class JsonRecord(Displayable):
    """Base of frozen dataclasses with a field `schema` that convert to JSON and back.

    Subclasses set `_what`, the name of the type in error messages, and `_schema`, the schema they can read.
    """

    _what: ClassVar[str]
    _schema: ClassVar[int]

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone. A widget belongs to one kernel: copies and pickles omit it, as well as cached
        properties."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to_dict(self) -> dict[str, Any]:
        """Return dicts, lists, strings and numbers, ready for `json.dumps`.

        Numbers that are not finite become the strings `NaN`, `Infinity` and `-Infinity`. Option values that are not
        plain data become their text.
        """
        return to_plain(self)

    def to_json(self, indent: int | None = None) -> str:
        """Return JSON text. `from_json` restores an equal object.

        Args:
            indent: Spaces per level; a single line by default.
        """
        # NaN and Infinity are not valid JSON. `to_dict` has replaced them by strings.
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build an object from the result of `to_dict`.

        Raises:
            ShardError: Invalid data; the message has the field.
        """
        if not isinstance(data, Mapping):
            raise ShardError(f"a {cls._what} is an object with fields, not {json_kind(data)}")
        schema = data.get("schema")
        if schema != cls._schema:
            raise cls._schema_error(schema)
        return from_plain(cls, data, cls._what)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build an object from the result of `to_json`.

        Raises:
            ShardError: The text is not JSON, or describes something else.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ShardError(f"not a {cls._what}: {error.msg} at line {error.lineno} of the JSON") from None
        # Python refuses numbers with very many digits, and JSON nested too deeply.
        except (ValueError, RecursionError, MemoryError) as error:
            raise ShardError(f"not a {cls._what}: {error or 'it takes more memory than there is'}") from None
        return cls.from_dict(data)

    @classmethod
    def _schema_error(cls, schema: Any) -> ShardError:
        """Return an error for another schema; for a newer one with the command to upgrade."""
        if isinstance(schema, int) and schema > cls._schema:
            return ShardError(
                f"this {cls._what} has schema {schema}; this version of jaxshard_magic reads schema {cls._schema}."
                " A newer jaxshard_magic reads it",
                fix=upgrade_command(),
            )
        given = "no schema" if schema is None else f"schema {schema!r}"
        return ShardError(f"this is no {cls._what}: it has {given}, a {cls._what} has schema {cls._schema}")


def writable_path(path: str | os.PathLike[str], *, overwrite: bool = True) -> Path:
    """Return the path at which a file can be written; `~` is the home folder.

    Args:
        path: Path of the file.
        overwrite: Whether an existing file may be overwritten.

    Raises:
        ShardError: The path is a folder, its folder doesn't exist, or the file may not be overwritten.
    """
    given = os.fspath(path)
    place = Path(os.path.expanduser(given))
    if os.path.isdir(place) or given.endswith(("/", os.sep)):
        raise ShardError(f"{given} is a folder: name a file in it, as {place / 'name'}")
    if not os.path.isdir(place.parent):
        above = place.parent.parent
        near = did_you_mean(place.parent.name, _folders(above)) if os.path.isdir(above) else ""
        line = f"!mkdir -p {quote(str(place.parent))}"
        raise ShardError(f"{given} can't be written: there is no folder {place.parent}.{near}", fix=line)
    # Unlike `exists`, `lexists` also reports a broken symbolic link.
    if not overwrite and os.path.lexists(place):
        raise ShardError(f"{given} is there already: name another file, or write over it with --force")
    return place


def write_file(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write `content` to a file, completely or not at all, and return the path.

    Args:
        path: The file; `~` is the home folder.
        content: Bytes, or text to write as UTF-8.

    Raises:
        ShardError: The file can't be written.
    """
    place = writable_path(path)
    # A lone surrogate has no UTF-8 form and becomes a question mark.
    data = content.encode("utf-8", "replace") if isinstance(content, str) else content
    try:
        # A device or pipe must be written in place: replacing it by a file would remove it.
        if place.exists() and not place.is_file():
            place.write_bytes(data)
        else:
            # `realpath`, so that a symbolic link stays and its target is replaced.
            write_atomic(Path(os.path.realpath(place)), data)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ShardError(f"{os.fspath(path)} can't be written: {why}") from error
    return place


def _folders(above: Path) -> list[str]:
    with suppress(OSError):
        return [each.name for each in above.iterdir() if each.is_dir()]
    return []


def to_plain(value: Any) -> Any:
    """Return `value` as dicts, lists, strings and finite numbers.

    Numbers that are not finite become the strings `NaN`, `Infinity` and `-Infinity`. Values that are not plain data
    become their text.
    """
    if value is None or isinstance(value, (str, bool)) or type(value) is int:  # most values, so tested first
        return value
    if isinstance(value, (tuple, list)):
        return [to_plain(v) for v in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        # JSON has neither NaN nor infinity; `json.dumps` gives their usual names.
        return number if math.isfinite(number) else json.dumps(number)
    return str(value)


_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def from_plain(type_hint: Any, value: Any, where: str) -> Any:
    """Build a value of a type from JSON data.

    Args:
        type_hint: Type hint of the value: a dataclass, tuple, dict, union or plain type.
        value: JSON data.
        where: Path of the value, for error messages.

    Raises:
        ShardError: The data doesn't match the type; the message has the path.
    """
    origin, args = typing.get_origin(type_hint), typing.get_args(type_hint)
    if type_hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        return _build_one_of(args, value, where)
    if isinstance(type_hint, type) and dataclasses.is_dataclass(type_hint):
        return _build_fields(type_hint, value, where)
    if origin is tuple and isinstance(value, list):
        kinds = args if args[-1] is not Ellipsis else (args[0],) * len(value)
        if len(kinds) != len(value):
            raise ShardError(f"{where} must have {len(kinds)} items, not {len(value)}")
        return tuple(from_plain(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True)))
    if origin is dict and isinstance(value, Mapping):
        return {str(k): from_plain(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if type_hint is float and isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if type_hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        # An integer in JSON may exceed the range of a float.
        except OverflowError:
            raise ShardError(f"{where} must be a number below 1.8e308") from None
    if type_hint is types.NoneType and value is None:
        return None
    # The exact type: a bool is an instance of int, but no number of a report.
    if isinstance(type_hint, type) and type(value) is type_hint:
        return value
    raise ShardError(f"{where} must be {_expected(type_hint)}, not {json_kind(value)}")


def _build_one_of(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    """Build a value of a union: None, an exact match, or the last alternative."""
    if value is None and types.NoneType in choices:
        return None
    rest = [choice for choice in choices if choice is not types.NoneType]
    for choice in rest[:-1]:
        if type(value) is choice:
            return value
    return from_plain(rest[-1], value, where)


def _build_fields(cls: Any, value: Any, where: str) -> Any:
    """Build a dataclass; unknown fields and missing fields without a default are errors."""
    if not isinstance(value, Mapping):
        raise ShardError(f"{where} must be {_expected(cls)}, not {json_kind(value)}")
    fields, hints = _fields(cls)
    for name in value:
        if name not in fields:
            problem = f"{where} has no field '{name}'"
            raise ShardError(unknown_name(problem, name, fields, f"its fields are {list_names(fields)}"))
    for name, known in fields.items():
        needed = known.default is dataclasses.MISSING and known.default_factory is dataclasses.MISSING
        if name not in value and needed:
            raise ShardError(f"{where} lacks the field '{name}'")
    return cls(**{name: from_plain(hints[name], v, f"{where}.{name}") for name, v in value.items()})


@cache
def _fields(cls: Any) -> tuple[dict[str, dataclasses.Field], dict[str, Any]]:
    """Return the fields and the type hints of a dataclass, cached by class."""
    return {f.name: f for f in dataclasses.fields(cls)}, typing.get_type_hints(cls)


_NAMES = {
    type(None): "null",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    tuple: "a list",
    dict: "an object",
}


def json_kind(value: Any) -> str:
    """Return the kind of a JSON value with its article: `an object`, `a number`."""
    return _NAMES.get(type(value), f"a {type(value).__name__}")


def _expected(wanted: Any) -> str:
    """Return the kind of JSON value expected for a type."""
    if dataclasses.is_dataclass(wanted):
        return "an object"
    return _NAMES.get(typing.get_origin(wanted) or wanted, str(wanted))
