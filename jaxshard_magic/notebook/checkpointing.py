"""What `--checkpoint` makes of a cell: the calls of its step are saved between them, or gone on with."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import ShardError
from ..temporary import Temporary
from .displays import say
from .options import ShardOptions

if TYPE_CHECKING:
    from ..step import ShardedStep
    from ..step.keeper import Keeper

EVERY, KEEP = "100", 3


class Checkpointing(Temporary):
    """A context of the cell's run, at whose end the loop's state is saved once more. `stopped` is told what came of
    that where the user stopped the cell. Nothing is done for a line without `--checkpoint`.

    Raises ShardError for a folder that has checkpoints, without `--resume`, and for one that can't be saved into.
    """

    def __init__(self, options: ShardOptions, stopped: Callable[[str], None]):
        self._options, self._stopped = options, stopped
        self._keeper: Keeper | None = None
        self._steps: list[ShardedStep] = []

    def of(self, sharded: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`sharded`, which makes the cell's step of a function: its calls are the loop's."""
        if self._options.checkpoint is None:
            return sharded

        def kept(function: Any) -> Any:
            step = sharded(function)
            step.keeper = step.kept = self._keeper
            self._steps = [*self._steps[-1:], step]
            return step

        return kept

    def begin(self) -> None:
        options = self._options
        if options.checkpoint is not None:
            from ..step import keeper

            every, keep = options.every or EVERY, options.keep or KEEP
            self._keeper = keeper.Keeper(options.checkpoint, every, keep, options.resume, say)

    def end(self) -> None:
        for step in self._steps:
            step.keeper = None  # later calls are none of the loop's
        if self._keeper is not None:
            self._keeper.let_go()

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: object = None,
    ) -> None:
        try:
            self._save(kind, error)
        finally:
            super().__exit__(kind, error, trace)

    def _save(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        if self._keeper is None:
            return
        for step in self._steps:
            step.keeper = None
        try:
            told = self._keeper.end(early=error)
        except KeyboardInterrupt:
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
