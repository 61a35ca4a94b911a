"""A comparison of strategies as a Jupyter widget. Which of its trials the reader chose is read and set here."""

from numbers import Integral
from typing import Any

from traitlets import observe

from jaxshard_magic.errors import ShardError
from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.report.sent import Pictured
from jaxshard_magic.views.comparison.payload import first_shown, packed_comparison
from jaxshard_magic.views.live_view import Chosen, LiveView, quoted


class ComparisonView(LiveView):
    """A comparison to sort and point at.

    `chosen` is the position in `comparison.trials` of the trial on show, at first the fastest; `other` that of one to
    set beside it, None for none. They change as the reader clicks, and setting them changes the picture; a line or a
    strategy is taken as well.

        comparison.view.chosen, comparison.view.other = "fsdp", "fsdp+tp"
        comparison.trials[comparison.view.chosen]
    """

    bundle = "compare"
    chosen_names = ("chosen", "other")

    chosen = Chosen().tag(sync=True)
    other = Chosen().tag(sync=True)

    def __init__(self, comparison: Comparison, shown: Pictured | None = None, data: bytes | None = None):
        self.comparison = comparison
        super().__init__(
            shown or comparison, data or packed_comparison(comparison), chosen=first_shown(comparison)
        )

    def __repr__(self) -> str:
        return f"<ComparisonView of {self.comparison!r}>"

    def checked(self, name: str, value: Any) -> int | None:
        """The position of the trial that is meant. Raises ShardError for one that the comparison does not have."""
        trials = self.comparison.trials
        if value is None:
            return None
        if isinstance(value, str):
            chosen = self.comparison[value]
            return next(i for i, trial in enumerate(trials) if trial is chosen)
        if isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) < len(trials):
            return int(value)
        there = f"they are 0 to {len(trials) - 1}" if trials else "it has none"
        raise ShardError(f"no trial {quoted(value)} in this comparison; {there}")

    @observe("chosen", "other")
    def _apart(self, _: Any) -> None:
        """No trial stands beside itself."""
        if self.other is not None and self.other == self.chosen:
            self.other = None
