"""One line in the place of JAX's error for a function that was given the state of a pipeline, on several stages."""

import re
import sys
from typing import TYPE_CHECKING, Any

from ..places import place
from . import cells
from .session import ShardSession

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_JAX_SAYS = "Received incompatible devices for jitted computation"  # jax 0.10 to 0.12
_ARGUMENT = re.compile(r"argument (\S+) of (\S+) with shape")
_DEVICES = re.compile(r"device ids \[([\d, ]+)\]")


class Scattered:
    """Tells who mixes arrays of several stages, in the place of JAX's own message and traceback."""

    def __init__(self, shell: "InteractiveShell", session: ShardSession):
        self._shell, self._session = shell, session
        self._step: Any = None  # the last that ran as a pipeline
        self._draw: Any = None  # how the shell draws errors

    def attach(self) -> None:
        """Look at errors before the shell draws them."""
        shell: Any = self._shell
        self._draw = shell.showtraceback
        shell.showtraceback = self._drawn

    def detach(self) -> None:
        """Undo `attach`, where nobody else has taken the place since."""
        shell: Any = self._shell
        if shell.__dict__.get("showtraceback") == self._drawn:
            del shell.showtraceback
            if shell.showtraceback != self._draw:  # somebody else's, who came before
                shell.showtraceback = self._draw

    def note(self, _result: Any) -> None:
        """IPython calls it when a cell has ended."""
        if _ran_in_stages(self._session.step):
            self._step = self._session.step

    def explain(self, error: BaseException | None, step: Any = None) -> None:
        """Have `error` say one line and be drawn as that, where it is JAX's for arrays on several stages of a pipeline:
        of `step`, or of the last that ran."""
        step = step if _ran_in_stages(step) else self._step
        if isinstance(error, ValueError) and step is not None and (line := self._line(error, step)):
            error.args = (line,)
            cells.drawn_as_line(error)

    def _drawn(self, *args: Any, **kwargs: Any) -> Any:
        self.explain(sys.exc_info()[1])
        return self._draw(*args, **kwargs)

    def _line(self, error: ValueError, step: Any) -> str | None:
        said = str(error)
        if _JAX_SAYS not in said or not _on_stages(said, step):
            return None
        named = _ARGUMENT.findall(said)
        function = named[0][1] if named else "a function"
        given = " and ".join(dict.fromkeys(argument for argument, _ in named)) or "arrays"
        at, name = cells.line_of(self._shell, error.__traceback__), step.path or step.name
        where = f" ({place(*at)})" if at else ""
        return (
            f"{function}{where} got {given}, which lie on different stages of the pipeline {name}: state = "
            f"{name}.gather(state) brings its state together for other functions"
        )


def _ran_in_stages(step: Any) -> bool:
    if step is None:
        return False
    from ..step import ShardedStep  # jax, which is there where there is a step

    return isinstance(step, ShardedStep) and step.request.pipeline is not None and step.calls > 0


def _on_stages(said: str, step: Any) -> bool:
    """Return whether the devices that an error names are those of whole stages of a step's pipeline."""
    from ..pipeline.homes import Ranks

    request = step.request
    stages = [{d.id for d in mesh.devices.flat} for mesh in Ranks(request.mesh, request.stage_axis).each]
    found = [{int(n) for n in ids.split(",")} for ids in _DEVICES.findall(said)]
    return bool(found) and all(ids == {d for s in stages if s & ids for d in s} for ids in found)
