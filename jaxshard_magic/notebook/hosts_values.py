"""Packing of a notebook's values for hosts, each value together with the names it needs."""

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

MAX_SENT_BYTES = 2**24  # for one value: a tenth of a second to each of two hosts
_IMMUTABLE = (bool, int, float, complex, str, bytes, tuple, frozenset, range, type(None), ModuleType)


@dataclass(frozen=True)
class _Part:
    """Form in which one name is sent.

    Attributes:
        item: Instruction to the host: import a module, run a definition, or unpickle.
        label: Name and size, as printed.
        required_names: Names to bind on the host first.
        names_read_in_calls: Names read by functions in the value when called.
        included_names: Other names whose values are inside this one.
    """

    item: Item
    label: str
    required_names: frozenset[str] = frozenset()
    names_read_in_calls: frozenset[str] = frozenset()
    included_names: tuple[str, ...] = ()


class NamePacker:
    """Packer of names of the notebook into one `Transfer`.

    Args:
        shell: IPython's shell.
        lacking: Names bound in the kernel and missing on the hosts.
        sent_before: Names sent before and still on the hosts.
        words: All words of the cell, to find submodules read as attributes.
        excluded: Names not to send.

    Attributes:
        unsendable: Names that can't be sent, with their bytes; None for values that can't be pickled.
        labels: Sent names, as printed.
        step_cells: Cells to run on the hosts afterwards, each with its number; each shards a step.
    """

    def __init__(
        self,
        shell: Any,
        lacking: Iterable[str],
        sent_before: Iterable[str],
        words: Iterable[str],
        excluded: Iterable[str],
    ):
        self._space: dict[str, Any] = shell.user_ns
        self._lacking, self._words = {*lacking}, {*words}
        self._definitions = cells.Definitions(shell)
        self._names, self._there = self._by_object(self._lacking), self._by_object(sent_before)
        self._as_text: dict[int, bool] = {}
        self._order: list[_Part] = []
        self._goes: dict[str, bool] = {}
        self._later: list[str] = []
        self.unsendable: dict[str, int | None] = dict.fromkeys(excluded)
        self.labels: list[str] = []
        self.step_cells: list[tuple[int, str]] = []

    def transfer(self, names: Iterable[str]) -> Transfer | None:
        """Pack `names` as far as possible, together with names read by functions among them.

        Returns:
            The transfer; None if there is nothing to send.
        """
        from ..hosts.pickling import Pickler

        self._later += names
        while self._later:
            self._add(self._later.pop(0))
        if not self._order:
            return None
        file = io.BytesIO()
        # One pickler for all values, so that objects shared by several names stay shared.
        pickler = Pickler(file, self._space, self._name_on_hosts)
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
        """Return the names by the id of their values, for values with an identity that matters."""
        import jax

        found = ((name, self._space[name]) for name in names)
        return {
            # Of immutable values and JAX arrays an equal copy is as good; identity matters for objects that change.
            id(x): name
            for name, x in found
            if not isinstance(x, _IMMUTABLE) and not isinstance(x, jax.Array)
        }

    def _add(self, name: str) -> bool:
        """Append a name after the names it depends on. Return False for a name that can't be sent."""
        from ..hosts.pickling import is_sharded_step

        if name not in self._lacking or name in self._goes:
            return self._goes.get(name, True)
        if is_sharded_step(self._space[name]):
            self._goes[name] = self._add_step(name, self._space[name])
            return self._goes[name]
        self._goes[name] = name not in self.unsendable  # until known: names may depend on each other
        part = self._part(name) if self._goes[name] else None
        if part is None:
            self._goes[name] = False
            return False
        for other in sorted(part.required_names):
            if not self._add(other):
                self.unsendable.setdefault(name, None)
                self._goes[name] = False
                return False
        along = [each for each in part.included_names if each not in self._goes]
        self._goes.update(dict.fromkeys(along, True))
        self._order += [part, *(_Part(Unpickle(each), each) for each in along)]
        self.labels += [part.label, *along]
        self._later += sorted(part.names_read_in_calls)
        return True

    def _part(self, name: str) -> _Part | None:
        """Return the form in which a name is sent; None if its value can't be pickled or is too large."""
        value = self._space[name]
        if isinstance(value, ModuleType) and sys.modules.get(value.__name__) is value:
            return _Part(Import(name, value.__name__, self._submodules(value)), name)
        if self._is_sent_as_text(value, name) and (found := self._definitions.find_definition(name, value)) is not None:
            return _Part(Define(name, found.parts), name, found.reads, found.reads_later)
        scan = self._scan(value)
        if (size := scan.size) is None or size > MAX_SENT_BYTES:
            self.unsendable[name] = size
            return None
        told = name if size < 2**10 or self._is_plain(value) else f"{name} ({byte_text(size)})"
        along = tuple(sorted(scan.shared_names - {name}))
        before = frozenset(each.partition(".")[0] for each in scan.names)
        return _Part(Unpickle(name), told, before, frozenset(scan.global_names), along)

    def _add_step(self, name: str, step: Any) -> bool:
        """Queue a cell that shards a step on the hosts: the step's `%%shard` line above its definition alone.

        Return False for a step defined elsewhere than in a cell with such a line.
        """
        self.unsendable[name] = None
        if step.cell is None or step.path != name:
            return False
        file, text = step.cell
        found, (number, _) = (
            self._definitions.find_definition(name, step.__wrapped__),
            self._definitions.text_of(file),
        )
        if found is None or found.parts[0][0] != file or number is None:
            return False
        del self.unsendable[name]
        line = text.partition("\n")[0].rstrip("; ")
        alone = self._definitions.cell_excerpt(*found.parts[0])
        self.step_cells.append((number, f"{line}\n{alone}\nNone;"))  # `None;` displays nothing
        self.labels.append(f"{name} under {line}")
        self._later += sorted(found.reads | found.reads_later)
        return True

    def _is_plain(self, value: Any) -> bool:
        """Return whether a value is a function defined in the notebook."""
        return isinstance(value, FunctionType) and value.__globals__ is self._space

    def _submodules(self, module: ModuleType) -> tuple[str, ...]:
        """Return the loaded submodules of `module` that the cell may read as attributes."""
        start = f"{module.__name__}."
        return tuple(
            sorted(
                each
                for each in list(sys.modules)
                if each.startswith(start) and self._words.issuperset(each.removeprefix(start).split("."))
            )
        )

    def _name_on_hosts(self, value: Any) -> str | None:
        """Return the name under which a host finds a value; None if the value has to be pickled.

        Raises:
            PicklingError: The value is a class that cells have defined again since.
        """
        from ..hosts.pickling import path_of, resolve_path

        if (name := self._there.get(id(value))) is not None:
            return name
        if getattr(value, "__module__", None) != "__main__" or not callable(value):
            return None
        if (path := path_of(value)) is None:
            return None
        root = path.partition(".")[0]
        if resolve_path(self._space, path) is value:
            return path if self._is_sent_as_text(self._space[root], root) else None
        if isinstance(value, type) and self._definitions.find_definition(root, value) is not None:
            raise PicklingError(f"{path} is another class by now")
        return None

    def _is_sent_as_text(self, value: Any, name: str) -> bool:
        """Return whether a value is sent as the statement that defines it.

        True for classes, and for results of decorators that can't be pickled.
        """
        from ..hosts.pickling import is_reloadable, is_sharded_step

        if self._is_plain(value) or getattr(value, "__module__", None) != "__main__" or is_sharded_step(value):
            return False
        if id(value) not in self._as_text:
            self._as_text[id(value)] = False  # until known: the scan may ask for the value again
            alone = isinstance(value, type) or not is_reloadable(value)
            # A class pickled by value would not register itself with jax on the host: its statement has to run there.
            fails = alone or self._scan(value).size is None
            is_there = isinstance(value, type) and name not in self._lacking
            self._as_text[id(value)] = fails and (
                is_there or self._definitions.find_definition(name, value) is not None
            )
        return self._as_text[id(value)]

    def _scan(self, value: Any) -> "Scan":
        """Pickle a value without keeping the bytes, to find its size and the names it needs."""
        from ..hosts.pickling import Scan

        return Scan(value, self._space, self._name_on_hosts, self._names)
