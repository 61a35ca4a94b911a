"""`%%hosts` and `%%here`: where a cell runs while a mesh lies on hosts."""

from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, cell_magic, magics_class, no_var_expand

if TYPE_CHECKING:
    from .on_hosts import OnHosts


@magics_class
class HostsMagics(Magics):
    """Where cells run; the input transformer of `on_hosts` writes `%%hosts` above each."""

    def __init__(self, shell: Any, hosts: "OnHosts"):
        super().__init__(shell)
        self._shell, self._hosts = shell, hosts

    @no_var_expand
    @cell_magic
    def hosts(self, line: str, cell: str) -> Any:
        """Run a cell on all hosts of the mesh, as every cell does while there are any; its value is host 0's."""
        __tracebackhide__ = True
        return self._hosts.run(cell)

    @no_var_expand
    @cell_magic
    def here(self, line: str, cell: str) -> None:
        """Run a cell in this kernel, also while cells run on hosts."""
        self._shell.run_cell(cell).raise_error()
