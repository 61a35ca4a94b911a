"""Timeline of a pipeline for a terminal."""

from jaxshard_magic.report import Pipeline
from jaxshard_magic.views.document.text import to_text as lowered
from jaxshard_magic.views.sections.run import pipeline
from jaxshard_magic.views.terminal import text_width


def to_text(p: Pipeline, width: int | None = None) -> str:
    """Render the timeline as lines for a terminal.

    Args:
        p: Pipeline to show.
        width: Columns, clamped to 60 to 100; None takes the width of the terminal.
    """
    return lowered(pipeline(p), text_width(width))
