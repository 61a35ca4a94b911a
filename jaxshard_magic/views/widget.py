"""The report as a Jupyter widget. What its reader selects is read and set here."""

from difflib import get_close_matches
from functools import cached_property
from numbers import Integral
from typing import Any

from jaxshard_magic.errors import ShardError, none_of, one_of
from jaxshard_magic.report import Report
from jaxshard_magic.views.format import printable, runs
from jaxshard_magic.views.live_view import Chosen, LiveView, quoted
from jaxshard_magic.views.payload import opens_on, packed, tab_ids


class ReportView(LiveView):
    """A report to point at; `report.view` gives the one that the notebook shows.

    `leaf` (a path), `device` (an id) and `tab` ("layout", "memory", "communication", "pipeline", "training") are what
    is selected: they change as the reader clicks, and setting them changes the picture. None clears.

        report.view.leaf = "state.params.wte.embedding"
    """

    chosen_names = ("leaf", "device", "tab")

    leaf = Chosen().tag(sync=True)
    device = Chosen().tag(sync=True)
    tab = Chosen().tag(sync=True)

    def __init__(self, report: Report):
        self.report = report
        super().__init__(report, packed(report))

    def __repr__(self) -> str:
        return f"<ReportView of {self.report!r}>"

    def checked(self, name: str, value: Any) -> Any:
        """`value` as the trait `name` holds it. Raises ShardError for what this report does not have."""
        if name == "leaf":
            return None if value is None else self._leaf(value)
        if name == "device":
            return None if value is None else self._device(value)
        return opens_on(self.report) if value is None else self._tab(value)

    @cached_property
    def _paths(self) -> dict[str, str]:
        """The leaves as the front end writes them, by that and by their own path."""
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
        if isinstance(value, Integral) and not isinstance(value, bool) and int(value) in self._devices:
            return int(value)
        ids = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs(self._devices)[:4])
        raise ShardError(f"no device {quoted(value)} in this mesh; its devices are {ids}")

    def _tab(self, value: Any) -> str:
        if isinstance(value, str) and value in self._tabs:
            return value
        tabs = f"this report's tabs are {one_of(self._tabs)}"
        raise ShardError(none_of(f"no tab {quoted(value)}", str(value), self._tabs, tabs))


def _nearest_leaf(path: str, paths: list[str]) -> str:
    """The leaf that was meant: the one that ends so, else one that looks alike."""
    ends = [known for known in paths if known.endswith(f".{path}")]
    near = ends[:1] or get_close_matches(path[:200], paths, n=1, cutoff=0.5)
    if near:
        return f" Did you mean '{near[0]}'?"
    return f" The first of {len(paths)} is '{paths[0]}'" if paths else " This report has none"
