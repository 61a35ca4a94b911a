"""Replacement of JAX's error for a function called with arrays on several stages of a pipeline: one line with the
fix."""

import re
import sys
from typing import TYPE_CHECKING, Any

from ..code_locations import location_text
from . import cells
from .session import ShardSession

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_JAX_SAYS = "Received incompatible devices for jitted computation"  # jax 0.10 to 0.12
_ARGUMENT = re.compile(r"argument (\S+) of (\S+) with shape")
_DEVICES = re.compile(r"device ids \[([\d, ]+)\]")


class StageErrors:
    """Rewriter of JAX's error about arrays on different devices.

    Args:
        shell: IPython's shell.
        session: State between cells, with the last step.
    """

    def __init__(self, shell: "InteractiveShell", session: ShardSession):
        self._shell, self._session = shell, session
        self._step: Any = None  # last step that ran as a pipeline
        self._draw: Any = None  # the shell's own `showtraceback`

    def attach(self) -> None:
        """Replace the shell's `showtraceback`, to see exceptions before IPython displays them."""
        shell: Any = self._shell
        self._draw = shell.showtraceback
        shell.showtraceback = self._drawn

    def detach(self) -> None:
        """Restore the shell's `showtraceback`, unless somebody else has replaced it since."""
        shell: Any = self._shell
        if shell.__dict__.get("showtraceback") == self._drawn:
            # Deleting the attribute of the instance uncovers the method of the class.
            del shell.showtraceback
            if shell.showtraceback != self._draw:  # one set on the instance before ours
                shell.showtraceback = self._draw

    def record_step(self, _result: Any) -> None:
        """Remember the last step that ran as a pipeline; IPython calls this after each cell."""
        if _ran_in_stages(self._session.step):
            self._step = self._session.step

    def explain(self, error: BaseException | None, step: Any = None) -> None:
        """Reword `error` in place, and have IPython display one line, if JAX refuses arrays on several stages of a
        pipeline.

        Args:
            error: Any exception.
            step: Step whose stages are meant; by default the last step that ran as a pipeline.
        """
        step = step if _ran_in_stages(step) else self._step
        if isinstance(error, ValueError) and step is not None and (line := self._line(error, step)):
            error.args = (line,)
            cells.show_as_one_line(error)

    def _drawn(self, *args: Any, **kwargs: Any) -> Any:
        """Reword the current exception, and display it with the shell's own function."""
        self.explain(sys.exc_info()[1])
        return self._draw(*args, **kwargs)

    def _line(self, error: ValueError, step: Any) -> str | None:
        """Return the line that replaces JAX's message; None for other errors."""
        said = str(error)
        if _JAX_SAYS not in said or not _on_stages(said, step):
            return None
        named = _ARGUMENT.findall(said)
        function = named[0][1] if named else "a function"
        given = " and ".join(dict.fromkeys(argument for argument, _ in named)) or "arrays"
        at, name = cells.failing_line(self._shell, error.__traceback__), step.path or step.name
        where = f" ({location_text(*at)})" if at else ""
        return (
            f"{function}{where} got {given}, which lie on different stages of the pipeline {name}: state = "
            f"{name}.gather(state) brings its state together for other functions"
        )


def _ran_in_stages(step: Any) -> bool:
    """Return whether a step has run as a pipeline."""
    if step is None:
        return False
    from ..step import ShardedStep  # imports JAX, as the step has already

    return isinstance(step, ShardedStep) and step.request.pipeline is not None and step.calls > 0


def _on_stages(said: str, step: Any) -> bool:
    """Return whether the devices named in an error are the devices of whole stages of a step's pipeline."""
    from ..pipeline.shardings import RankMeshes

    request = step.request
    stages = [{d.id for d in mesh.devices.flat} for mesh in RankMeshes(request.mesh, request.stage_axis).sub_meshes]
    found = [{int(n) for n in ids.split(",")} for ids in _DEVICES.findall(said)]
    return bool(found) and all(ids == {d for s in stages if s & ids for d in s} for ids in found)
