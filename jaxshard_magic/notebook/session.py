"""State of the notebook between cells: mesh, last sharded step, and reports."""

import os
from dataclasses import replace
from typing import Any

from traitlets import Any as AnyTrait
from traitlets import Bool, Enum, Float, Int, default
from traitlets import List as ListTrait
from traitlets.config import Configurable


class ShardSession(Configurable):
    """State of the magics between cells; `%config ShardSession.progress = False` sets a trait."""

    progress = Bool(True, help="Show progress while a step is compiled and a cell trains.").tag(config=True)
    view = Enum(
        ("auto", "widget", "html", "page", "data", "text"),
        "auto",
        help="How a Report is shown. auto: in a notebook a widget, with HTML for where no widget runs;"
        " widget: the widget alone; html: no widget; page: html, saved with what a book made of the notebook needs;"
        " data: for another kernel that shows it; text. The variable JAXSHARD_VIEW sets the default.",
    ).tag(config=True)
    compile_limit = Float(
        1800.0, min=0.0, help="Seconds after which a compile for hardware that isn't attached is stopped."
    ).tag(config=True)
    options_limit = Float(
        60.0, min=0.0, help="Seconds of compiling that showing what each option of a line changes may take."
    ).tag(config=True)
    count_rows = Bool(
        True,
        help="Count the rows of each expert before the first step, where experts are divided: a compile of the forward"
        " pass more.",
    ).tag(config=True)
    hosts_limit = Float(
        120.0, min=1.0, help="Seconds within which the hosts of a %mesh have to come, in a scheduler's queue, too."
    ).tag(config=True)
    remember = Bool(True, help="Keep every Report in the history of all notebooks, %shard history.").tag(config=True)
    keep = Int(100, min=1, help="How many Reports of this session are held.").tag(config=True)

    meet_every = Int(
        0,
        min=0,
        help="Steps after which hosts of a mesh look whether all go on. 0: before every step, and above 32 hosts so"
        " often that it takes 1% of a step's time.",
    ).tag(config=True)

    mesh = AnyTrait(None, allow_none=True, help="What %mesh built last: the mesh, and where its devices are from.")
    step = AnyTrait(None, allow_none=True, help="The ShardedStep of the last %%shard cell.")
    comparison = AnyTrait(
        None, allow_none=True, help="The Comparison, or the Choice, of the last %%shard cell, if it was one."
    )
    went_on = AnyTrait((None, None), help="The last Choice whose cell went on, and the Report of that.")
    reported = Bool(False, help="Whether the last of the history is the last step's.")
    reserve = AnyTrait(None, allow_none=True, help="Gives so many reports the numbers that they are kept by.")
    history = ListTrait(help="One Report for each %%shard cell, oldest first.")

    @default("view")
    def _view_of_the_environment(self) -> str:
        """Return the default of `view`: the environment variable JAXSHARD_VIEW, or "auto"."""
        return os.environ.get("JAXSHARD_VIEW") or "auto"

    def set_step(self, step: Any) -> None:
        """Make `step` the last step."""
        self.step, self.reported, self.comparison = step, False, None

    def add_comparison(self, comparison: Any) -> Any:
        """Make `comparison` the last one, and add its reports to the history.

        Returns:
            The comparison with numbered reports.
        """
        self.comparison = self._number_reports(comparison)
        return self.comparison

    def add_choice(self, choice: Any) -> Any:
        """Make `choice`, with no step run, the last comparison, and add its reports to the history.

        Returns:
            The choice with numbered reports.
        """
        self.comparison = replace(choice, comparison=self._number_reports(choice.comparison))
        return self.comparison

    def report(self) -> Any:
        """Return the current report of the last step, and store it in the history in place of the step's previous
        report.

        Raises:
            ShardError: The step was neither called nor prepared.
        """
        report = self.step.report()
        # A later report of the same step takes the place and the number of the previous one.
        *earlier, last = self.history if self.reported else (*self.history, None)
        (number,) = (last.number,) if last is not None else self._next_numbers(1)
        report = replace(report, number=number)
        getattr(self.step, "sharded", self.step).report_number = number  # a `DryRunStep` has the step as `sharded`
        self.history, self.reported = [*earlier, report][-self.keep :], True
        return report

    def add_host_report(self, report: Any, number: int | None = None) -> Any:
        """Add the report of a step that ran on hosts to the history.

        Args:
            report: The report, numbered by the host.
            number: Number of the report to replace; None gives the report a new number.

        Returns:
            The report with its number in the kernel.
        """
        if number is None:
            (number,) = self._next_numbers(1)
        report = replace(report, number=number)
        others = [each for each in self.history if each.number != number]
        self.history, self.reported = [*others, report][-self.keep :], False
        return report

    def _number_reports(self, comparison: Any) -> Any:
        """Number the reports of a comparison, and add them to the history."""
        numbers = iter(self._next_numbers(sum(trial.report is not None for trial in comparison.trials)))
        trials = [
            trial if trial.report is None else replace(trial, report=replace(trial.report, number=next(numbers)))
            for trial in comparison.trials
        ]
        found = [trial.report for trial in trials if trial.report is not None]
        self.history, self.reported = [*self.history, *found][-self.keep :], False
        return replace(comparison, trials=tuple(trials))

    def _next_numbers(self, count: int) -> range:
        """Return `count` numbers for reports.

        Numbers come from the history of all notebooks. Without a history they continue from the highest number of this
        session.
        """
        found = self.reserve(count) if count and self.remember and self.reserve is not None else None
        first = max((report.number or 0 for report in self.history), default=0) + 1
        return range(first, first + count) if found is None else found
