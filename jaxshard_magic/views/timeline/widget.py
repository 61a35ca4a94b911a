"""Jupyter widget of a pipeline's timeline without a report."""

from jaxshard_magic.report import Pipeline
from jaxshard_magic.views.live_view import LiveView
from jaxshard_magic.views.timeline.payload import packed_pipeline


class PipelineView(LiveView):
    """Widget to zoom and pan a timeline, and to compare other schedules of the same work; once drawn it needs no
    kernel.

    Args:
        pipeline: Pipeline to show, predicted or measured.
    """

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        super().__init__(pipeline, packed_pipeline(pipeline))

    def __repr__(self) -> str:
        return f"<PipelineView of {self.pipeline!r}>"
