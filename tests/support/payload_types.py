"""The types of `widgets/shared/payload_types.d.ts`, read so that a payload can be held to them without Node."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "widgets" / "shared" / "payload_types.d.ts"
_TOKEN = re.compile(r"/\*.*?\*/|//[^\n]*|\s+|(\w+|\"[^\"]*\"|[^\w\s])", re.DOTALL)
_PLAIN = {"string": (str,), "number": (int, float), "boolean": (bool,), "null": (type(None),)}


@dataclass(frozen=True)
class Interface:
    """Keys of an object with their types; those in `optional` may be missing."""

    fields: Mapping[str, Any]
    optional: frozenset[str]


@dataclass
class Types:
    """Reader of the declarations, and what it has read.

    A type is a tuple that begins with its form: `("name", "Report")`, `("is", 1)`, `("array", item)`,
    `("tuple", items)`, `("record", item)`, `("or", types)`. `met` has the names of types that values were held to.
    """

    text: str = field(default_factory=lambda: FILE.read_text(encoding="utf-8"))
    named: dict[str, Any] = field(default_factory=dict)
    met: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._tokens = [token for token in _TOKEN.findall(self.text) if token]
        while self._tokens:
            self._take("export")
            kind, name = self._take("interface", "type"), self._take()
            if kind == "type":
                self._take("=")
                self.named[name] = self._union()
                self._take(";")
            else:
                self.named[name] = self._interface()

    def _take(self, *expected: str) -> str:
        token = self._tokens.pop(0)
        assert not expected or token in expected, f"{token} where {expected} is expected"
        return token

    def _took(self, token: str) -> bool:
        if self._tokens[0] != token:
            return False
        self._take()
        return True

    def _interface(self) -> Interface:
        base = self.named[self._take()] if self._took("extends") else Interface({}, frozenset())
        fields, optional = dict(base.fields), set(base.optional)
        self._take("{")
        while not self._took("}"):
            name = self._take()
            if self._took("?"):
                optional.add(name)
            self._take(":")
            fields[name] = self._union()
            self._take(";")
        return Interface(fields, frozenset(optional))

    def _union(self) -> tuple[Any, ...]:
        self._took("|")
        options = [self._array()]
        while self._took("|"):
            options.append(self._array())
        return options[0] if len(options) == 1 else ("or", options)

    def _array(self) -> tuple[Any, ...]:
        item = self._one()
        while self._tokens[:2] == ["[", "]"]:
            self._take(), self._take()
            item = ("array", item)
        return item

    def _one(self) -> tuple[Any, ...]:
        if self._took("("):
            inner = self._union()
            self._take(")")
            return inner
        if self._took("["):
            items = []
            while not self._took("]"):
                if self._tokens[1] == ":":
                    self._take(), self._take()  # the name of an item
                items.append(self._union())
                self._took(",")
            return ("tuple", items)
        name = self._take()
        if name == "Record":
            for token in ("<", "string", ","):
                self._take(token)
            item = self._union()
            self._take(">")
            return ("record", item)
        if name[0] == '"' or name.isdigit():
            return ("is", name.strip('"') if name[0] == '"' else int(name))
        return ("name", name)

    def wrong(self, value: Any, of: Any, at: str = "") -> Iterator[str]:
        """Return what of `value`, plain data at the place `at`, is not of the type."""
        if isinstance(of, Interface):
            yield from self._wrong_fields(value, of, at)
            return
        form, what = of
        if form == "name" and what not in _PLAIN:
            lines = list(self.wrong(value, self.named[what], at))
            if not lines:
                self.met.add(what)
            yield from lines
        elif form == "or":
            attempts = []
            for option in what:
                before, lines = set(self.met), list(self.wrong(value, option, at))
                if not lines:
                    return
                self.met = before  # parts of an option that does not fit are not met
                attempts.append(lines)
            yield from max(attempts, key=lambda lines: len(lines[0].partition(":")[0]))  # the one that fits longest
        elif form == "array" and isinstance(value, list):
            for i, item in enumerate(value):
                yield from self.wrong(item, what, f"{at}[{i}]")
        elif form == "tuple" and isinstance(value, list) and len(value) == len(what):
            for i, (item, one) in enumerate(zip(value, what, strict=True)):
                yield from self.wrong(item, one, f"{at}[{i}]")
        elif form == "record" and isinstance(value, dict):
            for key, item in value.items():
                yield from self.wrong(item, what, f"{at}.{key}")
        elif not (form == "is" and type(value) is type(what) and value == what) and not (
            form == "name" and type(value) in _PLAIN[what]
        ):
            said = {"name": what, "is": repr(what)}.get(form, form)
            yield f"{at}: {value!r:.60} is no {said}"

    def _wrong_fields(self, value: Any, of: Interface, at: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{at}: {value!r:.60} is no object"
            return
        for name in of.fields.keys() - of.optional - value.keys():
            yield f"{at}.{name} is missing"
        for name in value.keys() - of.fields.keys():
            yield f"{at}.{name} is in no type"
        for name in value.keys() & of.fields.keys():
            yield from self.wrong(value[name], of.fields[name], f"{at}.{name}")
