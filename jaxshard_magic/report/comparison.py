"""Comparison of a step under several strategies, meshes and options: plain data, convertible to JSON and back."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jaxshard_magic.display import renderer
from jaxshard_magic.errors import ShardError, list_names
from jaxshard_magic.report import Report
from jaxshard_magic.report.exports import Exportable
from jaxshard_magic.report.records import JsonRecord

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SCHEMA = 1


@dataclass(frozen=True, repr=False)
class Trial:
    """A candidate, a strategy on a mesh with options, and its result.

    Attributes:
        strategy: Name of the strategy.
        mesh: Mesh axes with sizes.
        options: Options.
        line: Arguments of `%%shard` to run the candidate alone: `fsdp+tp --mesh "data=4 model=2" --precision bf16`.
        report: Report of the compiled step; None if compilation failed.
        why: Reason, in a line, for a missing report or for a compiled step that did not finish.
        fix: Suggested change.
        number: Number of the report, for a report from the history.
    """

    strategy: str
    mesh: dict[str, int]
    options: dict[str, Any]
    line: str
    report: Report | None = None
    why: str | None = None
    fix: str | None = None
    number: int | None = None

    @property
    def key(self) -> str:
        """Unique key within a comparison: the line, prefixed by the number of a report from the history."""
        return self.line if self.number is None else f"{self.number} {self.line}"

    @property
    def measured(self) -> float | None:
        """Median seconds per step, of the timed steps; None if the step did not run or failed."""
        timing = None if self.report is None or self.why is not None else self.report.timing
        return None if timing is None or timing.step_s is None else timing.step_s.median

    @property
    def simulated(self) -> bool:
        """Return whether the devices were simulated. `measured` is then a time of this machine's CPU."""
        return self.report is not None and self.report.mesh.source == "simulated"

    @property
    def predicted(self) -> float | None:
        """Predicted seconds per step on the chip named in the report; None without a chip."""
        timing = None if self.report is None else self.report.timing
        return None if timing is None else timing.predicted_step_s

    @property
    def peak(self) -> int | None:
        """Peak bytes on the fullest device."""
        memory = None if self.report is None else self.report.memory
        peaks = [d.peak for d in memory.per_device if d.peak is not None] if memory is not None else []
        return max(peaks, default=None)

    @property
    def limit(self) -> int | None:
        """Bytes available on the smallest device; None without a known limit."""
        memory = None if self.report is None else self.report.memory
        limits = [d.limit for d in memory.per_device if d.limit is not None] if memory is not None else []
        return min(limits, default=None)

    @property
    def fits(self) -> bool | None:
        """Return whether every device has room for its peak; None if peak or limit are unknown."""
        memory = None if self.report is None else self.report.memory
        rows = memory.per_device if memory is not None else ()
        known = [d.peak <= d.limit for d in rows if d.peak is not None and d.limit is not None]
        return all(known) if known else None

    @property
    def sent(self) -> dict[str, int] | None:
        """Bytes sent by a device in a step over each mesh axis, in mesh order.

        The key `data+model` has bytes over several axes at once, `?` bytes over unknown axes. None if nothing is known.
        """
        rows = None if self.report is None else self.report.collectives
        if rows is None:
            return None
        over = dict.fromkeys(self.mesh, 0)
        for row in rows:
            name = "?" if row.axes is None else "+".join(row.axes)
            over[name] = over.get(name, 0) + row.wire_bytes
        return over

    @property
    def bubble(self) -> float | None:
        """Idle share of a pipeline's ranks, 0 to 1: measured after a run, else predicted; None without a pipeline."""
        pipeline = None if self.report is None else self.report.pipeline
        if pipeline is None:
            return None
        measured = None if self.why is not None else pipeline.bubble.measured
        return pipeline.bubble.predicted if measured is None else measured


@dataclass(frozen=True, repr=False)
class Comparison(Exportable, JsonRecord):
    """Trials of a step.

    Attributes:
        name: Name of the step.
        trials: Trials in the order requested.
        left: Lines of candidates not tried because of an interrupt.
        notes: Sentences about the comparison as a whole.
        schema: Version of the JSON format.

    >>> comparison = Comparison("train_step", (Trial("dp", {"data": 8}, {}, "dp"),))
    >>> comparison["dp"].mesh
    {'data': 8}
    """

    name: str
    trials: tuple[Trial, ...]
    left: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    schema: int = field(default=SCHEMA)

    _what, _schema = "comparison", SCHEMA

    @property
    def source(self) -> str | None:
        """Origin of the step times compared: "measured" if a chip ran a step, otherwise "predicted"; None if both are
        unknown."""
        # Simulated devices measure no chip: their times are not compared.
        if any(trial.measured is not None and not trial.simulated for trial in self.trials):
            return "measured"
        return "predicted" if any(trial.predicted is not None for trial in self.trials) else None

    def seconds(self, trial: Trial) -> float | None:
        """Return the seconds per step of a trial according to `source`. Measured and predicted times are never
        compared."""
        if self.source == "measured":
            return None if trial.simulated else trial.measured
        return trial.predicted

    @property
    def usable(self) -> tuple[Trial, ...]:
        """Trials that ran or would run, fit as far as known, and agree numerically with the plain step."""
        return tuple(
            t
            for t in self.trials
            if t.report is not None
            and t.why is None
            and t.fits is not False
            and (t.report.check is None or t.report.check.passed)
        )

    @property
    def fastest(self) -> Trial | None:
        """Usable trial with the smallest step time."""
        known = [t for t in self.usable if self.seconds(t) is not None]
        # Ties go to the smaller peak.
        return min(known, key=lambda t: (self.seconds(t), t.peak or 0), default=None)

    @property
    def smallest(self) -> Trial | None:
        """Usable trial with the smallest peak memory."""
        known = [t for t in self.usable if t.peak is not None]
        return min(known, key=lambda t: (t.peak, self.seconds(t) or 0), default=None)

    @property
    def front(self) -> tuple[Trial, ...]:
        """Pareto front of the usable trials by step time and peak memory, fastest first.

        A trial is on the front unless another usable trial is at least as fast and as small, and better in time or
        memory.
        """
        known = [
            (seconds, trial.peak, trial)
            for trial in self.usable
            if (seconds := self.seconds(trial)) is not None and trial.peak is not None
        ]
        return tuple(
            trial
            for seconds, peak, trial in sorted(known, key=lambda each: each[:2])
            if not any(s <= seconds and p <= peak and (s, p) != (seconds, peak) for s, p, _ in known)
        )

    def __getitem__(self, which: int | str) -> Trial:
        """Return a trial by position, line or strategy.

        Raises:
            ShardError: No such trial, or several trials of the strategy.
        """
        if isinstance(which, int):
            return self.trials[which]
        # A line is unique; a strategy may have been tried on several meshes.
        matches = [t for t in self.trials if which == t.line] or [t for t in self.trials if which == t.strategy]
        if len(matches) == 1:
            return matches[0]
        lines = list_names(repr(t.line) for t in matches or self.trials)
        problem = f"{len(matches)} trials of {which!r}" if matches else f"no trial {which!r}"
        raise ShardError(f"{problem}; say which: {lines}")

    def to_markdown(self) -> str:
        """Return the comparison as GitHub-flavoured Markdown, for a pull request."""
        return renderer(self, "markdown")(self)

    @cached_property
    def view(self) -> Any:
        """Widget of the comparison, created once. `comparison.view.chosen` is the trial selected by the reader."""
        return renderer(self, "widget")(self)

    def figure(self, theme: str = "light") -> "Figure":
        """Return a plotly figure of peak memory against step time with the Pareto front.

        Args:
            theme: "light" or "dark".

        Raises:
            ShardError: No trial has both step time and peak memory.
        """
        return renderer(self, "figure")(self, theme)

    def _summary_line(self) -> str:
        return f"<Comparison of {self.name}: {', '.join(trial.line for trial in self.trials)}>"
