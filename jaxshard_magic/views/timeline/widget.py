"""A pipeline's timeline as a Jupyter widget that stands alone, without a report."""

from jaxshard_magic.report import Pipeline
from jaxshard_magic.views.live_view import LiveView
from jaxshard_magic.views.timeline.payload import packed_pipeline


class PipelineView(LiveView):
    """A pipeline to zoom, pan and point at, and what else the same work could cost; once drawn it needs no kernel.

    Args:
        pipeline: what `analysis.timeline.timeline` made of a schedule.
    """

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        super().__init__(pipeline, packed_pipeline(pipeline))

    def __repr__(self) -> str:
        return f"<PipelineView of {self.pipeline!r}>"
