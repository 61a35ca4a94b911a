"""Result of a search for the fastest strategy that fits, with the reasons against the other candidates."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxshard_magic.display import renderer
from jaxshard_magic.report import Report
from jaxshard_magic.report.comparison import Comparison, Trial
from jaxshard_magic.report.exports import Exportable
from jaxshard_magic.report.records import JsonRecord

SCHEMA = 1

CHOSEN, RUNNER_UP, SLOWER = "chosen", "runner-up", "slower"
TOO_LARGE, REFUSED = "too large", "refused"
BOUND, ESTIMATE, LEFT = "bound", "estimate", "left"


@dataclass(frozen=True)
class SearchCandidate:
    """A candidate of a search: a strategy on a mesh with its options.

    Attributes:
        strategy: Name of the strategy.
        mesh: Mesh axes with sizes.
        options: Options.
        line: Arguments of `%%shard` to run the candidate alone.
        outcome: For compiled candidates "chosen", "runner-up", "slower" or "too large". Not compiled: "bound" (cannot
            be faster than the choice), "estimate" (arrays do not fit, or it needs far more than a device has),
            "refused" (cannot be planned, compiled or run) or "left" (no budget left).
        why: Reason for the outcome, in a line.
        bound: Lower bound of the seconds per step, before compilation, from the plan's products and required
            communication. On a slice, with a compiler that reports hidden communication, all communication with a
            possible early start counts as hidden; otherwise the value of `guess`. None, as `guess` and `most`, if
            planning failed or without figures of the chip.
        needs: Bytes on the fullest device, estimated from the traced step.
        holds: Bytes of the arrays alone, included in `needs`.
        guess: Estimated seconds per step with the communication that compilers usually hide.
        most: Seconds per step without hidden communication.
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
    """A question of the usual decision path.

    Attributes:
        asks: The question.
        answer: True for yes; None if unknown.
        because: Figures behind the answer.
        yes: Consequence of a yes; "" leads to the next question.
        no: Consequence of a no; "" leads to the next question.
    """

    asks: str
    answer: bool | None
    because: str
    yes: str = ""
    no: str = ""


@dataclass(frozen=True, repr=False)
class Choice(Exportable, JsonRecord):
    """Result of a search for the fastest strategy that fits. The docstring of `jaxshard_magic.choose` has an example.

    Attributes:
        name: Name of the step.
        comparison: Compiled candidates, in order of compilation.
        candidates: All candidates, the choice first.
        path: Usual decision path with the figures of this step.
        source: Origin of the step times compared: "measured", "predicted" (from compiled programs, for the chip `on`)
            or "planned" (nothing was compiled).
        on: Chip of the predictions.
        limit: Bytes of memory available on a device; None if unknown.
        budget: Seconds allowed for the search; None for no limit.
        seconds: Seconds taken by the search.
        notes: Sentences about the search as a whole.
        error: Relative error observed for predictions. Among candidates within this error, the simplest is chosen.
        schema: Version of the JSON format.
    """

    name: str
    comparison: Comparison
    candidates: tuple[SearchCandidate, ...]
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
    def chosen(self) -> SearchCandidate | None:
        """The chosen candidate; None if nothing that was tried fits."""
        return self._first_with_outcome(CHOSEN)

    @property
    def runner_up(self) -> SearchCandidate | None:
        """The second best candidate that fits; None if only one is known to fit."""
        return self._first_with_outcome(RUNNER_UP)

    @property
    def trial(self) -> Trial | None:
        """The choice as compiled, and measured if it was run; None if nothing was compiled."""
        return None if self.chosen is None else self.trial_of(self.chosen)

    @property
    def report(self) -> Report | None:
        """Report of the choice; None if nothing was compiled."""
        return None if self.trial is None else self.trial.report

    def trial_of(self, candidate: SearchCandidate) -> Trial | None:
        """Return the compiled trial of a candidate; None for a candidate without."""
        return next((t for t in self.comparison.trials if t.line == candidate.line), None)

    def time_of(self, candidate: SearchCandidate) -> float | None:
        """Return the seconds per step of a candidate according to `source`; None if unknown.

        Compiled candidates have measured or predicted times, others planned times.
        """
        if self.source == "planned":
            return candidate.bound if candidate.guess is None else candidate.guess
        trial = self.trial_of(candidate)
        return None if trial is None else self.comparison.seconds(trial)

    def peak_of(self, candidate: SearchCandidate) -> int | None:
        """Return the peak bytes on the fullest device, as compiled, otherwise as estimated."""
        trial = self.trial_of(candidate)
        return candidate.needs if trial is None or trial.peak is None else trial.peak

    def with_outcome(self, outcome: str) -> tuple[SearchCandidate, ...]:
        """Return the candidates with this outcome, in order."""
        return tuple(c for c in self.candidates if c.outcome == outcome)

    def _first_with_outcome(self, outcome: str) -> SearchCandidate | None:
        return next(iter(self.with_outcome(outcome)), None)

    def to_markdown(self) -> str:
        """Return the result of the search as GitHub-flavoured Markdown, for a pull request."""
        return renderer(self, "markdown")(self)

    @cached_property
    def view(self) -> Any:
        """Widget of the choice, created once. Like a comparison's widget, it knows the trial selected by the reader."""
        return renderer(self, "widget")(self)

    def _summary_line(self) -> str:
        said = "nothing fits" if self.chosen is None else self.chosen.line
        return f"<Choice for {self.name}: {said}, of {len(self.candidates)} candidates>"
