"""A notebook's values put together for hosts, each with what it is made of."""

import io
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pickle import PicklingError
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from ..hosts.transfer import Define, Import, Item, Transfer, Unpickle
from ..units import byte_text
from . import cells

if TYPE_CHECKING:
    from ..hosts.pickling import Scan

SMALL = 2**24  # bytes of a value that goes along: a tenth of a second to each of two hosts
_IMMUTABLE = (bool, int, float, complex, str, bytes, tuple, frozenset, range, type(None), ModuleType)


@dataclass(frozen=True)
class _Part:
    """How one name goes: `before` are the names that the hosts need first, `later` those that functions in it read when
    they are called, `along` others whose values are in its own."""

    item: Item
    told: str
    before: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()
    along: tuple[str, ...] = ()


class Packing:
    """Names of the notebook put into one `Transfer`.

    Args:
        shell: The kernel's.
        lacking: The names that the kernel has and the hosts lack.
        there: Names of what was sent before and the hosts still have.
        words: All words of the cell, for submodules that it reads as attributes.

    Attributes:
        left: The names that can't go, with the bytes that they take; None for what can't be pickled.
        told: What goes, in words.
        steps: Cells to run after that, by number: each shards a step.
    """

    def __init__(
        self,
        shell: Any,
        lacking: Iterable[str],
        there: Iterable[str],
        words: Iterable[str],
        but: Iterable[str],
    ):
        self._space: dict[str, Any] = shell.user_ns
        self._lacking, self._words = {*lacking}, {*words}
        self._definitions = cells.Definitions(shell)
        self._names, self._there = self._by_object(self._lacking), self._by_object(there)
        self._as_text: dict[int, bool] = {}
        self._order: list[_Part] = []
        self._goes: dict[str, bool] = {}
        self._later: list[str] = []
        self.left: dict[str, int | None] = dict.fromkeys(but)
        self.told: list[str] = []
        self.steps: list[tuple[int, str]] = []

    def transfer(self, names: Iterable[str]) -> Transfer | None:
        """Return what brings these names, as far as they can go, and what functions among them read; None for
        nothing."""
        from ..hosts.pickling import Pickler

        self._later += names
        while self._later:
            self._add(self._later.pop(0))
        if not self._order:
            return None
        file = io.BytesIO()
        pickler = Pickler(file, self._space, self._named)
        files = set()
        for part in self._order:
            if isinstance(part.item, Unpickle):
                pickler.dump(self._space[part.item.name])
            elif isinstance(part.item, Define):
                files.update(each for each, _ in part.item.parts)
        texts = {each: self._definitions.text_of(each) for each in sorted(files | pickler.files)}
        texts = {each: (number, text) for each, (number, text) in texts.items() if text}
        items = tuple(part.item for part in self._order)
        return Transfer(items, file.getvalue(), texts, tuple(sys.path))

    def _by_object(self, names: Iterable[str]) -> dict[int, str]:
        """The names by the ids of what they stand for, where it matters which object that is."""
        import jax

        found = ((name, self._space[name]) for name in names)
        return {
            id(x): name for name, x in found if not isinstance(x, _IMMUTABLE) and not isinstance(x, jax.Array)
        }

    def _add(self, name: str) -> bool:
        """Put a name behind those that it is made of. Returns False for one that can't go."""
        from ..hosts.pickling import is_sharded_step

        if name not in self._lacking or name in self._goes:
            return self._goes.get(name, True)
        if is_sharded_step(self._space[name]):
            self._goes[name] = self._add_step(name, self._space[name])
            return self._goes[name]
        self._goes[name] = name not in self.left  # of names that are made of each other
        part = self._part(name) if self._goes[name] else None
        if part is None:
            self._goes[name] = False
            return False
        for other in sorted(part.before):
            if not self._add(other):
                self.left.setdefault(name, None)
                self._goes[name] = False
                return False
        along = [each for each in part.along if each not in self._goes]
        self._goes.update(dict.fromkeys(along, True))
        self._order += [part, *(_Part(Unpickle(each), each) for each in along)]
        self.told += [part.told, *along]
        self._later += sorted(part.later)
        return True

    def _part(self, name: str) -> _Part | None:
        value = self._space[name]
        if isinstance(value, ModuleType) and sys.modules.get(value.__name__) is value:
            return _Part(Import(name, value.__name__, self._submodules(value)), name)
        if self._goes_as_text(value, name) and (found := self._definitions.of(name, value)) is not None:
            return _Part(Define(name, found.parts), name, found.reads, found.reads_later)
        scan = self._scan(value)
        if (size := scan.size) is None or size > SMALL:
            self.left[name] = size
            return None
        told = name if size < 2**10 or self._is_plain(value) else f"{name} ({byte_text(size)})"
        along = tuple(sorted(scan.along - {name}))
        before = frozenset(each.partition(".")[0] for each in scan.names)
        return _Part(Unpickle(name), told, before, frozenset(scan.globals), along)

    def _add_step(self, name: str, step: Any) -> bool:
        """Put a step that a cell has defined and its line has sharded behind all else: its definition below that line,
        and nothing more of the cell. Returns False for one that was defined elsewhere."""
        self.left[name] = None
        if step.cell is None or step.path != name:
            return False
        file, text = step.cell
        found, (number, _) = self._definitions.of(name, step.__wrapped__), self._definitions.text_of(file)
        if found is None or found.parts[0][0] != file or number is None:
            return False
        del self.left[name]
        line = text.partition("\n")[0].rstrip("; ")
        alone = self._definitions.alone(*found.parts[0])
        self.steps.append((number, f"{line}\n{alone}\nNone;"))  # nothing is shown of it
        self.told.append(f"{name} under {line}")
        self._later += sorted(found.reads | found.reads_later)
        return True

    def _is_plain(self, value: Any) -> bool:
        """Whether a value is a function that the notebook defines."""
        return isinstance(value, FunctionType) and value.__globals__ is self._space

    def _submodules(self, module: ModuleType) -> tuple[str, ...]:
        start = f"{module.__name__}."
        return tuple(
            sorted(
                each
                for each in list(sys.modules)
                if each.startswith(start) and self._words.issuperset(each.removeprefix(start).split("."))
            )
        )

    def _named(self, value: Any) -> str | None:
        """The name that a value goes by on the hosts: it is there, or goes as text. Raises PicklingError for a class
        that cells have defined anew since."""
        from ..hosts.pickling import path_of, stands_for

        if (name := self._there.get(id(value))) is not None:
            return name
        if getattr(value, "__module__", None) != "__main__" or not callable(value):
            return None
        if (path := path_of(value)) is None:
            return None
        root = path.partition(".")[0]
        if stands_for(self._space, path) is value:
            return path if self._goes_as_text(self._space[root], root) else None
        if isinstance(value, type) and self._definitions.of(root, value) is not None:
            raise PicklingError(f"{path} is another class by now")
        return None

    def _goes_as_text(self, value: Any, name: str) -> bool:
        """Whether a value goes as the statement that defines it: a class, which may register itself as it is made, and
        what a decorator made of a function, where it can't be pickled."""
        from ..hosts.pickling import is_loaded_again, is_sharded_step

        if (
            self._is_plain(value)
            or getattr(value, "__module__", None) != "__main__"
            or is_sharded_step(value)
        ):
            return False
        if id(value) not in self._as_text:
            self._as_text[id(value)] = False  # while it is tried
            alone = isinstance(value, type) or not is_loaded_again(value)
            fails = alone or self._scan(value).size is None
            is_there = isinstance(value, type) and name not in self._lacking
            self._as_text[id(value)] = fails and (is_there or self._definitions.of(name, value) is not None)
        return self._as_text[id(value)]

    def _scan(self, value: Any) -> "Scan":
        from ..hosts.pickling import Scan

        return Scan(value, self._space, self._named, self._names)
