"""What the views that a browser draws have in common: data, the module that draws it, and an HTML twin."""

from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, cast
from uuid import uuid4

from anywidget import AnyWidget
from ipywidgets import Widget, widget_serialization
from traitlets import Bytes, Instance, TraitType, Unicode

from jaxshard_magic.errors import ShardError
from jaxshard_magic.report.sent import Pictured, Theme
from jaxshard_magic.views.format import printable

STATIC = Path(__file__).parents[1] / "static"


class ModuleText(Widget):
    """The text of a module that draws views. It travels once per kernel, and every view names it by its id."""

    text = Unicode().tag(sync=True)
    digest = Unicode().tag(sync=True)


_modules: dict[str, ModuleText] = {}


def module_text(bundle: str) -> ModuleText:
    """This kernel's one of `bundle`, made anew where somebody closed it (`Widget.close_all()`)."""
    if bundle not in _modules or _modules[bundle].comm is None:
        text = (STATIC / f"{bundle}.js").read_text(encoding="utf-8")
        _modules[bundle] = ModuleText(text=text, digest=sha256(text.encode()).hexdigest()[:16])
    return _modules[bundle]


class Chosen(TraitType[Any, Any]):
    """One part of what is selected; the view says what it may be."""

    default_value = None

    def validate(self, obj: "LiveView", value: Any) -> Any:
        return obj.checked(self.name or "", value)


class LiveView(AnyWidget):
    """A picture of `_data` that `bundle` draws; it hides the HTML of its class while it lives."""

    bundle: ClassVar[str] = "report"
    chosen_names: ClassVar[tuple[str, ...]] = ()

    _esm = (STATIC / "loader.js").read_text(encoding="utf-8")
    _data = Bytes().tag(sync=True)
    _static = Unicode().tag(sync=True)
    _module = Instance(Widget).tag(sync=True, **widget_serialization)

    def __init__(self, shown: Pictured | None, data: bytes, **traits: Any):
        self._shown = shown
        model_id = uuid4().hex  # chosen here, because the first message tells the twin's name already
        super().__init__(
            model_id=model_id,
            _data=data,
            _static=f"jsm-static-{model_id}",
            _module=module_text(self.bundle),
            **traits,
        )
        self.on_msg(self._answer)

    @property
    def static_class(self) -> str:
        """The class of the HTML that this view hides while it lives."""
        return self._static

    def checked(self, name: str, value: Any) -> Any:
        """`value` as the trait `name` of `chosen_names` holds it. Raises ShardError for what is not there."""
        raise NotImplementedError(name)

    def set_state(self, sync_data: Mapping[str, Any]) -> None:
        """What the front end chose; it is told what holds where it chose what is not there."""
        wrong = [
            name for name in self.chosen_names if name in sync_data and not self._has(name, sync_data[name])
        ]
        super().set_state({name: value for name, value in sync_data.items() if name not in wrong})
        if wrong:
            self.send_state(wrong)

    def _has(self, name: str, value: Any) -> bool:
        try:
            self.checked(name, value)
        except ShardError:
            return False
        return True

    def _answer(self, _: Any, content: Any, buffers: Any) -> None:
        """A front end that cannot read another model's state asks for the module's text, and a reader for a picture."""
        kind = content.get("kind") if isinstance(content, Mapping) else None
        if kind == "module":
            shared = module_text(self.bundle)
            self.send({"kind": "module", "digest": shared.digest, "text": shared.text})
        elif kind == "picture" and self._shown is not None:
            asked = {part: str(content.get(part)) for part in ("name", "theme")}
            with suppress(ShardError):  # of a page that asks for what is not there
                text = self._shown.drawn(asked["name"], cast("Theme", asked["theme"]))
                self.send({"kind": kind, **asked, "text": text})


def quoted(value: Any) -> str:
    """What was given, on one line of a bearable length."""
    text = printable(repr(value) if not isinstance(value, str) else f"'{value}'")
    return text if len(text) <= 120 else f"{text[:119]}…"
