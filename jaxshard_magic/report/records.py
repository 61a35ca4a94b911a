"""Base classes of plain data with text, HTML and JSON forms, and writing of files."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from shlex import quote
from typing import Any, ClassVar, Self, overload

from jaxshard_magic.display import renderer, writable
from jaxshard_magic.errors import ShardError, did_you_mean
from jaxshard_magic.files import write_atomic
from jaxshard_magic.packages import upgrade_command
from jaxshard_magic.report.json_data import from_plain, json_kind, to_plain


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
