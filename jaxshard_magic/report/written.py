"""What plain data has in common that is shown as text and HTML, and written as JSON."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from shlex import quote
from typing import Any, ClassVar, Self, overload

from jaxshard_magic.errors import ShardError, did_you_mean
from jaxshard_magic.files import put_whole
from jaxshard_magic.packages import upgrade
from jaxshard_magic.report.plain import build, kind, plain


class Shown(ABC):
    """A class of it says how it is shown."""

    @abstractmethod
    def _ways(self) -> tuple[Callable[..., str], Callable[..., str], Callable[..., str]]:
        """As text of a width, as a fragment of HTML, and as a whole page."""

    @abstractmethod
    def _short(self) -> str:
        """In one line, in angle brackets."""

    def to_text(self, width: int | None = None) -> str:
        """For a terminal, in `width` columns, held between 60 and 100; the terminal's by default."""
        return self._ways()[0](self, width)

    @overload
    def to_html(self, path: None = None) -> str: ...
    @overload
    def to_html(self, path: str | os.PathLike[str]) -> Path: ...

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str | Path:
        """As HTML without script: a fragment to embed, or a whole document written to `path`.

        Returns the fragment, or the path that was written. Raises ShardError where it can't be.
        """
        _, fragment, page = self._ways()
        return fragment(self) if path is None else saved(path, page(self))

    def __repr__(self) -> str:  # beside `_repr_pretty_`: IPython takes that of the class which has either
        return self._short()

    def _repr_html_(self) -> str:
        return self.to_html()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        from jaxshard_magic.views.terminal import writable

        printer.text(writable(repr(self) if cycle else self.to_text()))


@dataclass(frozen=True, repr=False)
class Written(Shown):
    """A frozen dataclass with a field `schema`. A class of it says what it is, as in "a comparison", and which schema
    it reads."""

    _what: ClassVar[str]
    _schema: ClassVar[int]

    def __getstate__(self) -> dict[str, Any]:
        """A widget belongs to one kernel: copies and pickles go without it, and without what was worked out once."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists, strings and numbers, ready for `json.dumps`.

        Figures that are not finite become the strings `NaN`, `Infinity` and `-Infinity`; option values
        that are not plain data become their text.
        """
        return plain(self)

    def to_json(self, indent: int | None = None) -> str:
        """All of it as JSON text, from which `from_json` makes an equal one."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What `to_dict` wrote. Raises ShardError naming the field that is wrong."""
        if not isinstance(data, Mapping):
            raise ShardError(f"a {cls._what} is an object with fields, not {kind(data)}")
        schema = data.get("schema")
        if schema != cls._schema:
            raise cls._other(schema)
        return build(cls, data, cls._what)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` wrote. Raises ShardError where the text is not JSON, or of something else."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ShardError(f"not a {cls._what}: {error.msg} at line {error.lineno} of the JSON") from None
        except (
            ValueError,
            RecursionError,
            MemoryError,
        ) as error:  # what Python does not read: a number, a nesting
            raise ShardError(f"not a {cls._what}: {error or 'it takes more memory than there is'}") from None
        return cls.from_dict(data)

    @classmethod
    def _other(cls, schema: Any) -> ShardError:
        if isinstance(schema, int) and schema > cls._schema:
            return ShardError(
                f"this {cls._what} has schema {schema}; this version of jaxshard_magic reads schema {cls._schema}."
                " A newer jaxshard_magic reads it",
                fix=upgrade(),
            )
        given = "no schema" if schema is None else f"schema {schema!r}"
        return ShardError(f"this is no {cls._what}: it has {given}, a {cls._what} has schema {cls._schema}")


def place_for(path: str | os.PathLike[str], *, over: bool = True) -> Path:
    """The file that can be written there; `~` is the home folder.

    Args:
        path: the file's path.
        over: whether a file that is there may be written over.

    Raises ShardError for a folder, for a file in a folder that is not there, and for one that may not be written over.
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
    if not over and os.path.lexists(place):
        raise ShardError(f"{given} is there already: name another file, or write over it with --force")
    return place


def saved(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """`content` in a file of its own, whole or not at all, text as UTF-8; the path. Raises ShardError where it can't be
    written."""
    place = place_for(path)
    data = content.encode("utf-8", "replace") if isinstance(content, str) else content
    try:
        if place.exists() and not place.is_file():  # a device or a pipe
            place.write_bytes(data)
        else:
            put_whole(Path(os.path.realpath(place)), data)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ShardError(f"{os.fspath(path)} can't be written: {why}") from error
    return place


def _folders(above: Path) -> list[str]:
    with suppress(OSError):
        return [each.name for each in above.iterdir() if each.is_dir()]
    return []
