"""`%%shard` cells that try several strategies for their step, on copies of its arguments.

A cell that compares ends with a table. `%%shard auto` chooses a strategy at the first call of the step, and continues
the cell with the chosen step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ShardError, list_names, parse_count
from ..introspect import is_method
from . import cells
from .displays import LiveOutput, say
from .history_line import MAX_NUMBER
from .progress import Progress
from .shard_cell import ShardCell, requests_of, shard_arguments

if TYPE_CHECKING:
    from ..history import Store
    from ..report import Report
    from ..report.choice import Choice
    from ..report.comparison import Comparison, Trial
    from ..search import Requests
    from ..step import ShardedStep


def compare_strategies(this: ShardCell, strategies: Sequence[str]) -> "tuple[Comparison, str]":
    """Try the cell's step under all strategies of the line.

    The cell runs up to the first call of its step; the arguments of this call are used for all trials.

    Args:
        this: The cell.
        strategies: Names from the line; the default strategies if empty.

    Returns:
        The comparison, and a text about the progress made if the user stopped the comparison, otherwise "".

    Raises:
        ShardError: The line is impossible (checked before the cell runs), or the step has no arguments.
        Interrupted: The user stopped the comparison before any strategy had compiled.
    """
    from ..config.strategies import COMPARED
    from ..search import TrialOptions, TrialRunner, candidates, chip_for
    from ..step.rejit import ShardedJits

    options, path, space = this.options, this.path, this.shell.user_ns
    requests = requests_of(options, list(strategies) or COMPARED, this.mesh)
    candidates(requests)  # raises for an impossible line, before the cell runs
    binding = cells.Binding(space, this.place, cells.ArgumentCapture)
    with binding, this.memory_guard(), ShardedJits():
        cells.run(this.shell, this.code, binding)
    binding.undo()
    if this.not_called_message is not None and (binding.sharded is None or binding.sharded.arguments is None):
        raise ShardError(this.not_called_message)
    if binding.sharded is None:
        raise ShardError(f"the cell ended without binding {path}")
    function = binding.sharded.__wrapped__
    args, kwargs = binding.sharded.arguments or cells.from_namespace(function, space, path)
    method = is_method(function)
    if method and not options.dry_run:
        say(f"{path} is a method, and to run it would change its object: it is only compiled")

    growing = LiveOutput(this.shows_early_results, this.session.view)
    with Progress(this.draw, label=path) as progress, growing:
        how = TrialOptions(
            options.name or path,
            run=not options.dry_run and not method and this.attached,
            repeat=options.repeat or None,
            say=progress,
            show=growing,
            prepare=this.prepare,
        )
        placed = shard_arguments(options, path, function) | {"on": chip_for(this.mesh, options.on)}
        requests = replace(requests, fixed=placed)
        trying = TrialRunner(function, candidates(requests), how)
        comparison = trying(args, kwargs)
    if not trying.stopped:
        return comparison, ""
    compiled = sum(trial.report is not None for trial in comparison.trials)
    every = f"{len(comparison.trials) + len(comparison.left)} strategies"
    if not compiled:
        raise cells.Interrupted(f"Stopped before any of {every} had compiled.")
    ran = sum(trial.measured is not None for trial in comparison.trials)
    return comparison, f"Stopped: {compiled} of {every} compiled{f', {ran} ran' if how.run else ''}."


def compare_reports(
    history: "Sequence[Report]", words: Sequence[str], names: Mapping[str, Any], store: "Store"
) -> "Comparison":
    """Return a comparison of reports selected by number or by variable name.

    Args:
        history: Reports of this session, compared if `words` is empty.
        words: Report numbers, or names of reports in the notebook.
        names: The notebook's namespace.
        store: History of all notebooks.

    Raises:
        ShardError: A word is neither a number nor the name of a report, or no report exists.
    """
    from ..report.comparison import Comparison

    if not history and not words:
        raise ShardError("no report yet: write %%shard fsdp above a cell with a train step")
    found = [_report(word, history, names, store) for word in words] or history
    # A report named twice is compared once.
    chosen = list({id(report): report for report in found}.values())
    return Comparison(list_names(dict.fromkeys(report.name for report in chosen)), tuple(map(_trial, chosen)))


def _report(word: str, history: "Sequence[Report]", names: Mapping[str, Any], store: "Store") -> "Report":
    """Return the report for a word: from the namespace, from this session, or from the stored history."""
    from ..report import Report

    if isinstance(named := names.get(word), Report):
        return named
    number = parse_count(word, MAX_NUMBER)
    if number is None:
        raise ShardError(
            f"%shard compare takes the numbers of reports, as %shard history lists them, or names of reports, not "
            f"{word!r}; alone it lists those of this session"
        )
    own = next((report for report in history if report.number == number), None)
    return own or replace(store.report(number), number=number)


def _trial(report: "Report") -> "Trial":
    """Return a report in the form of a trial, with the `%%shard` line that reproduces it."""
    from ..report.comparison import Trial
    from ..report.parts import mesh_text
    from ..search import VARIABLE_OPTIONS, line_of

    axes, options = dict(report.mesh.axes), dict(report.options)
    own = {name: value for name, value in options.items() if name in VARIABLE_OPTIONS}
    line = line_of(report.strategy, mesh_text(axes), own)
    return Trial(report.strategy, axes, options, line, report, number=report.number)


class AutoCell:
    """Search for the strategy of one `%%shard auto` cell.

    Args:
        this: The cell.
        lead: Called with the chosen step, to attach progress and monitoring.
        say: Receives a text about the current action.
        goes_on: Continue the cell with the chosen step. If false, the cell ends at the first call of its step, and no
            step runs.
    """

    def __init__(
        self, this: ShardCell, *, lead: "Callable[[ShardedStep], None]", say: Callable[[str], None], goes_on: bool
    ):
        self._cell, self._lead, self._say, self._goes_on = this, lead, say, goes_on
        self._choice: Choice | None = None
        self.step: ShardedStep | None = None  # chosen step, if the cell continues with it

    def check_line(self) -> None:
        """Check the line before the cell runs.

        Raises:
            ShardError: The options of the line do not describe a search space.
        """
        from ..search import strategy_space

        strategy_space(self._requests())

    def make_stand_in(self, function: Any) -> cells.DeferredStep:
        """Return the stand-in bound in place of the step until the first call."""
        return cells.DeferredStep(function, partial(self._choose, function))

    def finish(self, binding: cells.Binding) -> "Choice":
        """Return the choice after the cell has run, and bind the chosen step or the plain step.

        A step not called by the cell is called here once, on copies of the notebook's values.

        Args:
            binding: Binding of the step's name during the cell.

        Raises:
            ShardError: The cell neither called nor bound the step, or the notebook has no arguments for the call.
        """
        from ..step.copies import copy_arguments

        if self._choice is None and self._cell.not_called_message is not None:
            raise ShardError(self._cell.not_called_message)
        if not binding.bound:
            raise ShardError(f"the cell ended without binding {self._cell.path}")
        if self._choice is None:
            stand_in = binding.sharded
            with binding:
                args, kwargs = cells.from_namespace(stand_in.__wrapped__, binding.namespace, self._cell.path)
                # The step may donate its arguments, and the notebook's arrays have to survive.
                stand_in(*copy_arguments(args), **copy_arguments(kwargs))
        assert self._choice is not None
        self.bind_step(binding)
        return self._choice

    def bind_step(self, binding: cells.Binding) -> None:
        """Bind the chosen step, if any, in place of the stand-in."""
        if self.step is not None:
            binding.settle(self.step)

    def _choose(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Search with the arguments of the first call, and return the chosen step.

        Raises:
            CellStopped: The cell ends here: no step was chosen, none may run, or the step is a method.
        """
        from ..search import BUDGET, StrategySearch, TrialOptions, hardware_for
        from ..step import ShardedStep

        this, options, path = self._cell, self._cell.options, self._cell.path
        plain = function.__wrapped__ if isinstance(function, ShardedStep) else function
        # Running a method would change its object, so methods are only compiled.
        method = is_method(plain)
        hardware = hardware_for(this.mesh, options.on)
        placed = shard_arguments(options, path, plain) | {"on": hardware.on}
        with LiveOutput(this.shows_early_results, this.session.view) as growing:
            how = TrialOptions(
                options.name or path,
                run=self._goes_on and not method,
                repeat=options.repeat or None,
                say=self._say,
                show=growing,
                prepare=this.prepare,
            )
            search = StrategySearch(
                plain,
                replace(self._requests(), fixed=placed),
                how,
                hardware,
                budget=BUDGET if options.budget is None else options.budget,
                compile=not options.plan_only,
            )
            self._choice = search(args, kwargs)
        step = search.step
        if step is None or not self._goes_on or method:
            raise cells.CellStopped
        self.step = step
        if options.check:
            self.step.request_check()
        self._lead(self.step)
        return self.step

    def _requests(self) -> "Requests":
        from ..config.strategies import SEARCHED_STRATEGIES

        among = self._cell.options.among
        words = SEARCHED_STRATEGIES if among is None else [word.strip() for word in among.split(",") if word.strip()]
        return requests_of(self._cell.options, words, self._cell.mesh)
