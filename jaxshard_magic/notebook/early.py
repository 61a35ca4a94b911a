"""A cell that ends early, stopped or by an error of its own: what it found is kept, and shown below its traceback."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from IPython.display import display

from ..places import in_words, name_of
from . import cells
from .displays import say

if TYPE_CHECKING:
    from ..report import Ended, Report
    from ..report.comparison import Comparison
    from ..step import ShardedStep
    from .shard_cell import ShardCell

_STOPPED = "Stopped before {} had run; your arrays are as they were."


class Early:
    """Keeps the report of a step whose cell ended early: `keep(report, cell)` puts it into the history, `explain(error,
    step)` rewords an error of JAX's that the step had a part in."""

    def __init__(
        self,
        shell: Any,
        session: Any,
        keep: "Callable[[Report, str], None]",
        explain: Callable[[BaseException, Any], None],
    ):
        self._shell, self._session, self._keep, self._explain = shell, session, keep, explain
        self._came: tuple[int, float | None, int | None] | None = None
        self._saved = ""
        self._waiting: Report | Comparison | None = None

    def came(self, calls: int, loss: float | None, total: int | None) -> None:
        """Take how far the cell's loop has come: its calls, the newest loss, and how many calls there would have been,
        None where that is not known."""
        self._came = calls, loss, total

    def saved(self, told: str) -> None:
        """Take what became of the last save of a cell that was stopped, as a line."""
        self._saved = told

    @contextmanager
    def kept(
        self, this: "ShardCell", step: "Callable[[], ShardedStep | cells.Rehearsal | None]"
    ) -> Iterator[None]:
        """A context of the cell's run, `step()` being its step so far, which may be none. Where it ends early after the
        step ran, the report of that is kept and waits for `show`.

        Raises `Interrupted` in the place of an interrupt, once the step was called; other errors pass.
        """
        self._came, self._saved = None, ""
        try:
            yield
        except BaseException as error:
            ran, stopped = step(), isinstance(error, KeyboardInterrupt)
            if ran is not None and not isinstance(ran, cells.Rehearsal) and ran.calls:
                self._explain(error, ran)
                ended = self._ended(error, ran.calls)
                self._report(this, ran, ended)
                if stopped:
                    raise _stop(error, "; ".join(filter(None, (_told(ended), self._saved)))) from None
            elif stopped and cells.in_the_step(self._shell, error.__traceback__):
                raise _stop(error, _STOPPED.format(this.path)) from None
            elif stopped and self._saved:  # between calls that a run before has made
                raise _stop(error, f"Stopped; {self._saved}") from None
            raise

    def ended(self, found: "Report | Comparison", name: str | None, quiet: bool) -> None:
        """Put what a cell found before its early end under a name of the notebook; unless it is to be quiet it waits
        for `show`."""
        if name:
            self._shell.user_ns[name] = found
        if not quiet:
            self._waiting = found

    def show(self, result: Any) -> None:
        """IPython calls it when a cell has ended, its traceback shown."""
        if result.error_in_exec is not None:
            cells.let_go(result.error_in_exec)
        found, self._waiting = self._waiting, None
        if found is not None:
            display(found)

    def _ended(self, error: BaseException, calls: int) -> "Ended":
        from ..report import Ended

        calls, loss, total = self._came or (calls, None, None)
        at = cells.line_of(self._shell, error.__traceback__)
        said = None
        if not isinstance(error, KeyboardInterrupt):
            first = next(iter(str(error).splitlines()), "")
            said = f"{type(error).__name__}: {first}" if first else type(error).__name__
        if at is None:
            return Ended(calls, total, loss, said)
        return Ended(calls, total, loss, said, name_of(at[0]), at[1])

    def _report(self, this: "ShardCell", step: "ShardedStep", ended: "Ended") -> None:
        self._session.begin(step)
        step.ended = ended
        try:
            report = self._session.report()
        except Exception as error:  # the cell's own error is what is raised
            say(f"{this.path} has no report: {type(error).__name__}: {error}")
            return
        self._keep(report, this.code.text)
        self.ended(report, this.options.output, this.code.quiet)


def _stop(interrupt: BaseException, told: str) -> cells.Interrupted:
    """What is raised in the place of an interrupt, which Python keeps beside it: with no function that was running,
    whose arrays would stay on the devices."""
    interrupt.__traceback__ = interrupt.__context__ = interrupt.__cause__ = None
    return cells.Interrupted(told)


def _told(ended: "Ended") -> str:
    """`Stopped at step 396 of 3,000, loss 0.042: cell [3], line 12`."""
    from ..views.words import ended_spans

    said = "".join(span.text for span in ended_spans(ended)).removesuffix(".")
    return said if ended.line is None else f"{said}: {in_words(ended.file, ended.line)}"
