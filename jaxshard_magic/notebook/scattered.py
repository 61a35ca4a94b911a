"""A line under the error of a function that was given the state of a pipeline, which lies on its stages."""

import sys
from typing import Any

from .session import ShardSession

_JAX_SAYS = "incompatible devices"


class Scattered:
    """Knows which step of the session ran as a pipeline last, by what its cell calls it."""

    def __init__(self, session: ShardSession):
        self._session = session
        self._name: str | None = None

    def note(self, result: Any) -> None:
        """IPython calls it when a cell has ended."""
        step, error = self._session.step, result.error_in_exec
        if step is not None and _ran_in_stages(step):
            self._name = step.path or step.name
        if self._name is not None and isinstance(error, ValueError) and _JAX_SAYS in str(error):
            print(
                f"{self._name} ran as a pipeline, and its state lies on the devices of its stages: "
                f"state = {self._name}.gather(state) brings it together for other functions",
                file=sys.stderr,
            )


def _ran_in_stages(step: Any) -> bool:
    from ..step import ShardedStep  # jax, which is there where there is a step

    return isinstance(step, ShardedStep) and step.request.pipeline is not None and step.calls > 0
