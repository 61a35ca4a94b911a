"""Reports, comparisons and choices as GitHub-flavoured Markdown, for a pull request or an issue."""

from jaxshard_magic.report import Report
from jaxshard_magic.report.choice import Choice
from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.views.document.markdown import to_markdown
from jaxshard_magic.views.sections.choice import choice
from jaxshard_magic.views.sections.comparison import comparison
from jaxshard_magic.views.sections.report import report as report_parts


def of_report(report: Report, leaves: str | int = 8) -> str:
    """Render a report as Markdown.

    Args:
        report: Report to show.
        leaves: Number of the largest rows of leaves, or "all" for every leaf.

    Raises:
        ShardError: `leaves` is neither a number nor "all".
    """
    return to_markdown(report_parts(report, leaves))


def of_comparison(compared: Comparison) -> str:
    """Render a comparison as Markdown."""
    return to_markdown(comparison(compared))


def of_choice(chosen: Choice) -> str:
    """Render the result of a search as Markdown."""
    return to_markdown(choice(chosen))
