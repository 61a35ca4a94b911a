"""Transfer of the kernel's variables to the hosts before a cell that reads them.

Each value goes along with everything needed to rebuild it. For a value too large to send, or not picklable, an error
names the cell to run again on the hosts.
"""

import io
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pickle import PicklingError
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import ShardError
from ..hosts.transfer import Define, Import, Item, Transfer, Unpickle
from ..units import byte_text
from . import cells
from .displays import say

if TYPE_CHECKING:
    from ..hosts.cluster import Cluster
    from ..hosts.pickling import Scan

MAX_SENT_BYTES = 2**24  # for one value: a tenth of a second to each of two hosts
_IMMUTABLE = (bool, int, float, complex, str, bytes, tuple, frozenset, range, type(None), ModuleType)
_OF_THE_SHELL = re.compile(r"_+|_i+|_i?\d+|_[iod]h|_exit_code|In|Out")  # inputs, outputs: hosts have their own
_UNBOUND = re.compile(r"name '(\w+)' is not defined")
_SENT = re.compile(r"get_ipython\(\)\.run_cell_magic\('hosts'")  # a cell that ran on hosts


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


class HostNamespace:
    """Record of the notebook's names on the hosts of a cluster.

    Args:
        shell: IPython's shell.
        cluster: The hosts.
    """

    def __init__(self, shell: Any, cluster: "Cluster"):
        self._shell, self._cluster = shell, cluster
        self._sent: dict[str, Any] = {}  # values in the kernel when they were sent, by name
        self._left: dict[str, int | None] = {}  # bytes of values that could not be sent, by name

    def send_missing(self, text: str) -> list[tuple[int, str]]:
        """Send the names read by a cell and bound in the kernel, if the hosts lack them or the kernel has bound them
        again.

        The sent names are printed.

        Args:
            text: Source of the cell.

        Returns:
            Cells to run on the hosts first, each with its number: they shard steps as in the kernel.

        Raises:
            ShardError: The cell certainly reads a value that can't be sent. Nothing has been sent.
        """
        from ..hosts import engine

        reads = cells.cell_reads(text)
        if not (read := {*filter(self._is_user_name, reads.possible)}):
            return []
        space = self._shell.user_ns
        lacking, bound_on_hosts = self._cluster.call(engine.unbound_names, [*filter(self._is_user_name, space)], host=0)
        sent_before = [name for name in bound_on_hosts if name in self._sent]
        same = [name for name in sent_before if space.get(name) is self._sent[name]]
        lacking += [name for name in sent_before if name not in same and self._is_user_name(name)]
        words, failed = set(re.findall(r"\w+", text)), dict[str, str]()
        # A value may turn out unusable only on a host. The loop then packs again without such values.
        while wanted := sorted(read.intersection(lacking)):
            packing = NamePacker(self._shell, lacking, same, words, failed)
            packed = packing.transfer(wanted)
            self._left |= packing.unsendable
            if refused := next((name for name in wanted if name in reads.certain & packing.unsendable.keys()), None):
                why = f": {failed[refused]}" if refused in failed else ""
                raise ShardError(f"{self._rerun_message(refused)}{why}")
            if packed is None or not (more := self._send(packed)):
                if packing.labels:
                    say(f"to the hosts: {', '.join(packing.labels)}")
                return packing.step_cells
            failed |= more
        return []

    def explain_name_error(self, error: tuple[str, str]) -> str | None:
        """Return a line about the origin of a name missing on the hosts; None for errors other than a missing name.

        Args:
            error: Type name and message of the exception.
        """
        kind, message = error
        found = _UNBOUND.search(message) if kind == NameError.__name__ else None
        return self._rerun_message(found[1]) if found is not None and self._is_user_name(found[1]) else None

    def _send(self, packed: Transfer) -> dict[str, str]:
        """Send a transfer; return the names a host could not bind, with the reasons."""
        from ..hosts import engine

        answers = self._cluster.call(engine.bind_names, packed)
        failed = {name: why for each in answers for name, why in each.items()}
        if not failed:
            self._sent |= {item.name: self._shell.user_ns[item.name] for item in packed.items}
        return failed

    def _is_user_name(self, name: str) -> bool:
        """Return whether the user has bound `name`: neither the shell nor its history of inputs and outputs has."""
        space, hidden = self._shell.user_ns, self._shell.user_ns_hidden
        if name not in space or _OF_THE_SHELL.fullmatch(name):
            return False
        # The shell hides names that it has bound itself; bound again by the user they are the user's.
        return name not in hidden or space[name] is not hidden[name]

    def _rerun_message(self, name: str) -> str:
        """Return the line that asks to run again the cell defining `name`."""
        number = self._defining_cell(name)
        which = "the cell that makes it" if number is None else f"cell [{number}], which makes it,"
        size = self._left.get(name)
        held = "" if size is None else f" and takes {byte_text(size)}"
        return f"{name} is in this kernel{held}, and not on the hosts: run {which} again, there"

    def _defining_cell(self, name: str) -> int | None:
        """Return the number of the last cell run in this kernel that binds `name`; None if unknown."""
        inputs = self._shell.user_ns.get("In", ())
        typed = self._shell.history_manager.input_hist_raw if self._shell.history_manager is not None else []
        for number in range(len(inputs) - 1, 0, -1):
            if _SENT.match(inputs[number]) is None:
                texts = inputs[number], typed[number] if number < len(typed) else ""
                if any(name in s.binds | s.binds_later for text in texts for s in cells.statements_of(text)):
                    return number
        return None
