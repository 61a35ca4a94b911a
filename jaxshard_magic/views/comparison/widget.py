"""Jupyter widgets of a comparison and of a choice; the reader's selection is read and set from Python."""

from numbers import Integral
from typing import Any

from traitlets import observe

from jaxshard_magic.errors import ShardError
from jaxshard_magic.report.choice import Choice
from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.report.exports import HasPictures
from jaxshard_magic.views.choice.payload import packed_choice
from jaxshard_magic.views.comparison.payload import default_trial, packed_comparison
from jaxshard_magic.views.live_view import LiveView, SelectionTrait, quoted


class ComparisonView(LiveView):
    """Widget to sort trials and to compare two of them.

    `chosen` is the position in `comparison.trials` of the trial on show, at first the fastest. `other` is the position
    of a second trial, None for none. A click changes them, and setting them changes the picture. A line or a strategy
    is accepted as well.

        comparison.view.chosen, comparison.view.other = "fsdp", "fsdp+tp"
        comparison.trials[comparison.view.chosen]

    Args:
        comparison: Comparison to show.
        shown: Object that draws pictures to save; the comparison by default.
        data: Payload; that of the comparison by default.
    """

    bundle = "compare"
    selection_names = ("chosen", "other")

    chosen = SelectionTrait().tag(sync=True)
    other = SelectionTrait().tag(sync=True)

    def __init__(self, comparison: Comparison, shown: HasPictures | None = None, data: bytes | None = None):
        self.comparison = comparison
        super().__init__(shown or comparison, data or packed_comparison(comparison), chosen=default_trial(comparison))

    def __repr__(self) -> str:
        return f"<ComparisonView of {self.comparison!r}>"

    def validate_choice(self, name: str, value: Any) -> int | None:
        """Return the position of a trial given by position, line or strategy; None for None.

        Raises:
            ShardError: The comparison has no such trial.
        """
        trials = self.comparison.trials
        if value is None:
            return None
        if isinstance(value, str):
            chosen = self.comparison[value]
            return next(i for i, trial in enumerate(trials) if trial is chosen)
        # bool is an Integral in Python: True would be trial 1.
        if isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) < len(trials):
            return int(value)
        there = f"they are 0 to {len(trials) - 1}" if trials else "it has none"
        raise ShardError(f"no trial {quoted(value)} in this comparison; {there}")

    @observe("chosen", "other")
    def _apart(self, _: Any) -> None:
        """Clear `other` if both selections are the same trial."""
        if self.other is not None and self.other == self.chosen:
            self.other = None


class ChoiceView(ComparisonView):
    """Widget to explore the result of a search; `chosen` and `other` are positions in `choice.comparison.trials`.

    Args:
        choice: Result of a search.
    """

    def __init__(self, choice: Choice):
        self.choice = choice
        super().__init__(choice.comparison, choice, packed_choice(choice))

    def __repr__(self) -> str:
        return f"<ChoiceView of {self.choice!r}>"
