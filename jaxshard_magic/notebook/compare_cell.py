"""A `%%shard` cell that compares: its step, found as in any other, tried under several strategies on copies."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from IPython.display import display

from ..errors import ShardError, one_of, whole_number
from . import cells
from .displays import say
from .progress import Progress
from .shard_cell import ShardCell, placed_by, requests_of

if TYPE_CHECKING:
    from ..report import Report
    from ..report.comparison import Comparison, Trial


def compared(this: ShardCell, strategies: Sequence[str]) -> "Comparison":
    """The cell's step tried as its line has it; the cell ends at the step's first call, of which the arguments are.

    Raises ShardError for what the line alone tells, before the cell runs, and where the step has no arguments.
    """
    from ..comparing import USUAL, How, Trying, candidates

    options, path, space = this.options, this.path, this.shell.user_ns
    requests = requests_of(options, list(strategies) or USUAL, this.mesh)
    candidates(requests)
    binding = cells.Binding(space, this.place, cells.Awaited)
    with binding, this.room():
        cells.run(this.shell, this.code, binding)
    binding.undo()
    if this.not_called is not None and (binding.sharded is None or binding.sharded.arguments is None):
        raise ShardError(this.not_called)
    if binding.sharded is None:
        raise ShardError(f"the cell ended without binding {path}")
    function = binding.sharded.__wrapped__
    args, kwargs = binding.sharded.arguments or cells.from_namespace(function, space, path)
    method = hasattr(function, "__self__")
    if method and not options.dry_run:
        say(f"{path} is a method, and to run it would change its object: it is only compiled")

    growing = Growing(this.grows, this.session.view)
    with Progress(this.draw, of=path) as progress, growing:
        how = How(
            options.name or path,
            run=not options.dry_run and not method and this.attached,
            repeat=options.repeat or None,
            say=progress,
            show=growing,
            prepare=this.prepare,
        )
        requests = replace(requests, placed=placed_by(options, path, function))
        comparison = Trying(function, candidates(requests), how)(args, kwargs)
    if comparison.left and not any(trial.report for trial in comparison.trials):
        raise cells.Interrupted(f"Stopped before any of {len(comparison.left)} strategies had compiled.")
    return comparison


class Growing:
    """A context in which the comparison so far is shown in the cell's output, with what stops it; at its end both are
    taken away."""

    def __init__(self, wanted: bool, view: str):
        self._wanted, self._view = wanted, view
        self._handle: Any = None
        self._remove: Callable[[], None] | None = None

    def __call__(self, comparison: "Comparison") -> None:
        if self._wanted:
            self._put(comparison.to_text(), comparison.to_html())

    def _put(self, text: str, html: str) -> None:
        data = {"text/plain": text, "text/html": html}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def __enter__(self) -> "Growing":
        from ..views.show import show_stop

        if self._wanted:
            self._remove = show_stop(self._view)
        return self

    def __exit__(self, *_: object) -> None:
        if self._remove is not None:
            self._remove()
        if self._handle is not None:
            self._put("", "")


def of_the_past(history: "Sequence[Report]", words: Sequence[str]) -> "Comparison":
    """Reports by their numbers in the history, from 1 on; all of them without any.

    Raises ShardError for a number that no report has, and where there is none.
    """
    from ..report.comparison import Comparison

    if not history:
        raise ShardError("no report yet: write %%shard fsdp above a cell with a train step")
    numbers = []
    for word in words:
        number = whole_number(word, len(history))
        if number is None:
            raise ShardError(
                f"%shard compare takes the numbers of reports, 1 to {len(history)}, not {word!r}; alone it lists them"
            )
        numbers.append(number)
    chosen = list(dict.fromkeys(numbers)) or range(1, len(history) + 1)
    names = one_of(dict.fromkeys(history[number - 1].name for number in chosen))
    return Comparison(names, tuple(_trial(history[number - 1], number) for number in chosen))


def _trial(report: "Report", number: int) -> "Trial":
    from ..comparing import VARIED, line_of
    from ..report.comparison import Trial

    axes, options = dict(report.mesh.axes), dict(report.options)
    own = {name: value for name, value in options.items() if name in VARIED}
    line = line_of(report.strategy, " ".join(f"{axis}={size}" for axis, size in axes.items()), own)
    return Trial(report.strategy, axes, options, line, report, number=number)
