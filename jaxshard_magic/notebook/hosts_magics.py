"""`%%hosts` and `%%here`: choose where a cell runs while the mesh consists of several hosts."""

from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, cell_magic, magics_class, no_var_expand

if TYPE_CHECKING:
    from .hosts_session import HostsSession


@magics_class
class HostsMagics(Magics):
    """Magics that run a cell on the hosts or in the kernel.

    The input transformer of `hosts_session` turns each cell into a call of `%%hosts`.

    Args:
        shell: IPython's shell.
        hosts: Hosts of the notebook.
    """

    def __init__(self, shell: Any, hosts: "HostsSession"):
        super().__init__(shell)
        self._shell, self._hosts = shell, hosts

    @no_var_expand
    @cell_magic
    def hosts(self, line: str, cell: str) -> Any:
        """Run a cell on all hosts of the mesh, as every cell does while there are any; its value is host 0's."""
        # IPython leaves frames with this local variable out of tracebacks.
        __tracebackhide__ = True
        return self._hosts.run_cell(cell)

    @no_var_expand
    @cell_magic
    def here(self, line: str, cell: str) -> None:
        """Run a cell in this kernel, also while cells run on hosts."""
        self._shell.run_cell(cell).raise_error()
