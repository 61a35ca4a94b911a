"""Transfer of the kernel's variables to the hosts before a cell that reads them.

Values go along with everything needed to rebuild them. For a value too large to send, or not picklable, an error names
the cell to run again on the hosts.
"""

import re
from typing import TYPE_CHECKING, Any

from ..errors import ShardError
from ..units import byte_text
from . import cells
from .displays import say
from .hosts_values import NamePacker

if TYPE_CHECKING:
    from ..hosts.cluster import Cluster
    from ..hosts.transfer import Transfer

_OF_THE_SHELL = re.compile(r"_+|_i+|_i?\d+|_[iod]h|_exit_code|In|Out")  # inputs, outputs: hosts have their own
_UNBOUND = re.compile(r"name '(\w+)' is not defined")
_SENT = re.compile(r"get_ipython\(\)\.run_cell_magic\('hosts'")  # a cell that ran on hosts


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

    def _send(self, packed: "Transfer") -> dict[str, str]:
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
