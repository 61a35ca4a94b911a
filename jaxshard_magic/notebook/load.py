"""`%load_ext` and `%unload_ext`: what they put into a shell, and take out again."""

import os
import sys
from glob import glob
from typing import TYPE_CHECKING, Any

from IPython.core import completer

from ..places import forget_cells, number_cells
from ..temporary import end_leftovers
from . import cells, completions, displays
from .hosts_magics import HostsMagics
from .magics import ShardMagics

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_TARGETS, _THREAD_STATE = "jaxshard_magic.targets", "jaxshard_magic.program.thread_state"


def load(shell: "InteractiveShell") -> None:
    """Register the magics, their completions, the session's traits for `%config`, and how results are shown."""
    if not glob(
        "/dev/nvidia*"
    ):  # else jax prints a traceback where its CUDA plugin is there to compile and no more
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    magics = ShardMagics(shell)
    shell.register_magics(magics, HostsMagics(shell, magics.hosts))
    number_cells(shell, cells.number_of)
    configurables: list[Any] = shell.configurables
    configurables.append(magics.session)
    for word in completions.OURS:
        shell.set_hook("complete_command", completions.completions, str_key=word)
    if hasattr(completer, "context_matcher"):  # IPython 8.6; before, completions know no more than the line
        magics.matcher = completions.matcher_of(shell, magics.hosts.complete)
        _matchers(shell).append(magics.matcher)
    for event in ("pre_run_cell", "post_run_cell"):
        shell.events.register(event, _end_leftovers)
    shell.events.register("pre_run_cell", magics.later.begin)
    shell.events.register("post_run_cell", magics.later.end)
    shell.events.register("post_run_cell", magics.early.show)
    shell.events.register("post_run_cell", magics.keeping.write)
    shell.events.register("post_run_cell", magics.failed.note)
    shell.events.register("post_run_cell", magics.scattered.note)
    magics.scattered.attach()
    displays.register(shell, magics.session)


def unload(shell: "InteractiveShell") -> None:
    """Take out what `load` put in, and end the processes that were started since."""
    manager: Any = shell.magics_manager
    magics = manager.registry.pop(ShardMagics.__name__)
    for event in ("pre_run_cell", "post_run_cell"):
        shell.events.unregister(event, _end_leftovers)
    shell.events.unregister("pre_run_cell", magics.later.begin)
    shell.events.unregister("post_run_cell", magics.later.end)
    shell.events.unregister("post_run_cell", magics.early.show)
    shell.events.unregister("post_run_cell", magics.keeping.write)
    shell.events.unregister("post_run_cell", magics.failed.note)
    shell.events.unregister("post_run_cell", magics.scattered.note)
    magics.scattered.detach()
    magics.keeping.write()
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
    for word in completions.OURS:
        shell.strdispatchers["complete_command"].strs.pop(word, None)
    displays.remove(shell)
    if (
        targets := sys.modules.get(_TARGETS)
    ) is not None:  # else nothing was compiled for what is not attached
        targets.stop_compilers()


def _end_leftovers(_: object) -> None:
    """Undo what an interrupt has left changed: a cell is about to run, or has ended."""
    end_leftovers()
    if (state := sys.modules.get(_THREAD_STATE)) is not None:  # else nothing was traced
        state.leave_traces()


def _matchers(shell: "InteractiveShell") -> list[Any]:
    completes: Any = shell.Completer
    return completes.custom_matchers
