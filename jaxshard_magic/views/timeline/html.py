"""Timeline of a pipeline as HTML without script: text, a drawing, and a table of ranks."""

from jaxshard_magic.report import Pipeline
from jaxshard_magic.views import words
from jaxshard_magic.views.document.html import NO_MESH
from jaxshard_magic.views.document.html import to_html as lowered
from jaxshard_magic.views.document.parts import Paragraph
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.html_document import document
from jaxshard_magic.views.sections.run import pipeline_parts
from jaxshard_magic.views.words import Span


def to_html(p: Pipeline, also: str = "") -> str:
    """Render the timeline as one `<div>`, for a notebook or a page.

    Args:
        p: Pipeline to show.
        also: Further class of the `<div>`.
    """
    lead = (*words.pipeline_lead(p), Span(" "), Span(words.pipeline_about(p), "quiet"))
    return lowered((Paragraph(lead, leading=True), *pipeline_parts(p)), NO_MESH, also)


def page(p: Pipeline) -> str:
    """Render the timeline as a whole HTML document; the theme, light or dark, is the reader's."""
    return document(printable(f"{p.schedule}, {words.size_text(p)}"), to_html(p))
