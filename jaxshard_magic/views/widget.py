"""The report as a Jupyter widget. What its reader selects is read and set here."""

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cached_property
from hashlib import sha256
from numbers import Integral
from pathlib import Path
from typing import Any
from uuid import uuid4

from anywidget import AnyWidget
from ipywidgets import Widget, widget_serialization
from traitlets import Bytes, Instance, TraitType, Unicode

from jaxshard_magic.errors import ShardError, did_you_mean, one_of
from jaxshard_magic.report import Report
from jaxshard_magic.views.format import printable, runs
from jaxshard_magic.views.payload import devices, packed, tab_ids

_STATIC = Path(__file__).parents[1] / "static"
CHOSEN = ("leaf", "device", "tab")


class ModuleText(Widget):
    """The text of the views' module. It travels once per kernel, and every report names it by its id."""

    text = Unicode().tag(sync=True)
    digest = Unicode().tag(sync=True)


_shared: ModuleText | None = None


def module_text() -> ModuleText:
    """This kernel's one, made anew where somebody closed it (`Widget.close_all()`)."""
    global _shared
    if _shared is None or _shared.comm is None:
        text = (_STATIC / "report.js").read_text(encoding="utf-8")
        _shared = ModuleText(text=text, digest=sha256(text.encode()).hexdigest()[:16])
    return _shared


class Chosen(TraitType[Any, Any]):
    """One part of the selection; the view says what it may be."""

    default_value = None

    def validate(self, obj: "ReportView", value: Any) -> Any:
        return obj.checked(self.name or "", value)


class ReportView(AnyWidget):
    """A report to point at; `report.view` gives the one that the notebook shows.

    `leaf` (a path), `device` (an id) and `tab` ("layout", "memory", "communication", "pipeline") are what is selected:
    they change as the reader clicks, and setting them changes the picture. None clears.

        report.view.leaf = "state.params.wte.embedding"
    """

    _esm = (_STATIC / "loader.js").read_text(encoding="utf-8")
    _data = Bytes().tag(sync=True)
    _static = Unicode().tag(sync=True)
    _module = Instance(Widget).tag(sync=True, **widget_serialization)

    leaf = Chosen().tag(sync=True)
    device = Chosen().tag(sync=True)
    tab = Chosen().tag(sync=True)

    def __init__(self, report: Report):
        self.report = report
        model_id = uuid4().hex  # chosen here, because the first message tells the twin's name already
        super().__init__(
            model_id=model_id,
            _data=packed(report),
            _static=f"jsm-static-{model_id}",
            _module=module_text(),
        )
        self.on_msg(self._answer)

    def __repr__(self) -> str:
        return f"<ReportView of {self.report!r}>"

    @property
    def static_class(self) -> str:
        """The class of the HTML that this view hides while it lives."""
        return self._static

    def checked(self, name: str, value: Any) -> Any:
        """`value` as the trait `name` holds it. Raises ShardError for what this report does not have."""
        if name == "leaf":
            return None if value is None else self._leaf(value)
        if name == "device":
            return None if value is None else self._device(value)
        return next(iter(self._tabs), None) if value is None else self._tab(value)

    def set_state(self, sync_data: Mapping[str, Any]) -> None:
        """What the front end chose; it is told what holds where it chose what is not there."""
        wrong = [name for name in CHOSEN if name in sync_data and not self._has(name, sync_data[name])]
        super().set_state({name: value for name, value in sync_data.items() if name not in wrong})
        if wrong:
            self.send_state(wrong)

    def _has(self, name: str, value: Any) -> bool:
        try:
            self.checked(name, value)
        except ShardError:
            return False
        return True

    @cached_property
    def _paths(self) -> dict[str, str]:
        """The leaves as the front end writes them, by that and by their own path."""
        shown = {leaf.path: printable(leaf.path) for leaf in self.report.leaves}
        return {path: path for path in shown.values()} | shown

    @cached_property
    def _devices(self) -> frozenset[int]:
        return frozenset(devices(self.report))

    @cached_property
    def _tabs(self) -> list[str]:
        return tab_ids(self.report)

    def _leaf(self, value: Any) -> str:
        if isinstance(value, str) and value in self._paths:
            return self._paths[value]
        raise ShardError(f"no leaf {_quoted(value)}.{_nearest_leaf(str(value), list(self._paths.values()))}")

    def _device(self, value: Any) -> int:
        if isinstance(value, Integral) and not isinstance(value, bool) and int(value) in self._devices:
            return int(value)
        ids = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs(self._devices)[:4])
        raise ShardError(f"no device {_quoted(value)} in this mesh; its devices are {ids}")

    def _tab(self, value: Any) -> str:
        if isinstance(value, str) and value in self._tabs:
            return value
        near = did_you_mean(str(value), self._tabs)
        raise ShardError(f"no tab {_quoted(value)}; this report's tabs are {one_of(self._tabs)}.{near}")

    def _answer(self, _: Any, content: Any, buffers: Any) -> None:
        """A front end that cannot read another model's state asks for the module's text."""
        if isinstance(content, Mapping) and content.get("kind") == "module":
            shared = module_text()
            self.send({"kind": "module", "digest": shared.digest, "text": shared.text})


def _quoted(value: Any) -> str:
    """What was given, on one line of a bearable length."""
    text = printable(repr(value) if not isinstance(value, str) else f"'{value}'")
    return text if len(text) <= 120 else f"{text[:119]}…"


def _nearest_leaf(path: str, paths: list[str]) -> str:
    """The leaf that was meant: the one that ends so, else one that looks alike."""
    ends = [known for known in paths if known.endswith(f".{path}")]
    near = ends[:1] or get_close_matches(path[:200], paths, n=1, cutoff=0.5)
    if near:
        return f" Did you mean '{near[0]}'?"
    return f" The first of {len(paths)} is '{paths[0]}'" if paths else " This report has none"
