"""Jupyter widget of a choice: the widget of a comparison, with the search around it."""

from jaxshard_magic.report.choice import Choice
from jaxshard_magic.views.choice.payload import packed_choice
from jaxshard_magic.views.comparison.widget import ComparisonView


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
