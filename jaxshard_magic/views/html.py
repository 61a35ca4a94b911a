"""HTML without script of a report, a pipeline's timeline and a run in progress: fragments for a notebook, and whole
documents."""

from jaxshard_magic.report import Pipeline, Report
from jaxshard_magic.report.metrics import Metrics
from jaxshard_magic.report.parts import mesh_text
from jaxshard_magic.views import words
from jaxshard_magic.views.document.html import NO_MESH, parts_html, to_html
from jaxshard_magic.views.document.parts import Paragraph
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.html_tags import document, escaped
from jaxshard_magic.views.sections.report import report as report_parts
from jaxshard_magic.views.sections.run import pipeline_parts, training_parts
from jaxshard_magic.views.words import Span


def of_report(report: Report, extra_class: str = "") -> str:
    """Render a report as one `<div>`, for a notebook or a page.

    Args:
        report: Report to show.
        extra_class: Further class of the `<div>`.
    """
    return to_html(report_parts(report, page=True), report.mesh, extra_class)


def page_of_report(report: Report) -> str:
    """Render a report as a whole HTML document; the theme, light or dark, is the reader's."""
    title = f"{words.title_text(report)} {mesh_text(report.mesh.axes)}"
    return document(printable(title), of_report(report))


def of_pipeline(p: Pipeline, extra_class: str = "") -> str:
    """Render the timeline as one `<div>`, for a notebook or a page.

    Args:
        p: Pipeline to show.
        extra_class: Further class of the `<div>`.
    """
    lead = (*words.pipeline_lead(p), Span(" "), Span(words.pipeline_about(p), "quiet"))
    return to_html((Paragraph(lead, leading=True), *pipeline_parts(p)), NO_MESH, extra_class)


def page_of_pipeline(p: Pipeline) -> str:
    """Render the timeline as a whole HTML document; the theme, light or dark, is the reader's."""
    return document(printable(f"{p.schedule}, {words.size_text(p)}"), of_pipeline(p))


def of_running(metrics: Metrics, line: str) -> str:
    """Return the metrics of a run in progress, below a line of text.

    Args:
        metrics: Metrics so far.
        line: Plain text of the heading.
    """
    return f"<p><b>{escaped(line)}</b></p>\n{parts_html(training_parts(metrics, page=True), NO_MESH)}\n"
