"""The layouts of a step's arrays as they are planned: the strategy's own, and that with what is set by hand."""

import time
from collections.abc import Callable

from jax.sharding import Mesh

from ..comparing.trials import described
from ..errors import ShardError
from .array import Laid
from .stepped import Stepped

SLOW = 1.0  # seconds of planning: more than that is not done at every edit


class Layouts:
    """`laid`: how the strategy alone lays the arrays out, as it was planned last; `settled`: how they lie beside what
    is set by hand, which may move others, None where that was not planned.

    A mesh is given as what makes it, which may raise ShardError.
    """

    def __init__(self, stepped: Stepped | None, laid: Laid, note: str = ""):
        self._stepped, self._seconds = stepped, 0.0
        self.laid, self.settled = laid, None
        self._notes = [note, ""]

    @property
    def note(self) -> str:
        """Why one of them could not be planned, in one line; empty where both could."""
        return next(filter(None, self._notes), "")

    def plan(self, line: str, mesh: Callable[[], Mesh]) -> None:
        """The strategy alone, by its line; where it can't be planned, what was known stays."""
        found, why = self._planned(line, mesh)
        self.laid, self.settled, self._notes = found or self.laid, None, [why, ""]

    def settle(self, line: str | None, mesh: Callable[[], Mesh], *, anyway: bool = False) -> None:
        """The line with what is set by hand, None for nothing; not where planning takes long, unless `anyway`."""
        self.settled, self._notes[1] = None, ""
        if line is not None and not self._notes[0] and (anyway or self._seconds < SLOW):
            self.settled, self._notes[1] = self._planned(line, mesh)

    def _planned(self, line: str, mesh: Callable[[], Mesh]) -> tuple[Laid | None, str]:
        """A line planned, else why not."""
        assert self._stepped is not None
        start = time.perf_counter()
        try:
            return self._stepped.plan(line, mesh()), ""
        except ShardError as error:
            return None, " ".join(str(error).split())
        except Exception as error:  # the step's own code may go where this strategy can't
            return None, described(error)
        finally:
            self._seconds = time.perf_counter() - start
