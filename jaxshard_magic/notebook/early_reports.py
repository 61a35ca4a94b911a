"""Reports of cells that end early: interrupted by the user, or by an exception of their own.

The report covers the calls made so far. IPython shows the traceback first; the report follows below.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from IPython.display import display

from ..code_locations import file_label, line_text
from . import cells
from .displays import say

if TYPE_CHECKING:
    from ..report import EarlyEnd, Report
    from ..report.comparison import Comparison
    from ..step import ShardedStep
    from .shard_cell import ShardCell

_STOPPED = "Stopped before {} had run; your arrays are as they were."


class EarlyReports:
    """Handler of cells that end early: makes, stores and displays the reports of their steps.

    Args:
        shell: IPython's shell.
        session: State between cells.
        keep: Called with a report and the text of its cell, to store both in the history.
        explain: Rewords, in place, a JAX error in which the step had a part.
    """

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

    def record_progress(self, calls: int, loss: float | None, total: int | None) -> None:
        """Record the progress of the cell's loop.

        Args:
            calls: Finished calls.
            loss: Newest loss, if any.
            total: Expected number of calls; None if unknown.
        """
        self._came = calls, loss, total

    def record_save(self, told: str) -> None:
        """Record a line about the last checkpoint of an interrupted cell."""
        self._saved = told

    @contextmanager
    def report_if_early(
        self, this: "ShardCell", step: "Callable[[], ShardedStep | cells.DryRunStep | None]"
    ) -> Iterator[None]:
        """Keep the report of the step if the enclosed run of a cell ends early after at least one call.

        The report waits for `show`, called by IPython below the traceback.

        Args:
            this: The cell.
            step: Returns the step of the cell so far; None before the step is bound.

        Raises:
            Interrupted: In place of KeyboardInterrupt, once the cell has called the step or, in a resumed run, saved
                again. Other exceptions pass.
        """
        self._came, self._saved = None, ""
        try:
            yield
        except BaseException as error:
            ran, stopped = step(), isinstance(error, KeyboardInterrupt)
            if ran is not None and not isinstance(ran, cells.DryRunStep) and ran.calls:
                self._explain(error, ran)
                ended = self._describe_end(error, ran.calls)
                self._report(this, ran, ended)
                if stopped:
                    raise _interrupted(error, "; ".join(filter(None, (_end_line(ended), self._saved)))) from None
            elif stopped and cells.has_called_step(self._shell, error.__traceback__):
                raise _interrupted(error, _STOPPED.format(this.path)) from None
            # A resumed run skips the calls of the earlier run, so it may save before it has called the step.
            elif stopped and self._saved:
                raise _interrupted(error, f"Stopped; {self._saved}") from None
            raise

    def queue_result(self, found: "Report | Comparison", name: str | None, quiet: bool) -> None:
        """Bind an early result to a name of the notebook, and queue it for display.

        Args:
            found: Report or comparison.
            name: Name in the notebook; None binds nothing.
            quiet: Do not display.
        """
        if name:
            self._shell.user_ns[name] = found
        if not quiet:
            self._waiting = found

    def show(self, result: Any) -> None:
        """Display the queued result; IPython calls this after a cell, below its traceback."""
        # Python and IPython keep the last exception, and its frames would keep the step's arguments on the devices.
        if result.error_in_exec is not None:
            cells.release_frames(result.error_in_exec)
        found, self._waiting = self._waiting, None
        if found is not None:
            display(found)

    def _describe_end(self, error: BaseException, calls: int) -> "EarlyEnd":
        """Return progress, error and line at which the cell ended."""
        from ..report import EarlyEnd

        calls, loss, total = self._came or (calls, None, None)
        at = cells.failing_line(self._shell, error.__traceback__)
        said = None
        if not isinstance(error, KeyboardInterrupt):
            first = next(iter(str(error).splitlines()), "")
            said = f"{type(error).__name__}: {first}" if first else type(error).__name__
        if at is None:
            return EarlyEnd(calls, total, loss, said)
        return EarlyEnd(calls, total, loss, said, file_label(at[0]), at[1])

    def _report(self, this: "ShardCell", step: "ShardedStep", ended: "EarlyEnd") -> None:
        """Make, store and queue the report of a step whose cell ended early."""
        self._session.set_step(step)
        step.ended = ended
        try:
            report = self._session.report()
        except Exception as error:  # must not replace the cell's own exception
            say(f"{this.path} has no report: {type(error).__name__}: {error}")
            return
        self._keep(report, this.code.text)
        self.queue_result(report, this.options.output, this.code.quiet)


def _interrupted(interrupt: BaseException, told: str) -> cells.Interrupted:
    """Return the exception to raise in place of an interrupt."""
    # Python keeps the interrupt as the context of the new exception. Frames of the running functions would keep their
    # arrays on the devices.
    interrupt.__traceback__ = interrupt.__context__ = interrupt.__cause__ = None
    return cells.Interrupted(told)


def _end_line(ended: "EarlyEnd") -> str:
    """Return one line about the end of a cell: `Stopped at step 396 of 3,000, loss 0.042: cell [3], line 12`."""
    from ..views.words import ended_spans

    said = "".join(span.text for span in ended_spans(ended)).removesuffix(".")
    return said if ended.line is None else f"{said}: {line_text(ended.file, ended.line)}"
