"""`--checkpoint`: save the state of a cell's loop between calls of the step, or resume an earlier run."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import ShardError
from ..temporary import TemporaryChange
from .displays import say
from .options import ShardOptions

if TYPE_CHECKING:
    from ..step import ShardedStep
    from ..step.checkpoint_loop import CheckpointLoop

EVERY, KEEP = "100", 3


class Checkpointing(TemporaryChange):
    """Context of the run of one cell; saves the state of the loop once more at exit.

    Without `--checkpoint` on the line the context does nothing.

    Args:
        options: Parsed options of the line.
        stopped: Called with a line about the last save if the user stopped the cell.

    Raises:
        ShardError: On entry: the folder already has checkpoints and `--resume` is missing, or the folder is not
            writable.
    """

    def __init__(self, options: ShardOptions, stopped: Callable[[str], None]):
        self._options, self._stopped = options, stopped
        self._loop: CheckpointLoop | None = None
        self._steps: list[ShardedStep] = []

    def wrap_factory(self, make_step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a variant of a step factory whose steps are saved by the checkpoint loop.

        Args:
            make_step: Makes the cell's step from a function.
        """
        if self._options.checkpoint is None:
            return make_step

        def kept(function: Any) -> Any:
            step = make_step(function)
            step.checkpoint_loop = step.last_checkpoint_loop = self._loop
            self._steps = [*self._steps[-1:], step]
            return step

        return kept

    def apply(self) -> None:
        """Open the folder, and restore the newest checkpoint with `--resume`."""
        options = self._options
        if options.checkpoint is not None:
            from ..step import checkpoint_loop

            every, keep = options.every or EVERY, options.keep or KEEP
            self._loop = checkpoint_loop.CheckpointLoop(options.checkpoint, every, keep, options.resume, say)

    def revert(self) -> None:
        """Detach the loop from the steps, and release the folder."""
        for step in self._steps:
            step.checkpoint_loop = None  # calls after the cell are not part of the loop
        if self._loop is not None:
            self._loop.release()

    def __exit__(
        self, kind: type[BaseException] | None = None, error: BaseException | None = None, trace: object = None
    ) -> None:
        try:
            self._save(kind, error)
        finally:
            super().__exit__(kind, error, trace)

    def _save(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        """Save a last time. While another exception is raised, an error of the save is reported in place of being
        raised."""
        if self._loop is None:
            return
        for step in self._steps:
            step.checkpoint_loop = None
        try:
            told = self._loop.end(early=error)
        except KeyboardInterrupt:
            # An exception that has ended the cell must not be replaced by one of the save.
            if kind is None:
                raise
            told = "the last save was not waited for"
        except ShardError as error:
            if kind is None:
                raise
            told = str(error)
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._stopped(told)
        else:
            say(told)
