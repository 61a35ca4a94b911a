"""Result of an automatic search for a terminal."""

from jaxshard_magic.report.choice import Choice
from jaxshard_magic.views.document.text import to_text as lowered
from jaxshard_magic.views.sections.choice import choice
from jaxshard_magic.views.terminal import text_width


def to_text(chosen: Choice, width: int | None = None) -> str:
    """Render the choice as lines for a terminal. A line to paste is never broken.

    Args:
        chosen: Result of a search.
        width: Columns, clamped to 60 to 100; None takes the width of the terminal.
    """
    return lowered(choice(chosen), text_width(width))
