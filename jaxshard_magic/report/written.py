"""What frozen plain data has in common that is written as JSON, text and HTML."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, overload

from jaxshard_magic.errors import ShardError
from jaxshard_magic.report.plain import build, kind, plain


class Written:
    """A dataclass with a field `schema`. A class of it says what it is, as in "a comparison", which schema it reads,
    and how it is written: as text of a width, as a fragment of HTML, and as a whole page."""

    _what: ClassVar[str]
    _schema: ClassVar[int]

    def _ways(self) -> tuple[Callable[..., str], Callable[..., str], Callable[..., str]]:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists, strings and numbers, ready for `json.dumps`."""
        return plain(self)

    def to_json(self, indent: int | None = None) -> str:
        """All of it as JSON text, from which `from_json` makes an equal one."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What `to_dict` wrote. Raises ShardError naming the field that is wrong."""
        if not isinstance(data, Mapping):
            raise ShardError(f"a {cls._what} is an object with fields, not {kind(data)}")
        if data.get("schema") != cls._schema:
            raise ShardError(
                f"a {cls._what} of schema {data.get('schema')!r}; this version reads schema {cls._schema}"
            )
        return build(cls, data, cls._what)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` wrote. Raises ShardError where the text is not JSON, or of something else."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ShardError(f"no {cls._what}: {error.msg} at line {error.lineno} of the JSON") from None
        return cls.from_dict(data)

    def to_text(self, width: int | None = None) -> str:
        """For a terminal, in `width` columns, held between 60 and 100; the terminal's by default."""
        return self._ways()[0](self, width)

    @overload
    def to_html(self, path: None = None) -> str: ...
    @overload
    def to_html(self, path: str | os.PathLike[str]) -> Path: ...

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str | Path:
        """As HTML without script: a fragment to embed, or a whole document written to `path`.

        Returns the fragment, or the path that was written.
        """
        _, fragment, page = self._ways()
        if path is None:
            return fragment(self)
        written = Path(path)
        written.write_text(page(self), encoding="utf-8")
        return written

    def _repr_html_(self) -> str:
        return self.to_html()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self) if cycle else self.to_text())
