"""A report as HTML without script: a fragment for a notebook, and a whole document."""

from jaxshard_magic.report import Report
from jaxshard_magic.report.parts import mesh_text
from jaxshard_magic.views import words
from jaxshard_magic.views.document.html import to_html
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.html_document import document
from jaxshard_magic.views.sections import communication, layout, measured, memory, run, summary


def fragment(report: Report, extra_class: str = "") -> str:
    """Render a report as one `<div>`, for a notebook or a page.

    Args:
        report: Report to show.
        extra_class: Further class of the `<div>`.
    """
    parts = [
        summary.head(report),
        *summary.predicted_step(report),
        *summary.key_figures(report),
        *summary.options(report),
        *summary.hints(report),
        *memory.memory(report, page=True),
        *communication.communication(report, page=True),
        *measured.measured(report, page=True),
        *layout.experts_positions(report),
        *layout.layout(report),
        *run.pipeline(report.pipeline),
        *run.training(report.metrics, page=True),
        *summary.timing(report),
        *summary.check(report),
    ]
    return to_html(parts, report.mesh, extra_class)


def page(report: Report) -> str:
    """Render a report as a whole HTML document; the theme, light or dark, is the reader's."""
    title = f"{words.title_text(report)} {mesh_text(report.mesh.axes)}"
    return document(printable(title), fragment(report))
