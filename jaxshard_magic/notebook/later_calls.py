"""Later cells that call the last step: the calls in each cell are timed and followed as a loop of their own.

`%shard` then reports on the last such loop. A cell without a call of the step displays nothing; a thread for drawing
runs only in cells with calls.
"""

from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ..code_locations import location_text
from ..temporary import TemporaryChange
from . import cells
from .session import ShardSession

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..program.source_lines import EnclosingTrace
    from ..step import LoopMonitor, ShardedStep
    from ..step.rejit import ShardedJits


class LaterCalls:
    """Event handlers that tell the session's last step about the beginning and end of each cell.

    Args:
        shell: IPython's shell.
        session: State between cells.
    """

    def __init__(self, shell: Any, session: ShardSession):
        self._shell, self._session = shell, session
        self._watch: LoopMonitor | None = None  # of the running cell
        self._showing: list[TemporaryChange] = []
        self._calls = 0  # of the step before the running cell

    @cached_property
    def sharded_jits(self) -> "ShardedJits":
        """Context in which a `jax.jit` of a sharded step is sharded itself."""
        from ..step.rejit import ShardedJits

        return ShardedJits()

    def before_cell(self, _info: Any) -> None:
        """Start a new loop of the step; IPython calls this before each cell."""
        self._stop_following()  # of an outer cell that runs this one
        step = self._step
        if step is not None:
            self.sharded_jits.apply()
            self._calls, step.traced_within = step.calls, None
            step.loops.start_loop()
            self.follow(step)

    def after_cell(self, _result: Any) -> None:
        """Wait for the last call of the step, and stop following; IPython calls this after each cell.

        Interrupting the kernel ends the wait and nothing else.
        """
        if "sharded_jits" in vars(self):  # reverted for any step: the cell may have set another one
            self.sharded_jits.revert()
        step = self._step
        if step is not None:
            # JAX returns from a call before the device has finished, and the time of the end can't be read afterwards.
            with suppress(KeyboardInterrupt):
                step.loops.settle()
            if step.traced_within is not None and step.calls == self._calls:
                print(enclosing_trace_hint(step.path or step.name, step.traced_within, self._shell.user_ns))
            step.traced_within = None
        self._stop_following()

    @property
    def _step(self) -> "ShardedStep | None":
        """The session's last step; None before the first one and for a dry run."""
        step = self._session.step
        return None if isinstance(step, cells.DryRunStep) else step

    def follow(self, step: "ShardedStep") -> None:
        """Record the scalars returned by calls of `step` in the running cell.

        Nothing is recorded for a step with a monitor already attached. On several hosts each host records its own.
        """
        from ..step import LoopMonitor

        if step.watch is None:
            self._watch = watch = self._watch or LoopMonitor()
            watch.on_first_call = partial(self._show, watch, step.path or step.name)
            watch.follow(step)

    def _show(self, watch: "LoopMonitor", name: str) -> None:
        """Display progress at the first call of the step in a cell: in a notebook a view, on several hosts a line
        alone."""
        # In a terminal the cell may be drawing a progress bar of its own by then, and a line would overwrite the bar.
        if watch is not self._watch or not self._session.progress or not getattr(self._shell, "kernel", None):
            return
        from .loop_progress import LoopProgress
        from .progress import Progress, line_for
        from .training_view import TrainingOutput

        view = TrainingOutput(watch.run, self._session.view, stays=True)
        progress = Progress(line_for(self._shell), label=name)
        training = LoopProgress(watch.finished_calls, watch.run.total, watch.sample_activity)
        for each in (progress, view, progress.following(training, view)):
            self._showing.append(each)
            each.apply()

    def _stop_following(self) -> None:
        """Read all pending scalars, remove the displays, and stop following."""
        watch = self._watch
        try:
            if watch is not None:
                watch.read_ready(everything=True)
        finally:
            while self._showing:
                self._showing[-1].revert()
                self._showing.pop()
            if watch is not None:
                watch.stop()
            self._watch = None


def enclosing_trace_hint(path: str, within: "EnclosingTrace", namespace: "Mapping[str, Any]") -> str:
    """Return a hint about a step called while JAX traced another function.

    Args:
        path: Name of the step.
        within: The enclosing trace: function, file and line.
        namespace: The notebook's namespace, searched for a name of the enclosing function.
    """
    where = f" ({location_text(within.file, within.line)})" if within.file else ""
    names = [name for name, value in namespace.items() if value is within.owner and not name.startswith("_")]
    named = f"{names[0]}.{within.function}" if names and within.owner is not None else within.function
    if named is not None and named.partition(".")[0] in namespace and named != path:
        return f"{path} ran unsharded{where}, as a part of {named}, which JAX traced whole: --step {named} shards that"
    return (
        f"{path} ran unsharded, as another function called it{where} that is jitted or differentiates it: bind that "
        "one to a name and say it with --step"
    )
