"""Later cells that call the last step: the calls of each are timed as a loop of its own, which `%shard` shows."""

from contextlib import suppress
from typing import Any

from . import cells
from .session import ShardSession


class Later:
    """Tells the session's last step when a cell begins, and waits for the step when it has ended."""

    def __init__(self, session: ShardSession):
        self._session = session

    def begin(self, _info: Any) -> None:
        """IPython calls it before a cell runs."""
        step = self._session.step
        if step is not None and not isinstance(step, cells.Rehearsal):
            step.loops.begin()

    def end(self, _result: Any) -> None:
        """IPython calls it when a cell has ended. The last of its calls may be under way, and when they finish can't be
        told afterwards. Stopping the kernel ends the wait and nothing else."""
        step = self._session.step
        if step is not None and not isinstance(step, cells.Rehearsal):
            with suppress(KeyboardInterrupt):
                step.loops.settle()
