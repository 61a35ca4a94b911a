"""Jupyter widgets of a report, a timeline and a run in progress, and the button that ends a long cell early."""

from difflib import get_close_matches
from functools import cached_property
from numbers import Integral
from typing import Any

from anywidget import AnyWidget

from jaxshard_magic.errors import ShardError, list_names, unknown_name
from jaxshard_magic.report import Pipeline, Report
from jaxshard_magic.views.format import printable, runs
from jaxshard_magic.views.live_view import STATIC, LiveView, SelectionTrait, quoted
from jaxshard_magic.views.payload import first_tab, packed_report, tab_ids
from jaxshard_magic.views.timeline.payload import packed_pipeline


class ReportView(LiveView):
    """Interactive report; `report.view` is the one displayed by the notebook.

    Setting `leaf` (a path), `device` (an id) or `tab` ("layout", "memory", "communication", "measured", "pipeline",
    "training") changes the picture, and a click of the reader changes the traits. None clears `leaf` or `device`;
    for `tab` it gives the tab shown at first.

        report.view.leaf = "state.params.wte.embedding"

    Args:
        report: Report to show.
    """

    selection_names = ("leaf", "device", "tab")

    leaf = SelectionTrait().tag(sync=True)
    device = SelectionTrait().tag(sync=True)
    tab = SelectionTrait().tag(sync=True)

    def __init__(self, report: Report):
        self.report = report
        super().__init__(report, packed_report(report))

    def __repr__(self) -> str:
        return f"<ReportView of {self.report!r}>"

    def validate_choice(self, name: str, value: Any) -> Any:
        """Return `value` as the trait `name` stores it.

        Raises:
            ShardError: The report has no such leaf, device or tab.
        """
        if name == "leaf":
            return None if value is None else self._leaf(value)
        if name == "device":
            return None if value is None else self._device(value)
        return first_tab(self.report) if value is None else self._tab(value)

    @cached_property
    def _paths(self) -> dict[str, str]:
        """Displayed path of each leaf, by displayed path and by original path."""
        shown = {leaf.path: printable(leaf.path) for leaf in self.report.leaves}
        return {path: path for path in shown.values()} | shown

    @cached_property
    def _devices(self) -> frozenset[int]:
        return frozenset(self.report.mesh.numbers)

    @cached_property
    def _tabs(self) -> list[str]:
        return tab_ids(self.report)

    def _leaf(self, value: Any) -> str:
        if isinstance(value, str) and value in self._paths:
            return self._paths[value]
        raise ShardError(f"no leaf {quoted(value)}.{_nearest_leaf(str(value), list(self._paths.values()))}")

    def _device(self, value: Any) -> int:
        # bool is an Integral in Python: True would be device 1.
        if isinstance(value, Integral) and not isinstance(value, bool) and int(value) in self._devices:
            return int(value)
        ids = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs(self._devices)[:4])
        raise ShardError(f"no device {quoted(value)} in this mesh; its devices are {ids}")

    def _tab(self, value: Any) -> str:
        if isinstance(value, str) and value in self._tabs:
            return value
        tabs = f"this report's tabs are {list_names(self._tabs)}"
        raise ShardError(unknown_name(f"no tab {quoted(value)}", str(value), self._tabs, tabs))


def _nearest_leaf(path: str, paths: list[str]) -> str:
    """Return a hint for an unknown path: a leaf that ends with the path, else one with a similar path."""
    ends = [known for known in paths if known.endswith(f".{path}")]
    # A browser may send any text, and `difflib` takes quadratic time.
    near = ends[:1] or get_close_matches(path[:200], paths, n=1, cutoff=0.5)
    if near:
        return f" Did you mean '{near[0]}'?"
    return f" The first of {len(paths)} is '{paths[0]}'" if paths else " This report has none"


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


class TrainingView(LiveView):
    """Widget with the charts of a run in progress.

    `replace_data` sets the complete data, for pages opened later. `send_update` sends what is new since; a page that
    missed an update waits for the next complete data.

    Args:
        data: Payload of the first complete update.
    """

    bundle = "live"

    def __init__(self, data: bytes):
        super().__init__(None, data)

    def __repr__(self) -> str:
        return "<TrainingView>"

    def replace_data(self, data: bytes) -> None:
        """Replace the data.

        Args:
            data: Result of `packed_training`.
        """
        self._data = data

    def send_update(self, update: dict[str, Any]) -> None:
        """Send new data to open pages.

        Args:
            update: Result of `update_payload`.
        """
        self.send({"kind": "update", "update": update})


class StopButton(AnyWidget):
    """Widget that interrupts its kernel, so that the running cell raises KeyboardInterrupt.

    Where the page cannot, it shows a line of instructions.
    """

    _esm = (STATIC / "stop.js").read_text(encoding="utf-8")
