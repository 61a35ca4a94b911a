"""A pipeline's timeline as a Jupyter widget that stands alone, without a report."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from anywidget import AnyWidget
from ipywidgets import Widget, widget_serialization
from traitlets import Bytes, Instance, Unicode

from jaxshard_magic.report import Pipeline
from jaxshard_magic.views.timeline_payload import packed_pipeline
from jaxshard_magic.views.widget import module_text

_LOADER = Path(__file__).parents[1] / "static" / "loader.js"


class PipelineView(AnyWidget):
    """A pipeline to zoom, pan and point at, and what else the same work could cost; once drawn it needs no kernel.

    Args:
        pipeline: what `analysis.timeline.timeline` made of a schedule.
    """

    _esm = _LOADER.read_text(encoding="utf-8")
    _data = Bytes().tag(sync=True)
    _static = Unicode().tag(sync=True)
    _module = Instance(Widget).tag(sync=True, **widget_serialization)

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        model_id = uuid4().hex  # chosen here, because the first message tells the twin's name already
        super().__init__(
            model_id=model_id,
            _data=packed_pipeline(pipeline),
            _static=f"jsm-static-{model_id}",
            _module=module_text(),
        )
        self.on_msg(self._answer)

    def __repr__(self) -> str:
        return f"<PipelineView of {self.pipeline!r}>"

    @property
    def static_class(self) -> str:
        """The class of the HTML that this view hides while it lives."""
        return self._static

    def _answer(self, _: Any, content: Any, buffers: Any) -> None:
        """A front end that cannot read another model's state asks for the module's text."""
        if isinstance(content, Mapping) and content.get("kind") == "module":
            shared = module_text()
            self.send({"kind": "module", "digest": shared.digest, "text": shared.text})
