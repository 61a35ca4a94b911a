"""`%load_ext` and `%unload_ext`: install the magics in a shell, and remove them."""

import os
import sys
from glob import glob
from typing import TYPE_CHECKING, Any

from IPython.core import completer

from ..code_locations import forget_cells, number_cells
from ..temporary import end_abandoned
from . import cells, completions, displays
from .hosts_session import HostsMagics
from .magics import ShardMagics

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_TARGETS, _THREAD_STATE = "jaxshard_magic.targets", "jaxshard_magic.program.thread_state"


def load(shell: "InteractiveShell") -> None:
    """Register the magics, completions, traits for `%config`, event handlers, and displays of results."""
    # Without a GPU the CUDA plugin is installed for its compiler alone; its check would print a traceback.
    if not glob("/dev/nvidia*"):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    magics = ShardMagics(shell)
    shell.register_magics(magics, HostsMagics(shell, magics.hosts))
    number_cells(shell, cells.execution_number)
    configurables: list[Any] = shell.configurables
    # `%config` looks for traits in this list.
    configurables.append(magics.session)
    for word in completions.COMPLETED_MAGICS:
        shell.set_hook("complete_command", completions.completions, str_key=word)
    if hasattr(completer, "context_matcher"):  # since IPython 8.6; before, only the line is known
        magics.matcher = completions.matcher_of(shell, magics.hosts.complete)
        _matchers(shell).append(magics.matcher)
    for event in ("pre_run_cell", "post_run_cell"):
        shell.events.register(event, _end_leftovers)
    shell.events.register("pre_run_cell", magics.later.before_cell)
    shell.events.register("post_run_cell", magics.later.after_cell)
    shell.events.register("post_run_cell", magics.early.show)
    shell.events.register("post_run_cell", magics.history_writer.write)
    shell.events.register("post_run_cell", magics.failed.note)
    shell.events.register("post_run_cell", magics.stage_errors.record_step)
    magics.stage_errors.attach()
    displays.register(shell, magics.session)


def unload(shell: "InteractiveShell") -> None:
    """Remove everything installed by `load`, and end the processes started since."""
    manager: Any = shell.magics_manager
    magics = manager.registry.pop(ShardMagics.__name__)
    for event in ("pre_run_cell", "post_run_cell"):
        shell.events.unregister(event, _end_leftovers)
    shell.events.unregister("pre_run_cell", magics.later.before_cell)
    shell.events.unregister("post_run_cell", magics.later.after_cell)
    shell.events.unregister("post_run_cell", magics.early.show)
    shell.events.unregister("post_run_cell", magics.history_writer.write)
    shell.events.unregister("post_run_cell", magics.failed.note)
    shell.events.unregister("post_run_cell", magics.stage_errors.record_step)
    magics.stage_errors.detach()
    magics.history_writer.write()
    magics.hosts.close()
    forget_cells(shell)
    if magics.matcher is not None:
        _matchers(shell).remove(magics.matcher)
    configurables: list[Any] = shell.configurables
    configurables.remove(magics.session)
    for each in (magics, manager.registry.pop(HostsMagics.__name__)):
        for kind, names in each.magics.items():
            for name in names:
                manager.magics[kind].pop(name, None)
    for word in completions.COMPLETED_MAGICS:
        shell.strdispatchers["complete_command"].strs.pop(word, None)
    displays.remove(shell)
    if (targets := sys.modules.get(_TARGETS)) is not None:  # otherwise no compiler was started
        targets.stop_compilers()


def _end_leftovers(_: object) -> None:
    """Revert temporary changes that an interrupt has left behind; runs before and after each cell."""
    end_abandoned()
    if (state := sys.modules.get(_THREAD_STATE)) is not None:  # otherwise nothing was traced
        state.reset_tracing()


def _matchers(shell: "InteractiveShell") -> list[Any]:
    """Return IPython's list of custom completion matchers."""
    completes: Any = shell.Completer
    return completes.custom_matchers
