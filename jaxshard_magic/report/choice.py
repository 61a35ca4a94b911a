"""`Choice`: the strategy that a search found the fastest of those that fit, with what ruled the others out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jaxshard_magic.report import Report
from jaxshard_magic.report.comparison import Comparison, Trial
from jaxshard_magic.report.sent import PageWidget, Picture, Sendable
from jaxshard_magic.report.written import Written

if TYPE_CHECKING:
    from jaxshard_magic.views.choice.widget import ChoiceView

SCHEMA = 1

CHOSEN, RUNNER_UP, SLOWER = "chosen", "runner-up", "slower"
TOO_LARGE, REFUSED = "too large", "refused"
BOUND, ESTIMATE, LEFT = "bound", "estimate", "left"


@dataclass(frozen=True)
class Considered:
    """One candidate of a search: a strategy on a mesh with its options; `line` runs it alone, after `%%shard`.

    `bound`: seconds that a step takes at least by what its plan multiplies and must send, before anything is compiled:
    on a slice, whose compiler tells what it hides, where that is all communication that it may start ahead, else as
    `guess`, where it hides what compilers usually do. `most`: where it hides nothing. None where it could not be
    planned, or no figures of the chip are known. `needs`: bytes of the fullest device, estimated from the traced step;
    `holds`: of these what its arrays alone take.

    `outcome`: of those that were compiled "chosen", "runner-up", "slower" or "too large"; of those that were not,
    "bound" (it can't be faster than the choice), "estimate" (its arrays do not fit, or it needs far more than a device
    has), "refused" (it can't be planned, compiled or run), or "left" (the budget ended before). `why` says it in one
    line.
    """

    strategy: str
    mesh: dict[str, int]
    options: dict[str, Any]
    line: str
    outcome: str
    why: str = ""
    bound: float | None = None
    needs: int | None = None
    holds: int | None = None
    guess: float | None = None
    most: float | None = None


@dataclass(frozen=True)
class Question:
    """One question of the usual decision path. `answer`: True for yes, None where it is not known; `because`: the
    figures. `yes` and `no`: what an answer leads to, "" where it leads to the next question."""

    asks: str
    answer: bool | None
    because: str
    yes: str = ""
    no: str = ""


@dataclass(frozen=True, repr=False)
class Choice(Sendable, Written):
    """What a search for the fastest strategy that fits has found.

    `comparison` has what was compiled, in that order; `candidates` all that was considered, the choice first. `path`:
    the usual decision path with this step's figures. `source`: what step times are compared by, "measured",
    "predicted" (of the compiled programs, for the chip `on`) or "planned" (nothing was compiled). `error`: the share by
    which predictions were found to be wrong; of those that are no further apart the simplest is chosen. `limit`: bytes
    that a device has room for, None where it is not known. `budget` and `seconds`: what the search might take, None for
    no limit, and what it took. The docstring of `jaxshard_magic.choose` has an example.
    """

    name: str
    comparison: Comparison
    candidates: tuple[Considered, ...]
    path: tuple[Question, ...]
    source: str
    on: str | None = None
    limit: int | None = None
    budget: float | None = None
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    error: float | None = None
    schema: int = SCHEMA

    _what, _schema = "choice", SCHEMA

    @property
    def chosen(self) -> Considered | None:
        """The choice; None where nothing that was tried fits."""
        return self._of(CHOSEN)

    @property
    def runner_up(self) -> Considered | None:
        """The next best that fits; None where only one is known to."""
        return self._of(RUNNER_UP)

    @property
    def trial(self) -> Trial | None:
        """The choice as it was compiled, and run where it was; None where nothing was compiled."""
        return None if self.chosen is None else self.trial_of(self.chosen)

    @property
    def report(self) -> Report | None:
        """The report of the choice; None where nothing was compiled."""
        return None if self.trial is None else self.trial.report

    def trial_of(self, candidate: Considered) -> Trial | None:
        """A candidate as it was compiled; None where it was not."""
        return next((t for t in self.comparison.trials if t.line == candidate.line), None)

    def time_of(self, candidate: Considered) -> float | None:
        """Seconds of its step, as `source` says: measured or predicted where it was compiled, else as planned. None
        where it is not known."""
        if self.source == "planned":
            return candidate.bound if candidate.guess is None else candidate.guess
        trial = self.trial_of(candidate)
        return None if trial is None else self.comparison.seconds(trial)

    def peak_of(self, candidate: Considered) -> int | None:
        """Bytes of the fullest device at its peak, as compiled, else as estimated."""
        trial = self.trial_of(candidate)
        return candidate.needs if trial is None or trial.peak is None else trial.peak

    def with_outcome(self, outcome: str) -> tuple[Considered, ...]:
        """The candidates with this outcome, in their order."""
        return tuple(c for c in self.candidates if c.outcome == outcome)

    def _of(self, outcome: str) -> Considered | None:
        return next(iter(self.with_outcome(outcome)), None)

    def _ways(self) -> tuple[Any, Any, Any]:
        from jaxshard_magic.views.choice import html, text

        return text.to_text, html.to_html, html.page

    def _pictures(self) -> Mapping[str, Picture]:
        """Those of what was compiled, and of the report of the choice."""
        chosen = {} if self.report is None else self.report._pictures()
        return {**self.comparison._pictures(), **chosen}

    def _live(self) -> Sequence[PageWidget]:
        from jaxshard_magic.views.choice.payload import packed_choice
        from jaxshard_magic.views.comparison.payload import first_shown

        found = {"chosen": first_shown(self.comparison), "other": None}
        chosen = () if self.report is None else self.report._live()
        return [
            PageWidget("compare", packed_choice(self), found, self.comparison._pictures()),
            *(replace(live, title="The report of the choice") for live in chosen),
        ]

    @cached_property
    def view(self) -> "ChoiceView":
        """The choice's widget, the same each time; as a comparison's it tells which trial the reader chose."""
        from jaxshard_magic.views.choice.widget import ChoiceView

        return ChoiceView(self)

    def _short(self) -> str:
        said = "nothing fits" if self.chosen is None else self.chosen.line
        return f"<Choice for {self.name}: {said}, of {len(self.candidates)} candidates>"
