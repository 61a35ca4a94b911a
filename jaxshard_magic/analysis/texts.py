"""The texts of compiled programs, each taken from the compiler and read once, whoever asks for it first."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from .hlo import Module, read
from .origin import Origins

if TYPE_CHECKING:
    from ..step import Entry


class Parsed(NamedTuple):
    """A program as its text has it, and where what it does comes from."""

    module: Module
    origins: Origins


class Texts:
    """The texts of one entry's programs. `home`: the files to look for a line in first."""

    def __init__(self, home: Sequence[str]):
        self._home = tuple(home)
        self._known: dict[
            int, tuple[Any, Parsed | None]
        ] = {}  # by the program, which is kept: its number is its own
        self._parsed: dict[tuple[str, tuple[int, ...]], Parsed] = {}

    def of(self, compiled: Any, inputs: Sequence[int] = ()) -> Parsed | None:
        """A program's text, read when it is first asked for; None where the compiler gives none. `inputs`: the step's
        leaf that each parameter is, as `Origins` has them; those of who asks first hold."""
        if id(compiled) not in self._known:
            text = compiled.as_text()
            self._known[id(compiled)] = compiled, self._read(text, tuple(inputs)) if text else None
        return self._known[id(compiled)][1]

    def _read(self, text: str, inputs: tuple[int, ...]) -> Parsed:
        """Programs that were loaded for other devices have one text."""
        if (text, inputs) not in self._parsed:
            module = read(text)
            self._parsed[text, inputs] = Parsed(module, Origins(module, self._home, inputs))
        return self._parsed[text, inputs]


_kept: "WeakKeyDictionary[Entry, Texts]" = WeakKeyDictionary()


def texts_of(entry: "Entry") -> Texts:
    """The texts of an entry's programs. They are kept until those of another entry are asked for, or the entry is gone:
    of a very large program they are some hundred megabytes."""
    found = _kept.get(entry)
    if found is None:
        found = Texts(home_of(entry))
        _kept.clear()
        _kept[entry] = found
    return found


def home_of(entry: "Entry | None") -> list[str]:
    """The file that defines the step, where that is known."""
    return [entry.home] if entry is not None and entry.home else []


def inputs_of(entry: "Entry") -> list[int]:
    """Of a step of one program the input that each parameter of it is: jax drops those that it does not read."""
    return [i for i, is_read in zip(entry.order, entry.reads, strict=True) if is_read]
