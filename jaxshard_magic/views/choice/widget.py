"""A choice as a Jupyter widget: a comparison's, with what led to the choice."""

from jaxshard_magic.report.choice import Choice
from jaxshard_magic.views.choice.payload import packed_choice
from jaxshard_magic.views.comparison.widget import ComparisonView


class ChoiceView(ComparisonView):
    """A choice to look through; `chosen` and `other` are positions in `choice.comparison.trials`."""

    def __init__(self, choice: Choice):
        self.choice = choice
        super().__init__(choice.comparison, choice, packed_choice(choice))

    def __repr__(self) -> str:
        return f"<ChoiceView of {self.choice!r}>"
