"""Names that a cell reads, the hosts lack and the kernel has: they go along, with what they are made of. For what is
large or can't be pickled a line names the cell that made it, to run again."""

import re
from typing import TYPE_CHECKING, Any

from ..errors import ShardError
from ..units import byte_text
from . import cells
from .displays import say
from .hosts_values import Packing

if TYPE_CHECKING:
    from ..hosts.cluster import Cluster
    from ..hosts.transfer import Transfer

_OF_THE_SHELL = re.compile(
    r"_+|_i+|_i?\d+|_[iod]h|_exit_code|In|Out"
)  # inputs and outputs, which hosts have their own
_UNBOUND = re.compile(r"name '(\w+)' is not defined")
_SENT = re.compile(r"get_ipython\(\)\.run_cell_magic\('hosts'")  # a cell that ran on hosts


class Names:
    """What the hosts of a cluster have of the notebook's names."""

    def __init__(self, shell: Any, cluster: "Cluster"):
        self._shell, self._cluster = shell, cluster
        self._sent: dict[str, Any] = {}  # what the names stood for here that were sent
        self._left: dict[str, int | None] = {}  # what could not go, and its bytes

    def bring(self, text: str) -> list[tuple[int, str]]:
        """Give the hosts what a cell reads and the kernel has, where they lack it or the kernel has bound it anew;
        what that was is said.

        Returns:
            Cells to run before it, by number, which shard steps as they are in the kernel.

        Raises ShardError, before anything is sent, for a value that the cell has to have and that can't go.
        """
        from ..hosts import engine

        reads = cells.reads_of(text)
        if not (read := {*filter(self._is_ours, reads.possible)}):
            return []
        space = self._shell.user_ns
        lacking, kept = self._cluster.call(engine.lacking, [*filter(self._is_ours, space)], host=0)
        known = [name for name in kept if name in self._sent]
        same = [name for name in known if space.get(name) is self._sent[name]]
        lacking += [name for name in known if name not in same and self._is_ours(name)]
        words, failed = set(re.findall(r"\w+", text)), dict[str, str]()
        while wanted := sorted(read.intersection(lacking)):
            packing = Packing(self._shell, lacking, same, words, failed)
            packed = packing.transfer(wanted)
            self._left |= packing.left
            if refused := next(
                (name for name in wanted if name in reads.certain & packing.left.keys()), None
            ):
                why = f": {failed[refused]}" if refused in failed else ""
                raise ShardError(f"{self._elsewhere(refused)}{why}")
            if packed is None or not (more := self._send(packed)):
                if packing.told:
                    say(f"to the hosts: {', '.join(packing.told)}")
                return packing.steps
            failed |= more
        return []

    def missed(self, error: tuple[str, str]) -> str | None:
        """The line that says where a name comes from which a cell did not find on the hosts; None for other errors."""
        kind, message = error
        found = _UNBOUND.search(message) if kind == NameError.__name__ else None
        return self._elsewhere(found[1]) if found is not None and self._is_ours(found[1]) else None

    def _send(self, packed: "Transfer") -> dict[str, str]:
        """Send names. What could not be bound on a host, and why."""
        from ..hosts import engine

        answers = self._cluster.call(engine.take, packed)
        failed = {name: why for each in answers for name, why in each.items()}
        if not failed:
            self._sent |= {item.name: self._shell.user_ns[item.name] for item in packed.items}
        return failed

    def _is_ours(self, name: str) -> bool:
        """Whether a name is the notebook's: not one that the shell has given a value."""
        space, hidden = self._shell.user_ns, self._shell.user_ns_hidden
        if name not in space or _OF_THE_SHELL.fullmatch(name):
            return False
        return name not in hidden or space[name] is not hidden[name]

    def _elsewhere(self, name: str) -> str:
        number = self._made_by(name)
        which = "the cell that makes it" if number is None else f"cell [{number}], which makes it,"
        size = self._left.get(name)
        held = "" if size is None else f" and takes {byte_text(size)}"
        return f"{name} is in this kernel{held}, and not on the hosts: run {which} again, there"

    def _made_by(self, name: str) -> int | None:
        """The number of the last cell that ran in this kernel and binds a name."""
        inputs = self._shell.user_ns.get("In", ())
        typed = self._shell.history_manager.input_hist_raw if self._shell.history_manager is not None else []
        for number in range(len(inputs) - 1, 0, -1):
            if _SENT.match(inputs[number]) is None:
                texts = inputs[number], typed[number] if number < len(typed) else ""
                if any(name in s.binds | s.binds_later for text in texts for s in cells.statements_of(text)):
                    return number
        return None
