"""Reports as GitHub-flavoured Markdown, for a pull request or an issue."""

from jaxshard_magic.report import Report
from jaxshard_magic.views.document.markdown import to_markdown
from jaxshard_magic.views.text import document


def render(report: Report, leaves: str | int = 8) -> str:
    """Render a report as Markdown.

    Args:
        report: Report to show.
        leaves: Number of the largest rows of leaves, or "all" for every leaf.

    Raises:
        ShardError: `leaves` is neither a number nor "all".
    """
    return to_markdown(document(report, leaves))
