"""Layout explorer as a Jupyter widget; edits in the browser change the explorer, and the other way round."""

from collections.abc import Mapping
from math import prod
from numbers import Integral
from typing import TYPE_CHECKING, Any

from traitlets import Dict, observe

from jaxshard_magic.errors import ShardError
from jaxshard_magic.temporary import Replaced, attribute
from jaxshard_magic.views import explorer_payload as payload
from jaxshard_magic.views.live_view import LiveView, SelectionTrait, quoted

if TYPE_CHECKING:
    from jaxshard_magic.explorer import Explorer

MAX_AXIS_SIZE, MAX_DEVICES = 4096, 65_536  # of a mesh set in the browser; all device numbers are listed


class ExplorerView(LiveView):
    """Widget to edit an explorer's mesh, strategy and specs.

    Setting `leaf` (a path) or `device` (its position in the mesh) selects what the picture shows; None clears the
    selection. Mesh, strategy and specs belong to the explorer: `ex.mesh = "data=8"` changes the widget as well.

    Args:
        explorer: Explorer to show and to edit.
    """

    bundle = "explore"
    selection_names = ("leaf", "device", "axes", "strategy", "wishes")

    leaf = SelectionTrait().tag(sync=True)
    device = SelectionTrait().tag(sync=True)
    axes = SelectionTrait().tag(sync=True)
    strategy = SelectionTrait().tag(sync=True)
    wishes = SelectionTrait().tag(sync=True)
    laid = Dict().tag(sync=True)
    compiled = Dict(None, allow_none=True).tag(sync=True)

    def __init__(self, explorer: "Explorer"):
        self.explorer = explorer
        self._paths: dict[str, str] = {
            shown: a.path for shown, a in zip(payload.shown_paths(explorer), explorer.arrays, strict=True)
        }
        # Values set by the constructor are no edits: `_edited` ignores them while this is set.
        self._telling = True
        super().__init__(explorer, payload.packed_explorer(explorer), **payload.state(explorer))
        self._telling = False
        explorer.listen(self._pull_state)

    def __repr__(self) -> str:
        return f"<ExplorerView of {self.explorer!r}>"

    def validate_choice(self, name: str, value: Any) -> Any:
        """Return `value` as the trait `name` stores it.

        Raises:
            ShardError: The explorer has no such array, device, mesh, strategy or spec.
        """
        # Dispatch by name: each trait in `selection_names` needs a method `_checked_<trait>`.
        return getattr(self, f"_checked_{name}")(value)

    def _checked_leaf(self, value: Any) -> str | None:
        if value is None or (isinstance(value, str) and value in self._paths):
            return value
        if not isinstance(value, str):
            raise ShardError(f"no array {quoted(value)}")
        return list(self._paths)[self.explorer.index(str(value))]

    def _checked_device(self, value: Any) -> int | None:
        # bool is an Integral in Python: True would be device 1.
        if value is None or (isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0):
            return None if value is None else int(value)
        raise ShardError(f"no device {quoted(value)}: a device is its position in the mesh, from 0 on")

    def _checked_axes(self, value: Any) -> list[list[Any]]:
        pairs = [tuple(pair) for pair in value] if isinstance(value, (list, tuple)) else None
        if not pairs or any(len(pair) != 2 or not _is_axis(*pair) for pair in pairs) or len(dict(pairs)) < len(pairs):
            raise ShardError(f"no mesh {quoted(value)}: write its axes, each with its size")
        if (devices := prod(int(size) for _, size in pairs)) > MAX_DEVICES:
            raise ShardError(f"a mesh of {devices:,} devices: the explorer takes {MAX_DEVICES:,} at most")
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
            if not isinstance(cut, (list, tuple)) or not all(_is_axis_names(axes) for axes in cut):
                raise ShardError(f"no spec {quoted(cut)} of {quoted(path)}: the axes of each dimension")
        return {path: [list(axes) for axes in cut] for path, cut in cuts.items()}

    def _pull_state(self) -> None:
        """Copy the explorer's state into the traits."""
        # `hold_sync` sends all changed traits in one message.
        with Replaced(attribute(self, "_telling"), True), self.hold_sync():
            for name, value in payload.state(self.explorer).items():
                if getattr(self, name) != value:
                    setattr(self, name, value)

    @observe("axes", "strategy", "wishes")
    def _edited(self, _: Any) -> None:
        """Apply an edit from the browser to the explorer; restore the traits if the explorer refuses the edit."""
        if self._telling:
            return
        edited: dict[str, list[list[str]]] = self.wishes
        wishes = {self._paths.get(path, path): tuple(map(tuple, cut)) for path, cut in edited.items()}
        try:
            self.explorer.change(axes=dict(self.axes), strategy=self.strategy, wishes=wishes)
        except ShardError:
            self._pull_state()
        self.send_state("laid")  # a browser waits for an answer even if nothing changes

    def _reply(self, view: Any, content: Any, buffers: Any) -> None:
        super()._reply(view, content, buffers)
        if isinstance(content, Mapping) and content.get("kind") == "compile":
            self.explorer.try_to_compile()


def _is_axis(name: Any, size: Any) -> bool:
    # bool is an Integral in Python: True would be size 1.
    whole = isinstance(size, Integral) and not isinstance(size, bool)
    return isinstance(name, str) and name.isidentifier() and whole and 1 <= int(size) <= MAX_AXIS_SIZE


def _is_axis_names(axes: Any) -> bool:
    return isinstance(axes, (list, tuple)) and all(isinstance(axis, str) for axis in axes)
