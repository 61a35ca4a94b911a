"""The notebook's state: its mesh, the last sharded step, and the reports so far."""

import os
from dataclasses import replace
from typing import Any

from traitlets import Any as AnyTrait
from traitlets import Bool, Enum, Float, Int, default
from traitlets import List as ListTrait
from traitlets.config import Configurable


class ShardSession(Configurable):
    """What the magics remember between cells; `%config ShardSession.progress = False` sets a trait."""

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
        120.0,
        min=1.0,
        help="Seconds within which the hosts of a %mesh have to come, in a scheduler's queue, too.",
    ).tag(config=True)
    remember = Bool(True, help="Keep every Report in the history of all notebooks, %shard history.").tag(
        config=True
    )
    keep = Int(100, min=1, help="How many Reports of this session are held.").tag(config=True)

    meet_every = Int(
        0,
        min=0,
        help="Steps after which hosts of a mesh look whether all go on. 0: before every step, and above 32 hosts so"
        " often that it takes 1% of a step's time.",
    ).tag(config=True)

    mesh = AnyTrait(
        None, allow_none=True, help="What %mesh built last: the mesh, and where its devices are from."
    )
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
        return os.environ.get("JAXSHARD_VIEW") or "auto"

    def begin(self, step: Any) -> None:
        """Make `step` the last one."""
        self.step, self.reported, self.comparison = step, False, None

    def compared(self, comparison: Any) -> Any:
        """Make `comparison` the last one, and return it with its reports as they went into the history."""
        self.comparison = self._numbered(comparison)
        return self.comparison

    def chose(self, choice: Any) -> Any:
        """Make `choice`, of which nothing has run, the last one, and return it as `compared` does."""
        self.comparison = replace(choice, comparison=self._numbered(choice.comparison))
        return self.comparison

    def report(self) -> Any:
        """The last step's Report as of now, in its place in the history.

        Raises ShardError when the step was neither called nor prepared.
        """
        report = self.step.report()
        *earlier, last = self.history if self.reported else (*self.history, None)
        (number,) = (last.number,) if last is not None else self._numbers(1)
        report = replace(report, number=number)
        getattr(self.step, "sharded", self.step).number = number  # of a rehearsal that of the step behind it
        self.history, self.reported = [*earlier, report][-self.keep :], True
        return report

    def received(self, report: Any, number: int | None = None) -> Any:
        """Take the report of a step that ran on hosts as the last one, with a number of its own or in the place of the
        one that has `number`."""
        if number is None:
            (number,) = self._numbers(1)
        report = replace(report, number=number)
        others = [each for each in self.history if each.number != number]
        self.history, self.reported = [*others, report][-self.keep :], False
        return report

    def _numbered(self, comparison: Any) -> Any:
        """`comparison` with reports that have numbers and are in the history."""
        numbers = iter(self._numbers(sum(trial.report is not None for trial in comparison.trials)))
        trials = [
            trial
            if trial.report is None
            else replace(trial, report=replace(trial.report, number=next(numbers)))
            for trial in comparison.trials
        ]
        found = [trial.report for trial in trials if trial.report is not None]
        self.history, self.reported = [*self.history, *found][-self.keep :], False
        return replace(comparison, trials=tuple(trials))

    def _numbers(self, count: int) -> range:
        """Numbers for so many reports, those of the history of all notebooks; where nothing is kept they go on from the
        highest of this session."""
        found = self.reserve(count) if count and self.remember and self.reserve is not None else None
        first = max((report.number or 0 for report in self.history), default=0) + 1
        return range(first, first + count) if found is None else found
