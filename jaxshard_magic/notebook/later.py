"""Later cells that call the last step: the calls of each are a loop of its own, which is timed and followed.

`%shard` then shows that loop. A cell that does not call the step shows nothing; a thread draws only in one that does.
"""

from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ..places import place
from ..temporary import Temporary
from . import cells
from .session import ShardSession

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..program.lines import Within
    from ..step import ShardedStep, Watch
    from ..step.rejit import Rejits


class Later:
    """Tells the session's last step when a cell begins, and waits for the step when it has ended."""

    def __init__(self, shell: Any, session: ShardSession):
        self._shell, self._session = shell, session
        self._watch: Watch | None = None  # of the cell that runs
        self._showing: list[Temporary] = []
        self._calls = 0  # of the step before the cell that runs

    @cached_property
    def rejits(self) -> "Rejits":
        """A context in which a jit of a sharded step is sharded itself."""
        from ..step.rejit import Rejits

        return Rejits()

    def begin(self, _info: Any) -> None:
        """IPython calls it before a cell runs."""
        self._leave()  # a cell that runs this one
        step = self._step
        if step is not None:
            self.rejits.begin()
            self._calls, step.traced_within = step.calls, None
            step.loops.begin()
            self.follow(step)

    def end(self, _result: Any) -> None:
        """IPython calls it when a cell has ended. The last of its calls may be under way, and when they finish can't be
        told afterwards. Stopping the kernel ends the wait and nothing else."""
        if "rejits" in vars(self):  # the step may be another by now
            self.rejits.end()
        step = self._step
        if step is not None:
            with suppress(KeyboardInterrupt):
                step.loops.settle()
            if step.traced_within is not None and step.calls == self._calls:
                print(ran_within(step.path or step.name, step.traced_within, self._shell.user_ns))
            step.traced_within = None
        self._leave()

    @property
    def _step(self) -> "ShardedStep | None":
        step = self._session.step
        return None if isinstance(step, cells.Rehearsal) else step

    def follow(self, step: "ShardedStep") -> None:
        """Keep what the calls of `step` give in the cell that runs, but where somebody takes the rows of all cells. Of
        several hosts each keeps what it sees."""
        from ..step import Watch

        if step.watch is None:
            self._watch = watch = self._watch or Watch()
            watch.first = partial(self._show, watch, step.path or step.name)
            watch.follow(step)

    def _show(self, watch: "Watch", name: str) -> None:
        """The cell calls the step: a notebook shows how it goes, one on several hosts by the line alone. In a terminal
        the cell may have a bar of its own by then, which a line would write over."""
        if watch is not self._watch or not self._session.progress or not getattr(self._shell, "kernel", None):
            return
        from .progress import Progress, line_for
        from .progress.training import Training
        from .training_view import TrainingView

        view = TrainingView(watch.run, self._session.view, stays=True)
        progress = Progress(line_for(self._shell), of=name)
        training = Training(watch.finished, watch.run.total, watch.sample)
        for each in (progress, view, progress.following(training, view)):
            self._showing.append(each)
            each.begin()

    def _leave(self) -> None:
        watch = self._watch
        try:
            if watch is not None:
                watch.look(everything=True)
        finally:
            while self._showing:
                self._showing[-1].end()
                self._showing.pop()
            if watch is not None:
                watch.leave()
            self._watch = None


def ran_within(path: str, within: "Within", namespace: "Mapping[str, Any]") -> str:
    """What is told of a step that was called while JAX traced another function, and the name of that one, where the
    notebook has one."""
    where = f" ({place(within.file, within.line)})" if within.file else ""
    names = [name for name, value in namespace.items() if value is within.owner and not name.startswith("_")]
    named = f"{names[0]}.{within.function}" if names and within.owner is not None else within.function
    if named is not None and named.partition(".")[0] in namespace and named != path:
        return f"{path} ran unsharded{where}, as a part of {named}, which JAX traced whole: --step {named} shards that"
    return (
        f"{path} ran unsharded, as another function called it{where} that is jitted or differentiates it: bind that "
        "one to a name and say it with --step"
    )
