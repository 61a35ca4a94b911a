"""Base class of browser widgets: payload, JavaScript module, and the static HTML for front ends without widgets."""

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
from jaxshard_magic.report.exports import HasPictures, Theme
from jaxshard_magic.views.format import printable

STATIC = Path(__file__).parents[1] / "static"


class ModuleText(Widget):
    """JavaScript module of a widget as a model of its own, so that the text is sent once per kernel; views refer to its
    id."""

    text = Unicode().tag(sync=True)
    digest = Unicode().tag(sync=True)


_modules: dict[str, ModuleText] = {}


def module_text(bundle: str) -> ModuleText:
    """Return the kernel's model of a module.

    Args:
        bundle: Name of a file in `static/`, without `.js`.
    """
    # `Widget.close_all()` closes this model too. A closed model has no comm.
    if bundle not in _modules or _modules[bundle].comm is None:
        text = (STATIC / f"{bundle}.js").read_text(encoding="utf-8")
        _modules[bundle] = ModuleText(text=text, digest=sha256(text.encode()).hexdigest()[:16])
    return _modules[bundle]


class SelectionTrait(TraitType[Any, Any]):
    """Trait of a selection; `LiveView.validate_choice` of the owner decides on valid values."""

    default_value = None

    def validate(self, obj: "LiveView", value: Any) -> Any:
        return obj.validate_choice(self.name or "", value)


class LiveView(AnyWidget):
    """Widget that draws a payload with a JavaScript module, and hides its static HTML while alive.

    Args:
        shown: Object that draws pictures to save; None for none.
        data: Payload.
        traits: Initial values of further traits.
    """

    bundle: ClassVar[str] = "report"
    selection_names: ClassVar[tuple[str, ...]] = ()

    _esm = (STATIC / "loader.js").read_text(encoding="utf-8")
    _data = Bytes().tag(sync=True)
    _static = Unicode().tag(sync=True)
    _module = Instance(Widget).tag(sync=True, **widget_serialization)

    def __init__(self, shown: HasPictures | None, data: bytes, **traits: Any):
        self._shown = shown
        model_id = uuid4().hex  # chosen here, because the first message contains the class of the twin
        super().__init__(
            model_id=model_id, _data=data, _static=f"jsm-static-{model_id}", _module=module_text(self.bundle), **traits
        )
        self.on_msg(self._reply)

    @property
    def static_class(self) -> str:
        """CSS class of the static HTML hidden by this view."""
        return self._static

    def validate_choice(self, name: str, value: Any) -> Any:
        """Return `value` as the trait `name` of `selection_names` stores it.

        Raises:
            ShardError: There is no such value.
        """
        raise NotImplementedError(name)

    def set_state(self, sync_data: Mapping[str, Any]) -> None:
        """Accept the selection of the front end; send back the valid state for invalid values."""
        wrong = [name for name in self.selection_names if name in sync_data and not self._has(name, sync_data[name])]
        super().set_state({name: value for name, value in sync_data.items() if name not in wrong})
        # The front end keeps its own value until the kernel sends another.
        if wrong:
            self.send_state(wrong)

    def _has(self, name: str, value: Any) -> bool:
        try:
            self.validate_choice(name, value)
        except ShardError:
            return False
        return True

    def _reply(self, _: Any, content: Any, buffers: Any) -> None:
        """Answer a message of the front end: the text of the module, or a picture."""
        kind = content.get("kind") if isinstance(content, Mapping) else None
        # Some front ends can't read the state of another model, so they ask for the text.
        if kind == "module":
            shared = module_text(self.bundle)
            self.send({"kind": "module", "digest": shared.digest, "text": shared.text})
        elif kind == "picture" and self._shown is not None:
            asked = {part: str(content.get(part)) for part in ("name", "theme")}
            with suppress(ShardError):  # the page may ask for a picture that does not exist
                text = self._shown.drawn(asked["name"], cast("Theme", asked["theme"]))
                self.send({"kind": kind, **asked, "text": text})


def quoted(value: Any) -> str:
    """Return a value in quotes on one line, cut to 120 characters, for error messages."""
    text = printable(repr(value) if not isinstance(value, str) else f"'{value}'")
    return text if len(text) <= 120 else f"{text[:119]}…"
