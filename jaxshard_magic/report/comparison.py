"""`Comparison`: one step under several strategies, meshes and options, as plain data with JSON there and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jaxshard_magic.errors import ShardError, one_of
from jaxshard_magic.report import Report
from jaxshard_magic.report.sent import PageWidget, Picture, Sendable
from jaxshard_magic.report.written import Written

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from jaxshard_magic.views.comparison.widget import ComparisonView

SCHEMA = 1


@dataclass(frozen=True, repr=False)
class Trial:
    """One candidate: a strategy on a mesh, with its options, and what came of it.

    `line` is what runs it alone, written after `%%shard`: `fsdp+tp --mesh "data=4 model=2" --precision bf16`. `report`
    is None where it could not be compiled. `why` says in one line why there is no report, or why a step that was
    compiled did not run to its end; `fix` what would change that. `number`: of a report of the past, its own.
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
        """What tells it from the others: its line, with the number of a report of the past."""
        return self.line if self.number is None else f"{self.number} {self.line}"

    @property
    def measured(self) -> float | None:
        """Seconds of a step, the median of those that were timed; None where it was not run, or failed."""
        timing = None if self.report is None or self.why is not None else self.report.timing
        return None if timing is None or timing.step_s is None else timing.step_s.median

    @property
    def simulated(self) -> bool:
        """Whether its devices were simulated, so that `measured` is a time of this machine's CPU."""
        return self.report is not None and self.report.mesh.source == "simulated"

    @property
    def predicted(self) -> float | None:
        """Seconds that a step is predicted to take on the chip that the report names; None without one."""
        timing = None if self.report is None else self.report.timing
        return None if timing is None else timing.predicted_step_s

    @property
    def peak(self) -> int | None:
        """Bytes on the fullest device at its peak."""
        memory = None if self.report is None else self.report.memory
        peaks = [d.peak for d in memory.per_device if d.peak is not None] if memory is not None else []
        return max(peaks, default=None)

    @property
    def limit(self) -> int | None:
        """Bytes that the smallest device has room for; None where no limit is known."""
        memory = None if self.report is None else self.report.memory
        limits = [d.limit for d in memory.per_device if d.limit is not None] if memory is not None else []
        return min(limits, default=None)

    @property
    def fits(self) -> bool | None:
        """Whether every device has room at its peak; None where the peak or the limit is not known."""
        memory = None if self.report is None else self.report.memory
        rows = memory.per_device if memory is not None else ()
        known = [d.peak <= d.limit for d in rows if d.peak is not None and d.limit is not None]
        return all(known) if known else None

    @property
    def sent(self) -> dict[str, int] | None:
        """Bytes that one device sends in a step over each mesh axis, in the mesh's order; over several at once under
        `data+model`, and under `?` where it is not known over which. None where nothing is known."""
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
        """The idle share of a pipeline's ranks, 0 to 1, measured where it ran, else predicted; None without one."""
        pipeline = None if self.report is None else self.report.pipeline
        if pipeline is None:
            return None
        measured = None if self.why is not None else pipeline.bubble.measured
        return pipeline.bubble.predicted if measured is None else measured


@dataclass(frozen=True, repr=False)
class Comparison(Sendable, Written):
    """`trials` in the order in which they were asked for. `left`: the lines of candidates that an interrupt kept from
    being tried. `notes`: sentences on the comparison as a whole.

    >>> found = Comparison("train_step", (Trial("dp", {"data": 8}, {}, "dp"),))
    >>> found["dp"].mesh
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
        """What step times are compared by: "measured" where a chip ran a step, else "predicted"; None where neither is
        known. Simulated devices measure no chip, and their times are compared with nothing."""
        if any(trial.measured is not None and not trial.simulated for trial in self.trials):
            return "measured"
        return "predicted" if any(trial.predicted is not None for trial in self.trials) else None

    def seconds(self, trial: Trial) -> float | None:
        """A trial's step time, as `source` says; times of both kinds are never compared with each other."""
        if self.source == "measured":
            return None if trial.simulated else trial.measured
        return trial.predicted

    @property
    def usable(self) -> tuple[Trial, ...]:
        """The trials that are an answer: that ran, or would, fit as far as is known, and have no other numbers than the
        plain step."""
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
        """The least step time among those that are usable."""
        known = [t for t in self.usable if self.seconds(t) is not None]
        return min(known, key=lambda t: (self.seconds(t), t.peak or 0), default=None)

    @property
    def smallest(self) -> Trial | None:
        """The least peak memory among those that are usable."""
        known = [t for t in self.usable if t.peak is not None]
        return min(known, key=lambda t: (t.peak, self.seconds(t) or 0), default=None)

    @property
    def front(self) -> tuple[Trial, ...]:
        """The Pareto front: trials than which no other that is usable is both at least as fast and as small, and one of
        it better; fastest first."""
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
        """The trial at a position, or the one of that line or strategy. Raises ShardError where there is none, or
        where a strategy has several."""
        if isinstance(which, int):
            return self.trials[which]
        found = [t for t in self.trials if which == t.line] or [t for t in self.trials if which == t.strategy]
        if len(found) == 1:
            return found[0]
        lines = one_of(repr(t.line) for t in found or self.trials)
        said = f"{len(found)} trials of {which!r}" if found else f"no trial {which!r}"
        raise ShardError(f"{said}; say which: {lines}")

    def _ways(self) -> tuple[Any, Any, Any]:
        from jaxshard_magic.views.comparison import html, text

        return text.to_text, html.to_html, html.page

    def _pictures(self) -> Mapping[str, Picture]:
        from jaxshard_magic.views.pictures import named

        return named.of_comparison(self)

    def _live(self) -> Sequence[PageWidget]:
        from jaxshard_magic.views.comparison.payload import first_shown, packed_comparison

        chosen = {"chosen": first_shown(self), "other": None}
        return [PageWidget("compare", packed_comparison(self), chosen, self._pictures())]

    @cached_property
    def view(self) -> "ComparisonView":
        """The comparison's widget, the same each time: `comparison.view.chosen` is the trial that the reader chose."""
        from jaxshard_magic.views.comparison.widget import ComparisonView

        return ComparisonView(self)

    def figure(self, theme: str = "light") -> "Figure":
        """Peak memory against step time with the Pareto front, as a plotly figure. `theme`: "light" or "dark".

        Raises ShardError where no trial has both.
        """
        from jaxshard_magic.views import figures

        return figures.comparison(self, theme)

    def _short(self) -> str:
        return f"<Comparison of {self.name}: {', '.join(trial.line for trial in self.trials)}>"
