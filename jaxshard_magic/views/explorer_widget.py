"""An explorer as a Jupyter widget. What its reader edits there is the explorer's, and the other way round."""

from collections.abc import Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any

from traitlets import Dict, observe

from jaxshard_magic.errors import ShardError
from jaxshard_magic.temporary import Replaced, attribute
from jaxshard_magic.views import explorer_payload as payload
from jaxshard_magic.views.live_view import Chosen, LiveView, quoted

if TYPE_CHECKING:
    from jaxshard_magic.explorer import Explorer

MOST = 4096  # devices of a mesh that is set in the browser


class ExplorerView(LiveView):
    """An explorer to click in.

    `leaf` (a path) and `device` (its position in the mesh) are what is looked at, None for none; setting them changes
    the picture. The mesh, the strategy and the specs are the explorer's: `ex.mesh = "data=8"` changes it as well.
    """

    bundle = "explore"
    chosen_names = ("leaf", "device", "axes", "strategy", "wishes")

    leaf = Chosen().tag(sync=True)
    device = Chosen().tag(sync=True)
    axes = Chosen().tag(sync=True)
    strategy = Chosen().tag(sync=True)
    wishes = Chosen().tag(sync=True)
    laid = Dict().tag(sync=True)
    compiled = Dict(None, allow_none=True).tag(sync=True)

    def __init__(self, explorer: "Explorer"):
        self.explorer = explorer
        self._paths: dict[str, str] = {
            shown: a.path for shown, a in zip(payload.shown_paths(explorer), explorer.arrays, strict=True)
        }
        self._telling = True
        super().__init__(explorer, payload.packed_explorer(explorer), **payload.state(explorer))
        self._telling = False
        explorer.listen(self._tell)

    def __repr__(self) -> str:
        return f"<ExplorerView of {self.explorer!r}>"

    def checked(self, name: str, value: Any) -> Any:
        """`value` as the trait `name` holds it. Raises ShardError for what this explorer does not have."""
        return getattr(self, f"_checked_{name}")(value)

    def _checked_leaf(self, value: Any) -> str | None:
        if value is None or (isinstance(value, str) and value in self._paths):
            return value
        if not isinstance(value, str):
            raise ShardError(f"no array {quoted(value)}")
        return list(self._paths)[self.explorer.index(str(value))]

    def _checked_device(self, value: Any) -> int | None:
        if value is None or (isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0):
            return None if value is None else int(value)
        raise ShardError(f"no device {quoted(value)}: a device is its position in the mesh, from 0 on")

    def _checked_axes(self, value: Any) -> list[list[Any]]:
        pairs = [tuple(pair) for pair in value] if isinstance(value, (list, tuple)) else None
        if (
            not pairs
            or any(len(pair) != 2 or not _axis(*pair) for pair in pairs)
            or len(dict(pairs)) < len(pairs)
        ):
            raise ShardError(f"no mesh {quoted(value)}: write its axes, each with its size")
        return [[name, int(size)] for name, size in pairs]

    def _checked_strategy(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ShardError(f"no strategy {quoted(value)}")
        self.explorer.check_strategy(value)
        return value

    def _checked_wishes(self, value: Any) -> dict[str, list[list[str]]]:
        if not isinstance(value, Mapping) or not all(isinstance(path, str) for path in value):
            raise ShardError(f"no specs {quoted(value)}: the axes of each dimension by the path of an array")
        cuts: Mapping[str, Any] = value
        for path, cut in cuts.items():
            self.explorer.index(self._paths.get(path, path))
            if not isinstance(cut, (list, tuple)) or not all(_names(axes) for axes in cut):
                raise ShardError(f"no spec {quoted(cut)} of {quoted(path)}: the axes of each dimension")
        return {path: [list(axes) for axes in cut] for path, cut in cuts.items()}

    def _tell(self) -> None:
        """The explorer has changed."""
        with Replaced(attribute(self, "_telling"), True), self.hold_sync():
            for name, value in payload.state(self.explorer).items():
                if getattr(self, name) != value:
                    setattr(self, name, value)

    @observe("axes", "strategy", "wishes")
    def _edited(self, _: Any) -> None:
        """What was edited in the browser is the explorer's now; what it can't be is taken back there."""
        if self._telling:
            return
        edited: dict[str, list[list[str]]] = self.wishes
        wishes = {self._paths.get(path, path): tuple(map(tuple, cut)) for path, cut in edited.items()}
        try:
            self.explorer.change(axes=dict(self.axes), strategy=self.strategy, wishes=wishes)
        except ShardError:
            self._tell()
        self.send_state("laid")  # a browser that asked for the same again waits for an answer

    def _answer(self, view: Any, content: Any, buffers: Any) -> None:
        super()._answer(view, content, buffers)
        if isinstance(content, Mapping) and content.get("kind") == "compile":
            self.explorer.try_to_compile()


def _axis(name: Any, size: Any) -> bool:
    whole = isinstance(size, Integral) and not isinstance(size, bool)
    return isinstance(name, str) and name.isidentifier() and whole and 1 <= int(size) <= MOST


def _names(axes: Any) -> bool:
    return isinstance(axes, (list, tuple)) and all(isinstance(axis, str) for axis in axes)
